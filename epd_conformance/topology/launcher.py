"""The owner's side of the guard: start the warmed parent, start servers (forked or plain), learn of their ends, stop them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
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

from epd_conformance.errors import StackError
from epd_conformance.topology import causes

T = TypeVar("T")

# The guard answers at once; forking takes milliseconds. Only a graceful stop (6 s) and a stuck kill (20 s) take longer.
ANSWER_S = 40.0
# Importing vLLM takes about 10 s on two idle cores; ten times that on a busy machine is still alive.
WARM_S = 120.0


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

    @property
    def alive(self) -> bool:
        return self.status is None

    def obituary(self) -> str:
        """What a person needs to know about its end: status, likely cause, last lines of its log, where the log is."""
        how = f"with exit code {self.status}" if (self.status or 0) >= 0 else f"by signal {-(self.status or 0)}"
        return (
            f"{self.name} ended {how}: {causes.likely_cause(self.log, self.status)}\n"
            f"--- last lines of {self.log}\n{causes.tail(self.log)}"
        )


@dataclass(frozen=True)
class _Warmed:
    seconds: float = 0.0
    error: str = ""


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
        self._exits: dict[int, int] = {}
        self._processes: dict[int, Process] = {}
        self._ready: dict[str, Any] | None = None
        self._zygote: Process | None = None
        self._zygote_lock = threading.Lock()
        self._gone = False
        self._closing = False

    # -- life ----------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.logs.mkdir(parents=True, exist_ok=True)
        # Short on purpose: sockets of vLLM live in it, and a unix socket's path may have 107 bytes.
        self.scratch = Path(tempfile.mkdtemp(prefix="epd-"))
        self._environment["TMPDIR"] = str(self.scratch)
        self._environment["VLLM_RPC_BASE_PATH"] = str(self.scratch)
        ours, theirs = socket.socketpair()
        self._socket = ours
        guard = Path(__file__).with_name("guard.py")
        with (self.logs / "guard.log").open("ab") as log:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(guard), str(theirs.fileno()), str(self.scratch)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the owner's to interpret
            )
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="guard-reader", daemon=True)
        self._reader.start()
        if self.boot is Boot.FORK:
            self.warm()
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
            # Its end ends the servers through their lifeline.
            self._guard.kill()
            self._guard.wait()
        self._socket.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

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
            self._condition.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        with self._condition:
            match message.get("event"):
                case None:
                    self._answers[message["id"]] = message
                case "exit":
                    self._exits[message["pid"]] = message["status"]
                    if (process := self._processes.get(message["pid"])) is not None:
                        process.status = message["status"]
                case "zygote-ready":
                    self._ready = message
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

    def _register(self, name: str, pid: int, log: Path) -> Process:
        with self._condition:
            process = Process(name, pid, log, status=self._exits.get(pid))
            self._processes[pid] = process
        return process

    # -- programs ------------------------------------------------------------------------------------------------------

    def warm(self) -> Process:
        """Start the warmed parent; returns at once, `start` waits for it where it needs it."""
        log = self.logs / "warmed-parent.log"
        answer = self._ask(
            "warm",
            argv=[sys.executable, "-m", "epd_conformance.topology.zygote"],
            env=self._environment,
            log=str(log),
        )
        self._zygote = self._register("warmed-parent", answer["pid"], log)
        return self._zygote

    def wait_warm(self) -> float:
        """Wait for the warmed parent; returns the seconds that its imports took. Starts another one if it has died."""
        with self._zygote_lock:
            zygote = self._zygote
            if zygote is None or not zygote.alive:
                zygote = self.warm()

        def look() -> _Warmed | None:
            if self._ready is not None:
                return _Warmed(seconds=float(self._ready["seconds"]))
            return None if zygote.alive else _Warmed(error=zygote.obituary())

        found = self._wait(look, WARM_S, "the warmed parent was not ready")
        if found.error:
            raise StackError(found.error)
        return found.seconds

    def start(
        self, name: str, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start `python -m module arguments`, forked or plain. `environment` is laid over the launcher's."""
        log = self.logs / f"{name}.log"
        merged = {**self._environment, **(environment or {})}
        if self.boot is Boot.FORK:
            self.wait_warm()
            answer = self._ask("fork", argv=[module, *arguments], env=merged, log=str(log))
        else:
            answer = self._ask("spawn", argv=[sys.executable, "-m", module, *arguments], env=merged, log=str(log))
        return self._register(name, answer["pid"], log)

    def stop(self, process: Process, graceful: bool = False) -> None:
        """End a program and all its descendants. Graceful: SIGTERM first, so that vLLM runs its own shutdown."""
        if process.alive or self._tree(process.pid):
            self._ask("kill", pid=process.pid, graceful=graceful)

    def tree(self, process: Process) -> list[int]:
        """Pids of the program and its descendants."""
        return [int(pid) for pid in self._ask("tree", pid=process.pid)["pids"]]

    def _tree(self, pid: int) -> bool:
        """Whether anything is left in the program's process group after its leader has died."""
        try:
            os.killpg(pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    @property
    def guard_pid(self) -> int:
        return self._guard.pid

    @property
    def zygote_pid(self) -> int | None:
        return self._zygote.pid if self._zygote is not None else None
