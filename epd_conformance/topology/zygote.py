"""The warmed parent: imports vLLM once, then forks one server for each request (CPU only).

A plain start of one server takes about half a minute on two cores, nearly all of it imports done three times in series (API
server, engine core, worker). Forked from a parent that has imported them already it takes two to three seconds.

Forking is safe here because of three things, all of them kept by this module: one OpenMP thread and no other thread at the
moment of the fork; no CUDA (a parent that touched CUDA must never fork, so there is no warmed parent on GPU); and vLLM's own
processes are forked too, through `vllm.utils.system_utils.get_mp_context`, which would spawn on the CPU platform.

Each server is forked twice, so that it becomes a child of the guard, which reaps it; the death of the warmed parent then
takes no server with it and hides no exit status.

Run as `python -m epd_conformance.topology.zygote`, by the guard only; speaks JSON lines over the inherited socket.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from epd_conformance.runtime.repairs import Repair
from epd_conformance.runtime.site import _epd_lifeline as lifeline

FORK_CONTEXT = Repair(
    name="fork-context",
    what="vLLM's processes are forked from a warmed parent instead of spawned (get_mp_context gives a fork context), and a "
    "model's class is inspected in the process itself",
    why="a server is up in 2-3 s instead of half a minute; --boot plain starts servers without it",
    needed=lambda: True,
)

# What a server imports on its way up. A module that this release of vLLM does not have costs only the time it would have
# saved, so a missing one is reported and is no error.
MODULES = (
    "vllm",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.utils",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.structured_output",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm.distributed.ec_transfer.ec_connector.example_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
    "transformers.models.qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "epd_conformance.connectors.recording",
    "epd_conformance.connectors.verified_store",
    "epd_conformance.proxy.app",
    "uvloop",
)


def use_fork_context() -> None:
    """Make every `get_mp_context` that vLLM holds return a fork context.

    Setting VLLM_WORKER_MULTIPROC_METHOD=fork is not enough: vllm/utils/system_utils.py overwrites it on the CPU platform.
    Modules that imported the function by name hold their own reference, so each is replaced.
    """
    context = multiprocessing.get_context("fork")
    import vllm.utils.system_utils as system_utils

    original = system_utils.get_mp_context
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and getattr(module, "get_mp_context", None) is original:
            module.get_mp_context = lambda: context  # type: ignore[attr-defined]


def inspect_in_process() -> None:
    """Let vLLM's registry look at a model class in this process.

    The first boot of an architecture imports all of vLLM once more in a subprocess, only so that the parent need not touch
    CUDA (model_executor/models/registry.py); without CUDA that is half a minute for nothing.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def warm() -> None:
    """Import what servers import. Prints what took long, so that a slow start explains itself in the log."""
    import torch

    torch.set_num_threads(1)
    for name in MODULES:
        began = time.monotonic()
        try:
            importlib.import_module(name)
        except Exception as error:  # a warmed parent that lacks a module is slower, not broken
            print(f"not warmed: {name}: {error!r}"[:300], flush=True)
        took = time.monotonic() - began
        if took > 0.3:
            print(f"imported {name} in {took:.1f} s", flush=True)
    use_fork_context()
    inspect_in_process()
    # Keep the collector from touching, and so copying, the pages shared with every server.
    gc.collect()
    gc.freeze()


def become_server(request: dict[str, Any]) -> NoReturn:
    """In the forked child: take over log, environment and arguments, then run the module as `__main__` would be run."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(null)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    handed_on = {
        "EPD_LIFELINE": os.environ.get("EPD_ZYGOTE_LIFELINE", ""),
        "EPD_SCRATCH": os.environ.get("EPD_SCRATCH", ""),
    }
    os.environ.clear()
    os.environ.update({**request["env"], **handed_on})
    lifeline.watch()
    module, arguments = request["argv"][0], request["argv"][1:]
    sys.argv = [module, *arguments]
    code = 0
    try:
        if module == "vllm.entrypoints.openai.api_server":
            # Running it again by runpy would import it a second time under another name.
            from vllm.entrypoints.launchers.api_server.entry import main as serve

            serve()
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_server(channel: socket.socket, request: dict[str, Any]) -> None:
    """Fork twice, answer with the server's pid. A fork that the kernel refuses is an answer too."""
    reader, writer = os.pipe()
    pid, error = 0, "fork failed: too many processes, or too little memory"
    try:
        middle = os.fork()
    except OSError as refused:
        error = f"fork failed: {refused.strerror}"
    else:
        if middle == 0:
            os.close(reader)
            _fork_again(channel, writer, request)
        # Else the end of the middle one would not be seen.
        os.close(writer)
        writer = -1
        pid = int(os.read(reader, 32) or b"0")
        os.waitpid(middle, 0)
    if writer >= 0:
        os.close(writer)
    os.close(reader)
    answer: dict[str, Any] = {"id": request["id"], "pid": pid} if pid else {"id": request["id"], "error": error}
    channel.sendall((json.dumps(answer) + "\n").encode())


def _fork_again(channel: socket.socket, writer: int, request: dict[str, Any]) -> NoReturn:
    """In the middle process, a copy of the warmed parent with its socket: whatever goes wrong must end here."""
    code = 1
    try:
        server = os.fork()
        if server == 0:
            os.close(writer)
            channel.close()
            become_server(request)
        os.write(writer, str(server).encode())
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    channel = socket.socket(fileno=int(os.environ.pop("EPD_ZYGOTE_FD")))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    began = time.monotonic()
    warm()
    tasks = len(list(Path("/proc/self/task").iterdir()))
    ready = {"event": "zygote-ready", "seconds": round(time.monotonic() - began, 2), "threads": tasks}
    channel.sendall((json.dumps(ready) + "\n").encode())
    inbox = b""
    while True:
        data = channel.recv(1 << 16)
        if not data:
            return
        inbox += data
        while b"\n" in inbox:
            line, inbox = inbox.split(b"\n", 1)
            fork_server(channel, json.loads(line))


if __name__ == "__main__":
    main()
