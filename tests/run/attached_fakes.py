"""Fake servers in threads, as something else would have started them: an attachment file and what answers at its addresses."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from epd_conformance.topology.launcher import Boot, Process
from epd_conformance.topology.spec import Topology

MODEL = "org/some-model"
# As long as real ones: a prompt that a file KV connector can serve with blocks of 32.
PROMPT = tuple(range(100, 300))
Body = Mapping[str, Any]


def images(body: Body) -> int:
    return sum(
        part["type"] == "image_url"
        for message in body["messages"]
        if isinstance(message["content"], list)
        for part in message["content"]
    )


def completion(body: Body) -> dict[str, Any]:
    """An answer whose ids, of prompt and output, depend on the messages only."""
    seed = hashlib.sha256(json.dumps(body["messages"]).encode()).digest()
    ids = list(seed[: min(body.get("max_tokens") or 12, 12)])
    logprob = {"token": "t", "logprob": -0.5}
    content = [{**logprob, "top_logprobs": [logprob, {"token": "u", "logprob": -2.0}]} for _ in ids]
    choice = {
        "token_ids": ids,
        "finish_reason": "length",
        "logprobs": {"content": content},
        "message": {"content": ""},
    }
    return {
        "id": "chatcmpl-made",
        "prompt_token_ids": [*seed[:8], *PROMPT[8:]],
        "choices": [{**choice, "index": index} for index in range(body.get("n") or 1)],
        "usage": {"prompt_tokens": len(PROMPT), "completion_tokens": 0},
    }


def refusal(body: Body) -> str | None:
    """Why a server refuses a request; None where it takes it."""
    text = json.dumps(body["messages"])
    if text.count("too long") > 1000:
        return "the prompt is too long"
    if "base64,bm8g" in text:
        return "no picture"
    return "too cold" if body["temperature"] < 0 else None


def stream(answer: Mapping[str, Any]) -> bytes:
    answer = {**answer, "choices": [{**choice, "delta": choice["message"]} for choice in answer["choices"]]}
    return f"data: {json.dumps(answer)}\n\ndata: [DONE]\n\n".encode()


class Fake:
    """A server or proxy. `changed` may change an answer; `unknown` makes the error for a model that is not served."""

    def __init__(
        self,
        port: int = 0,
        changed: Callable[[Body, dict[str, Any]], dict[str, Any]] = lambda _, answer: answer,
        unknown: Callable[[Body, str], dict[str, Any]] = lambda _, __: {"message": "no such model"},
        resets: bool = False,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.health = 200
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                match self.path:
                    case "/health":
                        self.answer(fake.health, b"")
                    case "/version":
                        self.answer(200, b'{"version": "0.32.0"}')
                    case "/v1/models":
                        self.answer(200, json.dumps({"data": [{"id": MODEL, "max_model_len": 2048}]}).encode())
                    case "/reset_encoder_cache" if resets:
                        self.answer(405, b"")
                    case _:
                        self.answer(404, b"")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                if self.path == "/tokenize":
                    return self.answer(200, b'{"count": 2, "tokens": [1, 2]}')
                if self.path != "/v1/chat/completions":
                    return self.answer(200 if resets else 404, b"{}")
                fake.bodies.append(body)
                if body["model"] != MODEL:
                    error = unknown(body, self.headers["X-Request-Id"])
                    return self.answer(404, json.dumps({"error": error}).encode())
                if (why := refusal(body)) is not None:
                    return self.answer(400, json.dumps({"error": {"message": why}}).encode())
                answer = changed(body, completion(body))
                if body["stream"]:
                    return self.answer(200, stream(answer), "text/event-stream")
                return self.answer(200, json.dumps(answer).encode())

            def answer(self, status: int, data: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.005}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Cluster:
    """The servers of a topology, its baselines and somebody's proxy."""

    def __init__(self, folder: Path, topology: str = "e-pd", **proxy: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.topology = Topology.parse(topology)
        self.servers = {name: Fake(resets=True) for name, _ in self.topology.servers()}
        self.baseline = Fake()
        self.baseline_pd = Fake() if self.topology.has_kv else None
        self.proxy = Fake(unknown=self._unknown, **proxy)

    def _unknown(self, body: Body, request_id: str) -> dict[str, Any]:
        rest = "prefill" if self.topology.has_kv else "decode"
        stage = "encode" if images(body) else rest
        return {"stage": stage, "upstream_status": 404, "request_id": request_id}

    def urls(self, role: str) -> list[str]:
        return [fake.url for name, fake in self.servers.items() if name.rpartition("-")[0] == role]

    def table(self, **changes: Any) -> dict[str, Any]:
        """The attachment; a change to None leaves a key out."""
        single = self.topology.kind == "aggregated"
        table: dict[str, Any] = {
            "topology": self.topology.name,
            "model": MODEL,
            "environment_class": "cuda",
            "baseline": self.baseline.url,
            "baseline_pd": self.baseline_pd.url if self.baseline_pd else None,
            "proxy": None if single else self.proxy.url,
            "encode": self.urls("encode"),
            "prefill": self.urls("prefill"),
            "decode": self.urls("decode") + self.urls("prefill_decode") + self.urls("aggregated"),
            **changes,
        }
        return {key: value for key, value in table.items() if value not in (None, [])}

    def file(self, subject: bool = True, **changes: Any) -> Path:
        path = self.folder / "urls.toml"
        # A TOML value of these types is written as JSON writes it.
        lines = [f"{key} = {json.dumps(value)}" for key, value in self.table(**changes).items()]
        if subject:
            lines += ["[subject]", 'organization = "O"', 'project = "P"', 'version = "1.2"']
            lines += ['features = ["kv_disaggregation", "ec_both", "store_probe", "multi_producer"]']
        path.write_text("\n".join(lines) + "\n")
        return path

    def close(self) -> None:
        for fake in (*self.servers.values(), self.baseline, self.baseline_pd, self.proxy):
            if fake is not None:
                fake.close()


class Journals:
    """Writes journal lines as the recording connectors of the attached servers would."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.numbers: dict[str, Any] = {}

    def write(self, server: str, side: str, ev: str, t: float | None = None, **fields: Any) -> None:
        name = f"{server}.{side}.7.ndjson"
        number = next(self.numbers.setdefault(name, itertools.count()))
        line = {"seq": number, "t": t or time.time(), "server": server, "side": side, "ev": ev, **fields}
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def begin(self, *servers: str, t: float) -> None:
        for server in servers:
            for side in ("scheduler", "worker"):
                self.write(server, side, "init", t, connector="x.Theirs", blocks=1, block_size=16)


class FakeLauncher:
    """In the place of the `Launcher`: what would be our proxy is a fake of its own, kept in `started`."""

    started: dict[str, Fake]

    def __init__(self, boot: Boot, logs: Path, environment: Mapping[str, str]) -> None:
        assert boot is Boot.PLAIN
        self.logs = logs
        self.started = {}
        self.arguments: dict[str, list[str]] = {}
        self.stopped: list[str] = []

    def __enter__(self) -> FakeLauncher:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def start(self, name: str, module: str, arguments: list[str], environment: object = None) -> Process:
        log = self.logs / f"{name}.log"
        log.write_text("")
        self.started[name] = Fake(int(arguments[arguments.index("--port") + 1]))
        self.arguments[name] = arguments
        return Process(name, 1_000_000 + len(self.arguments), log)

    def stop(self, process: Process, graceful: bool = False) -> None:
        self.stopped.append(process.name)
        self.started.pop(process.name).close()

    def close(self) -> None:
        for fake in self.started.values():
            fake.close()
        self.started.clear()
