"""Limits, quarantine and deletion in a store that others use at the same time."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from epd_conformance.connectors import reclaim
from epd_conformance.connectors.object_format import Header, ObjectError, Reason, object_name, publish, repack
from epd_conformance.connectors.reclaim import Reclaimer, Swept, objects, purge, quarantine, sole, sweep

MODELS = ["ab" * 32, "cd" * 32]
ROWS = bytes(1024)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def put(root: Path, key: str, *, used: float = 0.0, model: str = MODELS[0]) -> Path:
    """An object that was last used so many seconds ago."""
    header = Header(key, model, "float32", 1, 256, "", "test", "2026-01-01T00:00:00.000+00:00")
    path = publish(root, key, repack(header, ROWS))
    moment = time.time() - used
    os.utime(path, (moment, moment))
    return path


def keys(root: Path) -> set[str]:
    return {reclaim.header_of(stored.path).key for stored in objects(root)}


def test_listing_knows_objects_from_everything_else(root: Path) -> None:
    put(root, "a")
    put(root, "b")
    (root / "notes.txt").write_text("x")
    (root / "ab").mkdir(exist_ok=True)
    (root / "ab" / "stray").write_text("x")
    (root / "ff").write_text("a file where a folder would be")
    assert keys(root) == {"a", "b"}


def test_age_counts_from_the_last_use(root: Path) -> None:
    put(root, "old", used=100)
    put(root, "new", used=10)
    read = put(root, "read", used=100)
    with read.open("rb") as file:
        reclaim.touch(read, os.fstat(file.fileno()))
    assert sweep(root, max_age_s=50, dry_run=True).objects == 1
    swept = sweep(root, max_age_s=50)
    assert (swept.objects, swept.kept_objects) == (1, 2)
    assert keys(root) == {"new", "read"}


def test_the_least_recently_used_go_first_and_some_room_is_made(root: Path) -> None:
    size = put(root, "k00", used=100).stat().st_size
    for number in range(1, 20):
        put(root, f"k{number:02}", used=100 - number)
    assert sweep(root, max_bytes=20 * size).objects == 0
    swept = sweep(root, max_bytes=19 * size)
    assert swept.kept_bytes <= 19 * size * reclaim.LOW_WATER
    assert keys(root) == {f"k{number:02}" for number in range(swept.objects, 20)}
    assert swept.bytes == swept.objects * size


def test_the_quarantine_counts_and_goes_first(root: Path) -> None:
    bad = put(root, "bad", used=1)
    size = bad.stat().st_size
    moved = quarantine(root, bad, Reason.CHECKSUM, None)
    assert moved is not None
    put(root, "good", used=100)
    sweep(root, max_bytes=int(1.5 * size))
    assert not moved.exists()
    assert keys(root) == {"good"}


def test_dead_temporaries_go_and_those_of_the_living_stay(root: Path) -> None:
    folder = put(root, "a").parent
    dead, alive = folder / ".1-aa.tmp", folder / ".2-bb.tmp"
    for path in (dead, alive):
        path.write_bytes(b"x")
    os.utime(dead, (1, 1))
    assert sweep(root).temporaries == 1
    assert (dead.exists(), alive.exists()) == (False, True)


def test_what_was_published_again_since_it_was_listed_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a", used=100)
    real = reclaim.objects

    def then_published(where: Path) -> list[reclaim.Stored]:
        found = list(real(where))
        put(root, "a")
        return found

    monkeypatch.setattr(reclaim, "objects", then_published)
    assert sweep(root, max_age_s=50).objects == 0
    assert keys(root) == {"a"}


def test_a_reader_keeps_what_is_deleted_under_it(root: Path) -> None:
    path = put(root, "a", used=100)
    with path.open("rb") as file:
        before = file.read(10)
        sweep(root, max_bytes=0)
        assert not path.exists()
        assert before + file.read() == repack(reclaim_header(), ROWS)


def reclaim_header() -> Header:
    return Header("a", MODELS[0], "float32", 1, 256, "", "test", "2026-01-01T00:00:00.000+00:00")


def test_purge_deletes_one_model_only(root: Path) -> None:
    for number in range(3):
        put(root, f"a{number}", model=MODELS[0])
        put(root, f"b{number}", model=MODELS[1])
    garbage = root / object_name("garbage")
    garbage.parent.mkdir(parents=True, exist_ok=True)
    garbage.write_bytes(b"garbage")
    assert purge(root, lambda header: header.model_fingerprint == MODELS[0], dry_run=True).objects == 3
    assert purge(root, lambda header: header.model_fingerprint == MODELS[0]).objects == 3
    garbage.unlink()
    assert keys(root) == {"b0", "b1", "b2"}


def test_quarantine_leaves_alone_what_is_new(root: Path) -> None:
    old = put(root, "a", used=10)
    seen = reclaim.identity_of(old.stat())
    put(root, "a")
    assert quarantine(root, old, Reason.CHECKSUM, seen) is None
    assert keys(root) == {"a"}
    assert quarantine(root, root / "ab" / "nothing", Reason.CHECKSUM, None) is None


def test_inspection_finds_an_object_under_another_name(root: Path) -> None:
    path = put(root, "a")
    assert reclaim.inspect(root, path).key == "a"
    other = root / object_name("b")
    other.parent.mkdir(parents=True, exist_ok=True)
    path.rename(other)
    with pytest.raises(ObjectError) as caught:
        reclaim.inspect(root, other)
    assert caught.value.reason is Reason.KEY


def test_only_one_reclaims_at_a_time(root: Path) -> None:
    with sole(root) as first, sole(root) as second:
        assert (first, second) == (True, False)
    with sole(root) as again:
        assert again


def test_the_reclaimer_wakes_when_enough_was_saved(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "SCAN_EVERY_S", 0.0)
    reports: list[Swept] = []
    failures: list[OSError] = []
    size = put(root, "k").stat().st_size
    reclaimer = Reclaimer(root, 5 * size, None, reports.append, failures.append)
    for number in range(50):
        put(root, f"k{number}")
        reclaimer.saved(size)
    deadline = time.monotonic() + 10
    while sum(stored.bytes for stored in objects(root)) > 5 * size:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert sum(report.objects for report in reports) >= 45
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    while not failures:
        reclaimer.saved(size)
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert isinstance(failures[0], FileNotFoundError)
    reclaimer.stop()


def test_what_lies_in_quarantine_says_what_when_and_why(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    utc = time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
    paths = [put(root, key, used=10 - number) for number, key in enumerate("ab")]
    with monkeypatch.context() as patched:
        patched.setattr(reclaim, "time", SimpleNamespace(strftime=time.strftime, gmtime=lambda: utc))
        moved = [quarantine(root, path, Reason.CHECKSUM, None) for path in paths]
    for path, there in zip(paths, moved, strict=True):
        assert there is not None
        assert there.parent == root / "quarantine"
        assert re.fullmatch(rf"{path.stem}\.checksum\.20260102T030405Z\.[0-9a-f]{{8}}", there.name)
    assert sweep(root, max_bytes=int(1.5 * moved[1].stat().st_size)).objects == 1  # type: ignore[union-attr]
    assert [path.exists() for path in moved if path is not None] == [False, True], "the older one first"


def test_reclaiming_stops_at_nine_tenths_of_the_limit(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "LOW_WATER", 0.5)
    size = put(root, "k0").stat().st_size
    for number in range(1, 5):
        put(root, f"k{number}")
    assert sweep(root, max_bytes=5 * size) == Swept(0, 0, 0, 5, 5 * size), "at the limit nothing goes"
    assert sweep(root, max_bytes=4 * size) == Swept(3, 3 * size, 0, 2, 2 * size)


def test_the_clock_is_that_of_the_store(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a", used=100)
    with monkeypatch.context() as patched:
        patched.setattr(reclaim, "time", SimpleNamespace(time=lambda: 0.0))
        assert sweep(root, max_age_s=50, dry_run=True).objects == 1
        for name in ("utime", "open"):
            with monkeypatch.context() as broken:
                broken.setattr(os, name, refuse)
                assert sweep(root, max_age_s=50, dry_run=True).objects == 0, "this host's, where there is no other"


def refuse(*args: object, **kwargs: object) -> int:
    raise OSError(errno.EROFS, "Read-only file system")


def test_servers_of_other_users_share_the_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = root / ".reclaim.lock"
    before = os.umask(0)
    try:
        sweep(root)
        assert lock.stat().st_mode & 0o777 == 0o666
        lock.unlink()
        with sole(root) as alone:
            assert alone
        assert lock.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)
    monkeypatch.setattr(reclaim.fcntl, "flock", refuse)
    with sole(root) as alone:
        assert alone, "a file system without locks"


def test_only_a_writers_files_are_taken_for_temporary(root: Path) -> None:
    folder = put(root, "a").parent
    for name in (".notes", "mine.tmp", ".1-aa.tmp"):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    assert sweep(root).temporaries == 1
    assert {path.name for path in folder.iterdir() if not path.name.endswith("safetensors")} == {".notes", "mine.tmp"}


def test_what_vanishes_while_it_is_listed_is_left_out(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = put(root, "a")
    put(root, "b")
    real = os.scandir

    def scandir(path: str | Path) -> list[os.DirEntry[str]]:
        found = list(real(path))
        if Path(path) == gone.parent:
            gone.unlink(missing_ok=True)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", scandir)
        assert len(list(objects(root))) == 1


def test_a_use_is_noted_once_a_minute(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(root, "a", used=30)
    before = path.stat()
    reclaim.touch(path, before)
    assert path.stat().st_atime_ns == before.st_atime_ns
    path = put(root, "a", used=90)
    before = path.stat()
    reclaim.touch(path, before)
    assert path.stat().st_atime > before.st_atime + 60
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    monkeypatch.setattr(os, "utime", refuse)
    reclaim.touch(path, before)  # who is not its owner may not


def test_a_reclaimer_is_woken_by_a_part_of_the_limit(root: Path) -> None:
    assert 0 < reclaim.SCAN_EVERY_S < reclaim.SCAN_AT_LEAST_S
    for limit, woken in ((1000, [False, True]), (None, [False, False])):
        reclaimer = Reclaimer(root, limit, None, lambda swept: None, lambda error: None)
        reclaimer._thread = threading.current_thread()  # so that none is started
        found = []
        for _ in range(2):
            reclaimer.saved(30)
            found.append(reclaimer._wake.is_set())
        assert found == woken


def test_a_reclaimer_looks_without_being_woken_and_never_keeps_its_process(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "SCAN_EVERY_S", 0.0)
    monkeypatch.setattr(reclaim, "SCAN_AT_LEAST_S", 0.001)
    reports: list[Swept] = []
    put(root, "old", used=100)
    put(root, "new")
    reclaimer = Reclaimer(root, None, 50, reports.append, lambda error: None)
    reclaimer.saved(1)
    assert reclaimer._thread is not None
    assert reclaimer._thread.daemon
    deadline = time.monotonic() + 10
    while len(reports) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    reclaimer.stop()
    reclaimer._thread.join(10)
    assert not reclaimer._thread.is_alive()
    assert keys(root) == {"new"}


def test_without_a_thread_a_reclaimer_says_so(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    failures: list[OSError] = []
    Reclaimer(root, 1, None, lambda swept: None, failures.append).saved(1)
    assert [str(error) for error in failures] == ["can't start new thread"]
