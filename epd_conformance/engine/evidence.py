"""What a plan left behind, written down so that anybody can judge it again: the plan, its events, and how a process ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from epd_conformance.engine.exits import exit_text
from epd_conformance.engine.explain import explained, once, share
from epd_conformance.engine.findings import HOOK_REQUIREMENT, Finding
from epd_conformance.engine.judge import Judge, judge_of
from epd_conformance.engine.plan import Plan

SCHEMA = "epd-conformance/engine-evidence/v1"
CELL_SCHEMA = "epd-conformance/engine-cell/v1"

#: Exit codes of a process that was killed from outside: by an operator, or by the kernel where the machine has no memory left.
KILLED = (-signal.SIGKILL, -signal.SIGTERM)

#: What stands in evidence for the folder of the plan, and for the one beside the store: they are gone, and nobody's affair.
ROOT, OUTSIDE = "{root}", "{outside}"

Events = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Death:
    """How the process of a plan ended before the plan did.

    `at`: the hook it was in, as `worker 0.save_caches`, or what the harness was at. `hung`: it was killed after `limit_s` seconds
    of silence; otherwise it ended with `status`.
    """

    at: str
    hung: bool
    status: int
    limit_s: float
    output: str = ""

    @property
    def hook(self) -> str:
        """The hook; empty outside of any."""
        return self.at.partition(".")[2]

    def finding(self) -> Finding | None:
        """What it says about the connector; None where the harness itself hung, or somebody else killed the process."""
        if not self.hung and self.status in KILLED:
            return None
        side, _, hook = self.at.partition(".")
        observed = (
            f"nothing for {self.limit_s:.0f} s" if self.hung else f"the process ended with {exit_text(self.status)}"
        )
        if hook:
            kind = f"{hook} hangs" if self.hung else f"{hook} ended the process"
            requirement = HOOK_REQUIREMENT.get(hook, "EPD-INIT-006")
            return Finding(requirement, kind, f"{side}.{hook} returns", f"{observed} in {side}.{hook}")
        if self.hung:
            return None
        if self.at == "reading rows":
            expected = "rows in the encoder cache stay readable"
            return Finding("EPD-XFER-007", "rows unreadable", expected, f"{observed} when the rows were read")
        # In a thread of the connector's own, or long after the hook that damaged memory.
        expected = "a connector never ends the process"
        return Finding("EPD-INIT-006", "ended the process between hooks", expected, observed)


@dataclass(frozen=True)
class PlanEvidence:
    """What one plan showed. `name`: of the plan; `hidden`: width of the language model; `events`: (server, event), in order.

    `twins`: the events of the plan without one circumstance, by the requirement about it, where a finding asked for it.
    """

    name: str
    plan: Plan
    hidden: int
    events: Events = ()
    twins: Mapping[str, Events] = field(default_factory=dict)
    death: Death | None = None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "plan": self.plan.to_json(),
            "hidden": self.hidden,
        }
        found["events"] = self.events
        found["twins"] = self.twins
        found["death"] = vars(self.death) if self.death is not None else None
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanEvidence:
        """Raises ValueError, KeyError or TypeError for what is no evidence, and UsageError for what is no plan."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not evidence of schema {SCHEMA}: {data.get('schema')!r}")
        return cls(
            data["name"],
            Plan.from_json(data["plan"]),
            data["hidden"],
            data["events"],
            data["twins"],
            Death(**data["death"]) if data["death"] is not None else None,
        )

    @cached_property
    def findings(self) -> list[Finding]:
        """What did not hold. Raises KeyError where a twin is needed and missing."""
        if self.death is not None:
            found = self.death.finding()
            return [found] if found is not None else []

        def judge(requirement: str, twin: Plan) -> Judge:
            return judged(twin, self.hidden, self.twins[requirement])

        return explained(once(self._judge.findings), self.plan, judge)

    @cached_property
    def exercised(self) -> frozenset[str]:
        """The requirements whose situation came about, and of which what they ask for was looked at."""
        if self.death is not None:
            return frozenset()
        return frozenset(self._judge.exercised) | _circumstances(self.plan, self._judge, self.events)

    @cached_property
    def _judge(self) -> Judge:
        return judged(self.plan, self.hidden, self.events)


def read_cell(data: Mapping[str, Any]) -> PlanEvidence | None:
    """The smallest failing plan of a cell's evidence, None where it has none. Raises ValueError for what is no such cell."""
    if data.get("schema") != CELL_SCHEMA:
        raise ValueError(f"not a cell of schema {CELL_SCHEMA}: {data.get('schema')!r}")
    return PlanEvidence.from_json(data["shrunk"]) if data["shrunk"] is not None else None


def judged(plan: Plan, hidden: int, events: Events) -> Judge:
    """A judge that has taken all events of a plan."""
    made = judge_of(plan, [item.identifier(OUTSIDE) for item in plan.items], hidden)
    for server, event in events:
        made.take(server, event)
    return made


def _circumstances(plan: Plan, judge: Judge, events: Events) -> frozenset[str]:
    """Requirements about a circumstance of the plan: exercised where the plan has it and an item crossed."""
    crossed = bool(judge.exercised["EPD-XFER-001"])
    names = [operation["op"] for operation in plan.operations]
    producers = [server for server in plan.servers if server.role != "ec_consumer"]
    consumers = [server for server in plan.servers if server.role != "ec_producer"]
    loading = bool(judge.exercised["EPD-XFER-011"])
    conditions = {
        "EPD-INIT-006": crossed and plan.apart,
        "EPD-XFER-009": crossed and any(item.strided for item in plan.items),
        "EPD-RACE-007": crossed and any(server.ranks > 1 for server in producers),
        "EPD-ROLE-010": crossed and any(server.runner == "v1" and server.role == "ec_producer" for server in producers),
        "EPD-RACE-011": loading and "abort" in names and any(server.asynchronous for server in consumers),
        "EPD-LIFE-007": bool(judge.exercised["EPD-LIFE-006"]) and any(server.runner == "v1" for server in consumers),
        "EPD-XFER-014": loading and any(map(share, plan.operations, plan.operations[1:])),
    }
    return frozenset(requirement for requirement, holds in conditions.items() if holds)
