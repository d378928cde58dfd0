"""The hunt: draw plans, carry them out, and shrink what was found to the smallest plan that shows it.

Hypothesis draws; shrinking is done here, on the plan's JSON. A plan often shows several things, Hypothesis would shrink it for one
of them only and, where a plan costs a process, would take many times the runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st

from epd_conformance.drawing import feed
from epd_conformance.engine import clock
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.plan import OPERATIONS, ItemSpec, Plan

#: Carries out a plan: its findings, and how many engine steps it took.
Carry = Callable[[Plan], tuple[list[Finding], int]]

#: Runs that shrinking one finding may take: with one or two milliseconds a step some seconds at most.
SHRINK_RUNS = 400
#: A hook that hangs costs the whole time limit of a plan in every run.
SHRINK_RUNS_OF_A_HANG = 6
HANGS = "hangs"


@dataclass
class Catch:
    """One thing that was found: the finding, and the smallest plan that shows it."""

    finding: Finding
    plan: Plan
    runs: int = 0
    examples: int = 1


@dataclass
class Hunt:
    """`seconds`: of the examples, `shrink_seconds`: of shrinking, by the machine's clock."""

    catches: dict[tuple[str, str], Catch] = field(default_factory=dict)
    examples: int = 0
    steps: int = 0
    seconds: float = 0.0
    shrink_seconds: float = 0.0


def hunt(
    carry: Carry,
    strategies: Mapping[str, st.SearchStrategy[Plan]],
    *,
    examples: int,
    random_seed: int,
    shrink: bool = True,
    stop: Callable[[Hunt], bool] = lambda so_far: False,
    database: Any = None,
) -> Hunt:
    """Carry out as many drawn plans, the same ones for the same seed.

    Args:
        strategies: by theme (`strategies.plans`); each gets the same share of the examples.
        stop: asked after each plan; True ends the hunt, as mutation testing does at the first finding.
        database: a Hypothesis database that keeps what failed between runs; None for none.
    """
    done = Hunt()
    began = clock.real()

    def take(plan: Plan) -> None:
        if stop(done):
            return
        findings, steps = carry(plan)
        done.examples += 1
        done.steps += steps
        for finding in findings:
            known = done.catches.get(finding.name)
            if known is None:
                done.catches[finding.name] = Catch(finding, plan)
            else:
                known.examples += 1
                if size(plan) < size(known.plan):
                    known.finding, known.plan = finding, plan

    for number, strategy in enumerate(strategies.values()):
        share = (examples + number) // len(strategies)
        if share and not stop(done):
            feed(strategy, share, random_seed + number, take, database)
    done.seconds = clock.real() - began
    if shrink:
        began = clock.real()
        for catch in done.catches.values():
            shrink_catch(catch, carry)
        done.shrink_seconds = clock.real() - began
    return done


def shrink_catch(catch: Catch, carry: Carry, runs: int = SHRINK_RUNS) -> None:
    """Make the plan smaller as long as it shows a finding of the same name, in at most so many runs."""
    if catch.finding.kind.endswith(HANGS):
        runs = min(runs, SHRINK_RUNS_OF_A_HANG)
    changed = True
    while changed and catch.runs < runs:
        changed = False
        for candidate in _smaller(catch.plan):
            if size(candidate) >= size(catch.plan):
                continue
            if catch.runs >= runs:
                return
            catch.runs += 1
            found = [finding for finding in carry(candidate)[0] if finding.name == catch.finding.name]
            if found:
                catch.plan, catch.finding, changed = candidate, found[0], True
                break


def size(plan: Plan) -> tuple[int, int]:
    """Fewer operations first, then a shorter text."""
    return len(plan.operations) + len(plan.servers), len(plan.to_text())


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans that may show the same and are smaller, the boldest first."""
    operations = plan.operations
    length = len(operations)
    cut = length // 2
    while cut:
        for start in range(0, length, cut):
            yield plan.with_operations(operations[:start] + operations[start + cut :])
        cut //= 2
    for index in range(len(plan.servers)):
        if len(plan.servers) > 1:
            yield replace(plan, servers=plan.servers[:index] + plan.servers[index + 1 :])
    yield replace(plan, apart=False, dtype="float32", shutdown="worker-first")
    for index, server in enumerate(plan.servers):
        for field_, usual in (
            ("ranks", 1),
            ("late", False),
            ("asynchronous", False),
            ("runner", "v1"),
            ("cache", 64),
            ("budget", 64),
            ("blocks", 0),
            ("prefix_caching", False),
            ("whole_items", False),
            ("priority", False),
            ("drafts", 0),
            ("lookahead", 0),
            ("kv_connector", False),
        ):
            if getattr(server, field_) != usual:
                changed: dict[str, Any] = {field_: usual}
                plain = replace(server, **changed)
                yield replace(plan, servers=(*plan.servers[:index], plain, *plan.servers[index + 1 :]))
    used = sorted({item for operation in operations for item in _items_of(operation)})
    if used and used[-1] < len(plan.items) - 1:
        yield replace(plan, items=plan.items[: used[-1] + 1])
    for index, item in enumerate(plan.items):
        for plain_item in _plainer(item):
            yield replace(plan, items=(*plan.items[:index], plain_item, *plan.items[index + 1 :]))
        if len(plan.items) > 1 and index not in used:
            shifted = [_shift(operation, index) for operation in operations]
            yield replace(plan, items=plan.items[:index] + plan.items[index + 1 :], operations=tuple(shifted))
    for index, operation in enumerate(operations):
        for simpler in _simpler(operation):
            yield plan.with_operations([*operations[:index], simpler, *operations[index + 1 :]])


def _items_of(operation: Any) -> list[int]:
    found = list(operation.get("items", ()))
    if operation["op"] == "damage":
        found.append(operation.get("item", 0))
    if operation.get("during"):
        found.append(operation["during"].get("item", 0))
    if operation["op"] == "transfer" and "items" not in operation:
        found.append(0)
    return found


def _shift(operation: Any, gone: int) -> dict[str, Any]:
    """The operation where the item `gone` is no more."""

    def moved(item: int) -> int:
        return item - 1 if item > gone else item

    shifted = dict(operation)
    if "items" in shifted:
        shifted["items"] = [moved(item) for item in shifted["items"]]
    if "item" in shifted:
        shifted["item"] = moved(shifted["item"])
    if shifted.get("during"):
        shifted["during"] = {**shifted["during"], "item": moved(shifted["during"].get("item", 0))}
    return shifted


def _plainer(item: ItemSpec) -> Iterator[ItemSpec]:
    for name, usual in (
        ("strided", False),
        ("gaps", 0),
        ("pad", 0),
        ("rows", 1),
        ("rows", 2),
        ("rows", 4),
    ):
        if getattr(item, name) != usual and (name != "rows" or item.rows > int(usual)):
            changed: dict[str, Any] = {name: usual}
            yield replace(item, **changed)


def _simpler(operation: Any) -> Iterator[dict[str, Any]]:
    """The operation with a field left out, a list shortened or a number made smaller."""
    usual = OPERATIONS[operation["op"]]
    for name, value in operation.items():
        if name == "op":
            continue
        yield {key: kept for key, kept in operation.items() if key != name}
        if isinstance(value, list) and len(value) > 1:
            for place in range(len(value)):
                yield {**operation, name: value[:place] + value[place + 1 :]}
        if type(value) is int and value > 0 and usual[name] != value:
            yield {**operation, name: value // 2}
