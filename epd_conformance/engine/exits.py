"""A process's end in words. Pure, so that both sides of a fork can use it."""

from __future__ import annotations

import signal


def exit_text(code: int) -> str:
    """`signal 11 (SIGSEGV)` or `status 3`, of an exit code as `os.waitstatus_to_exitcode` gives it."""
    if code >= 0:
        return f"status {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
