"""The host: a process that has imported vLLM and made its configurations, and forks children that carry out plans.

An import of vLLM takes seconds and a fork some milliseconds. The host never imports a connector: what that does, and whether the
child survives it, is the child's affair. It has one thread, which is what makes forking safe.

Run as `python -m epd_conformance.engine.host`, by `hosted.Host` only, with a Unix socket as file descriptor 3. A message `fork`
carries three descriptors: the child's socket, the memory of its beacon and the file for its output. `reap <pid>` waits for a child
that is gone. The end of the socket ends host and children.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from epd_conformance.engine.evidence import OUTSIDE, ROOT

if TYPE_CHECKING:
    from epd_conformance.subject import Subject

CONTROL_FD = 3
#: Private memory above which this child carries out no further plan: what objects of earlier plans have left, such as the threads
#: of one that was never shut down, must not be what the next one fails of.
_full = 0
#: The signals of a process that crashes: those of faulthandler.
_FATAL = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)


def main() -> None:
    """Serve the control socket until it ends."""
    control = socket.socket(fileno=CONTROL_FD)
    try:
        _warm()
    except Exception as error:
        control.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}).encode())
        return
    control.sendall(b"{}")
    children: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 4096, 3)
        if not message:
            break
        request = json.loads(message)
        if "reap" in request:
            pid = int(request["reap"])
            _, status = os.waitpid(pid, 0)
            children.discard(pid)
            control.sendall(json.dumps({"exit": os.waitstatus_to_exitcode(status)}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _child(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        children.add(pid)
        control.sendall(json.dumps({"pid": pid}).encode())
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _warm() -> None:
    from epd_conformance.engine import configs

    configs.prepare()
    import torch

    torch.set_num_threads(1)
    import vllm.distributed.ec_transfer.ec_connector.base
    import vllm.distributed.ec_transfer.ec_connector.metrics  # noqa: F401  (what most connectors import, and none of them)

    import epd_conformance.engine.machine
    import epd_conformance.engine.real_core  # noqa: F401

    configs.warm()
    # The collector would touch, and so copy, the pages that children share with this process.
    gc.collect()
    gc.freeze()


def _child(settings: dict[str, Any], talk: int, memory: int, output: int) -> NoReturn:
    """A child's whole life: plans come, outcomes go."""
    status = 1
    try:
        from epd_conformance.engine import beacon, clock
        from epd_conformance.engine.server import die_with_parent

        die_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        # A library that vLLM imports has a handler of its own, which spends a second on a stack that faulthandler has written down.
        for number in _FATAL:
            signal.signal(number, signal.SIG_DFL)
        faulthandler.enable(file=output, all_threads=True)
        beacon.share(mmap.mmap(memory, beacon.SIZE))
        _limit_memory(int(settings["memory"]))
        # Before a connector imports them by name.
        clock.install()
        sys.path[:0] = settings["paths"]
        pipe = Connection(talk)
        subjects: dict[str, Any] = {}
        while True:
            beacon.light("engine")
            answer = _answered(json.loads(pipe.recv_bytes()), subjects) | {"full": _data_bytes() > _full}
            pipe.send_bytes(json.dumps(answer).encode())
    except (EOFError, OSError):
        status = 0
    except BaseException as error:
        with contextlib.suppress(Exception):
            print(f"the child ends: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def _answered(request: dict[str, Any], subjects: dict[str, Any]) -> dict[str, Any]:
    """The answer; `broken` where an exception came out of the harness or the subject. What a hook raises does not get here."""
    try:
        return _answer(request, subjects)
    except MemoryError:
        raise  # the limit is far above what the harness takes: what a connector has kept between hooks ends the process
    except Exception:
        return {"broken": traceback.format_exc()[-4000:]}


def _answer(request: dict[str, Any], subjects: dict[str, Any]) -> dict[str, Any]:
    from epd_conformance import subject
    from epd_conformance.errors import UsageError

    name = request["subject"]
    try:
        if not request.get("bare") and name not in subjects:
            subjects[name] = subject.load(name)
        if "call" in request:
            module, _, function = request["call"].partition(":")
            called = getattr(importlib.import_module(module), function)
            return {"result": called(subjects.get(name, name), Path(request["root"]), **request["arguments"])}
        return _carried(request, subjects[name])
    except UsageError as error:
        return {"usage": str(error)}


def _carried(request: dict[str, Any], subject: Subject) -> dict[str, Any]:
    from epd_conformance.engine import configs, machine
    from epd_conformance.engine.plan import Plan
    from epd_conformance.engine.real_core import scheduler_core
    from epd_conformance.engine.server import contract_core

    root = Path(request["root"])
    outcome = machine.run(
        Plan.from_json(request["plan"]),
        subject,
        root,
        make_core=scheduler_core if request["core"] == "scheduler" else contract_core,
        keep_events=request["events"],
    )
    return {
        "findings": [finding.to_json() for finding in outcome.findings],
        "steps": outcome.steps,
        "seconds": outcome.seconds,
        "deaths": outcome.deaths,
        "hidden": configs.hidden_size(),
        "events": _neutral(outcome.events, root / "plan", root),
        "twins": {name: _neutral(events, root / f"twin-{name}", root) for name, events in outcome.twins.items()},
    }


def _neutral(events: Any, folder: Path, root: Path) -> Any:
    """Events without the folders of this plan, which are part of hostile keys and of error messages."""
    text = json.dumps(events)
    for path, word in ((folder / "outside", OUTSIDE), (root, ROOT)):
        text = text.replace(json.dumps(str(path))[1:-1], word)
    return json.loads(text)


def _limit_memory(more: int) -> None:
    """Let this process have so many bytes beyond what it has: what grows without end meets a MemoryError.

    What is only reserved does not count, as accelerators' libraries and threads' heaps reserve gigabytes.
    """
    global _full
    before = _data_bytes()
    _full = before + more // 2
    resource.setrlimit(resource.RLIMIT_DATA, (before + more, resource.RLIM_INFINITY))


def _data_bytes() -> int:
    """Private memory that this process may write, threads' stacks included (proc(5), statm)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5]) * mmap.PAGESIZE


if __name__ == "__main__":
    main()
