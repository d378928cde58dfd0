"""The judge of vLLM's Scheduler alone: what it says about events, with no scheduler; and the plans that are for it."""

from __future__ import annotations

from typing import Any

import pytest

from epd_conformance.catalogue import load as load_catalogue
from epd_conformance.engine.content import Content
from epd_conformance.engine.judge import Judge
from epd_conformance.engine.layers import examples, fixed
from epd_conformance.engine.plan import Plan, ServerSpec
from epd_conformance.engine.schedule_judge import STANDSTILL
from epd_conformance.engine.scheduler_corpus import EXERCISES, scheduler_corpus
from epd_conformance.features import Feature
from epd_conformance.verdict import Mode

ALL = frozenset(Feature)
KEYS = ("a", "b", "c")


def judge(**spec: Any) -> Judge:
    """Of one consumer with a cache of two items of four rows, unless the spec says otherwise, and one request for `a` and `b`."""
    contents = {key: Content(seed, 4, 8) for seed, key in enumerate(KEYS)}
    made = Judge(contents, frozenset(), frozenset({"c"}), {"c": ServerSpec("ec_consumer", **{"cache": 8, **spec})})
    queue(made, "r", "a", "b")
    return made


def queue(made: Judge, request: str, *keys: str) -> None:
    made.arrived(request, "c", dict.fromkeys(keys, True), False)
    made.take("c", ("queued", request, 5 * len(keys), [(key, 5 * i, "1111", False) for i, key in enumerate(keys)]))


def pass_(made: Judge, number: int, tokens: dict[str, int], computed: dict[str, int], **facts: Any) -> None:
    usual = {"limit": 64, "kv": "", "encodes": {}, "preempted": [], "evicted": [], "room": 0}
    made.take("c", ("built", bool(tokens)))
    made.take("c", ("pass", {"number": number, "tokens": tokens, "computed": computed, **usual, **facts}))


def chosen(made: Judge, request: str, *keys: str, local: bool = False) -> None:
    """The request is let through, and takes these items; not `local`: from the connector, which has them."""
    made.take("c", ("asked", request, 0, True))
    for index, key in enumerate(keys):
        if not local:
            made.take("c", ("room", request, index, 64, 4 * index, True, []))
            made.take("c", ("lookup", request, key, True))
    for index, _ in enumerate(keys):
        if not local:
            made.take("c", ("took", request, index))
            made.take("c", ("told", request, index))


def found(made: Judge) -> list[tuple[str, str]]:
    return [finding.name for finding in made.findings]


def test_an_item_from_the_connector_then_from_the_cache() -> None:
    made = judge()
    chosen(made, "r", "a", "b")
    pass_(made, 1, {"r": 10}, {"r": 0})
    queue(made, "s", "a", "b")
    chosen(made, "s", "a", "b", local=True)
    pass_(made, 2, {"s": 10}, {"s": 0})
    assert found(made) == []
    assert made.exercised["EPD-XFER-017"] == 1
    made.take("c", ("lookup", "s", "a", True))
    assert found(made) == [("EPD-XFER-016", "asked for a local item")]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("told", "r", 0), ("EPD-XFER-018", "allocation told wrongly")),
        (("built", True), ("EPD-XFER-019", "metadata asked wrongly")),
        (("room", "r", 0, 60, 8, True, []), ("EPD-XFER-017", "load charged to the budget")),
        (("room", "r", 0, 64, 4, True, []), ("EPD-XFER-017", "load takes no room")),
    ],
)
def test_one_call_too_many_or_with_another_number(change: tuple[Any, ...], name: tuple[str, str]) -> None:
    made = judge()
    chosen(made, "r", "a", "b")
    made.take("c", change)
    pass_(made, 1, {"r": 10}, {"r": 0})
    assert found(made) == [name]


def test_rows_are_counted_from_what_was_taken() -> None:
    made = judge()
    chosen(made, "r", "a", "b")
    pass_(made, 1, {"r": 10}, {"r": 0}, room=4)
    assert found(made) == [("EPD-XFER-017", "room counted wrongly")]


def test_an_entry_goes_only_for_another_one() -> None:
    made = judge()
    chosen(made, "r", "a", "b")
    pass_(made, 1, {"r": 10}, {"r": 0})
    made.take("c", ("settled", 1, {"r": 10}, {}, 0))
    made.take("c", ("finished", "r", "FINISHED_LENGTH_CAPPED", None))
    queue(made, "s", "c")
    made.take("c", ("room", "s", 0, 64, 0, True, ["a"]))
    assert found(made) == []
    made.take("c", ("room", "s", 0, 64, 0, True, ["b"]))
    assert found(made) == [("EPD-LIFE-018", "evicted without need")]


def test_the_engine_is_blamed_for_an_item_that_it_dropped() -> None:
    """And not the connector, though the worker dies in the same way as of an item that was promised and is not there."""
    made = judge(priority=True)
    made.take("c", ("asked", "r", 0, True))
    for index, key in enumerate(("a", "b")):
        made.take("c", ("room", "r", index, 64 - 4 * index, 4 * index, True, []))
        made.take("c", ("lookup", "r", key, False))
        made.take("c", ("took", "r", index))
        made.take("c", ("told", "r", index))
    pass_(made, 1, {}, {}, preempted=["r"])
    queue(made, "s", "a")
    chosen(made, "s", "a", local=True)
    pass_(made, 2, {"s": 5}, {"s": 0})
    made.take("c", ("lost", 0, "a"))
    assert found(made) == [("EPD-RACE-012", "neither encoded nor loaded")]


@pytest.mark.parametrize(("answer", "requirements"), [(True, ["EPD-LIFE-014"]), (False, ["EPD-LIFE-006"])])
def test_whoever_holds_a_request_back_is_blamed(answer: bool, requirements: list[str]) -> None:
    made = judge()
    for number in range(STANDSTILL + 1):
        if not answer:
            made.take("c", ("deferred", "r", False, 0, ["a", "b"], []))
        made.take("c", ("asked", "r", 0, answer))
        pass_(made, number, {}, {}, room=8)
    made.take("c", ("stuck", "r", 300.0))
    assert sorted({finding.requirement for finding in made.findings}) == requirements


def test_the_plans_come_back_equal_from_their_json() -> None:
    for plan in scheduler_corpus(ALL).values():
        assert Plan.from_json(plan.to_json()) == plan


def test_every_requirement_by_plans_has_plans() -> None:
    names = list(scheduler_corpus(ALL))
    asked = {item.id for item in load_catalogue() if item.topologies == ("scheduler",)}
    # A directed check shows the other one.
    assert asked - set(EXERCISES) == {"EPD-KEY-015"}
    for requirement, beginnings in EXERCISES.items():
        assert all(any(name.startswith(beginning) for name in names) for beginning in beginnings), requirement


def test_the_layers_share_their_plans() -> None:
    contract, scheduler = fixed("contract", ALL), fixed("scheduler", ALL)
    assert {name: scheduler[name] for name in contract} == contract
    assert set(scheduler) - set(contract) == set(scheduler_corpus(ALL))
    assert 0 < examples("scheduler", Mode.CERTIFY) < examples("contract", Mode.CERTIFY)
