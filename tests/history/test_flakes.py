"""Flaky or broken: the rule, night by night."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from epd_conformance.history.flakes import WINDOW, Kind, Past, Sight, judge
from epd_conformance.report.compare import State

FIRST = datetime(2026, 3, 1, tzinfo=UTC)
STATES = {"P": State.HOLDS, "F": State.FAILS, "-": State.NOT_SHOWN, ".": State.ABSENT}


def past(nights: str, inputs: str = "") -> Past:
    """One letter a night: Pass, Fail, - not shown, . not asked. `inputs`: one letter a night, too; all alike if empty."""
    letters = inputs or "a" * len(nights)
    return judge(
        "cell",
        [Sight(str(day), FIRST + timedelta(days=day), STATES[night], letters[day]) for day, night in enumerate(nights)],
    )


@pytest.mark.parametrize(
    ("nights", "kind"),
    [
        ("PPPPP", Kind.HOLDS),
        ("P", Kind.NEW),
        ("..P", Kind.NEW),
        ("--P", Kind.NEW),
        ("F", Kind.BROKEN),
        ("..F", Kind.BROKEN),
        # five nights: the one is broken, the other flaky
        ("PPPFF", Kind.BROKEN),
        ("PFPPF", Kind.FLAKY),
        ("PFPFP", Kind.FLAKY),
        ("FFFPF", Kind.FLAKY),
        # one turn is what a regression and its repair look like
        ("PPPPF", Kind.BROKEN),
        ("FFFFP", Kind.MENDED),
        ("FFFPP", Kind.HOLDS),
        # what shows nothing neither breaks a row nor makes one
        ("PF-F.F", Kind.BROKEN),
        ("P-P.P", Kind.HOLDS),
        ("F-P", Kind.MENDED),
        ("PPPP-", Kind.NOT_SHOWN),
        ("PFPF-", Kind.NOT_SHOWN),
        ("PPPP.", Kind.NOT_ASKED),
    ],
)
def test_the_rule(nights: str, kind: Kind) -> None:
    assert past(nights).kind is kind


def test_only_unchanged_inputs_make_a_cell_flaky() -> None:
    assert past("PFPFP", "aabbc").kind is Kind.FLAKY, "twice on unchanged inputs"
    assert past("PFPF", "abcd").kind is Kind.BROKEN
    assert past("PFP", "aab").kind is Kind.MENDED, "the way back was another build"


def test_a_flaky_cell_that_fails_each_time_is_broken() -> None:
    """As soon as its own rate would hardly give so many failures in a row."""
    often, seldom = "PFPFPFPFP", "P" * 18 + "FP"
    assert past(often + "F" * 8).kind is Kind.FLAKY
    assert past(often + "F" * 10).kind is Kind.BROKEN
    assert past(seldom + "FF").kind is Kind.FLAKY
    assert past(seldom + "FFF").kind is Kind.BROKEN


def test_what_lies_far_back_is_forgotten() -> None:
    assert past("PFP" + "P" * (WINDOW - 3)).kind is Kind.FLAKY
    assert past("PFP" + "P" * WINDOW).kind is Kind.HOLDS


def test_since_when_and_how_often() -> None:
    found = past("PPF-F")
    assert found.since is not None
    assert (found.since.run, found.shown, found.failed, found.row) == ("2", 4, 2, 2)
    assert found.words() == "fails each time since 2026-03-03 (2 nights)"
    assert past("FF").words() == "fails on every night known, since 2026-03-01 (2 nights)"
    assert past("PFPPF").words() == "failed on 2 of 5 nights, 3 turns on unchanged inputs"


def test_without_a_run_there_is_nothing_to_judge() -> None:
    with pytest.raises(ValueError, match="without a run"):
        judge("cell", [])
