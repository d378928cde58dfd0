"""`bench proxy`: what the proxy adds to a request and how many it carries, against calling the stages directly, against a
straightforward FastAPI+httpx relay, and against `vllm-router` where that is installed.

Everything runs in one go: servers that answer at once in one process, the proxy or router under test in another, and this
process as the client. A client here is one keep-alive connection a server and the next request as soon as the answer is
there; "directly" means that the same client sends the very legs that a proxy would, one after the other.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import importlib.util
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from epd_conformance.bench.result import Measurement
from epd_conformance.errors import StackError
from epd_conformance.proxy.media import extract_items, primer_body
from epd_conformance.proxy.stages import prefill_body

CLIENTS = (1, 16, 64, 256)

# One sample takes a second: some hundred requests of a single client, thousands of 256. Rounds alternate between the arms, so
# that a busy neighbour of the machine disturbs all of them.
ROUNDS = 3
SAMPLE_S = 1.0

# Requests before the clock starts: Python's first-call costs are over.
WARM_UP_S = 0.2

# A PNG photo as a client sends it: base64 of 96 kB.
IMAGE_BYTES = 96_000

# A router asks its servers how they are before it takes requests, some of them only every few seconds.
START_S = 60.0

CHAT = "/v1/chat/completions"

# What a fake server says to everything: a chat answer of usual size, with the KV hand-over that a prefill server adds.
ANSWER = json.dumps(
    {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": "bench",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes " * 50}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 50, "total_tokens": 150},
        "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "x", "remote_block_ids": [1, 2, 3]},
    }
).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)


class _Messages(asyncio.Protocol):
    """Cuts a connection's bytes into HTTP messages with a Content-Length; all that either side of the benchmark sends."""

    def __init__(self) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport: Any = None
        self.buffer = bytearray()
        self.needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while self.buffer and len(self.buffer) >= self.needed:
            if not self.needed:
                end = self.buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self.needed = end + 4 + _content_length(bytes(self.buffer[:end]))
                continue
            message = bytes(self.buffer[: self.needed])
            del self.buffer[: self.needed]
            self.needed = 0
            self.message(message)

    def message(self, message: bytes) -> None:
        raise NotImplementedError


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
        if name.lower() == b"transfer-encoding":
            raise ValueError("the benchmark's client reads answers with a Content-Length only")
    return 0


class _FakeServer(_Messages):
    def message(self, message: bytes) -> None:
        self.transport.write(HEAD + ANSWER)


class _Client(_Messages):
    """One keep-alive connection to one server."""

    answer: asyncio.Future[bytes] | None = None

    def message(self, message: bytes) -> None:
        assert self.answer is not None
        self.answer.set_result(message)

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error or ConnectionError("the server closed the connection"))

    async def ask(self, request: bytes) -> bytes:
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


@dataclass(frozen=True)
class Leg:
    """One request of an arm: where to, and the body."""

    port: int
    body: bytes

    @property
    def bytes(self) -> bytes:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
        return head.encode() + b"content-length: %d\r\n\r\n" % len(self.body) + self.body


@dataclass
class Arm:
    """One way to get a request answered: the legs that the client itself sends, and the process that does the rest."""

    name: str
    legs: Sequence[Leg]
    pid: int | None = None
    p50: dict[int, list[float]] = field(default_factory=dict)
    p99: dict[int, list[float]] = field(default_factory=dict)
    rps: dict[int, list[float]] = field(default_factory=dict)
    cpu: dict[int, list[float]] = field(default_factory=dict)

    def wait_until_ready(self) -> None:
        """Raises StackError where the first request is not answered with 200 within START_S."""
        end = time.monotonic() + START_S
        while b" 200 " not in (answer := asyncio.run(_once(self.legs))):
            if time.monotonic() > end:
                raise StackError(f"{self.name} answers {answer[:300]!r}")
            time.sleep(0.2)

    def sample(self, clients: int) -> None:
        """Adds one sample: milliseconds a request, requests a second, and the process' CPU milliseconds a request."""
        process = psutil.Process(self.pid) if self.pid else None
        before = _cpu(process)
        latencies, took = asyncio.run(_load(self.legs, clients))
        used = _cpu(process) - before
        # A single latency, of a single slow client, is all its quantiles.
        cuts = statistics.quantiles(latencies * 2 if len(latencies) == 1 else latencies, n=100)
        self.p50.setdefault(clients, []).append(cuts[49] * 1000)
        self.p99.setdefault(clients, []).append(cuts[98] * 1000)
        self.rps.setdefault(clients, []).append(len(latencies) / took)
        # The warm-up is in it too, and its requests are by estimate as many as its share of the time.
        self.cpu.setdefault(clients, []).append(used * 1000 / (len(latencies) * (1 + WARM_UP_S / took)))


def _cpu(process: psutil.Process | None) -> float:
    if process is None:
        return 0.0
    family = [process, *process.children(recursive=True)]
    return sum(sum(member.cpu_times()[:2]) for member in family)


async def _once(legs: Sequence[Leg]) -> bytes:
    """The first line of the last leg's answer."""
    answer = b""
    for leg in legs:
        _, way = await asyncio.get_running_loop().create_connection(_Client, "127.0.0.1", leg.port)
        try:
            answer = await way.ask(leg.bytes)
        finally:
            way.transport.close()
    return answer.partition(b"\r\n")[0]


async def _load(legs: Sequence[Leg], clients: int) -> tuple[list[float], float]:
    """Latencies in seconds of all requests in one sample, and how long it took."""
    loop = asyncio.get_running_loop()
    requests = [leg.bytes for leg in legs]
    latencies: list[float] = []
    # All are open before the clock starts: a client connects once in its life.
    clients_ways = [
        [(await loop.create_connection(_Client, "127.0.0.1", leg.port))[1] for leg in legs] for _ in range(clients)
    ]
    started = time.perf_counter() + WARM_UP_S
    end = started + SAMPLE_S

    async def client(ways: Sequence[_Client]) -> None:
        counted = False
        # However slow an arm is, each client counts once.
        while (began := time.perf_counter()) < end or not counted:
            for way, request in zip(ways, requests, strict=True):
                answer = await way.ask(request)
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise StackError(f"the benchmark got {answer[:300]!r}")
            if began >= started:
                counted = True
                latencies.append(time.perf_counter() - began)

    try:
        async with asyncio.TaskGroup() as group:
            for ways in clients_ways:
                group.create_task(client(ways))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        for ways in clients_ways:
            for way in ways:
                way.transport.close()
    return latencies, time.perf_counter() - started


# --- what is measured: processes of their own ---------------------------------------------------------------------------


def serve_fakes(*ports: int) -> None:
    """Servers that answer every request at once, all in one process."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        # All but the first are not waited for: asyncio's servers accept as soon as they are made.
        servers = [await loop.create_server(_FakeServer, "127.0.0.1", port, backlog=2048) for port in ports]
        await servers[0].serve_forever()

    _uvloop().run(run())


def _uvloop() -> Any:
    """uvloop where there is one: a slow fake would hide what a fast proxy gains."""
    return importlib.import_module("uvloop" if importlib.util.find_spec("uvloop") else "asyncio")


def serve_relay(port: int, encode: str, decode: str) -> None:
    """The baseline: what one writes in an afternoon. Prime each item, send the request on, hand the answer back.

    FastAPI where it is installed (vLLM brings it), else Starlette, on which FastAPI stands.
    """
    httpx = importlib.import_module("httpx")
    uvicorn = importlib.import_module("uvicorn")
    requests = importlib.import_module("starlette.requests")
    responses = importlib.import_module("starlette.responses")
    # Without limits: with its own it keeps 64 clients waiting for a connection until they time out.
    client = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=None), timeout=60)

    async def chat(request: Any) -> Any:
        body = await request.json()
        primers = [primer_body(body, item) for item in extract_items(body)]
        answers = await asyncio.gather(*(client.post(encode + CHAT, json=primer) for primer in primers))
        for answer in answers:
            answer.raise_for_status()
        answer = await client.post(decode + CHAT, json=body)
        return responses.JSONResponse(answer.json(), answer.status_code)

    if importlib.util.find_spec("fastapi"):
        app = importlib.import_module("fastapi").FastAPI()
        chat.__annotations__["request"] = requests.Request
        app.post(CHAT, response_model=None)(chat)
    else:
        routing = importlib.import_module("starlette.routing")
        app = importlib.import_module("starlette.applications").Starlette(
            routes=[routing.Route(CHAT, chat, methods=["POST"])]
        )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


@contextmanager
def running(folder: Path, name: str, command: Sequence[str], port: int) -> Iterator[int]:
    """A process that serves `port`; yields its pid when it accepts connections. Raises StackError where it does not."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        end = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise StackError(f"{name} did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _router() -> list[str] | None:
    """The command of `vllm-router`, or None where it is not installed."""
    found = shutil.which("vllm-router") or shutil.which("vllm-router", path=str(Path(sys.executable).parent))
    return [found] if found else None


# --- the measurements ---------------------------------------------------------------------------------------------------


def bodies() -> tuple[dict[str, Any], dict[str, Any]]:
    """A request with one image, and one of text alone."""
    image = base64.b64encode(random.Random(0).randbytes(IMAGE_BYTES)).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
        {"type": "text", "text": "What is this?"},
    ]
    common = {"model": "bench", "max_tokens": 50, "temperature": 0}
    return (
        {**common, "messages": [{"role": "user", "content": parts}]},
        {**common, "messages": [{"role": "user", "content": "Count to ten. " * 20}]},
    )


def measure(folder: Path, say: Callable[[str], None]) -> list[Measurement]:
    """All arms at every number of clients, in rounds."""
    with_image, text = bodies()
    (item,) = extract_items(with_image)
    primer = json.dumps(primer_body(with_image, item)).encode()
    image, plain = json.dumps(with_image).encode(), json.dumps(text).encode()
    module = [sys.executable, "-m"]
    ours = [*module, "epd_conformance.proxy"]
    mine = [*module, "epd_conformance.bench.proxy"]
    router = _router()
    with ExitStack() as stack:

        def start(name: str, command: Callable[[int], list[str]]) -> tuple[int, int]:
            port = _free_port()
            say(f"starting {name}")
            return port, stack.enter_context(running(folder, name, command(port), port))

        # Two addresses, because routers tell servers apart by them.
        second_port = _free_port()
        first_port, _ = start("the servers", lambda port: [*mine, "fakes", str(port), str(second_port)])
        first, second = f"http://127.0.0.1:{first_port}", f"http://127.0.0.1:{second_port}"
        e_pd = start("proxy e-pd", lambda port: [*ours, "--encode", first, "--decode", second, "--port", str(port)])
        p_d = start("proxy p-d", lambda port: [*ours, "--prefill", first, "--decode", second, "--port", str(port)])
        direct = Arm("direct", [Leg(first_port, primer), Leg(second_port, image)])
        proxied = Arm("proxy", [Leg(e_pd[0], image)], e_pd[1])
        prefill = json.dumps(prefill_body(text)).encode()
        direct_pd = Arm("direct p-d", [Leg(first_port, prefill), Leg(second_port, plain)])
        proxied_pd = Arm("proxy p-d", [Leg(p_d[0], plain)], p_d[1])
        arms = [direct, proxied, direct_pd, proxied_pd]
        relay: Arm | None = None
        if importlib.util.find_spec("httpx"):
            port, pid = start("relay", lambda port: [*mine, "relay", str(port), first, second])
            relay = Arm("relay", [Leg(port, image)], pid)
            arms.append(relay)
        else:
            say("httpx is not installed: no relay to compare with")
        routed: Arm | None = None
        if router:
            # In its own words: prefill servers have a second number, the bootstrap port, which vLLM's connectors do not need.
            command = [*router, "--vllm-pd-disaggregation", "--policy", "round_robin", "--disable-retries"]
            command += ["--prefill", first, "none", "--decode", second, "--log-level", "error"]
            command += ["--worker-startup-check-interval", "1", "--prometheus-port", str(_free_port())]
            port, pid = start("vllm-router", lambda port: [*command, "--port", str(port)])
            routed = Arm("vllm-router", [Leg(port, plain)], pid)
            arms.append(routed)
        else:
            say("vllm-router is not installed: nothing of that kind to compare with")
        for arm in arms:
            arm.wait_until_ready()
        for round_ in range(ROUNDS):
            for clients in CLIENTS:
                for arm in arms:
                    try:
                        arm.sample(clients)
                    except StackError as error:
                        if arm not in (relay, routed):
                            raise
                        # What we compare with may fail under load; that is said, and no figure.
                        say(f"{arm.name} failed with {clients} clients: {error}")
            say(f"round {round_ + 1} of {ROUNDS} done")
    results = added("one item, e-pd", proxied, direct, goal=True)
    if relay:
        results += against(proxied, relay, "one item, e-pd", goal=2.0)
    results += added("text, p-d", proxied_pd, direct_pd)
    if routed:
        results += added("vllm-router, text, p-d", routed, direct_pd)
        results += against(proxied_pd, routed, "text, p-d")
    return results


def added(what: str, arm: Arm, direct: Arm, *, goal: bool = False) -> list[Measurement]:
    """Latency that `arm` adds to the direct calls of the same round, and requests a second beside them.

    With more clients than the machine carries, latency is waiting for a turn; so the goal is set for one client.
    """
    results = []
    for clients in sorted(arm.rps):
        for quantile in ("p50", "p99"):
            mine, theirs = getattr(arm, quantile)[clients], getattr(direct, quantile)[clients]
            measured = Measurement.of(
                f"{what}: added {quantile}, {clients} clients",
                # An arm that failed in a round has fewer samples.
                [a - b for a, b in zip(mine, theirs, strict=False)],
                "ms",
                baseline=theirs,
            )
            if goal and quantile == "p50" and clients == 1:
                measured = replace(measured, goal="<= 1.5 ms", met=measured.value <= 1.5)
            results.append(measured)
        results.append(
            Measurement.of(
                f"{what}: requests, {clients} clients", arm.rps[clients], "1/s", baseline=direct.rps[clients]
            )
        )
    return results


def against(arm: Arm, other: Arm, what: str, *, goal: float | None = None) -> list[Measurement]:
    """Requests a second and CPU time of `arm`, with `other` as the baseline."""
    results = []
    for clients in sorted(other.rps):
        rps = Measurement.of(
            f"{what}: requests vs {other.name}, {clients} clients", arm.rps[clients], "1/s", baseline=other.rps[clients]
        )
        if goal is not None:
            rps = replace(rps, goal=f">= {goal:g}x", met=rps.ratio is not None and rps.ratio >= goal)
        results.append(rps)
        results.append(
            Measurement.of(
                f"{what}: CPU a request vs {other.name}, {clients} clients",
                arm.cpu[clients],
                "ms",
                baseline=other.cpu[clients],
            )
        )
    return results


if __name__ == "__main__":
    kind, number, *urls = sys.argv[1:]
    os.environ.pop("HTTP_PROXY", None)
    if kind == "fakes":
        serve_fakes(int(number), *map(int, urls))
    else:
        serve_relay(int(number), *urls)
