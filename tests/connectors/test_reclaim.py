"""Limits, quarantine and deletion in a store that others use at the same time."""

from __future__ import annotations

import os
import time
from pathlib import Path

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
    reclaimer.stop()
