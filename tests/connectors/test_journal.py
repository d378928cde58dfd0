"""The journal: whole lines under many writers, nothing raised into the engine, and no loss that stays silent."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from epd_conformance.connectors.journal import DIRECTORY, SERVER, Follower, Journal, JournalWriter


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "a folder" / "journal"))
    monkeypatch.setenv(SERVER, "encode-0")
    return tmp_path / "a folder" / "journal"


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["ev"] for event in events]


def test_what_is_written_is_read(folder: Path) -> None:
    JournalWriter("worker").write("save", id="k", digest="d")
    JournalWriter("scheduler").write("step", new=[], encode={"r": ["k"]})
    events = Journal(folder).read()
    assert kinds(events) == ["save", "step"]
    assert events[0].items() >= {"seq": 0, "server": "encode-0", "side": "worker", "id": "k", "digest": "d"}.items()
    assert {path.name for path in folder.iterdir()} == {
        f"encode-0.{side}.{os.getpid()}.ndjson" for side in ("worker", "scheduler")
    }


@pytest.mark.parametrize("name", [DIRECTORY, SERVER])
def test_outside_a_stack_the_writer_says_what_is_missing(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(RuntimeError, match=name):
        JournalWriter("worker")


def test_a_mark_cuts_out_what_came_after_it(folder: Path) -> None:
    journal = Journal(folder)
    assert journal.read() == []
    empty = journal.mark()
    writer = JournalWriter("worker")
    writer.write("one")
    mark = journal.mark()
    writer.write("two")
    JournalWriter("scheduler").write("three")
    assert kinds(journal.read(mark)) == ["two", "three"]
    assert kinds(journal.read(empty)) == ["one", "two", "three"]


def test_hostile_values_stay_on_one_line(folder: Path) -> None:
    keys = ["", "a\nb", "nul\0", "\ud800", "ünï", '"', "\u2028", "x" * 100_000]
    writer = JournalWriter("worker")
    for key in keys:
        writer.write("lookup", id=key)
    assert [event["id"] for event in Journal(folder).read()] == keys
    (file,) = folder.iterdir()
    assert file.read_bytes().count(b"\n") == len(keys)


def test_a_half_written_last_line_is_left_for_later(folder: Path) -> None:
    JournalWriter("worker").write("one")
    (file,) = folder.iterdir()
    whole = json.dumps({"seq": 1, "t": 1e12, "server": "s", "side": "worker", "ev": "two"}).encode() + b"\n"
    with file.open("ab") as handle:
        handle.write(whole[:30])
    assert kinds(Journal(folder).read()) == ["one"]
    with file.open("ab") as handle:
        handle.write(whole[30:])
    assert kinds(Journal(folder).read()) == ["one", "two"]


def _write_many(folder: str, number: int, lines: int) -> None:
    os.environ[DIRECTORY], os.environ[SERVER] = folder, "server"
    writer = JournalWriter("worker")
    # All processes into one file: the strictest case, and what DP engines in one process do.
    writer._fd = os.open(Path(folder) / "server.worker.0.ndjson", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for line in range(lines):
        writer.write("line", writer=number, line=line, filler="x" * (number * 997 + line))


def test_concurrent_writers_never_mix_lines(folder: Path) -> None:
    folder.mkdir(parents=True)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(str(folder), n, 100)) for n in range(4)]
    for process in processes:
        process.start()
    seen = 0
    while any(process.is_alive() for process in processes):
        events = Journal(folder).read()
        assert set(kinds(events)) <= {"line"}
        seen = len(events)
    for process in processes:
        process.join()
        assert process.exitcode == 0
    events = Journal(folder).read()
    assert len(events) == 400 >= seen
    assert {(event["writer"], event["line"]) for event in events} == {(n, i) for n in range(4) for i in range(100)}


def test_threads_of_one_writer_share_its_sequence(folder: Path) -> None:
    writer = JournalWriter("worker")
    threads = [
        threading.Thread(target=lambda: [writer.write("line") for _ in range(50)])  # type: ignore[func-returns-value]
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(event["seq"] for event in Journal(folder).read()) == list(range(200))


class TestLoss:
    """Writing never raises, and what was not written is said."""

    def test_a_full_disk_is_survived_and_owned_up_to(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        writer = JournalWriter("worker")
        writer.write("one")
        disk = writer._fd
        writer._fd = os.open("/dev/full", os.O_WRONLY)
        writer.write("two")
        writer.write("three")
        assert kinds(Journal(folder).read()) == ["one"]
        assert capfd.readouterr().err.count("cannot write to the journal") == 1
        os.close(writer._fd)
        writer._fd = disk
        writer.write("four")
        one, lost, four = Journal(folder).read()
        assert (lost["ev"], lost["lines"]) == ("lost", 2)
        assert "No space left" in lost["error"]
        assert (lost["server"], lost["side"]) == ("encode-0", "worker")
        assert [one["seq"], lost["seq"], four["seq"]] == [0, 1, 2]

    def test_a_line_that_was_cut_off_takes_no_other_with_it(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = JournalWriter("worker")
        real = os.write
        room = [25]

        def short(fd: int, data: bytes) -> int:
            taken = data[: room.pop()] if room else data
            return real(fd, taken)

        monkeypatch.setattr(os, "write", short)
        writer.write("cut")
        writer.write("whole")
        events = Journal(folder).read()
        assert [event["ev"] for event in events if event["ev"] != "lost"] == ["whole"]
        assert any(event.get("lines") == 1 for event in events)
        assert any(event.get("error") == "a torn line" for event in events)

    def test_a_value_that_is_no_json_is_owned_up_to_at_once(self, folder: Path) -> None:
        writer = JournalWriter("worker")
        writer.write("step", free={1, 2})
        (lost,) = Journal(folder).read()
        assert (lost["ev"], lost["lines"]) == ("lost", 1)
        assert "step" in lost["error"]
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        writer.write("step", free=cyclic)
        assert kinds(Journal(folder).read()) == ["lost", "lost"]

    def test_a_deleted_folder_is_made_anew_and_owned_up_to(self, folder: Path) -> None:
        writer = JournalWriter("worker")
        for _ in range(3):
            writer.write("before")
        mark = Journal(folder).mark()
        shutil.rmtree(folder)
        assert Journal(folder).read(mark) == []
        writer.write("after")
        events = Journal(folder).read(mark)
        assert kinds(events) == ["lost", "after"]
        assert events[0]["lines"] == 3

    def test_a_folder_that_cannot_be_made_anew_is_survived(self, folder: Path) -> None:
        writer = JournalWriter("worker")
        writer.write("before")
        shutil.rmtree(folder)
        folder.write_text("now a file")
        writer.write("nowhere")
        writer.write("nowhere")
        folder.unlink()
        writer.write("after")
        events = Journal(folder).read()
        assert kinds(events) == ["lost", "after"]
        assert events[0]["lines"] >= 2

    def test_a_deleted_file_costs_nothing_that_was_never_written(self, folder: Path) -> None:
        writer = JournalWriter("worker")
        shutil.rmtree(folder)
        writer.write("first")
        assert kinds(Journal(folder).read()) == ["first"]

    def test_a_closed_descriptor_is_survived(self, folder: Path) -> None:
        writer = JournalWriter("worker")
        os.close(writer._fd)
        writer.write("nowhere")

    @pytest.mark.parametrize("line", [b"{}\n", b"5\n", b"\n", b'{"t": 1}\n', b'{"t": 1, "ev"\n', b"\xff\n"])
    def test_a_line_that_is_no_event_is_a_lost_one(self, folder: Path, line: bytes) -> None:
        JournalWriter("worker").write("one")
        (file,) = folder.iterdir()
        with file.open("ab") as handle:
            handle.write(line)
        events = Journal(folder).read()
        assert sorted(kinds(events)) == ["lost", "one"]
        lost = next(event for event in events if event["ev"] == "lost")
        assert (lost["server"], lost["side"]) == ("encode-0", "worker")

    def test_a_file_that_vanishes_while_reading_is_no_error(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        JournalWriter("worker").write("one")
        journal = Journal(folder)
        gone = folder / "gone.worker.1.ndjson"
        monkeypatch.setattr(Journal, "_files", lambda self: [*folder.glob("*.ndjson"), gone])
        assert kinds(journal.read()) == ["one"]
        assert [name for name, _ in journal.mark().offsets] == [path.name for path in folder.iterdir()]


def test_who_follows_sees_what_a_whole_reading_sees(folder: Path) -> None:
    """Also a line in two halves, a torn one, a file made anew with more in it than before, and one that has gone."""
    journal, follower = Journal(folder), Follower()
    assert follower.read(journal) == []
    JournalWriter("worker").write("one")
    JournalWriter("scheduler").write("two")
    (worker,) = folder.glob("*.worker.*")
    (scheduler,) = folder.glob("*.scheduler.*")
    texts = worker.read_text().replace('"seq": 0', '"seq": 1'), "torn\n"
    for text in ("", texts[0][:30], texts[0][30:], *texts):
        with worker.open("a") as file:
            file.write(text)
        assert follower.read(journal) == journal.read()
    assert kinds(journal.read()).count("lost") == 1
    other = worker.with_name("new")
    other.write_text(worker.read_text().replace('"one"', '"another"') + texts[0])
    other.rename(worker)
    assert follower.read(journal) == journal.read()
    assert "another" in kinds(follower.read(journal))
    worker.write_text(texts[0])
    assert follower.read(journal) == journal.read()
    scheduler.unlink()
    assert kinds(follower.read(journal)) == kinds(journal.read()) == ["one"]
