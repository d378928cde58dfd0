"""What the stacks of a topology are called, which part each server plays, and where their evidence lies: pure data.

The session names its stacks by it, and `verify` looks for the evidence by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from epd_conformance.oracle import baselines
from epd_conformance.oracle.transport import Roles
from epd_conformance.topology.spec import Role, Topology, ec_role

STACKS = "stacks"
_SEPARATORS = {"[": "_", "/": "_", "]": ""}


def cell_path(cell: str) -> str:
    """Where a cell's raw evidence lies, relative to the folder of the run."""
    # Bracket and slashes become `_`; what else is unusual, `_` too, is written as its code, so that no two cells share a file.
    name = re.sub(r"[^\w.~+-]|_", lambda found: _SEPARATORS.get(found[0], f"%{ord(found[0]):02x}"), cell)
    return f"cells/{name}.json"


@dataclass(frozen=True)
class Layout:
    """The servers of a topology's stack and the folders of its raw evidence, relative to the run's."""

    topology: Topology

    @property
    def stack(self) -> str:
        """The name of the stack under test; one that was booted again after a death has a number behind it."""
        return self.topology.name if self.topology.kind != "aggregated" else "ec-both"

    @property
    def baseline(self) -> str:
        """The name of the aggregated baseline."""
        return f"baseline-{self.topology.name}"

    @property
    def pd_baseline(self) -> str:
        """The name of the p-d baseline, where the topology has one."""
        return f"baseline-p-d-{self.topology.name}"

    @property
    def pd_journal(self) -> str | None:
        """The journal of the p-d baseline; None where the topology has none."""
        return f"{STACKS}/{self.pd_baseline}/journal" if self.topology.has_kv else None

    def is_journal(self, path: str) -> bool:
        """Whether a path is the journal folder of a stack under test of this topology."""
        return re.fullmatch(rf"{STACKS}/{re.escape(self.stack)}(-[0-9]+)?/journal", path) is not None

    def paths(self, stack: str) -> tuple[str, ...]:
        """What a cell that ran on this stack rests on, besides its own file: for its `artifacts`."""
        found = (f"{STACKS}/{stack}/journal", f"{baselines.FOLDER}/{self.topology.name}.json", self.pd_journal)
        return tuple(path for path in found if path is not None)

    @property
    def roles(self) -> Roles:
        """The part that each server plays, by journal name."""
        single = self._names(Role.AGGREGATED)
        return Roles(
            encode=self._names(Role.ENCODE),
            consumers=self._names(Role.PREFILL, Role.PREFILL_DECODE) | single,
            decode=self._names(Role.DECODE),
            both=single,
        )

    @property
    def connected(self) -> list[str]:
        """The servers that are configured with the EC connector, in order."""
        return [name for name, role in self.topology.servers() if role is Role.AGGREGATED or ec_role(role) is not None]

    def first_stage(self, images: bool) -> str:
        """The stage that a request meets first behind the proxy."""
        if images and self.topology.has_ec:
            return "encode"
        return "prefill" if self.topology.has_kv else "decode"

    def _names(self, *wanted: Role) -> frozenset[str]:
        return frozenset(name for name, role in self.topology.servers() if role in wanted)
