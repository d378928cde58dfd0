"""Private copies of stored objects: what the scheduler's process has verified and the workers of the same server read.

Whatever a stored file is read through later (a descriptor, a hard link, a mapping), somebody else can truncate it or write
into it. So an object is copied into memory that has no name and belongs to this server, verified there, and only that copy is
ever promised to the engine.

How the copy reaches the workers: measured between two processes, for objects of 256 KiB, 4 MiB and 64 MiB, against sending
the bytes along in the step's metadata (which the executor pickles into its message queue, and above 16 MiB into a socket):

    bytes in the metadata     0.18 ms    59 ms    640 ms
    anonymous memory file     0.12 ms     7 ms    200 ms

Hence one anonymous memory file (``memfd``) a server: the metadata name a place in it, and a worker reads that place into its
own tensor. It has no name in any file system and dies with its process, so a killed server leaves nothing to sweep. Where
there is no such file (not Linux) or the workers may be on other hosts, the bytes go in the metadata.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import mmap
import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple

from epd_conformance.connectors.object_format import Header, fill

#: The part of the area that stays resident when it is free. A fresh page costs about 1.7 microseconds (a third of a
#: millisecond for each MiB), several times as much as the copy into it. The largest outputs of today's usual requests are
#: 64 MiB; two of them.
WARM_BYTES = 128 << 20

_PAGE = mmap.PAGESIZE


class Place(NamedTuple):
    """Where rows lie in the scheduler's memory file. ``inode`` tells that the path still leads to that file."""

    path: str
    inode: int
    offset: int


@dataclass(eq=False)
class Room:
    """Memory for one object. ``offset`` is its place in the area's file, -1 if the area is not shared."""

    view: memoryview
    offset: int
    size: int


@dataclass(eq=False)
class Pin:
    """One verified object.

    Attributes:
        room: its bytes, header included. start, stop: where the rows begin and end in them.
        users: request id -> whether that request has consumed the item (it may still come back after a preemption).
        last_step: number of the last step whose metadata name this pin.
    """

    header: Header
    room: Room
    start: int
    stop: int
    users: dict[str, bool] = field(default_factory=dict)
    last_step: int = 0

    def rows(self) -> memoryview:
        """The verified bytes."""
        return self.room.view[self.start : self.stop]


class PinArea:
    """The memory of all pins of a server, at most ``limit`` bytes. Only touched pages take memory. Thread-safe.

    Args:
        limit: bytes. shared: False where the workers could not open the file of this process.
    """

    def __init__(self, limit: int, *, shared: bool = True) -> None:
        self._lock = threading.Lock()
        self._limit = limit - limit % _PAGE
        self._used = 0
        self._closed = False
        self._map: mmap.mmap | None = None
        self._path = ""
        self._inode = 0
        # Free extents as (offset, size), sorted and never adjacent. First fit keeps pins at the warm, low end.
        self._free: list[tuple[int, int]] = [(0, self._limit)]
        if shared and self._limit:
            with contextlib.suppress(
                OSError, AttributeError
            ):  # not Linux, or forbidden here: the bytes go in the metadata
                self._make_file()

    def _make_file(self) -> None:
        descriptor = os.memfd_create("epd-verified-store", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close_file = weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, self._limit)
        # Nobody may make it shorter under a reader, or longer.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        # Of a process that may not be looked into (prctl PR_SET_DUMPABLE), /proc belongs to root.
        if os.lstat(path).st_uid == os.geteuid():
            self._map = mmap.mmap(descriptor, self._limit)
            self._path = path
            self._inode = os.fstat(descriptor).st_ino

    @property
    def used(self) -> int:
        """Bytes in use."""
        return self._used

    def reserve(self, size: int) -> Room | None:
        """Room for an object of ``size`` bytes, or None if there is none."""
        whole = max(_PAGE, size + -size % _PAGE)
        with self._lock:
            if self._closed or self._used + whole > self._limit:
                return None
            if self._map is None:
                self._used += whole
                return Room(memoryview(bytearray(size)), -1, whole)
            for index, (offset, free) in enumerate(self._free):
                if free >= whole:
                    self._free[index : index + 1] = [(offset + whole, free - whole)] if free > whole else []
                    self._used += whole
                    return Room(memoryview(self._map)[offset : offset + size], offset, whole)
        return None

    def release(self, room: Room) -> None:
        """Give room back. Its view must not be used afterwards."""
        room.view.release()
        with self._lock:
            self._used -= room.size
            if self._map is None:
                return
            start, end = room.offset, room.offset + room.size
            cold = max(start, WARM_BYTES)
            if cold < end:
                self._map.madvise(mmap.MADV_REMOVE, cold, end - cold)
            index = bisect.bisect(self._free, (start, 0))
            if index < len(self._free) and self._free[index][0] == end:
                end += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == start:
                index -= 1
                start = self._free.pop(index)[0]
            self._free.insert(index, (start, end - start))

    def place(self, pin: Pin) -> Place | None:
        """Where a worker finds the rows of a pin; None if they must be sent along."""
        if self._map is None:
            return None
        return Place(self._path, self._inode, pin.room.offset + pin.start)

    def close(self) -> None:
        """Take no more pins. Safe to repeat, and while look-ups still write: the memory goes with the last user."""
        with self._lock:
            self._closed = True
        if self._map is not None:
            self._close_file()


def read_place(place: Place, view: memoryview) -> None:
    """Read rows of a pin into this process's memory.

    Raises:
        OSError: the file is gone, is not the one that was meant, or ends too early.
    """
    descriptor = os.open(place.path, os.O_RDONLY)
    try:
        if os.fstat(descriptor).st_ino != place.inode:
            raise OSError(f"{place.path} is not the scheduler's memory file any more")
        if fill(descriptor, view, place.offset) < len(view):
            raise OSError(f"{place.path} ends before byte {place.offset + len(view)}")
    finally:
        os.close(descriptor)
