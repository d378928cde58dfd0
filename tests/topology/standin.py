"""Stand-ins for vLLM servers: small real programs with the habits that make processes hard to get rid of.

`python -m standin READY [HABIT ...]` listens on a port, takes on the habits, writes what it has made to the file READY
(JSON: port, pids, blocks, trackers) and then waits for ever.

Habits: `child` (a forked child), `session` (a child in a session of its own), `daemon` (forked twice into a session of its
own, so no descendant), `memory` (a block and a semaphore under /dev/shm that nobody unlinks), `deaf` (all of them ignore
SIGTERM), `say=TEXT` and `exit=CODE` (print, end instead of waiting).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import NoReturn


def wait_for_ever() -> NoReturn:
    while True:
        time.sleep(60)


def child(own_session: bool) -> int:
    pid = os.fork()
    if pid == 0:
        if own_session:
            os.setsid()
        wait_for_ever()
    return pid


def daemon() -> int:
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        last = os.fork()
        if last == 0:
            wait_for_ever()
        os.write(writer, str(last).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    return int(os.read(reader, 20))


def main() -> None:
    ready, habits = Path(sys.argv[1]), sys.argv[2:]
    if "deaf" in habits:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pids, blocks, trackers = [os.getpid()], [], []
    kept: list[object] = []
    listener = socket.create_server(("127.0.0.1", 0))
    for habit in habits:
        name, _, value = habit.partition("=")
        if name in ("child", "session"):
            pids.append(child(own_session=name == "session"))
        elif name == "daemon":
            pids.append(daemon())
        elif name == "memory":
            block = shared_memory.SharedMemory(create=True, size=4096)
            # As after a crash: Python's own tracker shall not clean up in the guard's place.
            resource_tracker.unregister(f"/{block.name}", "shared_memory")
            semaphore = multiprocessing.get_context("spawn").Lock()
            resource_tracker.unregister(semaphore._semlock.name, "semaphore")  # type: ignore[attr-defined]
            kept.append(semaphore)
            # The C library maps a semaphore under another name than it can be found by.
            blocks += [block.name, f"sem.{semaphore._semlock.name[1:]}"]  # type: ignore[attr-defined]
            kept.append(block)
            trackers.append(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
        elif name == "say":
            print(value, flush=True)
        elif name == "exit":
            sys.exit(int(value))
    made = {"port": listener.getsockname()[1], "pids": pids, "blocks": blocks, "trackers": trackers}
    ready.with_suffix(".part").write_text(json.dumps(made), encoding="utf-8")
    ready.with_suffix(".part").rename(ready)
    wait_for_ever()


if __name__ == "__main__":
    main()
