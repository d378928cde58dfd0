"""The guard: a small process between a run and its servers, so that nothing outlives the run.

It is a child subreaper, so every descendant that loses its parent becomes its child, whatever session or process group it
is in: none can escape. It holds one socket to its owner, and the owner's pidfd; when either ends, for whatever reason (exit,
crash, SIGKILL), it kills all descendants, removes the shared memory they had mapped and the run's scratch folder, and ends.
Should the guard itself be killed, the servers notice by a pipe (the lifeline) whose write end only the guard holds.

It runs by path with `python -I -S`, imports the standard library only (it must be up in milliseconds), and has one thread:
a parent-death signal is per *thread* of the parent, so only a single-threaded parent may rely on it.

Protocol: JSON lines. Requests carry `id`; answers carry the same `id`; events carry `event`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# A SIGKILLed process is gone within milliseconds, except in uninterruptible sleep (a GPU driver tearing down); then the
# guard must still end some time.
KILL_DEADLINE_S = 20.0
# vLLM's own shutdown after SIGTERM takes about 2 s on two cores; three times that, then it is forced.
GRACE_S = 6.0
SHM = "/dev/shm/"
# How the blocks are named that vLLM, Python, torch and NCCL make. Other programs' blocks may be mapped as well (a vendor's
# store, CUDA's own service), and those are not ours to remove. The lifeline holds the same tuple.
SHM_NAMES = ("psm_", "vllm", "sem.", "torch_", "mp-", "nccl-")
# The variable that tells a server's first process where its lifeline is.
LIFELINE = "EPD_LIFELINE"
# Stop signals that the guard ignores; what it starts must have them as anybody's programs have them.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    """Call prctl(2); raises OSError when the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def processes() -> dict[int, tuple[int, int]]:
    """Parent and process group of every process that is not a zombie, from /proc: {pid: (ppid, pgrp)}."""
    found: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as handle:
                fields = handle.read().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        # The first thread of a process may have ended while others have not; then all of its memory is still there.
        if fields[0] not in "ZX" or int(fields[17]) > 1:
            found[int(entry)] = int(fields[1]), int(fields[2])
    return found


def descendants(root: int, table: dict[int, tuple[int, int]] | None = None) -> list[int]:
    """All living descendants of `root`, nearest first; in `table`, or in one that is read now."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in (processes() if table is None else table).items():
        children.setdefault(parent, []).append(pid)
    order: list[int] = []
    queue = list(children.get(root, []))
    while queue:
        pid = queue.pop(0)
        order.append(pid)
        queue.extend(children.get(pid, []))
    return order


def shared_memory(pids: Iterable[int]) -> set[str]:
    """Paths under /dev/shm that these processes have mapped or open.

    By inode: the C library makes a named semaphore under another name, which is the one that /proc shows, and links it.
    """
    inodes: set[int] = set()
    for pid in pids:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as handle,
        ):
            inodes.update(int(line.split(None, 5)[4]) for line in handle if SHM in line)
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(SHM):
                        inodes.add(os.stat(f"/proc/{pid}/fd/{fd}").st_ino)
    if not inodes:
        return set()
    with contextlib.suppress(OSError):
        return {entry.path for entry in os.scandir(SHM) if entry.inode() in inodes}
    return set()


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process; one that is gone already is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Guard:
    """State of the guard; `run()` returns when the owner is gone and everything is clean."""

    def __init__(self, owner: socket.socket, owner_pid: int, scratch: str) -> None:
        self.owner = owner
        self.scratch = scratch
        self.inbox = b""
        self.outbox = b""
        self.zygote: socket.socket | None = None
        self.zygote_pid = 0
        self.zygote_inbox = b""
        self.noted: dict[int, set[str]] = {}  # shared memory of servers, as `tree` has last seen it
        self.forking: set[int] = set()  # requests that the warmed parent has not answered yet
        self.lifeline_read, self.lifeline_write = os.pipe()
        os.set_inheritable(self.lifeline_read, True)
        self.selector = selectors.DefaultSelector()
        self.wake_read, wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C reaches the whole foreground group; the owner decides what it means, and the guard follows the owner.
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        self.selector.register(owner, selectors.EVENT_READ, "owner")
        self.selector.register(self.wake_read, selectors.EVENT_READ, "child")
        # A child that the owner forked holds the socket too and may outlive it, so the owner itself is watched as well.
        # Kernels before 5.3 have no pidfd, and then the socket must do.
        with contextlib.suppress(OSError):
            self.selector.register(os.pidfd_open(owner_pid), selectors.EVENT_READ, "owner-end")

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.owner.sendall((json.dumps(message) + "\n").encode())

    def run(self) -> None:
        """Serve until the owner's socket ends."""
        try:
            while True:
                for key, _ in self.selector.select():
                    if key.data == "owner":
                        data = self.owner.recv(1 << 16)
                        if not data:
                            return
                        self.inbox += data
                        while b"\n" in self.inbox:
                            line, self.inbox = self.inbox.split(b"\n", 1)
                            self.handle(json.loads(line))
                    elif key.data == "owner-end":
                        return
                    elif key.data == "zygote":
                        # Another event of the same round may have put an end to it, or started its successor.
                        if key.fileobj is self.zygote:
                            self.read_zygote()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            os.read(self.wake_read, 4096)
                        self.reap()
        except (ConnectionError, json.JSONDecodeError):
            return
        finally:
            self.end()

    def handle(self, request: dict[str, Any]) -> None:
        """Carry out one request and answer it; a failure is an answer, never the guard's end."""
        operation = request["op"]
        try:
            if operation == "spawn":
                answer: dict[str, Any] = {"pid": self.spawn(request)}
            elif operation == "warm":
                answer = {"pid": self.warm(request)}
            elif operation == "fork":
                if self.zygote is None:
                    raise RuntimeError("the warmed parent is not running")
                # Answered when the warmed parent has forked, or is gone.
                self.forking.add(int(request["id"]))
                with contextlib.suppress(OSError):
                    self.zygote.sendall((json.dumps(request) + "\n").encode())
                return
            elif operation == "kill":
                answer = {"killed": self.kill_tree(int(request["pid"]), bool(request.get("graceful")))}
            elif operation == "tree":
                answer = {"pids": self.tree(int(request["pid"]))}
            else:
                raise RuntimeError(f"unknown operation {operation!r}")
        except Exception as error:  # any failure must reach the owner as an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.send({"id": request["id"], **answer})

    # -- processes -----------------------------------------------------------------------------------------------------

    def popen(self, request: dict[str, Any], pass_fds: tuple[int, ...], lifeline: str) -> int:
        # A server with a lifeline must not get a parent-death signal as well: that would end its first process before this
        # can end the others.
        has_lifeline = lifeline == LIFELINE
        environment = dict(request["env"])
        environment[lifeline] = lifeline_token(self.lifeline_read)
        environment["EPD_SCRATCH"] = self.scratch  # the lifeline removes it should the guard be unable to
        guard_pid = os.getpid()

        def prepare() -> None:
            for number in IGNORED:
                signal.signal(number, signal.SIG_DFL)
            if not has_lifeline:
                # The guard has one thread, so this signal comes when, and only when, the guard dies.
                prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != guard_pid:
                    os._exit(1)

        with open(request["log"], "ab") as log:
            process = subprocess.Popen(
                request["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(self.lifeline_read, *pass_fds),
                preexec_fn=prepare,  # safe: the guard has no second thread
            )
        # `reap` waits for every child by itself; Popen must not.
        process.returncode = 0
        return process.pid

    def spawn(self, request: dict[str, Any]) -> int:
        return self.popen(request, (), LIFELINE)

    def warm(self, request: dict[str, Any]) -> int:
        if self.zygote is not None:
            raise RuntimeError("the warmed parent runs already")
        ours, theirs = socket.socketpair()
        request = dict(request)
        request["env"] = {**request["env"], "EPD_ZYGOTE_FD": str(theirs.fileno())}
        try:
            # Under another name: the warmed parent must have no second thread when it forks, so it only passes it on.
            self.zygote_pid = self.popen(request, (theirs.fileno(),), "EPD_ZYGOTE_LIFELINE")
        finally:
            theirs.close()
        self.zygote = ours
        self.selector.register(ours, selectors.EVENT_READ, "zygote")
        return self.zygote_pid

    def read_zygote(self) -> None:
        assert self.zygote is not None
        try:
            data = self.zygote.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            self.drop_zygote()
            return
        self.zygote_inbox += data
        while b"\n" in self.zygote_inbox:
            line, self.zygote_inbox = self.zygote_inbox.split(b"\n", 1)
            message = json.loads(line)
            self.forking.discard(message.get("id", 0))
            self.send(message)

    def drop_zygote(self) -> None:
        """Forget the warmed parent that has ended, and answer what it has left unanswered."""
        if self.zygote is None:
            return
        self.selector.unregister(self.zygote)
        self.zygote.close()
        self.zygote = None
        self.zygote_pid = 0
        self.zygote_inbox = b""
        self.send({"event": "zygote-gone"})
        for number in sorted(self.forking):
            self.send({"id": number, "error": "the warmed parent has ended"})
        self.forking.clear()

    def reap(self) -> None:
        """Collect every child that ended and tell the owner; orphans of servers are children of the guard too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.zygote_pid:
                # Not only by the socket's end: a server that is being forked holds a copy of it for a moment.
                self.read_last_words()
            self.send({"event": "exit", "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def read_last_words(self) -> None:
        """Take what the warmed parent had sent before it ended, then forget it."""
        while self.zygote is not None and select.select([self.zygote], [], [], 0)[0]:
            self.read_zygote()
        self.drop_zygote()

    def tree(self, pid: int) -> list[int]:
        """A server and its descendants. Notes their shared memory: when all of them die at once, nobody maps it any more."""
        pids = [pid, *descendants(pid)]
        self.noted.setdefault(pid, set()).update(shared_memory(pids))
        return pids

    def kill_tree(self, pid: int, graceful: bool) -> int:
        """End a server: its process, its descendants, and whatever is in its process group. Returns how many there were."""
        tree: set[int] = set()
        memory = self.noted.pop(pid, set())

        def alive() -> list[int]:
            """Who of the tree lives now. Grows the tree: a process may fork between a listing and a signal."""
            table = processes()
            # Only ever our own: the number of a server that has ended may be another program's by now.
            ours = descendants(os.getpid(), table)
            # By the group too: orphans of a leader that is dead already are no descendants of it any more.
            tree.update(p for p in ours if p == pid or table[p][1] == pid)
            for member in list(tree):
                tree.update(descendants(member, table))
            return [p for p in ours if p in tree]

        left = alive()
        if graceful and pid in left:
            memory |= shared_memory(left)
            signal_all([pid], signal.SIGTERM)
            deadline = time.monotonic() + GRACE_S
            while (left := alive()) and time.monotonic() < deadline:
                self.reap()
                time.sleep(0.02)
        deadline = time.monotonic() + KILL_DEADLINE_S
        while left and time.monotonic() < deadline:
            memory |= shared_memory(left)
            signal_all(left, signal.SIGKILL)
            time.sleep(0.02)
            self.reap()
            left = alive()
        # Its end must have been told before the answer is; the kernel may take a moment to have it ready.
        while pid in tree and os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.001)
        # What a server has from the warmed parent, all servers of the run have.
        _unlink(memory - shared_memory(descendants(os.getpid())))
        return len(tree)

    def end(self) -> None:
        """Kill all descendants, remove what they left, in any case."""
        memory: set[str] = set().union(*self.noted.values())
        deadline = time.monotonic() + KILL_DEADLINE_S
        while time.monotonic() < deadline:
            left = descendants(os.getpid())
            if not left:
                break
            memory |= shared_memory(left)
            # Again and again: a process may fork between the listing and the signal.
            signal_all(left, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.01)
        _unlink(memory)
        if self.scratch:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _unlink(paths: set[str]) -> None:
    for path in paths:
        if os.path.basename(path).lower().startswith(SHM_NAMES):
            with contextlib.suppress(OSError):
                os.unlink(path)


def lifeline_token(fd: int) -> str:
    """`fd:inode`: a process that did not inherit the pipe may have another file under the same number."""
    return f"{fd}:{os.fstat(fd).st_ino}"


def main() -> None:
    owner = socket.socket(fileno=int(sys.argv[1]))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Guard(owner, int(sys.argv[2]), sys.argv[3]).run()


if __name__ == "__main__":
    main()
