"""Cases: what a suite declares for each cell. A case draws its plan; the session carries it out; a judge decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from epd_conformance.catalogue.model import IN_PROCESS
from epd_conformance.engine.case import EngineCase
from epd_conformance.plans.plan import Draw, Plan
from epd_conformance.proxycheck.case import ProxyCase

MARK = "requirement"


@dataclass(frozen=True)
class Case:
    """One case of a requirement. `build` draws the plan; `judge` names the judge in `oracle.judges`.

    `exact` says that the answers are compared with the baseline, so that the prompts take part in the noise floor.
    """

    name: str
    judge: str
    build: Callable[[Draw], Plan]
    exact: bool = True


AnyCase = Case | EngineCase | ProxyCase


def belongs(case: AnyCase, topology: str) -> bool:
    """Whether a case is one of this topology's, or layer's: a requirement may be asked both with servers and without."""
    if isinstance(case, ProxyCase):
        return topology in case.arrangements
    return not topology.startswith("proxy-") and isinstance(case, EngineCase) is (topology in IN_PROCESS)


def requirement(requirement_id: str, *cases: AnyCase) -> pytest.MarkDecorator:
    """Mark a test of a suite: the requirement it tests, and one cell for each case and topology (an `EngineCase`: its layer)."""
    return getattr(pytest.mark, MARK)(requirement_id, cases)  # type: ignore[no-any-return]


def plan_of(case: Case, seed: int, cell: str) -> Plan:
    """The plan of a cell: the same for the same seed and cell, whatever else runs."""
    return case.build(Draw(seed, cell))
