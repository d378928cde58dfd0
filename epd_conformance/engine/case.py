"""What a suite without servers declares for each cell. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from epd_conformance.verdict import Owner


@dataclass(frozen=True)
class EngineCase:
    """One case of a requirement. `check`: the directed check that shows it (`measured.CHECKS`); empty: all plans do."""

    name: str
    check: str = ""


#: Every plan of the corpus and every drawn one may break any requirement, so all of them judge it.
PLANS = EngineCase("plans")


def directed(check: str) -> EngineCase:
    """The case of a directed check."""
    return EngineCase(check, check)


@dataclass(frozen=True)
class EngineCell:
    """A cell that will run: its id, its layer in the place of a topology, the requirement's owner, and its case."""

    id: str
    topology: str
    owner: Owner
    case: EngineCase
