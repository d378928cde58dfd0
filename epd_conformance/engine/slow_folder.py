"""A folder on which every operation takes its time, for all code of a process: Python's, that of libraries, and of their threads.

Linux hands the system calls that name a path to another process before they are carried out (seccomp(2),
SECCOMP_RET_USER_NOTIF, Linux 5.5), which lets each of them go on when it likes. A store that is no folder here is not slowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import select
import socket
import struct
import threading
import time
from collections import Counter
from pathlib import Path

from epd_conformance.engine import clock

# asm/unistd.h: the system calls that name a path -> which argument does.
_CALLS: dict[str, dict[int, int]] = {
    "x86_64": {2: 0, 4: 0, 6: 0, 21: 0, 82: 0, 83: 0, 84: 0, 85: 0, 86: 0, 87: 0, 88: 1, 89: 0}
    | dict.fromkeys((257, 258, 262, 263, 264, 265, 267, 269, 316, 332, 437, 439), 1),
    "aarch64": dict.fromkeys((34, 35, 37, 38, 48, 56, 78, 79, 276, 291, 437, 439), 1),
}
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# linux/seccomp.h, linux/prctl.h, linux/bpf_common.h
_SET_MODE_FILTER, _NEW_LISTENER, _NO_NEW_PRIVS = 1, 8, 38
_ALLOW, _USER_NOTIF, _CONTINUE = 0x7FFF0000, 0x7FC00000, 1
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTICE = struct.Struct("QIIiIQ6Q")
_PATH_BYTES = 4096


class SlowFolder:
    """Made by the process that holds operations up; the one that is held up is forked from it and calls `install`.

    Args:
        seconds: what each operation takes, while switched on.
        limit_s: seconds after the first operation of a phase for which any is held up: nothing is to hang.
    """

    def __init__(self, folder: Path, seconds: float, limit_s: float) -> None:
        self._folder = os.fsencode(folder)
        self._seconds = seconds
        self._limit_s = limit_s
        self._switch = mmap.mmap(-1, 1)
        self._ours, self._theirs = socket.socketpair()
        self._first: dict[int, float] = {}
        #: Phase -> operations that were held up.
        self.held: Counter[int] = Counter()

    # ---- in the process that is held up ----

    def install(self) -> bool:
        """From now on, and for good, operations of this process can be held up. False where the kernel does not offer it."""
        machine = platform.machine()
        found = _listener(machine) if machine in _CALLS else -1
        if found < 0:
            self._theirs.sendall(b"-")
            return False
        socket.send_fds(self._theirs, [b"+"], [found])
        os.close(found)
        return True

    def slow(self, phase: int) -> None:
        """Slow from now on. `phase`: each has a time limit and a count of its own; 0: not slow."""
        self._switch[0] = phase

    # ---- in the other one ----

    def serve(self) -> None:
        """Start to hold operations up, in threads that end with the other process. Returns once that has installed it."""
        self._theirs.close()
        _, descriptors, _, _ = socket.recv_fds(self._ours, 1, 1)
        self._ours.close()
        if descriptors:
            threading.Thread(target=self._listen, args=(descriptors[0],), daemon=True).start()

    def _listen(self, listener: int) -> None:
        waiting = select.poll()
        waiting.register(listener, select.POLLIN)
        while True:
            (_, event), *_ = waiting.poll()
            if not event & select.POLLIN:
                break
            notice = bytearray(_NOTICE.size)
            with contextlib.suppress(OSError):  # the caller was killed meanwhile
                fcntl.ioctl(listener, _RECEIVE, notice)
                threading.Thread(target=self._hold, args=(listener, bytes(notice)), daemon=True).start()
        os.close(listener)

    def _hold(self, listener: int, notice: bytes) -> None:
        number, pid, _, call, _, _, *arguments = _NOTICE.unpack(notice)
        if phase := self._switch[0]:
            path = _path(pid, arguments, _CALLS[platform.machine()][call])
            if path == self._folder or path.startswith(self._folder + b"/"):
                now = clock.real()
                if now - self._first.setdefault(phase, now) < self._limit_s:
                    self.held[phase] += 1
                    time.sleep(self._seconds)
        with contextlib.suppress(OSError):
            fcntl.ioctl(listener, _SEND, struct.pack("QqiI", number, 0, 0, _CONTINUE))


def _listener(machine: str) -> int:
    """Put the filter in force; the descriptor of its notices, or -1."""
    calls = list(_CALLS[machine])
    program = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    program += [(_IF_EQUAL, len(calls) - index, 0, call) for index, call in enumerate(calls)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _USER_NOTIF)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None)
    libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    arguments = (ctypes.c_long(_SET_MODE_FILTER), ctypes.c_long(_NEW_LISTENER), ctypes.byref(head))
    return int(libc.syscall(ctypes.c_long(_SECCOMP[machine]), *arguments))


def _path(pid: int, arguments: list[int], at: int) -> bytes:
    """The path that a system call names; empty for none, as of an operation on an open file."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            memory.seek(arguments[at])
            path = memory.read(_PATH_BYTES).split(b"\0")[0]
        if not path or path.startswith(b"/"):
            return path
        folder = ctypes.c_int(arguments[0]).value if at else -1
        place = f"/proc/{pid}/fd/{folder}" if folder >= 0 else f"/proc/{pid}/cwd"
        return os.fsencode(os.readlink(place)) + b"/" + path  # noqa: PTH115
    except OSError:
        return b""
