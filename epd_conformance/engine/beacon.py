"""Which hook is running, written where another process can read it after this one hung or died."""

from __future__ import annotations

import mmap

#: Long enough for `worker 0.build_connector_worker_meta` and an operation's number.
SIZE = 96

_shared: mmap.mmap | None = None


def share(memory: mmap.mmap) -> None:
    """Write to this memory, at least `SIZE` bytes, from now on."""
    global _shared
    _shared = memory


def light(text: str) -> None:
    """Say what is about to run; costs nothing where nobody reads it."""
    if _shared is not None:
        _shared[:SIZE] = text.encode("ascii", "replace")[:SIZE].ljust(SIZE, b"\0")


def read(memory: mmap.mmap) -> str:
    """What was last written."""
    return memory[:SIZE].rstrip(b"\0").decode("ascii")


def last() -> str:
    """What this process, or one forked from it, wrote last; empty where nobody reads it."""
    return read(_shared) if _shared is not None else ""
