"""The lifeline: a server's main process ends its process group and its descendants when the guard is gone.

The guard holds the only write end of a pipe. Each server's first process waits on the read end in a thread; end-of-file
means that the guard died without having been able to clean up. A parent-death signal would not do: it is per thread of the
parent, is lost over a fork, and reaches no grandchild; it would even end the process that could reach them.

It then does the guard's work for its own server: kill, remove the shared memory that was mapped and the scratch folder. What a
server has put into another session and has lost as a child is out of its reach; only the guard finds that.

Standard library only, and nothing imported when the end has come: another thread may hold an import lock. It is imported at
interpreter start by the `sitecustomize` that servers get.
"""

# pathlib and contextlib would be imported by every server for its last moment only.
# ruff: noqa: PTH123, PTH208, SIM105
from __future__ import annotations

import os
import signal
import stat
import threading

TYPE_CHECKING = False  # importing typing would cost every server several milliseconds
if TYPE_CHECKING:
    from collections.abc import Callable

SHM = "/dev/shm/"
# The same as in topology/guard.py, which says why; neither can import the other.
SHM_NAMES = ("psm_", "vllm", "sem.", "torch_", "mp-", "nccl-")


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
    end()


def end() -> None:
    """Kill this process's group and descendants, itself last, after removing what they leave behind."""
    me, group = os.getpid(), os.getpgrp()
    memory: set[int] = set()
    # Twice: a process may fork between the listing and the signal.
    for _ in range(2):
        for pid in _members(group):
            memory |= _shared_memory(pid)
            if pid != me:
                _quietly(os.kill, pid, signal.SIGKILL)
    for entry in os.scandir(SHM) if memory else ():
        if entry.inode() in memory and entry.name.lower().startswith(SHM_NAMES):
            _quietly(os.unlink, entry.path)
    scratch = os.environ.get("EPD_SCRATCH", "")
    if scratch:
        for folder, folders, files in os.walk(scratch, topdown=False):
            for name in files:
                _quietly(os.unlink, f"{folder}/{name}")
            for name in folders:
                _quietly(os.rmdir, f"{folder}/{name}")
        _quietly(os.rmdir, scratch)
    os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Everybody in the group, and this process's descendants in other groups."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as handle:
                    fields = handle.read().rsplit(")", 1)[1].split()
                table[int(entry)] = int(fields[1]), int(fields[2])
            except (OSError, IndexError):
                continue
    found = {pid for pid, (_, its_group) in table.items() if its_group == group}
    more = {os.getpid()}
    while more:
        found |= more
        more = {pid for pid, (parent, _) in table.items() if parent in more and pid not in found}
    return sorted(found)


def _shared_memory(pid: int) -> set[int]:
    """Inodes of what the process has mapped of /dev/shm: names need not be those under which it was mapped."""
    inodes = set()
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as handle:
            for line in handle:
                if SHM in line:
                    inodes.add(int(line.split(None, 5)[4]))
    except OSError:
        pass
    return inodes


def _quietly(call: Callable[..., object], *arguments: object) -> None:
    """Whatever is gone already is no error; the next step must come in any case."""
    try:
        call(*arguments)
    except OSError:
        pass
