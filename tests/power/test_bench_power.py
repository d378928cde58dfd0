"""What `bench power` makes of fates: its rates, what is counted apart, and what ledgers come to together."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("mutmut") is None:
    pytest.skip("mutmut is not installed: it makes the mutants", allow_module_level=True)

from epd_conformance.bench import power
from epd_conformance.errors import UsageError
from epd_conformance.power.explained import Explanation
from epd_conformance.power.ledger import Life, line, lives
from epd_conformance.power.mutants import Mutant
from epd_conformance.power.trial import AGAINST, Against, Fate, Outcome


def life(number: int, *outcomes: Outcome, found: tuple[str, ...] = ()) -> Life:
    """Its fate with the contract layer, and with the tests where it has met them."""
    mutant = Mutant("a.pins", "f", number, "swap_op", f"b{number}", f"a{number}", "", range(0))
    steps = {"layer": "miss" if found else "", "tests": "test_pins.py::test" if outcomes[-1] == "killed" else ""}
    fates = [
        Fate(mutant, outcome, steps[against], found if against == "layer" else (), against=against)
        for against, outcome in zip(AGAINST, outcomes, strict=False)
    ]
    return Life(mutant, {one.against: one for one in fates})


LIVES = [
    life(1, "killed", found=("EPD-KEY-001", "EPD-XFER-001")),
    life(2, "killed", found=("EPD-KEY-001",)),
    life(3, "killed", found=("EPD-XFER-001",)),
    life(4, "survived", "survived"),
    life(5, "not reached", "not reached"),
    life(6, "timed out"),
    life(7, "broken"),
    life(8, "survived", "killed"),
    life(9, "not reached", "killed"),
    life(10, "not reached", "survived"),
]
KNOWN = [
    Explanation(module="pins", function="f", before="b4", after="a4", kind="equivalent", why="w"),
    Explanation(module="pins", function="f", before="b10", after="a10", kind="accepted", why="w"),
]


def test_both_together_and_the_layer_alone() -> None:
    figures = {one.name: one.value for one in power.measurements(LIVES, 1.0, KNOWN)}
    assert figures["mutants"] == 10
    assert figures["kill rate, layer alone"] == 3 / 8
    assert (figures["killed by the layer"], figures["killed by tests"]) == (3, 2)
    assert figures["kill rate"] == 5 / 8
    assert figures["kill rate, equals aside"] == round(5 / 7, 4), "what is accepted stays a survivor"
    assert figures["of them unexplained"] == figures["of them run by nothing"] == 1
    assert "left when time was up" not in figures
    unmet = Life(LIVES[0].mutant)
    assert {one.name for one in power.measurements([*LIVES, unmet], 1.0, KNOWN)} - set(figures) == {
        "left when time was up"
    }


def test_of_what_the_tests_left_alive_the_layer_has_no_rate() -> None:
    met_by_tests = Life(LIVES[0].mutant, {"tests": Fate(LIVES[0].mutant, "killed", against="tests")})
    figure = next(one for one in power.measurements([*LIVES, met_by_tests], 1.0, KNOWN) if "alone" in one.name)
    assert (figure.goal, figure.met) == ("not measured", None)


def test_the_lists_say_which_mutant_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    power.show(LIVES, KNOWN, survivors=True)
    printed = capsys.readouterr().out
    assert "EPD-KEY-001              2       2" in printed
    assert "EPD-XFER-001             1       2" in printed
    assert "survived (not run): a/pins.py:5 f, swap_op\n    b5\n -> a5" in printed
    assert "explained (equivalent): a/pins.py:4" in printed
    assert "explained (accepted): a/pins.py:10" in printed
    assert "timed out: a/pins.py:6" in printed


def written(path: Path, *fates: Fate) -> Path:
    path.write_text("".join(f"{line(fate)}\n" for fate in fates), encoding="utf-8")
    return path


def test_dead_in_one_ledger_is_dead(tmp_path: Path) -> None:
    mutants = power._chosen("widths")[:5]
    layer = written(
        tmp_path / "layer.ndjson",
        *(
            Fate(one, what)
            for one, what in zip(mutants, ("killed", "survived", "not reached", "survived"), strict=False)
        ),
    )
    tests = written(
        tmp_path / "tests.ndjson",
        Fate(mutants[0], "survived", against="tests"),
        Fate(mutants[1], "killed", "t.py::test", against="tests"),
        Fate(mutants[2], "survived", against="tests"),
        Fate(mutants[3], "timed out", against="tests"),
    )
    for ledgers in ([layer, tests], [tests, layer]):
        found = lives(mutants, ledgers)
        assert [one.end for one in found] == ["killed", "killed by tests", "survived", "timed out", "not met"]
        assert [one.dead for one in found] == [True, True, False, True, False]
    later = written(tmp_path / "later.ndjson", Fate(mutants[2], "killed", "miss", ("EPD-KEY-001",)))
    assert [one.end for one in lives(mutants, [layer, later])][2] == "killed"
    assert [one.end for one in lives(mutants, [later, layer])][2] == "killed"


def test_two_changes_alike_are_not_told_apart_in_favour_of_the_rate(tmp_path: Path) -> None:
    mutant = power._chosen("widths")[0]
    ledger = written(tmp_path / "l.ndjson", Fate(mutant, "killed"), Fate(mutant, "survived"))
    assert [one.end for one in lives([mutant], [ledger])] == ["survived"]


def test_what_lives_meets_both_and_what_is_dead_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutants = power.spread(power._chosen("widths"), 1000)
    known = written(
        tmp_path / "known.ndjson",
        Fate(mutants[0], "killed", "miss", ("R",)),
        Fate(mutants[1], "survived", against="tests"),
    )
    asked = []

    def run(trial: Any, mutants: list[Mutant], *, take: Callable[[Fate], None], **_: Any) -> tuple[list[Fate], int]:
        against: Against = "layer" if isinstance(trial, power.Layer) else "tests"
        asked.append((against, mutants))
        fates = [Fate(one, "survived", against=against) for one in mutants[:2]]
        for fate in fates:
            take(fate)
        return fates, len(mutants) - 2

    monkeypatch.setattr(power, "run", run)
    ledger = tmp_path / "l.ndjson"
    power.command(module="widths", ledger=ledger, again=[known])
    assert asked == [("layer", mutants[1:]), ("tests", mutants[1:3])]
    power.command(module="widths", against="nothing", again=[known])
    assert len(asked) == 2
    ends = [
        (told["line"], told["against"], told["outcome"]) for told in map(json.loads, ledger.read_text().splitlines())
    ]
    second, third = (one.line for one in mutants[1:3])
    assert ends == [
        (second, "layer", "survived"),
        (third, "layer", "survived"),
        (second, "tests", "survived"),
        (third, "tests", "survived"),
    ]


def test_what_is_no_module_or_ledger_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="no module of the reference connector is called 'reclaimer': use object_format"
    ):
        power._chosen("reclaimer")
    with pytest.raises(UsageError, match="is no ledger"):
        lives([], [tmp_path / "none"])


def test_where_nothing_was_killed_and_nothing_survived_no_goal_is_met() -> None:
    for figure in power.measurements([life(1, "timed out"), life(2, "broken")], 1.0, KNOWN):
        assert figure.met is None
        assert not figure.name.startswith("kill rate") or figure.goal == "not measured"


def test_a_ledger_that_cannot_be_written_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(power, "run", lambda *_, **__: pytest.fail("it began"))
    with pytest.raises(UsageError, match="cannot be written"):
        power.command(module="widths", ledger=tmp_path / "none" / "l.ndjson")
