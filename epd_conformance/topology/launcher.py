"""The owner's side of the guard: start the warmed parent, start servers (forked or plain), learn of their ends, stop them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self, TypeVar

from epd_conformance.errors import StackError, UsageError
from epd_conformance.runtime import repairs
from epd_conformance.topology import causes, guard

T = TypeVar("T")

# The guard answers at once; forking takes milliseconds. Only a graceful stop (6 s) and a stuck kill (20 s) take longer.
ANSWER_S = 40.0
# Importing vLLM takes about 10 s on two idle cores; ten times that on a busy machine is still alive.
WARM_S = 120.0
# The lifeline ends servers within milliseconds of the guard's end; the second half of this is for those without one.
SWEEP_S = 4.0
# A unix socket's path may have 107 bytes, and vLLM puts a name of 36 into the scratch folder; ours has 12.
LONGEST_TEMPORARY_FOLDER = 55


class Boot(StrEnum):
    """How servers start: forked from a warmed parent (CPU only), or plainly, as anybody would start them."""

    FORK = "fork"
    PLAIN = "plain"


@dataclass
class Process:
    """One started program: `status` is None while it runs, else its exit code, or minus the signal that ended it."""

    name: str
    pid: int
    log: Path
    status: int | None = None
    started: float = field(default_factory=time.monotonic)
    # The guard ended before it: then nobody has seen its end, and `status` is what the lifeline makes of it.
    unseen: bool = False

    @property
    def alive(self) -> bool:
        return self.status is None

    def obituary(self) -> str:
        """What a person needs to know about its end: status, likely cause, and the lines of its log that lead up to it."""
        how = f"with exit code {self.status}" if (self.status or 0) >= 0 else f"by signal {-(self.status or 0)}"
        return (
            f"{self.name} ended {how}: {causes.likely_cause(self.log, self.status)}\n"
            f"--- from {self.log}\n{causes.excerpt(self.log)}"
        )

    def failure(self) -> UsageError | StackError:
        """The obituary as an error: UsageError where the cause is what was asked for, or the machine; else StackError."""
        usage = causes.diagnose(self.log, self.status).usage
        return UsageError(self.obituary()) if usage else StackError(self.obituary())


def _short_folder() -> str | None:
    """Where the scratch folder goes: None for the usual place, /tmp where the usual place is too deep for sockets."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > LONGEST_TEMPORARY_FOLDER and os.access("/tmp", os.W_OK) else None


def _with_site(environment: Mapping[str, str]) -> dict[str, str]:
    """With the folder first on PYTHONPATH that brings lifeline and repairs, also where a subject has set its own path."""
    return {**environment, **repairs.server_environment(environment)}


class Launcher:
    """Context manager over the guard. Leaving it, or dying in any way, ends everything that was started through it."""

    def __init__(self, boot: Boot, logs: Path, environment: Mapping[str, str]) -> None:
        """`logs`: folder for one log file a process. `environment`: complete environment of every process started."""
        self.boot = boot
        self.logs = logs
        self._environment = dict(environment)
        self._ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._condition = threading.Condition()
        self._send_lock = threading.Lock()
        # Ends of programs that are being started: one may end before its pid has reached us.
        self._exits: dict[int, int] = {}
        self._starting = 0
        self._processes: dict[int, Process] = {}
        self._ready: dict[str, Any] | None = None
        self._was_ready = False
        self._zygote: Process | None = None
        self._zygote_lock = threading.Lock()
        self._gone = False
        self._closing = False

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        self.scratch = Path(tempfile.mkdtemp(prefix="epd-", dir=_short_folder()))
        self._environment["TMPDIR"] = str(self.scratch)
        self._environment["VLLM_RPC_BASE_PATH"] = str(self.scratch)
        ours, theirs = socket.socketpair()
        self._socket = ours
        try:
            with (self.logs / "guard.log").open("ab") as log:
                self._guard = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", guard.__file__),
                        *(str(theirs.fileno()), str(os.getpid()), str(self.scratch)),
                    ],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is the owner's to interpret
                )
        except BaseException:
            ours.close()
            shutil.rmtree(self.scratch, ignore_errors=True)
            raise
        finally:
            theirs.close()
        self._reader = threading.Thread(target=self._read, name="guard-reader", daemon=True)
        self._reader.start()
        try:
            if self.boot is Boot.FORK:
                self.warm()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything and wait until it is gone."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._guard.wait(timeout=ANSWER_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        self._reader.join()
        self._socket.close()
        if self._guard.returncode != 0:
            self._sweep()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _sweep(self) -> None:
        """Wait for what the guard's unnatural end has ended through the lifeline, and kill what has none."""
        groups = {process.pid for process in self._processes.values() if process.unseen}
        deadline = time.monotonic() + SWEEP_S
        while time.monotonic() < deadline:
            left = [pid for pid, (_, group) in guard.processes().items() if group in groups]
            if not left:
                return
            if deadline - time.monotonic() < SWEEP_S / 2:
                guard.signal_all(left, signal.SIGKILL)
            time.sleep(0.02)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        buffer = b""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                data = b""
            if not data:
                break
            buffer += data
            while b"\n" in buffer:
                line, buffer = buffer.split(b"\n", 1)
                self._take(json.loads(line))
        with self._condition:
            self._gone = True
            self._ready = None
            for process in self._processes.values():
                # The guard's end is theirs, and nobody is left to report it.
                if process.status is None:
                    process.status, process.unseen = -signal.SIGKILL, True
            self._condition.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._condition:
            match message.get("event"):
                case None:
                    self._answers[message["id"]] = message
                case "exit":
                    process = self._processes.get(message["pid"])
                    if process is not None and process.alive:
                        process.status = message["status"]
                    elif self._starting:
                        self._exits[message["pid"]] = message["status"]
                case "zygote-ready":
                    self._ready, self._was_ready = message, True
                case "zygote-gone":
                    self._ready = None
            self._condition.notify_all()

    def _ask(self, operation: str, **fields: Any) -> dict[str, Any]:
        number = next(self._ids)
        try:
            with self._send_lock:
                self._socket.sendall((json.dumps({"op": operation, "id": number, **fields}) + "\n").encode())
        except OSError:
            raise StackError("the guard process is gone, and all servers with it: start the run again") from None
        answer = self._wait(
            lambda: self._answers.pop(number, None), ANSWER_S, f"the guard did not answer to {operation!r}"
        )
        if "error" in answer:
            raise StackError(f"the guard could not {operation}: {answer['error']}")
        return answer

    def _wait(self, look: Callable[[], T | None], seconds: float, otherwise: str) -> T:
        deadline = time.monotonic() + seconds
        with self._condition:
            while True:
                found = look()
                if found is not None:
                    return found
                if self._gone:
                    raise StackError("the guard process is gone, and all servers with it: start the run again")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StackError(f"{otherwise} within {seconds:.0f} s")
                self._condition.wait(left)

    def _launch(self, operation: str, name: str, log: Path, **fields: Any) -> Process:
        """Have the guard start a program, and note it."""
        with self._condition:
            self._starting += 1
        try:
            pid = int(self._ask(operation, log=str(log), **fields)["pid"])
            with self._condition:
                process = Process(name, pid, log, status=self._exits.pop(pid, None))
                self._processes[pid] = process
        finally:
            with self._condition:
                self._starting -= 1
                if not self._starting:
                    # Orphans of servers; kept, they would pass for the end of a later program of the same number.
                    self._exits.clear()
        return process

    # -- programs ------------------------------------------------------------------------------------------------------

    def warm(self) -> Process:
        """Start the warmed parent; returns at once, `start` waits for it where it needs it."""
        self._was_ready = False
        self._zygote = self._launch(
            "warm",
            "warmed-parent",
            self.logs / "warmed-parent.log",
            argv=[sys.executable, "-m", "epd_conformance.topology.zygote"],
            env=_with_site(self._environment),
        )
        return self._zygote

    def wait_warm(self) -> float:
        """Wait for the warmed parent; returns the seconds that its imports took. Starts another one if it has died."""
        while True:
            with self._zygote_lock:
                zygote = self._zygote
                if zygote is None or not zygote.alive:
                    zygote = self.warm()

            def look(zygote: Process = zygote) -> dict[str, Any] | None:
                return self._ready if zygote.alive else {}

            ready = self._wait(look, WARM_S, "the warmed parent was not ready")
            if ready:
                return float(ready["seconds"])
            if not self._was_ready:
                raise zygote.failure()
            # It had become ready and its end has been noticed only now.

    def start(
        self, name: str, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start `python -m module arguments`, forked or plain. `environment` is laid over the launcher's."""
        log = self.logs / f"{name}.log"
        merged = _with_site({**self._environment, **(environment or {})})
        if self.boot is Boot.PLAIN:
            return self._launch("spawn", name, log, argv=[sys.executable, "-m", module, *arguments], env=merged)
        self.wait_warm()
        try:
            return self._launch("fork", name, log, argv=[module, *arguments], env=merged)
        except StackError:
            if self._ready is not None or self._gone:
                raise
        # The warmed parent ended between the two; the next one may fare better.
        self.wait_warm()
        return self._launch("fork", name, log, argv=[module, *arguments], env=merged)

    def stop(self, process: Process, graceful: bool = False) -> None:
        """End a program and all its descendants. Graceful: SIGTERM first, so that vLLM runs its own shutdown."""
        # Also when it has ended: it may have left children and shared memory.
        self._ask("kill", pid=process.pid, graceful=graceful)

    def tree(self, process: Process) -> list[int]:
        """Pids of the program and its descendants. The guard notes their shared memory, and removes it at the latest when it
        ends: call this once when a program is up, for the case that all of its processes die at once."""
        return [int(pid) for pid in self._ask("tree", pid=process.pid)["pids"]]

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    @property
    def zygote_pid(self) -> int | None:
        return self._zygote.pid if self._zygote is not None else None
