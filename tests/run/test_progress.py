"""Progress: plain lines where nobody looks on, a table with counts on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from epd_conformance.progress import Progress
from epd_conformance.verdict import Verdict

CELL = "EPD-TOK-002[e-pd/tiny/img1]"


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(live=False) as progress:
        progress.expect("e-pd")
        progress.say("asking [/tmp/x]")
        progress.cell_done(CELL, "e-pd", Verdict.PASS, "", 0.5)
        progress.cell_done(CELL, "e-pd", Verdict.INCONCLUSIVE, "no power", 1.25)
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = err.splitlines()
    assert first.endswith("s] asking [/tmp/x]")
    assert second.endswith(f"pass           {CELL} 0.50 s")
    assert third.endswith(f"inconclusive: no power {CELL} 1.25 s")
    assert "\x1b" not in err


def test_no_table_where_stderr_is_no_terminal_or_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Progress()._live is None
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes rich believe in a terminal
    monkeypatch.delenv("CI", raising=False)
    assert Progress()._live is not None
    monkeypatch.setenv("CI", "true")
    assert Progress()._live is None


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> tuple[Progress, io.StringIO]:
    screen = io.StringIO()
    progress = Progress(live=True)
    assert progress._live is not None
    progress.console = progress._live.console = Console(
        file=screen, force_terminal=True, width=100, color_system=None, highlight=False, legacy_windows=False
    )
    progress._live.auto_refresh = False
    return progress, screen


def shown(progress: Progress) -> str:
    """What the table shows now."""
    assert progress._live is not None
    plain = Console(file=io.StringIO(), width=100, color_system=None)
    with plain.capture() as capture:
        plain.print(progress._live.renderable)
    return capture.get()


def test_the_table_counts(terminal: tuple[Progress, io.StringIO]) -> None:
    progress, screen = terminal
    with progress:
        for _ in range(5):
            progress.expect("e-pd")
        progress.expect("e-p-d")
        for verdict in (Verdict.PASS, Verdict.PASS, Verdict.FAIL, Verdict.ERROR):
            progress.cell_done(CELL, "e-pd", verdict, "", 0.1)
        rows = [line.split() for line in shown(progress).splitlines()]
        assert ["topology", "done", "pass", "fail", "other"] in rows
        assert ["e-pd", "4/5", "2", "1", "1"] in rows
        assert ["e-p-d", "0/1", "0", "0", "0"] in rows
    # What did not pass stays on the screen; what passed does not.
    assert f"fail  {CELL}" in screen.getvalue()
    assert f"error  {CELL}" in screen.getvalue()
    assert f"pass  {CELL}" not in screen.getvalue()


@pytest.mark.parametrize("text", [CELL, "logs in [/tmp/out/logs]", "[bold]", "[", "\\[x]"])
def test_brackets_are_shown_as_they_are(terminal: tuple[Progress, io.StringIO], text: str) -> None:
    progress, screen = terminal
    with progress:
        progress.expect("e-pd")
        progress.say(text)
        assert text in shown(progress)
        progress.cell_done(text, "e-pd", Verdict.FAIL, "[/why]", 0.1)
        assert text in shown(progress)
    assert f"fail: [/why]  {text}" in screen.getvalue()


@pytest.mark.parametrize("verdict", list(Verdict))
def test_every_verdict_has_a_style(terminal: tuple[Progress, io.StringIO], verdict: Verdict) -> None:
    progress, _ = terminal
    with progress:
        progress.cell_done(CELL, "e-pd", verdict, "", 0.1)
