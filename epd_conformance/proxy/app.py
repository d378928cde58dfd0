"""The proxy's HTTP face: routes, error answers, pass-through of streams, and the process that serves them."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from epd_conformance.errors import UsageError
from epd_conformance.proxy.media import extract_items
from epd_conformance.proxy.stages import Call, Stages
from epd_conformance.proxy.upstreams import CHAT_PATH, Answer, Leg, StageError, Upstreams

log = logging.getLogger(__name__)

# The client's headers that every leg carries: its key, and the trace it belongs to.
FORWARDED_HEADERS = ("authorization", "traceparent", "tracestate")

# The id travels in headers and stands in log lines: visible ASCII only, and short enough for any server's
# log.
REQUEST_ID = re.compile(r"[!-~]{1,128}")

# aiohttp, the strictest of the usual clients, refuses a header line above 8190 bytes.
LEGS_HEADER_BYTES = 8000

# Longest tail of a stream that is looked at for its end mark: `data: [DONE]` and blank lines around it.
TAIL_BYTES = 64

# What nginx logs for a client that went away before its answer; never sent to anybody.
CLIENT_GONE = 499

# Longer than the usual clients keep an idle socket (httpx 5 s, aiohttp 15 s), so that it is always they who
# close first.
CLIENT_KEEP_ALIVE_S = 30

# Time that open requests have after SIGTERM; with uvicorn's 0.1 s tick and the closing of sockets the process
# ends in 2 s.
GRACE_S = 1

# Then they are told that the proxy was stopped; a client that does not even read that is not waited for.
LAST_WORDS_S = 0.3


class ProxyConfig(BaseModel):
    """Where the servers are. `e-pd` has no `prefill`, `p-d` no `encode`; `decode` alone is a plain proxy."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    encode: list[str] = []
    prefill: list[str] = []
    decode: list[str] = Field(min_length=1)
    timeout_s: float = Field(
        # A hang must end as an error of this request, so there must be a bound; it is longer than any
        # non-streaming generation on a slow CPU server that also waits behind others, in which the upstream
        # sends nothing at all.
        default=300.0,
        gt=0,
        description="seconds that an upstream may stay silent, before or within its answer",
    )

    @field_validator("encode", "prefill", "decode")
    @classmethod
    def _base_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            try:
                parts = urlsplit(url)
                usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                usable = False
            if not usable or "?" in url or "#" in url:
                raise ValueError(f"'{url}' is no server address; write http://HOST:PORT")
        return [url.rstrip("/") for url in urls]


def _parse_call(request: Request, raw: bytes, request_id: str) -> Call:
    """The client's request as a call. Raises StageError (400) where id, JSON or shape is wrong."""

    def bad(message: str) -> StageError:
        return StageError(message, code=400, stage="proxy")

    given = request.headers.get("x-request-id")
    if given and given != request_id:
        raise bad("X-Request-Id must be 1 to 128 visible ASCII characters")
    try:
        body = json.loads(raw)
    except RecursionError:
        raise bad("the request body is nested too deeply") from None
    except ValueError as error:
        raise bad(f"the request body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise bad("the request body must be a JSON object")
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise bad("'messages' must be a list of objects")
    headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
    return Call(request_id, body, headers)


def _request_id(request: Request) -> str:
    """The client's id where it is usable, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _legs_json(legs: list[Leg]) -> str:
    """The legs as JSON for a header: as many encode legs as fit, always the others."""

    def row(leg: Leg) -> dict[str, Any]:
        return {
            "stage": leg.stage,
            "upstream": leg.upstream,
            "request_id": leg.request_id,
            "status": leg.status,
        }

    rest = [row(leg) for leg in legs if leg.stage != "encode"]
    room = LEGS_HEADER_BYTES - len(json.dumps(rest))
    shown: list[dict[str, Any]] = []
    for leg in legs:
        if leg.stage == "encode":
            room -= len(json.dumps(row(leg))) + 2
            if room < 0:
                break
            shown.append(row(leg))
    return json.dumps(shown + rest)


class _Exchange:
    """One client request and its answer: runs the stages, sends the answer, keeps the times."""

    def __init__(self, request: Request, stages: Stages, send: Send) -> None:
        self.request = request
        self.stages = stages
        self.send = send
        self.request_id = _request_id(request)
        self.legs: list[Leg] = []
        self.ms: dict[str, float] = {}
        self.status = CLIENT_GONE
        self.sent: Literal["nothing", "plain head", "stream head"] = "nothing"
        self.tail = b""
        self.failure: StageError | None = None
        self.started = time.perf_counter()

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.ms[stage] = self.ms.get(stage, 0.0) + (time.perf_counter() - start) * 1000

    async def run(self, raw: bytes) -> None:
        """Answers the request, whatever happens to it, exactly once."""
        try:
            answer = await self._stages(raw)
            try:
                with self._timed("decode"):
                    if answer.content_type.startswith("text/event-stream"):
                        await self._stream(answer)
                        return
                    body = await answer.read()
            finally:
                answer.close()
            await self._head(200, answer.content_type, len(body))
            await self.send({"type": "http.response.body", "body": body})
        except StageError as error:
            await self.fail(error)
        except Exception:
            log.exception("%s fault in the proxy", self.request_id)
            if self.sent != "nothing":
                # Too late for an error answer: the server breaks the connection, which no client takes for
                # an end.
                raise
            await self.fail(StageError("fault in the proxy; its log has the details", code=500, stage="proxy"))

    async def _stages(self, raw: bytes) -> Answer:
        """All stages up to the head of the decode server's answer."""
        call = _parse_call(self.request, raw, self.request_id)
        self.legs = call.legs
        urls = self.stages.upstreams.urls
        items = extract_items(call.body)
        if items and urls["encode"]:
            with self._timed("encode"):
                await self.stages.encode(call, items)
        prefilled = None
        if urls["prefill"]:
            with self._timed("prefill"):
                prefilled = await self.stages.prefill(call)
        with self._timed("decode"):
            return await self.stages.decode(call, prefilled)

    async def _stream(self, answer: Answer) -> None:
        """Hands a stream on, byte for byte; where it ends too early, ends it with an error event."""
        await self._head(200, answer.content_type, None)
        try:
            async for chunk in answer.chunks():
                self.tail = (self.tail + chunk[-TAIL_BYTES:])[-TAIL_BYTES:]
                await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not self.tail.rstrip().endswith(b"data: [DONE]"):
                raise answer.leg.error("ended its stream without [DONE]", code=502)
        except StageError as error:
            await self.fail(error)
        else:
            await self.send({"type": "http.response.body", "body": b""})

    async def fail(self, error: StageError) -> None:
        """Ends the exchange with an error: a JSON answer, or the last event of a stream that has begun."""
        self.failure = error
        body = json.dumps(error.envelope(self.request_id)).encode()
        if self.sent == "plain head":
            # The length is promised: all that is left is to end short of it, which no client takes for an end.
            return
        if self.sent == "stream head":
            # Half an event may have been sent: a blank line parts the error from it.
            start = b"" if not self.tail or self.tail.endswith(b"\n\n") else b"\n\n"
            body = start + b"data: " + body + b"\n\n"
        else:
            await self._head(error.code, "application/json", len(body))
        await self.send({"type": "http.response.body", "body": body})

    async def _head(self, status: int, content_type: str, length: int | None) -> None:
        self.status = status
        self.sent = "stream head" if length is None else "plain head"
        headers = {"content-type": content_type, "x-request-id": self.request_id}
        if length is not None:
            headers["content-length"] = str(length)
        if self.request.headers.get("x-epd-debug") == "1":
            total = (time.perf_counter() - self.started) * 1000
            headers["x-epd-timings"] = json.dumps(
                {stage: round(ms, 3) for stage, ms in {**self.ms, "total": total}.items()}
            )
            headers["x-epd-legs"] = _legs_json(self.legs)
        await self.send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
            }
        )

    def log_line(self) -> None:
        """One line: id, status, legs and milliseconds of each stage, the total, and which stage failed."""
        parts = []
        for stage, ms in self.ms.items():
            count = sum(leg.stage == stage for leg in self.legs)
            parts.append(f"{stage}={count}x{ms:.1f}ms")
        parts.append(f"total={(time.perf_counter() - self.started) * 1000:.1f}ms")
        if self.failure is not None:
            parts.append(f"failed={self.failure.stage}")
        log.info("%s %d %s", self.request_id, self.status, " ".join(parts))


class _Chat:
    """ASGI endpoint of POST /v1/chat/completions.

    Plain ASGI, because a client that goes away must end the work on its request in every stage, not only
    while a stream is being sent.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.open: set[asyncio.Task[Any]] = set()

    async def finish(self) -> None:
        """Lets the requests that the server has cancelled say so to their clients."""
        if self.open:
            await asyncio.wait(self.open, timeout=LAST_WORDS_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            raw = await request.body()
        except ClientDisconnect:
            return
        exchange = _Exchange(request, self.stages, send)
        if (task := asyncio.current_task()) is not None:
            self.open.add(task)
            task.add_done_callback(self.open.discard)

        async def client_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        work = asyncio.create_task(exchange.run(raw))
        gone = asyncio.create_task(client_gone())
        stopping = False
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The server's grace period is over. This is the outermost frame of the request, so nobody waits for
            # the cancellation to be passed on, and the client can be told.
            stopping = True
        gone.cancel()
        work.cancel()
        await asyncio.wait({work, gone})
        if work.cancelled() and stopping:
            await exchange.fail(StageError("the proxy was stopped", code=503, stage="proxy"))
        elif work.cancelled():
            exchange.status = CLIENT_GONE
        exchange.log_line()
        if not work.cancelled():
            work.result()


def create_app(config: ProxyConfig, stages_factory: Callable[[Upstreams], Stages] = Stages) -> Starlette:
    """The proxy as an ASGI application; its upstream connections live from lifespan start to lifespan end.

    `stages_factory` is `Stages` or a subclass of it.
    """
    upstreams = Upstreams(config.encode, config.prefill, config.decode, config.timeout_s)
    chat = _Chat(stages_factory(upstreams))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with upstreams:
            yield
            await chat.finish()

    async def models(request: Request) -> Response:
        request_id = _request_id(request)
        headers = {name: request.headers[name] for name in FORWARDED_HEADERS if name in request.headers}
        # Every decode server serves the same models; asking the first leaves the turns of the chat requests
        # alone.
        leg = Leg("decode", config.decode[0], request_id)
        try:
            answer = await upstreams.get(leg, "/v1/models", headers)
            try:
                body = await answer.read()
            finally:
                answer.close()
        except StageError as error:
            return JSONResponse(error.envelope(request_id), error.code, {"X-Request-Id": request_id})
        return Response(body, headers={"X-Request-Id": request_id, "Content-Type": answer.content_type})

    async def health(_: Request) -> Response:
        roles = await upstreams.health()
        healthy = all(server["healthy"] for servers in roles.values() for server in servers)
        return JSONResponse({"status": "healthy" if healthy else "unhealthy", **roles}, 200 if healthy else 503)

    async def no_route(request: Request, error: Exception) -> Response:
        code = error.status_code if isinstance(error, HTTPException) else 500
        request_id = _request_id(request)
        what = f"{request.method} {request.url.path}: no such route; see POST {CHAT_PATH}"
        failure = StageError(what, code=code, stage="proxy")
        headers = dict(getattr(error, "headers", None) or {}) | {"X-Request-Id": request_id}
        return JSONResponse(failure.envelope(request_id), code, headers)

    return Starlette(
        routes=[
            Route(CHAT_PATH, chat, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ],
        exception_handlers={HTTPException: no_route},
        lifespan=lifespan,
    )


def make_config(**fields: Any) -> ProxyConfig:
    """A ProxyConfig from loose values. Raises UsageError with one sentence that names the wrong field."""
    try:
        return ProxyConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "too_short":
            raise UsageError("the proxy needs at least one decode server; give --decode URL") from None
        raise UsageError(f"proxy configuration, {where}: {first['msg'].removeprefix('Value error, ')}") from None


def load_stages(factory: str | None) -> Callable[[Upstreams], Stages]:
    """The class named `module:Class`, or Stages itself for None. Raises UsageError where there is none."""
    if factory is None:
        return Stages
    module_name, _, class_name = factory.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"cannot load stages '{factory}' ({error}); write module:Class") from None
    if not (isinstance(found, type) and issubclass(found, Stages)):
        raise UsageError(f"'{factory}' is no subclass of epd_conformance.proxy.stages:Stages")
    return found


def serve(config: ProxyConfig, host: str, port: int, factory: str | None = None) -> None:
    """Serves the proxy in the foreground until SIGINT or SIGTERM; port 0 takes a free one.

    The address is printed on stderr as soon as connections are accepted by the kernel, and after that one
    line a chat request. Raises UsageError where the address cannot be bound or `factory` (`module:Class`)
    cannot be loaded.
    """
    app = create_app(config, load_stages(factory))
    try:
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048
        )
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from None
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s proxy %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    shown = f"[{host}]" if ":" in host else host
    log.info("listening on http://%s:%d", shown, listener.getsockname()[1])
    uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=CLIENT_KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    ).run(sockets=[listener])
