"""What keeps a store in order: listing, quarantine, limits of size and age, deletion by model.

Any number of servers and hands may do this at once, and none of it can hurt a reader: a reader has its own copy before it
uses an object, and a file that is deleted while it is read stays whole for who has opened it (over NFS the read fails, and
the object counts as missing). What is deleted costs one more encode, never an answer.

Importing this needs neither vLLM nor torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from epd_conformance.connectors.object_format import (
    SUFFIX,
    Header,
    ObjectError,
    Reason,
    StatIdentity,
    check,
    fill,
    identity_of,
    object_name,
    open_object,
    read_header,
)

QUARANTINE = "quarantine"
_LOCK = ".reclaim.lock"

#: Reasons for which an object is wrong in itself, whoever reads it. The others are about a reader: an object of another
#: model, another version of the format or another number of rows may be right for somebody else.
DAMAGED = frozenset({Reason.TRUNCATED, Reason.MALFORMED, Reason.CHECKSUM, Reason.KEY})

#: A temporary file of a writer that is alive is renamed within seconds; after an hour its writer is dead.
TEMPORARY_S = 3600.0

#: How far below the limit a reclamation goes, so that not every save has to delete one object.
LOW_WATER = 0.9

#: At most one scan a second in one server: a scan reads the status of every object.
SCAN_EVERY_S = 1.0
#: And one at least so often, for the limit of age.
SCAN_AT_LEAST_S = 60.0

#: How exactly the time of the last use is kept: each note of it is a write to the store.
USED_GRAIN_S = 60.0

#: How much of an object is read for its header. A key of 10,000 characters of three bytes, percent-encoded, takes 90 kB.
_HEADER_BYTES = 256 << 10

_FOLDER = re.compile(r"[0-9a-f]{2}")


@dataclass(frozen=True)
class Stored:
    """One file of a store.

    Attributes:
        bytes: size on record. used: when it was last written or, where readers may say so, used (seconds since 1970).
    """

    path: Path
    identity: StatIdentity
    used: float

    @property
    def bytes(self) -> int:
        return self.identity.size


@dataclass(frozen=True)
class Swept:
    """What a reclamation did. ``kept_bytes``: the size of what is left."""

    objects: int
    bytes: int
    temporaries: int
    kept_objects: int
    kept_bytes: int


def objects(root: Path) -> Iterator[Stored]:
    """Every object file, in no order. What vanishes meanwhile is left out.

    Raises:
        OSError: the root cannot be read.
    """
    for first in os.scandir(root):
        if _FOLDER.fullmatch(first.name):
            yield from _files(Path(first.path), lambda name: name.endswith(SUFFIX))


def quarantined(root: Path) -> Iterator[Stored]:
    """Every file in quarantine."""
    yield from _list(root / QUARANTINE, lambda name: True)


def header_of(path: Path) -> Header:
    """The header of a stored object; its rows are not read.

    Raises:
        ObjectError: as ``read_header``, ``missing``, ``unreadable``.
    """
    with open_object(path) as (descriptor, status):
        return read_header(os.pread(descriptor, _HEADER_BYTES, 0), status.st_size)[0]


def inspect(root: Path, path: Path) -> Header:
    """Read an object whole, and check everything that can be checked without knowing what a reader wants.

    Raises:
        ObjectError: with the reason.
    """
    with open_object(path) as (descriptor, status):
        view = memoryview(bytearray(status.st_size))
        filled = fill(descriptor, view)
    header, _ = check(view[:filled])
    if object_name(header.key) != path.relative_to(root).as_posix():
        raise ObjectError(Reason.KEY, f"the object is of another item than its name {path.name} says")
    return header


def quarantine(root: Path, path: Path, reason: Reason, seen: StatIdentity | None) -> Path | None:
    """Take a damaged object out of the way: ``quarantine/<name>.<reason>.<time>.<random>`` under the root.

    Args:
        seen: the state in which it was found bad; another one now means that it was published again, and it stays.

    Returns:
        Where it lies now; None if it was left alone.

    Raises:
        OSError: it may not be moved (a read-only store).
    """
    try:
        now = identity_of(path.lstat())
    except FileNotFoundError:
        return None
    if seen is not None and now != seen:
        return None
    folder = root / QUARANTINE
    folder.mkdir(exist_ok=True)
    name = path.name.removesuffix(SUFFIX)
    moved = folder / f"{name}.{reason}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.{secrets.token_hex(4)}"
    try:
        path.rename(moved)
    except FileNotFoundError:
        return None
    return moved


def touch(path: Path, status: os.stat_result) -> None:
    """Note that an object was used, in its access time: most mounts do not keep that themselves. Its time of writing stays.

    Only its owner may; for everybody else the time of writing counts. Once a minute is enough to tell what is in use.
    """
    if time.time() - status.st_atime > USED_GRAIN_S:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))


def sweep(root: Path, *, max_bytes: int | None = None, max_age_s: float | None = None, dry_run: bool = False) -> Swept:
    """Delete what is too old, then what was not used for the longest time until the rest fits; and dead temporary files.

    The quarantine counts, and goes first. Several may sweep at once.

    Args:
        max_bytes: if the store is larger, it is brought down to nine tenths of this. None: no limit.
        max_age_s: what was neither written nor used for so many seconds goes. None: no limit.

    Raises:
        OSError: the root cannot be read.
    """
    # By the file system's clock, which is that of the times below; the one of this host may be wrong.
    now = _clock(root)
    dead = [temporary for temporary in _temporaries(root) if now - temporary.used > TEMPORARY_S]
    kept = sorted(objects(root), key=lambda stored: stored.used)
    kept = sorted(quarantined(root), key=lambda stored: stored.used) + kept
    size = sum(stored.bytes for stored in kept)
    target = max_bytes * LOW_WATER if max_bytes is not None and size > max_bytes else math.inf
    gone = count = 0
    left = 0
    for stored in kept:
        old = max_age_s is not None and now - stored.used > max_age_s
        over = size - gone > target
        if (old or over) and (dry_run or _delete(stored)):
            gone += stored.bytes
            count += 1
        else:
            left += 1
    temporaries = sum(1 for temporary in dead if dry_run or _delete(temporary))
    return Swept(count, gone, temporaries, left, size - gone)


def purge(root: Path, wanted: Callable[[Header], bool], *, dry_run: bool = False) -> Swept:
    """Delete every object whose header a predicate wants gone, such as those of a model whose weights were replaced.

    What is no valid object has no model and stays, for ``verify`` to find.

    Raises:
        OSError: the root cannot be read.
    """
    count = size = left = left_bytes = 0
    for stored in objects(root):
        try:
            header = header_of(stored.path)
        except ObjectError:
            left, left_bytes = left + 1, left_bytes + stored.bytes
            continue
        if wanted(header) and (dry_run or _delete(stored)):
            count, size = count + 1, size + stored.bytes
        else:
            left, left_bytes = left + 1, left_bytes + stored.bytes
    return Swept(count, size, 0, left, left_bytes)


@contextlib.contextmanager
def sole(root: Path) -> Iterator[bool]:
    """Whether this is the only one that reclaims in the store now. Only saves work: two at once do no harm.

    Raises:
        OSError: the root cannot be written.
    """
    descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True
    finally:
        os.close(descriptor)


class Reclaimer:
    """Keeps a store within its limits, from a thread of a producing server.

    Args:
        report: called in that thread with what each sweep did. failed: with the error of one that failed.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        max_age_s: float | None,
        report: Callable[[Swept], None],
        failed: Callable[[OSError], None],
    ) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._report = report
        self._failed = failed
        self._saved = 0
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def saved(self, size: int) -> None:
        """Tell of a published object. The thread is started by the first one and woken when enough has come together."""
        self._saved += size
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="verified-store-reclaim", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system has no more of them
                self._failed(OSError(str(error)))
                return
            self._thread = thread
        if self._max_bytes is not None and self._saved > self._max_bytes * (1 - LOW_WATER) / 2:
            self._wake.set()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()

    def _work(self) -> None:
        while not self._stopped:
            self._saved = 0
            try:
                with sole(self._root) as alone:
                    if alone:
                        self._report(sweep(self._root, max_bytes=self._max_bytes, max_age_s=self._max_age_s))
            except OSError as error:
                self._failed(error)
            time.sleep(SCAN_EVERY_S)
            self._wake.wait(SCAN_AT_LEAST_S)
            self._wake.clear()


def _delete(stored: Stored) -> bool:
    """Delete a file, unless it is another one than when it was listed."""
    try:
        if identity_of(stored.path.lstat()) != stored.identity:
            return False
        if stored.path.is_dir():
            return False
        stored.path.unlink()
    except OSError:
        return False
    return True


def _temporaries(root: Path) -> Iterable[Stored]:
    for first in os.scandir(root):
        if _FOLDER.fullmatch(first.name):
            yield from _files(Path(first.path), lambda name: name.startswith(".") and name.endswith(".tmp"))


def _files(first: Path, wanted: Callable[[str], bool]) -> Iterator[Stored]:
    with contextlib.suppress(OSError):
        for second in os.scandir(first):
            yield from _list(Path(second.path), wanted)


def _list(folder: Path, wanted: Callable[[str], bool]) -> Iterator[Stored]:
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if not wanted(entry.name):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                used = max(status.st_mtime, status.st_atime)
                yield Stored(Path(entry.path), identity_of(status), used)


def _clock(root: Path) -> float:
    """The present time of the store's file system, or of this host if nothing may be written there."""
    try:
        descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return time.time()
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    except OSError:
        return time.time()
    finally:
        os.close(descriptor)
