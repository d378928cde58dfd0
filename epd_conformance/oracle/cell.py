"""A cell's raw evidence, and what a judge says about it: pure data.

A cell's evidence is written down as it is (plan, answers, baseline answers, journal lines), and a verdict is always computed
from it; so whoever has the evidence can compute the verdict again and need not believe ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from epd_conformance.oracle import transport
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.transport import KVTransfer, Roles, Transport
from epd_conformance.plans.plan import Plan
from epd_conformance.report.failure import Divergence
from epd_conformance.report.schema import Evidence
from epd_conformance.verdict import Owner, Verdict

SCHEMA = "epd-conformance/cell/v1"


@dataclass(frozen=True)
class CellEvidence:
    """Everything that a judge may look at.

    `answers`: those of the plan's requests, in order. `baseline`: by request digest, then by arm (`aggregated`, `p-d`), the
    first answer of that arm. `admitted`: request digests that may be compared exactly; `floor` the noise floor in nats, and
    `floor_enough` whether enough prompts were admitted at all. `before`: earlier journal lines that matter for the cell's
    keys; `during`: all lines of the cell. `deaths`: obituaries of servers that ended during the cell, `{name, status, text}`.
    `facts`: what a judge of a special case needs besides (for instance which status a planted error must have).
    """

    cell: str
    judge: str
    topology: str
    owner: Owner
    plan: Plan
    answers: tuple[Answer, ...]
    baseline: Mapping[str, Mapping[str, Answer]]
    admitted: frozenset[str]
    floor: float
    floor_enough: bool
    roles: Roles
    before: tuple[Mapping[str, Any], ...] = ()
    during: tuple[Mapping[str, Any], ...] = ()
    deaths: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cell": self.cell,
            "judge": self.judge,
            "topology": self.topology,
            "owner": str(self.owner),
            "plan": self.plan.to_json(),
            "answers": [answer.to_json() for answer in self.answers],
            "baseline": {
                digest: {arm: answer.to_json() for arm, answer in arms.items()}
                for digest, arms in self.baseline.items()
            },
            "admitted": sorted(self.admitted),
            "floor": self.floor,
            "floor_enough": self.floor_enough,
            "roles": self.roles.to_json(),
            "before": list(self.before),
            "during": list(self.during),
            "deaths": list(self.deaths),
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellEvidence:
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a cell of schema {SCHEMA}: {data.get('schema')!r}")
        return cls(
            cell=data["cell"],
            judge=data["judge"],
            topology=data["topology"],
            owner=Owner(data["owner"]),
            plan=Plan.from_json(data["plan"]),
            answers=tuple(Answer.from_json(answer) for answer in data["answers"]),
            baseline={
                digest: {arm: Answer.from_json(answer) for arm, answer in arms.items()}
                for digest, arms in data["baseline"].items()
            },
            admitted=frozenset(data["admitted"]),
            floor=data["floor"],
            floor_enough=data["floor_enough"],
            roles=Roles.from_json(data["roles"]),
            before=tuple(data["before"]),
            during=tuple(data["during"]),
            deaths=tuple(data["deaths"]),
            facts=data["facts"],
        )

    def events(
        self, index: int, span: tuple[float, float] | None = None
    ) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """Journal lines before and during one request. `span`: from when to when it ran; by default the requests of a cell are sent
        one after the other."""
        start = self.answers[index].started if index else 0.0
        stop = self.answers[index + 1].started if index + 1 < len(self.answers) else float("inf")
        start, stop = span or (start, stop)
        earlier = [event for event in self.during if event["t"] < start]
        return [*self.before, *earlier], [event for event in self.during if start <= event["t"] < stop]

    def transport(self, index: int, span: tuple[float, float] | None = None) -> Transport:
        """Proof of transport of one request of the plan."""
        proof = transport.transport(*self.events(index, span), self.answers[index].request_id, self.roles)
        wanted = len(self.plan.requests[index].images)
        if proof.problem is None and len(proof.items) != wanted:
            problem = f"item-missing: the consumer saw {len(proof.items)} of the request's {wanted} items"
            return replace(proof, problem=problem, digests_equal=None if proof.digests_equal else proof.digests_equal)
        return proof

    def kv(self, index: int, span: tuple[float, float] | None = None) -> KVTransfer | None:
        """Proof of KV of one request; None in a topology without a decode server."""
        if not self.roles.decode:
            return None
        before, during = self.events(index, span)
        return transport.kv_transfer(before, during, self.answers[index].request_id, self.roles)


@dataclass(frozen=True)
class Judgement:
    """A verdict with what a person needs to understand it."""

    verdict: Verdict
    reason: str = ""
    rung: str | None = None
    expected: str = ""
    observed: str = ""
    divergence: Divergence | None = None
    causes: tuple[str, ...] = ()
    blame: Owner | None = None
    evidence: Evidence = field(default_factory=Evidence)


Judge = Callable[[CellEvidence], Judgement]
