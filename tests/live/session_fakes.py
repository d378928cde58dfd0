"""Fake servers under a real `Site`: threads that answer over HTTP and write journals, in the place of vLLM's processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from epd_conformance.connectors.barriers import FOLDER, Gate
from epd_conformance.connectors.journal import DIRECTORY, SERVER
from epd_conformance.errors import StackError, UsageError
from epd_conformance.topology.launcher import Boot, Process
from epd_conformance.topology.stack import SERVED_NAME

# As long as real ones: a prompt that the file KV connector can serve with blocks of 32.
PROMPT = tuple(range(100, 300))


def completion(body: Mapping[str, Any]) -> dict[str, Any]:
    """An answer whose ids depend on the messages only."""
    seed = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
    ids = list(seed[: min(body["max_tokens"], 12)])
    content = [{"logprob": -0.5, "top_logprobs": [{"logprob": -0.5}, {"logprob": -2.0}]} for _ in ids]
    choice = {"token_ids": ids, "finish_reason": "length", "logprobs": {"content": content}}
    return {"prompt_token_ids": PROMPT, "choices": [choice], "usage": {"completion_tokens": len(ids)}}


class _Lines:
    """In the place of a `JournalWriter`."""

    def __init__(self, fake: FakeServer, side: str) -> None:
        self._fake, self.server, self.side = fake, fake._name, side

    def write(self, event: str, **fields: Any) -> None:
        self._fake.write(self.side, event, **fields)


class FakeServer:
    """One server (or proxy). `status` is what a completion is answered with; `killed_by_request`: the next request ends it.

    `requests` and `ids` are what was asked, with `X-Request-Id`; `busy` is what its metrics say, None where it has none.
    """

    def __init__(self, process: Process, port: int, environment: Mapping[str, str]) -> None:
        self.process = process
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.ids: list[str] = []
        self.busy: int | None = 0
        self.health = 200
        self.status = 200
        self.killed_by_request = False
        self._journal = environment.get(DIRECTORY)
        self._name = environment.get(SERVER, "")
        self._lines = itertools.count()
        # As a recording connector's, or our proxy's: `test_faulting` reaches its points.
        self.gates = {}
        if FOLDER in environment:
            for side in ("proxy",) if process.name.endswith(("proxy", "bypass")) else ("scheduler", "worker"):
                self.gates[side] = Gate(Path(environment[FOLDER]), _Lines(self, side))
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    lines = [f'vllm:num_requests_{what}{{engine="0"}} {fake.busy}.0' for what in ("running", "waiting")]
                    self.send("\n".join(["# HELP vllm:num_requests_running", *lines] if fake.busy is not None else []))
                elif self.path == "/health":
                    self.answer(fake.health, {})
                else:
                    self.answer(200, {"data": [{"id": SERVED_NAME}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                fake.ids.append(self.headers.get("X-Request-Id", ""))
                fake.requests.append((self.path, body))
                if fake.killed_by_request:
                    fake.die(-11)
                    self.close_connection = True
                    return
                if self.path == "/v1/chat/completions" and body["model"] == SERVED_NAME:
                    self.answer(fake.status, completion(body))
                else:
                    self.answer(200 if self.path == "/reset_encoder_cache" else 404, {"error": "no"})

            def answer(self, status: int, data: Any) -> None:
                self.send(json.dumps(data), status)

            def send(self, text: str, status: int = 200) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None: ...

        self.closed = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()

    def write(self, side: str, ev: str, **fields: Any) -> None:
        """A line of the server's journal."""
        assert self._journal is not None
        line = {"seq": next(self._lines), "t": time.time(), "server": self._name, "side": side, "ev": ev, **fields}
        with (Path(self._journal) / f"{self._name}.{side}.1.ndjson").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def die(self, status: int = -9) -> None:
        if self.process.status is None:
            self.process.status = status
            threading.Thread(target=self.close, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.closed.set()


class FakeLauncher:
    """In the place of the `Launcher`. `servers` are those that run, by process name; `refuse` names what does not start."""

    def __init__(self, boot: Boot, logs: Path, environment: Mapping[str, str]) -> None:
        self.boot = boot
        self.logs = logs
        self.scratch = Path(tempfile.mkdtemp(prefix="epd-"))
        self.servers: dict[str, FakeServer] = {}
        self.started: list[str] = []
        self.stopped: list[str] = []
        self.refuse: dict[str, str] = {}
        self._pids = itertools.count(1_000_000)

    def __enter__(self) -> FakeLauncher:
        self.logs.mkdir(parents=True)
        return self

    def close(self) -> None:
        for name in list(self.servers):
            self.servers.pop(name).close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def start(
        self, name: str, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> Process:
        for part, kind in self.refuse.items():
            if name.startswith(part):
                raise UsageError(f"{name} was refused") if kind == "usage" else StackError(f"{name} did not come up")
        log = self.logs / f"{name}.log"
        log.write_text(f"the log of {name}\n")
        process = Process(name, next(self._pids), log)
        fake = FakeServer(process, int(arguments[arguments.index("--port") + 1]), environment or {})
        for option, sides in (
            ("--ec-transfer-config", ("scheduler", "worker")),
            ("--kv-transfer-config", ("kv-scheduler", "kv-worker")),
        ):
            for side in sides if option in arguments else ():
                fake.write(side, "init", connector="x.Fake", blocks=1, block_size=32)
        self.servers[name] = fake
        self.started.append(name)
        return process

    def stop(self, process: Process, graceful: bool = False) -> None:
        fake = self.servers.pop(process.name, None)
        if fake is not None and process.alive:
            process.status = -15
            fake.close()
        elif fake is not None:
            # As of a real one that has ended, its port is free.
            assert fake.closed.wait(30)
        self.stopped.append(process.name)

    def tree(self, process: Process) -> list[int]:
        return [process.pid]
