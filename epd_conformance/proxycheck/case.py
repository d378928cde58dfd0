"""What a suite declares for each cell of the layer `proxy`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.proxycheck.plan import ARRANGEMENTS, Plan
from epd_conformance.verdict import Owner

#: Our own proxy: its name as a subject, and organization and project of who made it. Somebody else's has no organization.
OWN = "proxy"
OWN_MAKER = ("epd-conformance", "epd-conformance proxy")

# Silence of a server that our own proxy bears. Fakes answer at once, so it matters only where a case says another.
OWN_LIMIT_S = 20.0

# The same of somebody else's, where nobody says what it is.
FOREIGN_LIMIT_S = 60.0


@dataclass(frozen=True)
class ProxyCase:
    """One case of a requirement. `judge` names the judge in `proxycheck.judges`.

    `arrangements`: where it can be shown. `options`: what our own proxy must be started with for it (`ProxyConfig`); somebody
    else's is as it is.
    """

    name: str
    judge: str
    plan: Plan
    arrangements: tuple[str, ...] = tuple(ARRANGEMENTS)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ProxyCell:
    """A cell that will run: its id, its arrangement in the place of a topology, the requirement's owner, and its case."""

    id: str
    topology: str
    owner: Owner
    case: ProxyCase
