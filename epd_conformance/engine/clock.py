"""A clock that can be put forward, so that a time limit of a minute is reached in a test of a millisecond.

Replaces `time.monotonic`, `time.time` and `time.perf_counter` in this process: what a connector reads, also in its own threads.
Not replaced are sleeps and waits with a time limit; a connector that waits in them is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_offset = 0.0
_originals: dict[str, Callable[[], float]] = {}


def install() -> None:
    """Replace the clocks, before anything imports them by name; again changes nothing."""
    if _originals:
        return
    for name in ("monotonic", "time", "perf_counter"):
        original: Callable[[], float] = getattr(time, name)
        _originals[name] = original
        setattr(time, name, lambda original=original: original() + _offset)


def uninstall() -> None:
    """Put the machine's clocks back."""
    global _offset
    for name, original in _originals.items():
        setattr(time, name, original)
    _originals.clear()
    _offset = 0.0


def real() -> float:
    """Seconds by the machine's own clock, as `time.perf_counter` gives them without this module."""
    return _originals.get("perf_counter", time.perf_counter)()


def advance(seconds: float) -> None:
    """Let time pass. Without `install` nothing happens."""
    global _offset
    _offset += seconds
