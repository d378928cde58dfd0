"""The journal: append-only ndjson in which the recording connectors write what happened inside each server process.

One file a process and side (`<server>.<side>.<pid>.ndjson`), written with one `write(2)` a line, so that a reader never sees
half a line of another writer and a crash loses nothing that was written before. The reader half is used by the harness; both
halves use the standard library only.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Set in each server's environment by the stack.
DIRECTORY = "EPD_JOURNAL"
SERVER = "EPD_SERVER"


class JournalWriter:
    """Writes the lines of one side (`scheduler`, `worker`, `kv-scheduler`, `kv-worker`) of one process."""

    def __init__(self, side: str) -> None:
        directory = os.environ[DIRECTORY]
        self.server = os.environ[SERVER]
        self.side = side
        path = Path(directory) / f"{self.server}.{side}.{os.getpid()}.ndjson"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._next = 0

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. `fields` must be JSON values; a key that is no valid unicode is escaped by json itself."""
        line = {
            "seq": self._next,
            "t": time.time(),
            "server": self.server,
            "side": self.side,
            "ev": event,
            **fields,
        }
        self._next += 1
        os.write(self._fd, (json.dumps(line) + "\n").encode())


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
        return Mark(tuple((path.name, path.stat().st_size) for path in self._files()))

    def read(self, since: Mark | None = None) -> list[dict[str, Any]]:
        """All events after `since`, oldest first. A line that is still being written is left for the next read."""
        offsets = dict(since.offsets) if since is not None else {}
        events: list[dict[str, Any]] = []
        for path in self._files():
            events.extend(_lines(path, offsets.get(path.name, 0)))
        events.sort(key=lambda event: (event["t"], event["server"], event["side"], event["seq"]))
        return events


def _lines(path: Path, offset: int) -> Iterator[dict[str, Any]]:
    with path.open("rb") as handle:
        handle.seek(offset)
        for raw in handle:
            if raw.endswith(b"\n"):
                yield json.loads(raw)
