"""The noise floor: which prompts are steady enough for exact comparison, and when there are too few."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from epd_conformance.oracle.answers import NO_IDS, Answer
from epd_conformance.oracle.noise import MARGIN_FACTOR, measure, spread

GOOD = Answer("l", "r", 200, (1, 2), (5, 6), (-0.5, -1.0), (1.0, 0.75))


def runs(*changes: dict[str, Any]) -> list[Answer]:
    return [replace(GOOD, **change) for change in changes]


def steady() -> list[Answer]:
    return runs({}, {})


def why(answers: list[Answer], **more: Any) -> str:
    """The reason for which prompt `x` is rejected beside eight good ones."""
    arms: list[Any] = [{**{str(i): steady() for i in range(8)}, "x": answers}]
    found = measure(arms, **more)
    assert "x" not in found.admitted
    assert len(found.admitted) == 8
    return found.rejected["x"]


def test_steady_prompts_are_admitted_with_a_floor_of_nothing() -> None:
    found = measure([{str(i): steady() for i in range(10)}])
    assert (found.floor, found.least_margin, found.offered, found.repetitions) == (0.0, 0.75, 10, 2)
    assert found.admitted == {str(i) for i in range(10)}
    assert found.rejected == {}
    assert found.enough
    assert "10 of 10" in found.words()


def test_the_floor_is_the_largest_difference_between_two_runs() -> None:
    noisy = runs({"logprobs": (-0.5, -1.0)}, {"logprobs": (-0.5, -1.125)}, {"logprobs": (-0.375, -1.0)})
    assert spread(noisy) == 0.125
    found = measure([{"a": steady(), "b": noisy}])
    assert found.floor == 0.125
    # The floor holds for every prompt, also for the steady one: 0.75 is above twice 0.125.
    assert found.admitted == {"a", "b"}


@pytest.mark.parametrize(("margin", "admitted"), [(0.25, False), (0.2500001, True), (0.0, False)])
def test_a_margin_must_exceed_what_noise_could_close(margin: float, admitted: bool) -> None:
    assert MARGIN_FACTOR == 2
    noisy = runs({"logprobs": (-0.5, -1.0)}, {"logprobs": (-0.5, -1.125)})
    near = runs({"margins": (1.0, margin)}, {"margins": (1.0, 1.0)})
    found = measure([{"noisy": noisy, "near": near}])
    assert ("near" in found.admitted) is admitted
    assert ("near" in found.rejected) is not admitted


def test_a_tie_is_rejected_even_without_noise() -> None:
    assert "margin" in why(runs({"margins": (1.0, 0.0)}, {"margins": (1.0, 0.0)}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{}, {"ids": (5, 7)}], "different ids"),
        ([{}, {"prompt_ids": (1, 3)}], "different ids"),
        ([{}, {"status": 500, "body": "boom"}], "status 500: boom"),
        ([{}, {"error": NO_IDS}], NO_IDS),
        ([{}], "not asked twice"),
        ([], "not asked twice"),
        ([{"ids": (), "logprobs": (), "margins": ()}] * 2, "without a token"),
        ([{"prompt_ids": ()}] * 2, "without a token"),
        ([{}, {"logprobs": (-0.5,)}], "without a log-probability"),
        ([{"margins": ()}] * 2, "without a log-probability"),
        ([{"logprobs": (-0.5, math.nan)}] * 2, "no number"),
        ([{"margins": (math.inf, 1.0)}] * 2, "no number"),
    ],
)
def test_what_cannot_be_compared_is_rejected(changes: list[dict[str, Any]], words: str) -> None:
    assert words in why(runs(*changes))


def test_a_nan_does_not_spoil_the_floor_of_the_others() -> None:
    found = measure([{"bad": runs(*[{"logprobs": (-0.5, math.nan)}] * 2), "good": steady()}])
    assert found.floor == 0.0
    assert found.admitted == {"good"}


def test_baselines_that_differ_from_each_other_are_rejected() -> None:
    other = runs({"ids": (5, 9)}, {"ids": (5, 9)})
    found = measure([{"a": steady(), "b": steady()}, {"a": other, "b": steady()}])
    assert found.admitted == {"b"}
    assert "differ from each other" in found.rejected["a"]


def test_a_prompt_that_one_baseline_never_answered_is_rejected() -> None:
    found = measure([{"a": steady(), "b": steady()}, {"b": steady()}])
    assert found.admitted == {"b"}


def test_an_unproven_baseline_is_none() -> None:
    found = measure([{"a": steady(), "b": steady()}], {"a": "the p-d baseline: kv-recompute"})
    assert found.admitted == {"b"}
    assert found.rejected == {"a": "the p-d baseline: kv-recompute"}


@pytest.mark.parametrize(
    ("good", "bad", "enough"),
    [(8, 0, True), (7, 0, False), (8, 2, True), (8, 3, False), (80, 20, True), (79, 21, False)],
)
def test_fewer_than_eight_or_than_four_fifths_are_too_few(good: int, bad: int, enough: bool) -> None:
    arm = {f"g{i}": steady() for i in range(good)} | {f"b{i}": runs({}, {"ids": (1, 1)}) for i in range(bad)}
    assert measure([arm]).enough is enough
