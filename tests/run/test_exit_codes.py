"""Exit codes and what stands in the report, over a fake live session: the run is real from the options to the report."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import run_fakes
from run_fakes import Call, start

from epd_conformance import run as runs
from epd_conformance.oracle import judges

TOKEN = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"


@pytest.fixture
def order(command: Call) -> list[str]:
    """The cells of e-pd in the order in which they run."""
    return [row["cell"] for row in json.loads(command("list", "--cells", "--profile", "e-pd", "--json").out)]


def test_everything_passes(fake_run: Call) -> None:
    ended = fake_run()
    assert (ended.code, ended.errors) == (0, [])
    assert ended.report is not None
    assert ended.report["outcome"] == "conformant"
    assert ended.report["complete"] is True
    assert set(ended.verdicts.values()) == {"pass"}
    assert "reference: conformant" in ended.out


@pytest.mark.parametrize(
    ("action", "code", "outcome", "verdict"),
    [
        ("fail", 1, "nonconformant", "fail "),
        ("inconclusive", 3, "incomplete", "inconclusive "),
        ("stack", 3, "incomplete", "error stack"),
        ("harness", 3, "incomplete", "error harness"),
        ("usage", 3, "incomplete", "error usage"),
    ],
)
def test_one_cell_decides(fake_run: Call, action: str, code: int, outcome: str, verdict: str) -> None:
    ended = fake_run({"TOK-002": action})
    assert ended.code == code
    assert ended.report is not None
    assert ended.report["outcome"] == outcome
    assert ended.verdicts[TOKEN].startswith(verdict.strip())
    others = {name: words for name, words in ended.verdicts.items() if name != TOKEN}
    assert set(others.values()) == {"pass"}, "its neighbours are not touched"


def test_a_failure_outweighs_an_error_and_an_interrupt(fake_run: Call) -> None:
    ended = fake_run({"TOK-002": "fail", "TOK-003": "harness", "TOK-004": "interrupt"})
    assert ended.code == 1
    assert ended.report is not None
    assert ended.report["interrupted"] is True


def test_a_defect_of_the_harness_shows_its_traceback(fake_run: Call) -> None:
    message = fake_run({"TOK-002": "harness"}).cells[TOKEN]["message"]
    assert "Traceback" in message
    assert "a defect of the fake" in message
    assert "run_fakes.py" in message


def test_a_page_that_cannot_be_made_costs_a_run_nothing(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such template")

    monkeypatch.setattr(runs.html, "write_page", broken)
    ended = fake_run({"TOK-002": "fail"})
    assert (ended.code, ended.verdicts[TOKEN].split()[0]) == (1, "fail")
    assert "report.html could not be made (RuntimeError: no such template)" in ended.err
    assert "page: " not in ended.out


def test_a_capture_that_breaks_hides_no_failure(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runs.Run, "_capture", broken)
    ended = fake_run({"TOK-002": "fail"})
    assert ended.code == 1
    assert ended.verdicts[TOKEN].startswith("fail")


# -- cut short ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("action", "words"), [("interrupt", "interrupted by the user"), ("terminate", "terminated")])
@pytest.mark.parametrize("where", ["boot", "in the cell", "behind the cell", "behind the last"])
def test_cut_short(fake_run: Call, order: list[str], action: str, words: str, where: str) -> None:
    """Ctrl-C and SIGTERM: during the boot, in a cell, between two cells, behind the last one."""
    before = signal.getsignal(signal.SIGTERM)
    position = order.index(TOKEN)
    key, done = {
        "boot": ("stage e-pd", 0),
        "in the cell": (TOKEN, position),
        "behind the cell": (f"after {TOKEN}", position + 1),
        "behind the last": (f"after {order[-1]}", len(order)),
    }[where]
    ended = fake_run({key: action})
    assert ended.code == 3
    assert ended.report is not None
    assert ended.report["interrupted"] is True
    assert ended.report["complete"] is False
    assert ended.report["outcome"] == "incomplete"
    assert words in " ".join(ended.report["warnings"])
    # What was cut off or did not come has not run: it is no defect of the harness.
    assert {ended.verdicts[name] for name in order[:done]} <= {"pass"}
    assert {ended.verdicts[name] for name in order[done:]} <= {"could-not-run did not run"}
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_real_signal(tmp_path: Path, order: list[str], name: str) -> None:
    out = tmp_path / "out"
    process = start(["-m", "run_fakes", "run", "--subject", "reference", "--out", out], {"TOK-002": "sleep"})
    assert process.stderr is not None
    seen = next(line for line in process.stderr if run_fakes.SLEEPS in line)
    process.send_signal(getattr(signal, name))
    _, err = process.communicate(timeout=20)
    assert process.returncode == 3, seen + err
    report = run_fakes.read(out)
    assert report is not None
    assert report["interrupted"] is True
    assert report["summary"]["pass"] == order.index(TOKEN)
    assert report["summary"]["error"] == 0


def test_an_internal_error_behind_the_last_cell(fake_run: Call, order: list[str]) -> None:
    ended = fake_run({f"after {order[-1]}": "harness"})
    assert ended.code == 3
    assert ended.report is not None
    assert ended.report["interrupted"] is True
    assert "internal error" in " ".join(ended.report["warnings"])
    assert "a defect of the fake" in ended.err
    assert set(ended.verdicts.values()) == {"pass"}


def test_a_test_that_judges_nothing_is_an_error(
    fake_run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suites = tmp_path / "suites"
    suites.mkdir()
    (suites / "test_silent_suite.py").write_text(
        "from epd_conformance.live.case import Case, requirement\n"
        "from epd_conformance.plans.plan import Plan\n"
        "@requirement('EPD-TOK-002', Case('img1', 'equality', lambda draw: Plan(())))\n"
        "def test_silent(cell): pass\n"
    )
    monkeypatch.setattr(runs, "suites_folder", lambda: suites)
    ended = fake_run()
    assert ended.code == 3
    assert ended.verdicts[TOKEN] == "error harness"
    # And a requirement whose test was lost is a hole, never forgotten.
    assert ended.verdicts["EPD-TOK-003[e-pd]"] == "could-not-run no test was collected"


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ("", "asks for `cell` without @requirement"),
        ("@requirement('EPD-TOK-999', Case('a', 'equality', None))\n", "EPD-TOK-999"),
        ("@requirement('EPD-TOK-002', Case('a/b', 'equality', None))\n", "is no cell id"),
    ],
)
def test_a_suite_that_is_wrong_is_one_sentence(
    fake_run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mark: str, says: str
) -> None:
    suites = tmp_path / "suites"
    suites.mkdir()
    # Names of their own: Python keeps what it has imported once.
    for name in (f"test_wrong_{len(mark)}", f"test_wrong_too_{len(mark)}"):
        (suites / f"{name}.py").write_text(
            f"from epd_conformance.live.case import Case, requirement\n{mark}def test_wrong(cell): cell.check()\n"
        )
    monkeypatch.setattr(runs, "suites_folder", lambda: suites)
    ended = fake_run()
    assert ended.code == 2
    assert [says in line for line in ended.errors] == [True]
    assert "Traceback" not in ended.err


def test_a_suite_that_does_not_import_ends_the_run(
    fake_run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    suites = tmp_path / "suites"
    suites.mkdir()
    (suites / "test_broken_suite.py").write_text("import no_such_module_at_all\n")
    monkeypatch.setattr(runs, "suites_folder", lambda: suites)
    ended = fake_run()
    assert ended.code == 2
    assert ended.report is None
    assert "no_such_module_at_all" in ended.err
    assert not (tmp_path / "out").exists()


# -- errors of usage while servers start -------------------------------------------------------------------------------


def test_a_usage_error_of_the_first_boot_ends_the_run(fake_run: Call) -> None:
    ended = fake_run({"stage e-pd": "usage"})
    assert ended.code == 2
    assert ended.report is None
    assert ended.errors == ["error: the fake cannot: mend it"]
    assert "Traceback" not in ended.err


def test_a_usage_error_of_a_later_boot_keeps_what_was_found(fake_run: Call) -> None:
    ended = fake_run({"stage e-p-d": "usage"}, "--profile", "all")
    assert ended.code == 3
    late = [words for name, words in ended.verdicts.items() if "[e-p-d/" in name]
    assert set(late) == {"error usage"}
    assert {words for name, words in ended.verdicts.items() if "[e-p-d/" not in name} == {"pass"}
    assert "mend it" in ended.cells["EPD-KV-001[e-p-d/tiny-qwen2.5-vl/img1]"]["message"]


def test_a_reader_who_leaves_does_not_change_the_code(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """`epd-conformance run ... | head -1`: by itself typer would end with 1, which says nonconformant."""

    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("epd_conformance.report.render_text.print_report", gone)
    assert fake_run().code == 0


def test_the_verdict_rests_on_the_judges(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of this file: if the judges passed everything, nothing above could tell."""
    good = judges.judge(run_fakes.passing("equality"))
    monkeypatch.setattr(judges, "judge", lambda evidence: good)
    assert fake_run({"TOK-002": "fail"}).code == 0
