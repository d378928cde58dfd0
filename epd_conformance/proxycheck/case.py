"""What a suite declares for each cell of the layer `proxy`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.proxycheck.plan import ARRANGEMENTS, Plan
from epd_conformance.verdict import Owner


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
