"""Plans in processes of their own: a connector that hangs, crashes, exits or eats memory becomes a finding.

One host imports vLLM; a child of it carries out plan after plan, until it dies of one, has to be killed, or has done its share.
What it was at when it died, it has written down before: see `beacon`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from epd_conformance.engine import beacon
from epd_conformance.engine.evidence import Death, PlanEvidence
from epd_conformance.engine.exits import exit_text
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.plan import Plan
from epd_conformance.errors import StackError, UsageError

#: Real seconds that a plan may take. One takes a tenth of a second; ten times as long on a busy machine, and ten times that again
#: for what is found to be explained by further runs, is still less.
LIMIT_S = 30.0
#: Memory of its own that a plan may take beyond what vLLM has. A plan's tensors are some kilobytes each.
MEMORY_BYTES = 1 << 30
#: Plans that one child carries out at most. A fork is cheap beside that many, and what a connector leaks is soon gone.
PLANS_A_CHILD = 100
#: Importing vLLM takes about ten seconds, on a loaded machine with a cold disk a minute.
START_LIMIT_S = 300.0
#: How long a process that hangs may take to write down where.
_ABORT_LIMIT_S = 2.0
_OUTPUT_BYTES = 4000


@dataclass
class Carried:
    """What a plan showed. `death`: how its process ended, where it did not outlive the plan."""

    findings: list[Finding]
    steps: int = 0
    seconds: float = 0.0
    deaths: int = 0
    evidence: PlanEvidence | None = None
    death: Death | None = None

    @property
    def output(self) -> str:
        """The end of what a dead child wrote, with the stacks of its threads."""
        return self.death.output if self.death is not None else ""


class Host:
    """A context manager. Not safe to use from several threads.

    Args:
        subject: a subject's name, as `--subject` takes it.
        paths: folders that children have in front of `sys.path`.
        core: `contract`, or `scheduler` for vLLM's own scheduler.
        log: what the host itself writes goes there; None: nowhere.
    """

    def __init__(
        self,
        subject: str,
        *,
        paths: Sequence[str] = (),
        core: str = "contract",
        limit_s: float = LIMIT_S,
        memory_bytes: int = MEMORY_BYTES,
        log: Path | None = None,
    ) -> None:
        self.subject = subject
        self.core = core
        self.limit_s = limit_s
        self.children = 0
        self._settings = {"memory": memory_bytes, "paths": [*paths, str(Path.cwd())]}
        self._log = log
        self._child: _Child | None = None

    def __enter__(self) -> Host:
        """Start the host. Raises UsageError where vLLM cannot be imported."""
        self._folder = Path(tempfile.mkdtemp(prefix="epd-engine-"))
        ours, theirs = socket.socketpair()
        self._control = ours
        with theirs, contextlib.ExitStack() as stack:
            output: Any = stack.enter_context(self._log.open("ab")) if self._log else subprocess.DEVNULL
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._control.settimeout(START_LIMIT_S)
        try:
            started = self._control.recv(4096)
            problem = json.loads(started).get("error") if started else "its process ended"
        except TimeoutError:
            problem = f"it took more than {START_LIMIT_S:.0f} s"
        if problem:
            self.__exit__(None, None, None)
            raise UsageError(f"vLLM does not start in a process of its own ({problem}): see `epd-conformance doctor`")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
        self._control.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def carry(
        self, plan: Plan, *, subject: str | None = None, limit_s: float | None = None, keep: str | None = None
    ) -> Carried:
        """Carry out a plan, for this host's subject or another one. `keep`: return its evidence, under this name.

        Raises UsageError for a subject that cannot be used, StackError where the harness itself dies or hangs.
        """
        request = {"plan": plan.to_json(), "core": self.core, "events": keep is not None}
        answer = self._ask(request, subject, limit_s)
        if isinstance(answer, Carried):
            if keep is not None:
                answer.evidence = PlanEvidence(keep, plan, 0, death=answer.death)
            return answer
        findings = [Finding(**finding) for finding in answer["findings"]]
        carried = Carried(findings, answer["steps"], answer["seconds"], answer["deaths"])
        if keep is not None:
            carried.evidence = PlanEvidence(keep, plan, answer["hidden"], answer["events"], answer["twins"])
        return carried

    def call(
        self,
        function: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        subject: str | None = None,
        bare: bool = False,
        limit_s: float | None = None,
    ) -> Any:
        """The result of `module:function(subject, folder, **arguments)` in a child; everything but these two is JSON.

        `bare`: in a child of its own that has not imported the subject; the function takes the subject's name.

        Returns Carried with one finding where the child died or hung in a hook. Raises as `carry`.
        """
        if bare:
            self.recycle()
        answer = self._ask({"call": function, "arguments": dict(arguments or {}), "bare": bare}, subject, limit_s)
        if bare:
            self.recycle()
        return answer if isinstance(answer, Carried) else answer["result"]

    def recycle(self) -> None:
        """End the child: the next plan gets a new one, as after `PLANS_A_CHILD` plans."""
        if self._child is not None:
            child, self._child = self._child, None
            self._reap(child)

    def _ask(self, request: dict[str, Any], subject: str | None, limit_s: float | None) -> dict[str, Any] | Carried:
        if self._child is not None and self._child.done >= PLANS_A_CHILD:
            self.recycle()
        if self._child is None:
            self._child = self._fork()
        child = self._child
        root = self._folder / f"plan-{self.children}-{child.done}"
        root.mkdir()
        child.done += 1
        request = {**request, "subject": subject or self.subject, "root": str(root)}
        limit = self.limit_s if limit_s is None else limit_s
        try:
            child.pipe.send_bytes(json.dumps(request).encode())
            answered = child.pipe.poll(limit)
            answer = json.loads(child.pipe.recv_bytes()) if answered else None
        except (EOFError, OSError):
            answered, answer = True, None
        finally:
            shutil.rmtree(root, ignore_errors=True)
        if answer is None:
            return self._buried(child, hung=not answered, limit=limit)
        if "usage" in answer:
            raise UsageError(answer["usage"])
        if "broken" in answer:
            # Nobody knows what state it is in.
            self.recycle()
            raise StackError(
                f"the harness or the subject raised while a plan or check was carried out: {answer['broken']}"
            )
        if answer.pop("full"):
            self.recycle()
        told: dict[str, Any] = answer
        return told

    def _fork(self) -> _Child:
        ours, theirs = socket.socketpair()
        memory, output = os.memfd_create("beacon"), os.memfd_create("output")
        os.ftruncate(memory, beacon.SIZE)
        with theirs:
            socket.send_fds(self._control, [json.dumps(self._settings).encode()], [theirs.fileno(), memory, output])
            pid = int(self._told()["pid"])
        self.children += 1
        seen = mmap.mmap(memory, beacon.SIZE)
        os.close(memory)
        return _Child(pid, Connection(ours.detach()), seen, output)

    def _told(self) -> dict[str, Any]:
        answer = self._control.recv(4096)
        if not answer:
            raise StackError("the process that imported vLLM has ended: nothing more can be carried out")
        told: dict[str, Any] = json.loads(answer)
        return told

    def _reap(self, child: _Child) -> int:
        child.close()
        self._control.sendall(json.dumps({"reap": child.pid}).encode())
        return int(self._told()["exit"])

    def _buried(self, child: _Child, *, hung: bool, limit: float) -> Carried:
        """What a child's death, or its silence, says about the connector."""
        at = beacon.read(child.beacon)
        if hung:
            # Makes it write down its threads' stacks.
            _signal(child.pid, signal.SIGABRT)
            end = time.monotonic() + _ABORT_LIMIT_S
            while time.monotonic() < end and not child.gone():
                time.sleep(0.01)
            _signal(child.pid, signal.SIGKILL)
        output = child.tail()
        code = self._reap(child)
        self._child = None
        death = Death(at, hung, code, limit, output)
        finding = death.finding()
        if finding is None and not hung:
            raise StackError(f"the process of a plan was killed from outside with {exit_text(code)} ({at})")
        if finding is None:
            raise StackError(f"a plan did not end within {limit:.0f} s, outside any hook ({at}): {output[-400:]}")
        return Carried([finding], deaths=1, death=death)


@dataclass
class _Child:
    pid: int
    pipe: Connection
    beacon: mmap.mmap
    output: int
    done: int = 0

    def gone(self) -> bool:
        """Whether it has ended: a zombie, since only the host can reap it."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return True
        return stat.rsplit(")", 1)[1].split()[0] == "Z"

    def tail(self) -> str:
        """The end of its output; where it wrote down its threads' stacks, those without the lists that follow them."""
        size = os.fstat(self.output).st_size
        text = os.pread(self.output, size, 0).decode("utf-8", "replace")
        before, mark, stacks = text.rpartition("Fatal Python error")
        if mark:
            stacks = stacks.split("\nExtension modules:")[0].split("\nCurrent thread's C stack trace")[0]
            return before[-_OUTPUT_BYTES // 4 :] + mark + stacks[:_OUTPUT_BYTES]
        return text[-_OUTPUT_BYTES:]

    def close(self) -> None:
        if self.output >= 0:
            self.pipe.close()
            self.beacon.close()
            os.close(self.output)
            self.output = -1


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


# The descriptor is moved first: `pass_fds` keeps numbers, and 3 may be anything in the parent.
_START = (
    "import os, sys, runpy; fd = int(sys.argv[1]); fd == 3 or (os.dup2(fd, 3), os.close(fd)); "
    "runpy.run_module('epd_conformance.engine.host', run_name='__main__', alter_sys=True)"
)
