"""Why a finding came about: a plan is carried out once more without one of its circumstances, and if the finding is then gone, the
requirement about that circumstance is named. Pure: who carries out the second plan, or has its evidence, is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epd_conformance.engine.findings import Finding
from epd_conformance.engine.judge import Judge
from epd_conformance.engine.plan import Plan, argument

#: The judge of a twin, by the requirement about the circumstance that it lacks.
TwinJudge = Callable[[str, Plan], Judge]


def explained(findings: Sequence[Finding], plan: Plan, judge: TwinJudge) -> list[Finding]:
    """The findings of a plan, with those that only one circumstance brings about under the requirement about that one.

    A twin that did not put the same to the test explains nothing.
    """
    left = [finding for finding in findings if finding.requirement in _UNEXPLAINED]
    found: dict[tuple[str, str], Finding] = {}
    for requirement, kind, without in TWINS:
        applies = _APPLIES.get(requirement, _UNEXPLAINED)
        meant = [finding for finding in left if finding.requirement in applies]
        twin = without(plan) if meant else None
        if twin is None or twin == plan:
            continue
        shown = judge(requirement, twin)
        still = {finding.name for finding in shown.findings}
        gone = [finding for finding in meant if finding.name not in still and shown.exercised[finding.requirement]]
        for finding in gone:
            found[finding.name] = replace(
                finding, requirement=requirement, kind=f"{finding.kind.partition(', ')[0]}, {kind}"
            )
            left.remove(finding)
    return once([found.get(finding.name, finding) for finding in findings])


def once(findings: Sequence[Finding]) -> list[Finding]:
    """The first of each name."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault(finding.name, finding)
    return list(first.values())


def _evicts_at_a_producer(plan: Plan, operation: Mapping[str, Any]) -> bool:
    if operation["op"] not in ("evict", "reset"):
        return False
    role = plan.servers[int(argument(operation, "server")) % len(plan.servers)].role
    return role == "ec_producer"


def _one_by_one(operations: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Requests that arrive together and share an item are served one after the other instead."""
    apart: list[Mapping[str, Any]] = []
    for operation in operations:
        if apart and share(apart[-1], operation):
            apart.append({"op": "run", "server": argument(operation, "server")})
        apart.append(operation)
    return apart


def share(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two operations are requests to one server that name one item."""
    return (
        one["op"] == other["op"] == "request"
        and argument(one, "server") == argument(other, "server")
        and bool(set(argument(one, "items")) & set(argument(other, "items")))
    )


def _fault(operation: Mapping[str, Any]) -> str:
    return str(argument(operation, "fault")) if operation["op"] == "store" else ""


#: A circumstance of a plan, how the plan is without it, and the requirement about it.
TWINS: tuple[tuple[str, str, Any], ...] = (
    (
        "EPD-INIT-006",
        "only in processes of their own",
        lambda plan: replace(plan, apart=False) if plan.apart else None,
    ),
    (
        "EPD-XFER-009",
        "only when not contiguous",
        lambda plan: replace(plan, items=tuple(replace(item, strided=False) for item in plan.items)),
    ),
    (
        "EPD-RACE-011",
        "only with asynchronous scheduling",
        lambda plan: replace(plan, servers=tuple(replace(s, asynchronous=False, late=False) for s in plan.servers)),
    ),
    (
        "EPD-RACE-007",
        "only with several ranks",
        lambda plan: replace(plan, servers=tuple(replace(s, ranks=1) for s in plan.servers)),
    ),
    (
        "EPD-ROLE-010",
        "only where a producer's output is dropped",
        lambda plan: replace(
            plan,
            servers=tuple(replace(s, runner="v2") if s.role == "ec_producer" else s for s in plan.servers),
        ),
    ),
    (
        "EPD-LIFE-007",
        "only where the worker is not called on empty steps",
        lambda plan: replace(
            plan, servers=tuple(replace(s, runner="v2") if s.role != "ec_producer" else s for s in plan.servers)
        ),
    ),
    (
        "EPD-XFER-010",
        "only after an eviction at the producer",
        lambda plan: plan.with_operations([o for o in plan.operations if not _evicts_at_a_producer(plan, o)]),
    ),
    (
        "EPD-XFER-014",
        "only when requests of one step share it",
        lambda plan: plan.with_operations(_one_by_one(plan.operations)),
    ),
    (
        "EPD-SEC-004",
        "only with hostile parameters",
        lambda plan: plan.with_operations(
            [{**o, "params": None} if o.get("params") is not None else o for o in plan.operations]
        ),
    ),
    (
        "EPD-ERR-003",
        "only after the store was full",
        lambda plan: plan.with_operations([o for o in plan.operations if _fault(o) != "full"]),
    ),
    (
        "EPD-ERR-004",
        "only after the store was away or read-only",
        lambda plan: plan.with_operations([o for o in plan.operations if _fault(o) not in ("read-only", "removed")]),
    ),
)

#: Findings that say what happened and not why: a twin may tell.
_UNEXPLAINED = {
    "EPD-KEY-001",
    "EPD-XFER-001",
    "EPD-XFER-006",
    "EPD-XFER-011",
    "EPD-LIFE-004",
    "EPD-LIFE-006",
    "EPD-ERR-003",
    "EPD-ERR-004",
}

#: Twins that tell only about some findings: without an eviction nothing is saved a second time, so that a miss would go with it
#: whatever caused it; runner V1's empty steps matter to a request that waits; and what a store's failure leaves behind is an item
#: that is not found or cannot be loaded.
_LEFT_BEHIND = {"EPD-KEY-001", "EPD-XFER-001", "EPD-XFER-006", "EPD-XFER-011"}
_APPLIES = {
    "EPD-XFER-010": {"EPD-XFER-001", "EPD-XFER-006"},
    "EPD-LIFE-007": {"EPD-LIFE-006"},
    "EPD-ERR-003": _LEFT_BEHIND,
    "EPD-ERR-004": _LEFT_BEHIND,
}
