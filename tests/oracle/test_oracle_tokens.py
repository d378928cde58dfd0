"""The token oracle: where two answers part, and what the place means."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.tokens import compare, first_divergence, hint

IDS = st.lists(st.integers(0, 9), max_size=12)


def answer(prompt: tuple[int, ...], ids: tuple[int, ...], margins: tuple[float, ...] = ()) -> Answer:
    return Answer("l", "r", 200, prompt, ids, margins=margins)


@given(IDS, IDS)
def test_equal_exactly_if_nothing_parts(expected: list[int], observed: list[int]) -> None:
    found = first_divergence("output", expected, observed)
    assert (found is None) == (expected == observed)
    if found is not None:
        assert expected[: found.index] == observed[: found.index]
        assert expected[found.index : found.index + 1] != observed[found.index : found.index + 1]


def test_a_shorter_sequence_parts_at_its_end() -> None:
    for pair in (((1, 2, 3), (1, 2)), ((1, 2), (1, 2, 3))):
        found = first_divergence("output", *pair)
        assert found is not None
        assert found.index == 2


def test_the_margin_is_the_baselines_at_that_place() -> None:
    base, other = answer((1,), (4, 5), (0.5, 0.25)), answer((1,), (4, 6), (9.0, 9.0))
    found = compare(base, other)
    assert found is not None
    assert (found.index, found.margin, found.sequence) == (1, 0.25, "output")
    # Behind the end of the margins there is none.
    longer = compare(base, answer((1,), (4, 5, 6)))
    assert longer is not None
    assert longer.margin is None


def test_prompts_come_first() -> None:
    found = compare(answer((1, 2), (4,), (0.5,)), answer((1, 3), (5,)))
    assert found is not None
    assert (found.sequence, found.index, found.margin) == ("prompt", 1, None)
    assert compare(answer((1,), (4,)), answer((1,), (4,))) is None


def test_hints_tell_the_places_apart() -> None:
    prompt = compare(answer((1,), ()), answer((2,), ()))
    first = compare(answer((), (1, 2)), answer((), (2, 2)))
    later = compare(answer((), (1, 2)), answer((), (1, 3)))
    assert prompt
    assert first
    assert later
    assert len({hint(prompt), hint(first), hint(later)}) == 3
    assert "prompt" in hint(prompt)
    assert "numerics" in hint(later)
