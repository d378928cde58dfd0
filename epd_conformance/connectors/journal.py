"""The journal: append-only ndjson in which the recording connectors write what happened inside each server process.

One file a process and side (`<server>.<side>.<pid>.ndjson`), written with one `write(2)` a line, so that a reader never sees
half a line of another writer and a crash loses nothing that was written before. The reader half is used by the harness; both
halves use the standard library only.

A journal that cannot be opened stops its server from starting, when nothing was answered yet. After that, writing never
raises into the engine: a full disk must not change an answer. What could not be written is counted, and said by a line `lost`
as soon as a line can be written again; a line that was cut off, the reader turns into one. Judges let no cell with such a
line pass. Lines that are missing at the end of a file prove nothing, so they need no mark.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Set in each server's environment by the stack.
DIRECTORY = "EPD_JOURNAL"
SERVER = "EPD_SERVER"


class JournalWriter:
    """Writes the lines of one side (`scheduler`, `worker`, `kv-scheduler`, `kv-worker`) of one process.

    Raises RuntimeError outside of a server that a stack started, OSError where the file cannot be made.
    """

    def __init__(self, side: str) -> None:
        for name in (DIRECTORY, SERVER):
            if not os.environ.get(name):
                raise RuntimeError(f"{name} is not set: a recording connector runs only in servers that a stack starts")
        self.server = os.environ[SERVER]
        self.side = side
        self.path = Path(os.environ[DIRECTORY]) / f"{self.server}.{side}.{os.getpid()}.ndjson"
        self._lock = threading.Lock()
        self._fd = -1
        self._next = 0
        self._missing = 0
        self._why = ""
        self._torn = False
        self._open()

    def write(self, event: str, **fields: Any) -> None:
        """Append one event; never raises. `fields` must be JSON values, or the line is lost and said to be."""
        with self._lock:
            try:
                self._own_up()
                self._append(event, fields)
            except (OSError, TypeError, ValueError, RecursionError) as error:
                self._lose(1, f"{event}: {error!r}")
                with contextlib.suppress(OSError):
                    self._own_up()

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def _own_up(self) -> None:
        """Say how many lines were lost before; first find out whether the file itself was deleted, and begin another."""
        if os.fstat(self._fd).st_nlink == 0:
            if self._next:
                self._lose(self._next, "the journal was deleted")
                self._next = 0
            old = self._fd
            self._open()
            os.close(old)
        if self._missing:
            self._append("lost", {"lines": self._missing, "error": self._why})
            self._missing = 0

    def _append(self, event: str, fields: dict[str, Any]) -> None:
        line = {"seq": self._next, "t": time.time(), "server": self.server, "side": self.side, "ev": event, **fields}
        # Plain ASCII: json escapes whatever a key holds, lone surrogates too.
        data = (json.dumps(line) + "\n").encode()
        # What a full disk cut off must not swallow this line as well.
        written = os.write(self._fd, b"\n" + data if self._torn else data)
        wanted = len(data) + self._torn
        self._torn = written < wanted if written else self._torn
        if written < wanted:
            raise OSError(f"{written} of {wanted} bytes written")
        self._next += 1

    def _lose(self, lines: int, why: str) -> None:
        if not self._missing:
            self._why = why[:500]
            # Into the server's log, for the case that nothing can be written to the journal any more.
            with contextlib.suppress(Exception):
                print(
                    f"epd-conformance: cannot write to the journal {self.path}: {self._why}",
                    file=sys.stderr,
                    flush=True,
                )
        self._missing += lines


@dataclass(frozen=True)
class Mark:
    """A position in every file of a journal directory: {file name: bytes}."""

    offsets: tuple[tuple[str, int], ...]


class Journal:
    """Reads a journal directory. Keeps no state: a mark taken before a cell cuts out what the cell caused."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _files(self) -> list[Path]:
        return sorted(self.directory.glob("*.ndjson")) if self.directory.is_dir() else []

    def mark(self) -> Mark:
        """The current end of every file."""
        ends = []
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                ends.append((path.name, path.stat().st_size))
        return Mark(tuple(ends))

    def read(self, since: Mark | None = None) -> list[dict[str, Any]]:
        """All events after `since`, oldest first. A line that is still being written is left for the next read.

        A whole line that is no event becomes a `lost` event: a full disk, or a mark from before the file was made anew.
        """
        offsets = dict(since.offsets) if since is not None else {}
        events: list[dict[str, Any]] = []
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                events += _Part().read(path, offsets.get(path.name, 0)).events
        events.sort(key=_order)
        return events


class Follower:
    """Reads one journal directory again and again, of each file only what is new: a stack's journal grows with every cell."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def read(self, journal: Journal) -> list[dict[str, Any]]:
        """What `journal.read()` would give."""
        parts: dict[str, _Part] = {}
        for path in journal._files():
            with contextlib.suppress(FileNotFoundError):
                part = self._parts.get(path.name)
                if part is None or not part.goes_on_in(path):
                    part = _Part()
                parts[path.name] = part.read(path, part.end)
        self._parts = parts
        return sorted((event for part in parts.values() for event in part.events), key=_order)


def _order(event: dict[str, Any]) -> tuple[Any, ...]:
    return event["t"], event["server"], event["side"], event["seq"]


@dataclass
class _Part:
    """What was read of one file."""

    events: list[dict[str, Any]] = field(default_factory=list)
    end: int = 0
    inode: int = 0
    last: float = 0.0

    def goes_on_in(self, path: Path) -> bool:
        """Whether the file is still the one that was read, and not made anew."""
        status = path.stat()
        return (status.st_ino, True) == (self.inode, status.st_size >= self.end)

    def read(self, path: Path, offset: int) -> _Part:
        """Read on from `offset` to the last whole line."""
        with path.open("rb") as handle:
            status = os.fstat(handle.fileno())
            self.inode = status.st_ino
            # A file that is shorter than it was has been deleted and made anew: all of it is new.
            self.end = offset if offset <= status.st_size else 0
            handle.seek(self.end)
            for raw in handle:
                if not raw.endswith(b"\n"):
                    break
                self.end += len(raw)
                try:
                    event = json.loads(raw)
                    self.last = [event[name] for name in ("seq", "server", "side", "ev", "t")][-1]
                except (ValueError, TypeError, KeyError):
                    server, side, *_ = path.name.rsplit(".", 3)
                    event = {
                        "seq": -1,
                        "t": self.last,
                        "server": server,
                        "side": side,
                        "ev": "lost",
                        "error": "a torn line",
                    }
                self.events.append(event)
        return self
