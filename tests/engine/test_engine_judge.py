"""The judge alone: what it says about events, with no connector and no engine."""

from __future__ import annotations

from typing import Any

import pytest

from epd_conformance.engine.content import Content, expected_digest
from epd_conformance.engine.judge import Judge

A, B = Content(0, 4, 8), Content(1, 4, 8)


def judge() -> Judge:
    return Judge({"a": A, "b": B}, frozenset({"e"}), frozenset({"c"}))


def saved(made: Judge, key: str = "a") -> Judge:
    made.take("e", ("saved", 0, key, []))
    made.arrived("r", "c", {key: True}, False)
    return made


def loaded(content: Content, *, key: str = "a", **change: Any) -> tuple[Any, ...]:
    values = {"digest": expected_digest(content), "shape": [4, 8], "dtype": "float32", "device": "cpu", "asked": True}
    values.update(change)
    return ("loaded", 0, key, *values.values())


def requirements(made: Judge) -> list[str]:
    return [finding.requirement for finding in made.findings]


def test_a_saved_item_is_to_be_found() -> None:
    made = saved(judge())
    made.take("c", ("lookup", "r", "a", True))
    made.take("c", loaded(A))
    made.take("c", ("used", 0, "a", expected_digest(A)))
    assert made.findings == []
    made.take("c", ("lookup", "r", "a", False))
    assert requirements(made) == ["EPD-KEY-001"]


def test_a_request_that_came_before_the_save_may_miss() -> None:
    made = judge()
    made.arrived("r", "c", {"a": True}, False)
    made.take("e", ("saved", 0, "a", []))
    made.take("c", ("lookup", "r", "a", False))
    assert made.findings == []


@pytest.mark.parametrize("how", ["deleted", "flipped-bit"])
def test_a_damaged_item_may_be_missed_or_be_right(how: str) -> None:
    made = saved(judge())
    made.take("e", ("damaged", "a", how, ""))
    made.take("c", ("lookup", "r", "a", False))
    made.take("c", loaded(A))
    assert made.findings == []


def test_a_damaged_item_may_not_be_wrong_until_it_is_saved_again() -> None:
    made = saved(judge())
    made.take("e", ("damaged", "a", "flipped-bit", ""))
    made.take("c", loaded(A, digest="other"))
    assert requirements(made) == ["EPD-INTEG-009"]
    made.take("e", ("saved", 0, "a", []))
    made.take("c", loaded(A, digest="other"))
    assert requirements(made)[1:] == ["EPD-XFER-001"]


@pytest.mark.parametrize(
    ("event", "requirement"),
    [
        (loaded(A, shape=[3, 8]), "EPD-XFER-006"),
        (loaded(A, dtype="bfloat16"), "EPD-XFER-006"),
        (loaded(A, device="cuda"), "EPD-XFER-006"),
        (loaded(B), "EPD-KEY-003"),
        (loaded(A, asked=False), "EPD-XFER-012"),
        (("missing", 0, "a"), "EPD-XFER-011"),
        (("saved", 0, "a", ["file"]), "EPD-ROLE-011"),
        (("raised", "worker 0", "save_caches", "x", []), "EPD-ROLE-011"),
        (("raised", "worker 0", "start_load_caches", "x", []), "EPD-XFER-011"),
        (("unencodable", "r", "a"), "EPD-ERR-002"),
        (("deferred", "r", True, 9, [], []), "EPD-LIFE-008"),
        (("named", ["r"]), "EPD-ERR-001"),
        (("finished", "r", "FINISHED_ABORTED", ("EPD-LIFE-003", "x")), "EPD-LIFE-003"),
    ],
)
def test_what_may_not_be(event: tuple[Any, ...], requirement: str) -> None:
    made = saved(judge())
    made.take("c", event)
    assert requirements(made) == [requirement]


def test_a_promise_that_is_lost_is_blamed_on_what_happened_to_it() -> None:
    made = saved(judge())
    made.take("c", ("lookup", "r", "a", True))
    made.take("c", ("promised", "r", "a", False))
    made.take("c", ("damaged", "a", "deleted", "load"))
    made.take("c", ("loading", ["a"]))
    made.take("c", ("missing", 0, "a"))
    assert [finding.name for finding in made.findings] == [("EPD-RACE-002", "deleted before the load")]


def test_rows_that_change_while_they_are_held_are_found_once_they_are_used() -> None:
    made = saved(judge())
    made.take("c", loaded(A))
    made.take("c", ("used", 0, "a", "other"))
    assert requirements(made) == ["EPD-XFER-007"]


def test_while_the_store_fails_nothing_is_to_be_found_and_hooks_still_return() -> None:
    made = saved(judge())
    made.store_broke("removed")
    made.take("c", ("lookup", "r", "a", False))
    assert made.findings == []
    made.take("c", ("raised", "scheduler", "has_cache_item", "x", ["a"]))
    assert requirements(made) == ["EPD-ERR-004"]
    made.store_broke("")
    made.take("c", ("lookup", "r", "a", False))
    assert requirements(made)[1:] == ["EPD-KEY-001"]


@pytest.mark.parametrize(
    ("fault", "absent", "requirement"),
    [
        ("removed", ["a", "b"], "EPD-ERR-004"),
        ("removed", ["b"], ""),  # what was there before still is
        ("read-only", ["b"], "EPD-ERR-004"),
        ("full", ["b"], "EPD-ERR-003"),
        ("full", ["a"], ""),  # what was saved meanwhile is there
        ("full", [], ""),
    ],
)
def test_a_fault_of_the_store_counts_where_it_shows(fault: str, absent: list[str], requirement: str) -> None:
    made = saved(judge())
    for event in (("fault", fault), ("saved", 0, "b", []), ("lookup", "r", "a", False), ("absent", absent)):
        made.take("e" if event[0] == "saved" else "c", event)
    assert {name for name in made.exercised if name.startswith("EPD-ERR")} == {requirement} - {""}


def test_a_look_up_that_raises_is_blamed_on_the_object_that_lies_there() -> None:
    for damaged, expected in ((True, "EPD-INTEG-001"), (False, "EPD-KEY-001")):
        made = saved(judge())
        made.take("e", ("damaged", "a" if damaged else "b", "truncated", ""))
        made.take("c", ("raised", "scheduler", "has_cache_item", "x", ["a"]))
        assert requirements(made) == [expected]


def test_only_what_was_loaded_once_can_be_lost_when_loaded_again() -> None:
    for loads, expected in (([loaded(A)], "EPD-XFER-015"), ([("encoded", 0, "a")], "EPD-XFER-011")):
        made = saved(judge())
        for event in [*loads, ("evicted", "a", False), ("missing", 0, "a")]:
            made.take("c", event)
        assert requirements(made) == [expected]


def test_a_server_that_keeps_nothing_may_miss_after_its_restart() -> None:
    for keeps, expected in ((True, ["EPD-KEY-001"]), (False, [])):
        made = saved(judge())
        made.restarted("e", keeps)
        made.take("c", ("lookup", "r", "a", False))
        assert requirements(made) == expected


def test_a_producer_that_vouches_for_a_damaged_object() -> None:
    made = saved(judge())
    made.take("e", ("damaged", "a", "truncated", ""))
    made.take("e", ("lookup", "p", "a", True))
    made.take("c", ("lookup", "r", "a", False))
    assert requirements(made) == ["EPD-INTEG-014"]


def test_the_end_of_references() -> None:
    made = judge()
    made.arrived("r", "c", {"a": False}, False)
    # Nobody saved it: giving it up is right.
    made.take("c", ("named", ["r"]))
    assert made.findings == []
    made.take("e", ("saved", 0, "b", []))
    made.arrived("s", "c", {"b": False}, False)
    made.take("c", ("named", ["s"]))
    assert requirements(made) == ["EPD-KEY-001"]
