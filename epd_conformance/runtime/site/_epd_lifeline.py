"""The lifeline: a server's main process ends its whole process group when the guard is gone.

The guard holds the only write end of a pipe. Each server's first process waits on the read end in a thread; end-of-file
means that the guard died without having been able to clean up. A parent-death signal would not do: it is per thread of the
parent, is lost over a fork, and reaches no grandchild.

Standard library only: it is imported at interpreter start by the `sitecustomize` that servers get.
"""

from __future__ import annotations

import os
import signal
import stat
import threading


def watch() -> bool:
    """Start the watching thread when this process inherited the lifeline. Returns whether it did."""
    token = os.environ.get("EPD_LIFELINE", "")
    fd_text, _, inode = token.partition(":")
    if not inode:
        return False
    fd = int(fd_text)
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    # A spawned grandchild has the variable but not the pipe.
    if not stat.S_ISFIFO(status.st_mode) or str(status.st_ino) != inode:
        return False
    threading.Thread(target=_wait, args=(fd,), name="epd-lifeline", daemon=True).start()
    return True


def _wait(fd: int) -> None:
    while True:
        try:
            if not os.read(fd, 1):
                break
        except InterruptedError:
            continue
        except OSError:
            return
    os.killpg(os.getpgrp(), signal.SIGKILL)
