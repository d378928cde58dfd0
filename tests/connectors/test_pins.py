"""The memory of pins: who gets which bytes, and that they are private."""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import pytest

from epd_conformance.connectors import pins
from epd_conformance.connectors.object_format import Header
from epd_conformance.connectors.pins import Pin, PinArea, Place, Room, read_place

HEADER = Header("k", "ab" * 32, "float32", 1, 1, "", "", "")
PAGE = pins._PAGE

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no anonymous memory files on this system")


@pytest.mark.parametrize("shared", [True, False])
def test_rooms_never_overlap_and_all_memory_comes_back(shared: bool) -> None:
    area = PinArea(64 * PAGE, shared=shared)
    rng = random.Random(0)
    rooms: dict[int, Room] = {}
    for turn in range(2000):
        if rooms and rng.random() < 0.5:
            number = rng.choice(list(rooms))
            room = rooms.pop(number)
            assert bytes(room.view) == bytes([number % 251]) * len(room.view)
            area.release(room)
            continue
        room_ = area.reserve(rng.randrange(1, 9 * PAGE))
        if room_ is not None:
            room_.view[:] = bytes([turn % 251]) * len(room_.view)
            rooms[turn] = room_
        assert area.used <= 64 * PAGE
    for room in rooms.values():
        area.release(room)
    assert area.used == 0
    assert area.reserve(64 * PAGE) is not None
    assert area.reserve(1) is None


@needs_memfd
def test_another_process_reads_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "WARM_BYTES", PAGE)  # so that the second is given back to the system in between
    area = PinArea(4 * PAGE)
    area.reserve(PAGE)
    for content in (b"first", b"other"):
        room = area.reserve(5)
        assert room is not None
        room.view[:] = content
        place = area.place(Pin(HEADER, room, 1, 5))
        assert place is not None
        child = os.fork()
        if child == 0:
            got = bytearray(4)
            read_place(place, memoryview(got))
            os._exit(0 if got == content[1:] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        area.release(room)


@needs_memfd
def test_the_memory_has_no_name_and_its_length_is_fixed() -> None:
    area = PinArea(4 * PAGE)
    room = area.reserve(8)
    assert room is not None
    place = area.place(Pin(HEADER, room, 0, 8))
    assert place is not None
    assert "memfd:" in str(Path(place.path).readlink())
    with pytest.raises(PermissionError):
        os.truncate(place.path, 0)


@needs_memfd
def test_a_place_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    area = PinArea(PAGE)
    room = area.reserve(8)
    assert room is not None
    place = area.place(Pin(HEADER, room, 0, 8))
    assert place is not None
    other = tmp_path / "file"
    other.write_bytes(bytes(100))
    view = memoryview(bytearray(8))
    for wrong in (place._replace(inode=1), place._replace(path=str(other)), place._replace(offset=PAGE)):
        with pytest.raises(OSError, match=r"is not the scheduler's|ends before"):
            read_place(wrong, view)
    area.close()
    area.close()
    with pytest.raises(OSError, match=r"No such file|not the scheduler's"):
        read_place(place, view)
    assert area.reserve(1) is None


def test_an_area_that_is_not_shared_has_no_places() -> None:
    area = PinArea(PAGE, shared=False)
    room = area.reserve(3)
    assert room is not None
    assert room.offset == -1
    room.view[:] = b"abc"
    pin = Pin(HEADER, room, 1, 3)
    assert area.place(pin) is None
    assert bytes(pin.rows()) == b"bc"
    assert Place("p", 1, 2).offset == 2


@needs_memfd
def test_without_a_file_that_workers_can_open_nothing_has_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # as if /proc belonged to somebody else
    area = PinArea(PAGE)
    room = area.reserve(3)
    assert room is not None
    assert area.place(Pin(HEADER, room, 0, 3)) is None
    monkeypatch.undo()

    def forbidden(*args: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    assert PinArea(PAGE).reserve(3) is not None
    monkeypatch.delattr(os, "memfd_create")  # as where the system has none
    assert PinArea(PAGE).reserve(3) is not None


def mapped(area: PinArea) -> int:
    """Bytes of its file that take memory."""
    return Path(area._path).stat().st_blocks * 512


@needs_memfd
def test_free_memory_stays_warm_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "WARM_BYTES", 2 * PAGE)
    area = PinArea(8 * PAGE)
    rooms = [area.reserve(3 * PAGE) for _ in range(2)]
    for room in rooms:
        assert room is not None
        room.view[:] = bytes([1]) * len(room.view)
    assert mapped(area) == 6 * PAGE
    for room in rooms:
        assert room is not None
        area.release(room)
    assert mapped(area) == 2 * PAGE
    again = area.reserve(8 * PAGE)
    assert again is not None
    small = PinArea(2 * PAGE)
    all_of_it = small.reserve(2 * PAGE)
    assert all_of_it is not None
    small.release(all_of_it)  # what is cold would begin where the area ends
    assert again.offset == 0
    assert set(again.view[2 * PAGE :]) == {0}


@needs_memfd
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2), (1, 2, 0)])
def test_what_is_free_is_one_piece_again(order: tuple[int, ...]) -> None:
    area = PinArea(6 * PAGE)
    rooms = [area.reserve(2 * PAGE) for _ in range(3)]
    assert area._free == []
    for index in order:
        room = rooms[index]
        assert room is not None
        area.release(room)
    assert area._free == [(0, 6 * PAGE)]


@pytest.mark.parametrize("shared", [True, False])
def test_room_is_whole_pages_and_no_more_than_the_limit(shared: bool) -> None:
    area = PinArea(3 * PAGE + 5, shared=shared)
    empty = area.reserve(0)
    assert empty is not None
    assert len(empty.view) == 0
    assert area.used == PAGE
    page = area.reserve(PAGE)
    assert page is not None
    assert area.used == 2 * PAGE
    assert area.reserve(PAGE + 1) is None
    assert area.reserve(1) is not None
    assert area.used == 3 * PAGE
    area.release(page)
    assert area.used == 2 * PAGE
    assert PinArea(PAGE - 1, shared=shared).reserve(0) is None


@needs_memfd
def test_the_first_room_that_fits_is_taken_and_the_file_is_closed_with_its_area() -> None:
    area = PinArea(8 * PAGE)
    first, between, third = area.reserve(PAGE), area.reserve(3 * PAGE), area.reserve(PAGE)
    assert first is not None
    assert between is not None
    assert third is not None
    area.release(first)
    area.release(between)
    taken = area.reserve(2 * PAGE)
    assert taken is not None
    assert (taken.offset, len(taken.view), taken.size) == (0, 2 * PAGE, 2 * PAGE)
    path = area._path
    assert Path(path).stat().st_size == 8 * PAGE
    del area
    assert not Path(path).exists()


@needs_memfd
def test_the_file_cannot_be_made_longer_either_and_its_seals_stay() -> None:
    area = PinArea(PAGE)
    descriptor = os.open(area._path, os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 2 * PAGE)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert Path(area._path).stat().st_size == PAGE
        assert not os.get_inheritable(int(area._path.rpartition("/")[2]))
    finally:
        os.close(descriptor)


@needs_memfd
def test_reading_closes_what_it_opens_and_starts_where_the_rows_are() -> None:
    area = PinArea(4 * PAGE)
    area.reserve(PAGE)
    room = area.reserve(16)
    assert room is not None
    room.view[:] = bytes(range(16))
    place = area.place(Pin(HEADER, room, 4, 12))
    assert place is not None
    assert place.offset == PAGE + 4
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        got = bytearray(8)
        read_place(place, memoryview(got))
        assert got == bytes(range(4, 12))
    with pytest.raises(OSError, match="not the scheduler's"):
        read_place(place._replace(inode=1), memoryview(bytearray(8)))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
