"""Generated scripts: every list of operations makes a plan that can be carried out, and a shorter one asks nothing new."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from epd_conformance.drawing import draw as drawn
from epd_conformance.faults.store import FAULTS
from epd_conformance.plans.generated import FIRST, KINDS, LAST, Operation, compiled, operations, random_script
from epd_conformance.plans.plan import Draw, Plan
from epd_conformance.plans.steps import check

CELL = "EPD-STALE-011[e-pd/tiny/drawn-1]"


def plan(given: Sequence[Operation]) -> Plan:
    return compiled(given, Draw(0, CELL))


def words(made: Plan) -> list[str]:
    labels = iter(request.label for request in made.requests)
    return [
        " ".join([*step.values(), *([next(labels)] if step["do"] == "send" else [])])
        for step in made.steps
    ]  # fmt: skip


def test_damage_is_primed_met_and_allowed_as_long_as_it_lasts() -> None:
    made = plan(
        [
            ("spoil", "a", "truncated"),
            ("send", "ba", "proxy"),
            ("send", "b", "proxy"),
            ("heal",),
            ("send", "a", "proxy"),
        ]
    )
    assert words(made) == [
        "send proxy loaded y",
        "prime",
        "damage truncated",
        "send past-encode contained a",
        "send proxy contained ba",
        "send proxy any b",
        "heal",
        "send proxy any a",
        "send proxy loaded z",
    ]


def test_what_has_no_sense_is_left_out() -> None:
    nothing: list[list[Operation]] = [
        [("heal",)],
        # What is gone cannot be damaged while an encode server still holds it: it would not be saved again.
        [("send", "a", "proxy"), ("purge",), ("spoil", "a", "garbage")],
        # Nothing is stored.
        [("purge",), ("purge",)],
    ]
    assert ["heal" in words(plan(one)) for one in nothing] == [False, False, False]
    assert sum("damage" in line for line in words(plan(nothing[1]))) == 0
    assert words(plan(nothing[2])).count("store emptied") == 1
    # One object at a time is damaged, and while it is nobody empties the store.
    both = words(plan([("spoil", "a", "empty"), ("spoil", "b", "empty"), ("purge",)]))
    assert [line for line in both if line.startswith(("damage", "store"))] == ["damage empty"]
    # After a reset the encode servers save anew.
    again = words(plan([("send", "a", "proxy"), ("purge",), ("reset", "encoder"), ("spoil", "a", "garbage")]))
    assert "damage garbage" in again


def test_unknown_operations_are_errors() -> None:
    with pytest.raises(ValueError, match="no operation 'fly'"):
        plan([("fly",)])


@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(operations(restarts=True))
def test_every_list_makes_a_plan(given_operations: list[Operation]) -> None:
    made = plan(given_operations)
    for step in made.steps:
        check(step)
    sends = [step for step in made.steps if step["do"] == "send"]
    assert len(sends) == len(made.requests) == len(made.contrasts)
    assert (made.requests[0].label, made.requests[-1].label) == (FIRST, LAST)
    assert {step["how"] for step in (sends[0], sends[-1])} == {"loaded"}
    assert Plan.from_json(made.to_json()) == made
    # Of fewer operations, whoever asks for the same items asks the same: the baselines are known.
    asked = {request.label: request.digest() for request in (*made.requests, *made.contrasts)}
    for left in range(len(given_operations)):
        shorter = plan([*given_operations[:left], *given_operations[left + 1 :]])
        again = {request.label: request.digest() for request in (*shorter.requests, *shorter.contrasts)}
        assert all(asked.get(label, digest) == digest for label, digest in again.items())


def test_the_same_cell_draws_the_same_script_and_another_one_another() -> None:
    names = [f"EPD-STALE-011[e-pd/tiny/drawn-{number}]" for number in range(8)]
    made = [random_script(Draw(0, name)) for name in names]
    assert made[0] == random_script(Draw(0, names[0]))
    assert made[0] != random_script(Draw(1, names[0]))
    shapes = {tuple(words(one)) for one in made}
    assert len(shapes) == len(made)
    assert all(any(step["do"] == "damage" for step in one.steps) for one in made), "each does damage"


def test_nothing_is_left_where_scripts_are_drawn(tmp_path: Path) -> None:
    code = "from epd_conformance.plans.generated import random_script as r, Draw; r(Draw(0, 'x'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_operation_comes_up() -> None:
    found = [operation for one in drawn(operations(restarts=True), 200, 0) for operation in one]
    assert {operation[0] for operation in found} == {"send", "spoil", "heal", "purge", "reset", "restart"}
    assert {operation[2] for operation in found if operation[0] == "spoil"} == set(KINDS) <= set(FAULTS)
    assert not any(operation[0] == "restart" for one in drawn(operations(), 200, 0) for operation in one)


def test_steps_name_what_they_mean() -> None:
    steps: tuple[Mapping[str, str], ...] = plan([("restart", "consumer"), ("reset", "mm")]).steps
    assert [dict(step) for step in steps[1:3]] == [
        {"do": "restart", "servers": "consumer"},
        {"do": "reset", "cache": "mm"},
    ]
