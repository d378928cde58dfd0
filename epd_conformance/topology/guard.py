"""The guard: a small process between a run and its servers, so that nothing outlives the run.

It is a child subreaper, so every descendant that loses its parent becomes its child, whatever session or process group it
is in: none can escape. It holds one socket to its owner; when that closes, for whatever reason (exit, crash, SIGKILL), it
kills all descendants, removes the shared memory they had mapped and the run's scratch folder, and ends. Should the guard
itself be killed, the servers notice by a pipe (the lifeline) whose write end only the guard holds.

It runs by path with `python -I -S`, imports the standard library only (it must be up in milliseconds), and has one thread:
a parent-death signal is per *thread* of the parent, so only a single-threaded parent may rely on it.

Protocol: JSON lines. Requests carry `id`; answers carry the same `id`; events carry `event`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# A SIGKILLed process is gone within milliseconds, except in uninterruptible sleep (a GPU driver tearing down); then the
# guard must still end some time.
KILL_DEADLINE_S = 20.0
SHM = "/dev/shm/"


def prctl(option: int, value: int) -> None:
    """Call prctl(2); raises OSError when the kernel refuses."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def parents() -> dict[int, int]:
    """Parent of every process that is not a zombie, from /proc: {pid: ppid}."""
    found: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", encoding="utf-8", errors="replace") as handle:
                fields = handle.read().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if fields[0] != "Z":
            found[int(entry)] = int(fields[1])
    return found


def descendants(root: int) -> list[int]:
    """All living descendants of `root`, nearest first."""
    children: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        children.setdefault(parent, []).append(pid)
    order: list[int] = []
    queue = list(children.get(root, []))
    while queue:
        pid = queue.pop(0)
        order.append(pid)
        queue.extend(children.get(pid, []))
    return order


def shared_memory(pids: list[int]) -> set[str]:
    """Paths under /dev/shm that these processes have mapped or open."""
    paths: set[str] = set()
    for pid in pids:
        with (
            contextlib.suppress(OSError),
            open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as handle,
        ):
            for line in handle:
                at = line.find(SHM)
                if at >= 0:
                    paths.add(line[at:].rstrip("\n").removesuffix(" (deleted)"))
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{fd}")
                    if target.startswith(SHM):
                        paths.add(target.removesuffix(" (deleted)"))
    return paths


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to each process; one that is gone already is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


class Guard:
    """State of the guard; `run()` returns when the owner is gone and everything is clean."""

    def __init__(self, owner: socket.socket, scratch: str) -> None:
        self.owner = owner
        self.scratch = scratch
        self.inbox = b""
        self.outbox = b""
        self.zygote: socket.socket | None = None
        self.zygote_pid = 0
        self.zygote_inbox = b""
        self.lifeline_read, self.lifeline_write = os.pipe()
        os.set_inheritable(self.lifeline_read, True)
        self.selector = selectors.DefaultSelector()
        self.wake_read, wake_write = os.pipe()
        os.set_blocking(self.wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C reaches the whole foreground group; the owner decides what it means, and the guard follows the owner.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.selector.register(owner, selectors.EVENT_READ, "owner")
        self.selector.register(self.wake_read, selectors.EVENT_READ, "child")

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
                    elif key.data == "zygote":
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
                # Answered when the warmed parent has forked.
                self.zygote.sendall((json.dumps(request) + "\n").encode())
                return
            elif operation == "kill":
                answer = {"killed": self.kill_tree(int(request["pid"]), bool(request.get("graceful")))}
            elif operation == "tree":
                answer = {"pids": [int(request["pid"]), *descendants(int(request["pid"]))]}
            else:
                raise RuntimeError(f"unknown operation {operation!r}")
        except Exception as error:  # any failure must reach the owner as an answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        self.send({"id": request["id"], **answer})

    # -- processes -----------------------------------------------------------------------------------------------------

    def popen(self, request: dict[str, Any], pass_fds: tuple[int, ...], lifeline: str) -> int:
        environment = dict(request["env"])
        environment[lifeline] = lifeline_token(self.lifeline_read)
        guard_pid = os.getpid()

        def prepare() -> None:
            # The guard has one thread, so this signal comes when, and only when, the guard dies.
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard_pid:
                os._exit(1)

        with open(request["log"], "ab") as log:
            process = subprocess.Popen(
                request["argv"],
                env=environment,
                cwd=request.get("cwd"),
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
        return self.popen(request, (), "EPD_LIFELINE")

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
            self.selector.unregister(self.zygote)
            self.zygote.close()
            self.zygote = None
            self.send({"event": "zygote-gone"})
            return
        self.zygote_inbox += data
        while b"\n" in self.zygote_inbox:
            line, self.zygote_inbox = self.zygote_inbox.split(b"\n", 1)
            self.send(json.loads(line))

    def reap(self) -> None:
        """Collect every child that ended and tell the owner; orphans of servers are children of the guard too."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.send({"event": "exit", "pid": pid, "status": os.waitstatus_to_exitcode(status)})

    def kill_tree(self, pid: int, graceful: bool) -> int:
        """End a server: its process, its descendants, and whatever is in its process group. Returns how many there were."""
        # The group first: when the leader is dead already its orphans are no descendants of it any more.
        group = [p for p in parents() if _group(p) == pid]
        everyone = sorted({pid, *descendants(pid), *group})
        memory = shared_memory(everyone)
        if graceful:
            signal_all([pid], signal.SIGTERM)
            # vLLM's own shutdown takes about 2 s here; three times that, then it is forced.
            self.wait_gone(everyone, 6.0)
        signal_all(everyone, signal.SIGKILL)
        self.wait_gone(everyone, KILL_DEADLINE_S)
        _unlink(memory)
        return len(everyone)

    def wait_gone(self, pids: list[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.reap()
            alive = parents()
            if not any(pid in alive for pid in pids):
                return
            time.sleep(0.02)

    def end(self) -> None:
        """Kill all descendants, remove what they left, in any case."""
        memory: set[str] = set()
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


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except OSError:
        return 0


def _unlink(paths: set[str]) -> None:
    for path in paths:
        # Only names that vLLM and Python's shared memory make; another program's block may be mapped as well.
        if os.path.basename(path).lower().startswith(("psm_", "vllm", "sem.", "torch_", "mp-")):
            with contextlib.suppress(OSError):
                os.unlink(path)


def lifeline_token(fd: int) -> str:
    """`fd:inode`: a process that did not inherit the pipe may have another file under the same number."""
    return f"{fd}:{os.fstat(fd).st_ino}"


def main() -> None:
    owner = socket.socket(fileno=int(sys.argv[1]))
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    Guard(owner, sys.argv[2]).run()


if __name__ == "__main__":
    main()
