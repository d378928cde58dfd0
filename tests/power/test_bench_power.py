"""What `bench power` makes of fates: two rates, and what is counted apart."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

if importlib.util.find_spec("mutmut") is None:
    pytest.skip("mutmut is not installed: it makes the mutants", allow_module_level=True)

from epd_conformance.bench import power
from epd_conformance.errors import UsageError
from epd_conformance.power.explained import Explanation
from epd_conformance.power.mutants import Mutant
from epd_conformance.power.trial import Fate, Outcome


def fate(number: int, outcome: Outcome, *requirements: str) -> Fate:
    mutant = Mutant("a.pins", "f", number, "swap_op", f"b{number}", f"a{number}", "", range(0))
    return Fate(mutant, outcome, "miss" if requirements else "", requirements)


FATES = [
    fate(1, "killed", "EPD-KEY-001", "EPD-XFER-001"),
    fate(2, "killed", "EPD-KEY-001"),
    fate(3, "killed", "EPD-XFER-001"),
    fate(4, "survived"),
    fate(5, "not reached"),
    fate(6, "timed out"),
    fate(7, "broken"),
]
KNOWN = [Explanation(module="pins", function="f", before="b4", after="a4", kind="equivalent", why="w")]


def test_explained_survivors_count_in_the_first_rate_only() -> None:
    figures = {one.name: one.value for one in power.measurements(FATES, 0, 1.0, KNOWN)}
    assert figures["mutants"] == 7
    assert figures["kill rate"] == 3 / 5
    assert figures["kill rate, explained aside"] == 3 / 4
    assert figures["of them run by no step"] == 1
    assert "left when time was up" not in figures
    assert {one.name for one in power.measurements(FATES, 4, 1.0, KNOWN)} - set(figures) == {"left when time was up"}


def test_the_lists_say_which_mutant_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    power.show(FATES, KNOWN, survivors=True)
    printed = capsys.readouterr().out
    assert "EPD-KEY-001              2       2" in printed
    assert "EPD-XFER-001             1       2" in printed
    assert "survived (not run): a/pins.py:5 f, swap_op\n    b5\n -> a5" in printed
    assert "explained (equivalent): a/pins.py:4" in printed
    assert "timed out: a/pins.py:6" in printed


def test_only_what_survived_is_tried_again(tmp_path: Path) -> None:
    ledger = tmp_path / "l.ndjson"
    mutants = power._chosen("widths", None)
    with ledger.open("w", encoding="utf-8") as file:
        for mutant, outcome in zip(mutants[:4], ("killed", "survived", "not reached", "timed out"), strict=True):
            power._write(file, Fate(mutant, outcome))  # type: ignore[arg-type]
    assert power._chosen("", ledger) == mutants[1:3]
    assert [json.loads(line)["line"] for line in ledger.read_text().splitlines()] == [one.line for one in mutants[:4]]


def test_what_is_no_module_or_ledger_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="no module of the reference connector is called 'reclaimer': use object_format"
    ):
        power._chosen("reclaimer", None)
    with pytest.raises(UsageError, match="is no ledger"):
        power._chosen("", tmp_path / "none")


def test_where_nothing_was_killed_and_nothing_survived_no_goal_is_met() -> None:
    for figure in power.measurements([fate(1, "timed out"), fate(2, "broken")], 0, 1.0, KNOWN):
        assert figure.met is None
        assert not figure.name.startswith("kill rate") or figure.goal == "not measured"


def test_a_ledger_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power.trial, "run", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(UsageError, match="cannot be written"):
        power.command(module="widths", ledger=tmp_path / "none" / "l.ndjson")
