"""The history database: a run is stored once, several nights may write at a time, and nobody else's file is touched."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from made_nights import CELL, GOOD, night, with_

from epd_conformance import cli
from epd_conformance.errors import UsageError
from epd_conformance.history.database import SCHEMA, History
from epd_conformance.history.flakes import Kind
from epd_conformance.history.records import Series, StoredRun, cells_of, inputs
from epd_conformance.history.trend import trend
from epd_conformance.verdict import Outcome, Verdict


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "history.db"


def add(file: Path, folder: Path, day: int, cells: dict[str, str], **more: object) -> StoredRun:
    with History(file, write=True) as history:
        return history.add(night(folder / str(day), day, cells, **more), "there").stored


def test_what_is_stored_is_what_was_run(file: Path, tmp_path: Path) -> None:
    report = night(tmp_path / "run", 0, with_("fail"))
    with History(file, write=True) as history:
        added = history.add(report, "there", "commit")
        assert added.new and added.green is None
    with History(file) as history:
        (run,) = history.runs()
        assert run == added.stored == StoredRun.of(report, "there", "commit")
        assert run.outcome is Outcome.NONCONFORMANT and not run.green
        assert (run.counts[Verdict.PASS], run.counts[Verdict.FAIL]) == (2, 1)
        assert history.report(run) == report
        assert history.cells([run])[run.run] == sorted(cells_of(report), key=lambda cell: cell.cell)
        assert history.runs("mine", "e-pd") == [run]
        assert history.runs("another") == history.runs(profile="another") == []


def test_a_run_is_stored_once(file: Path, tmp_path: Path) -> None:
    report = night(tmp_path / "run", 0, GOOD)
    with History(file, write=True) as history:
        assert history.add(report, "here").new
        again = history.add(report, "elsewhere")
        assert not again.new
        assert again.stored.folder == "here"
        assert len(history.runs()) == 1
        assert history.pasts(Series.of(report))[CELL].shown == 1


def test_nights_at_the_same_time(file: Path, tmp_path: Path) -> None:
    """Threads with connections of their own, all of them on a file that is not there yet; some bring the same run."""
    reports = [night(tmp_path / str(day), day, GOOD) for day in range(4)]
    begin, failed = threading.Barrier(6), []

    def bring(number: int) -> None:
        begin.wait()
        try:
            for report in reports[number % 3 :]:
                with History(file, write=True) as history:
                    history.add(report, "")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=bring, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with History(file) as history:
        assert [run.run for run in history.runs()] == [report.run.id for report in reports]
        assert all(len(cells) == len(GOOD) for cells in history.cells(history.runs()).values())


def test_a_writer_that_dies_leaves_nothing_half(file: Path, tmp_path: Path) -> None:
    add(file, tmp_path, 0, GOOD)
    dies = (
        "import os, sys; from pathlib import Path; from epd_conformance.history.database import History\n"
        "history = History(Path(sys.argv[1]), write=True)\n"
        "history._db.execute('BEGIN IMMEDIATE'); history._db.execute('DELETE FROM cells'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", dies, str(file)], check=False).returncode == 9
    assert add(file, tmp_path, 1, with_("fail")).run
    with History(file) as history:
        assert all(len(cells) == len(GOOD) for cells in history.cells(history.runs()).values())


class TestGreen:
    def test_the_last_green_night_is_what_counts(self, file: Path, tmp_path: Path) -> None:
        greens = [
            add(file, tmp_path, day, with_(word)).green for day, word in enumerate(("pass", "fail", "error", "pass"))
        ]
        assert greens == [True, False, False, True]
        with History(file, write=True) as history:
            added = history.add(night(tmp_path / "next", 4, GOOD), "")
            assert added.green is not None and added.green.report.run.id == "e-pd-3"

    def test_a_night_only_sees_what_was_before_it(self, file: Path, tmp_path: Path) -> None:
        add(file, tmp_path, 5, GOOD)
        with History(file, write=True) as history:
            added = history.add(night(tmp_path / "late", 1, with_("fail")), "")
            assert added.green is None
            assert added.pasts[CELL].shown == 1

    def test_another_series_is_another_thing(self, file: Path, tmp_path: Path) -> None:
        add(file, tmp_path, 0, GOOD)
        assert add(file, tmp_path, 1, GOOD, profile="all").green
        with History(file, write=True) as history:
            added = history.add(night(tmp_path / "next", 2, GOOD, profile="all"), "")
            assert added.green is not None and added.green.report.run.profile == "all"
            assert added.pasts[CELL].shown == 2

    def test_a_person_may_accept(self, file: Path, tmp_path: Path) -> None:
        add(file, tmp_path, 0, GOOD)
        add(file, tmp_path, 1, with_("fail"))
        with History(file, write=True) as history:
            for start, words in (("e-pd", "has 2 runs"), ("x", "has no run"), ("", "has no run")):
                with pytest.raises(UsageError, match=words):
                    history.accept(start)
            assert history.accept("e-pd-1").accepted
            added = history.add(night(tmp_path / "next", 2, with_("fail")), "")
            assert added.green is not None and added.green.name.endswith("accepted)")


def test_a_report_that_this_version_cannot_read_is_told(file: Path, tmp_path: Path) -> None:
    add(file, tmp_path, 0, GOOD)
    with sqlite3.connect(file) as database:
        database.execute("UPDATE runs SET report = x'00'")
    with History(file, write=True) as history:
        added = history.add(night(tmp_path / "next", 1, GOOD), "")
    assert added.green is None
    assert "none of this version" in added.note
    assert added.pasts[CELL].kind is Kind.HOLDS, "the cells are still known"


def test_inputs(tmp_path: Path) -> None:
    first = night(tmp_path / "a", 0, GOOD)
    assert inputs(first) == inputs(night(tmp_path / "b", 9, with_("fail"))), "neither the day nor the verdicts"
    assert inputs(first) != inputs(night(tmp_path / "c", 0, GOOD, vllm="0.33.0"))
    assert inputs(first) != inputs(first, "another build")


def test_a_page_takes_its_trend_from_the_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for day, verdict in ((0, "pass"), (1, "fail")):
        add(file, tmp_path, day, with_(verdict))
    page = tmp_path / "page.html"
    words = ["render", str(tmp_path / "1"), "--out", str(page), "--history", str(file)]
    monkeypatch.setattr("sys.argv", ["epd-conformance", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0, capsys.readouterr().err
    (trend,) = re.findall(r'<section id="trend".*?</section>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert re.findall(r"2026-03-\d\d", trend) == ["2026-03-02", "2026-03-01"], "this run, and the one before"


def test_a_trend_is_plain(file: Path, tmp_path: Path) -> None:
    for day, verdict in ((2, "fail"), (0, "pass")):
        add(file, tmp_path, day, with_(verdict))
    with History(file) as history:
        points = trend(history.runs())
    assert [(point.time.day, point.outcome, point.counts[Verdict.FAIL]) for point in points] == [
        (1, Outcome.CONFORMANT, 0),
        (3, Outcome.NONCONFORMANT, 1),
    ]
    assert json.loads(json.dumps(points[1].to_json()))["counts"]["pass"] == 2


# -- whatever else lies there ------------------------------------------------------------------------------------------


def foreign(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE runs (run TEXT)")


def newer(path: Path) -> None:
    History(path, write=True).__exit__(None, None, None)
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA + 1}")


def damaged(path: Path) -> None:
    with History(path, write=True) as history:
        for day in range(3):
            history.add(night(path.with_name(str(day)), day, GOOD), "")
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (foreign, "is not a history of epd-conformance"),
        (newer, f"has schema {SCHEMA + 1} and this epd-conformance knows {SCHEMA}"),
        (damaged, "is no SQLite database, or a damaged one"),
        (lambda path: path.write_bytes(b"{}\n" * 500), "is no SQLite database, or a damaged one"),
        (lambda path: path.mkdir(), "cannot be used|there is no history"),
    ],
    ids=["foreign", "newer", "damaged", "text", "folder"],
)
@pytest.mark.parametrize("write", [False, True])
def test_one_sentence_and_nothing_written(
    make: Callable[[Path], object], says: str, write: bool, tmp_path: Path
) -> None:
    path = tmp_path / "there.db"
    make(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(UsageError, match=says) as error:
        History(path, write)
    assert "\n" not in str(error.value)
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_reading_makes_no_file(file: Path) -> None:
    with pytest.raises(UsageError, match="there is no history"):
        History(file)
    assert not file.parent.exists()


# -- the verb ----------------------------------------------------------------------------------------------------------


def test_the_verb(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(*words: object, code: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["epd-conformance", "history", *map(str, words), "--history", str(file)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == code
        streams = capsys.readouterr()
        return streams.out if code == 0 else streams.err

    folders = [tmp_path / str(day) for day in range(3)]
    for day, verdict in enumerate(("pass", "fail", "fail")):
        night(folders[day], day, with_(verdict))
    assert "there is no history" in call("show", code=2)
    assert "give the directory of a run" in call("add", tmp_path, code=2)
    said = call("add", *reversed(folders))
    assert said.splitlines()[0] == "e-pd-0 stored: mine e-pd full cpu-v1 tiny, 2026-03-01: conformant, green"
    assert "is stored already" in call("add", folders[0])
    shown = call("show").splitlines()
    assert [line.split()[2] for line in shown] == ["run", "e-pd-2", "e-pd-1", "e-pd-0"]
    assert shown[-1].endswith("conformant, green")
    past = call("show", "--cell", CELL).splitlines()
    assert past[1] == "2026-03-02  e-pd-1  fail          tokens-differ"
    assert past[-1] == "mine e-pd full cpu-v1 tiny: fails each time since 2026-03-02 (2 nights)"
    assert call("show", "--kind", "broken").startswith(CELL)
    assert json.loads(call("show", "--kind", "broken", "--json"))[0]["row"] == 2
    assert "no cell is flaky" in call("show", "--kind", "flaky")
    assert "no kind" in call("show", "--kind", "odd", code=2)
    assert "has the cell" in call("show", "--cell", "none", code=2)
    assert "2026-03-01 02:00  conformant (green): 3 pass" in call("trend")
    (series,) = json.loads(call("trend", "--json"))
    assert [point["outcome"] for point in series["points"]] == ["conformant", "nonconformant", "nonconformant"]
    assert "accepted mine" in call("accept", "e-pd-2")
    assert json.loads(call("show", "--json"))[0]["accepted"] is True
