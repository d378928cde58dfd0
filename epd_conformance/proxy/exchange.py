"""One client request and its answer: reads the body, runs the stages, passes bytes on, tells failures, keeps the times."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from epd_conformance.proxy.media import MediaItem, extract_items, holds_media, replace_parts
from epd_conformance.proxy.policy import Fetcher, MediaPolicy, urls_in
from epd_conformance.proxy.stages import DEADLINE_HEADER, Call, Stages, one_prompt
from epd_conformance.proxy.upstreams import CHAT_PATH, Answer, Leg, StageError
from epd_conformance.proxy.wire import Wire

log = logging.getLogger("epd_conformance.proxy.app")

COMPLETIONS_PATH = "/v1/completions"

# The client's headers that every leg carries: its key, and the trace it belongs to.
FORWARDED_HEADERS = frozenset({b"authorization", b"traceparent", b"tracestate"})

# What belongs to one connection, not to the message (RFC 9110, 7.6.1), and what the proxy writes itself. Expect was answered
# when the body was read.
HOP_BY_HOP = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "x-request-id",
    }
)

# The id travels in headers and stands in log lines: visible ASCII only, and short enough for any server's
# log.
REQUEST_ID = re.compile(r"[!-~]{1,128}")

# aiohttp, the strictest of the usual clients, refuses a header line above 8190 bytes.
LEGS_HEADER_BYTES = 8000

# Longest tail of a stream that is looked at for its end mark: `data: [DONE]` and blank lines around it.
TAIL_BYTES = 64

# uvicorn waits for the client to read only above this (its HIGH_WATER_LIMIT); a shorter answer needs no timeout.
BUFFERED_BYTES = 65_536

# What nginx logs for a client that went away before its answer; never sent to anybody.
CLIENT_GONE = 499


def bad_request(message: str, code: int = 400, item: int | None = None) -> StageError:
    """A StageError about what the client sent."""
    return StageError(message, code=code, stage="proxy", item=item)


def header(request: Request, name: str) -> str | None:
    """The value of a header, or None; the names in a scope are lower case."""
    # Starlette's own look-up decodes every header each time, and a request asks for half a dozen.
    wanted = name.encode()
    for found, value in request.scope["headers"]:
        if found == wanted:
            return str(value.decode("latin-1"))
    return None


def request_id_of(request: Request) -> str:
    """The client's id where it is usable, else a new one."""
    given = header(request, "x-request-id") or ""
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def forwarded_headers(request: Request) -> dict[str, str]:
    """The client's headers that go along to every leg. Raises StageError (400) for one that cannot be sent as it came."""
    return {
        name.decode(): utf8_header(name, value) for name, value in request.scope["headers"] if name in FORWARDED_HEADERS
    }


def utf8_header(name: bytes, value: bytes) -> str:
    """A header's value for the client library, which writes UTF-8. Raises StageError (400) where it is something else."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise bad_request(f"the header {name.decode('latin-1')} is not UTF-8") from None


async def read_body(request: Request, receive: Receive, limit: int, timeout_s: float) -> bytes | None:
    """The client's body; None where the client went away. Raises StageError: 413 where it is too large, 408 where the client
    stopped sending."""
    too_large = bad_request(f"the request body is larger than {limit} bytes", 413)
    length = header(request, "content-length") or ""
    if length.isdecimal() and int(length) > limit:
        raise too_large
    pieces: list[bytes] = []
    size = 0
    try:
        while True:
            async with asyncio.timeout(timeout_s):
                message = await receive()
            if message["type"] == "http.disconnect":
                return None
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise too_large
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except TimeoutError:
        raise bad_request(f"the client sent nothing for {timeout_s:g} s in the middle of its body", 408) from None


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


class Exchange:
    """One client request and its answer. Subclasses say how the answer is come by (`answer`) and passed on (`hand_on`)."""

    def __init__(self, route: Endpoint, request: Request, send: Send) -> None:
        self.route = route
        self.stages = route.stages
        self.config = route.stages.config
        self.metrics = route.stages.upstreams.metrics
        self.request = request
        self._send = send
        self.request_id = request_id_of(request)
        self.legs: list[Leg] = []
        self.ms: dict[str, float] = {}
        self.stage: Literal["proxy", "encode", "prefill", "decode"] = "proxy"
        self.bypassed = ""
        self.status = CLIENT_GONE
        self.sent: Literal["nothing", "plain head", "stream head"] = "nothing"
        self.tail = b""
        # Only where it failed: the error itself holds the frames, and with them the bodies, until Python looks for cycles.
        self.failed_stage = ""
        self.started = time.perf_counter()
        self.deadline: float | None = None
        self.deadline_s = 0.0

    async def answer(self, raw: bytes) -> Answer:
        """Does the work up to the head of the answer that the client shall get."""
        raise NotImplementedError

    async def hand_on(self, answer: Answer) -> None:
        """Passes the answer to the client."""
        raise NotImplementedError

    @contextmanager
    def timed(self, stage: Literal["encode", "prefill", "decode"]) -> Iterator[None]:
        """Adds the time inside to the stage's, and names the stage if the deadline passes there."""
        start = time.perf_counter()
        self.stage = stage
        try:
            yield
        finally:
            self.ms[stage] = self.ms.get(stage, 0.0) + (time.perf_counter() - start) * 1000

    def set_deadline(self) -> None:
        """Takes the client's deadline, at most the proxy's. Raises StageError (400) where it is no number of seconds."""
        given = header(self.request, DEADLINE_HEADER)
        limit = self.config.deadline_s
        if given is not None:
            try:
                seconds = float(given)
            except ValueError:
                seconds = -1.0
            # Also false for NaN.
            if not 0 < seconds < 1e9:
                raise bad_request(f"{DEADLINE_HEADER} must be a number of seconds above 0")
            limit = seconds if limit is None else min(limit, seconds)
        if limit is not None:
            self.deadline_s = limit
            self.deadline = time.monotonic() + limit

    async def run(self, raw: bytes) -> None:
        """Answers the request, whatever happens to it, exactly once."""
        try:
            self.set_deadline()
            if self.deadline is None:
                await self._run(raw)
                return
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout_at(loop.time() + self.deadline - time.monotonic()):
                    await self._run(raw)
            except TimeoutError:
                raise StageError(
                    f"the deadline of {self.deadline_s:g} s passed in the {self.stage} stage",
                    code=504,
                    stage=self.stage,
                ) from None
        except StageError as error:
            await self.fail(error)
        except RecursionError:
            # What was just shallow enough to be read may be too deep to be written.
            await self.fail(bad_request("the request body is nested too deeply"))
        except Exception:
            log.exception("%s fault in the proxy", self.request_id)
            if self.sent != "nothing":
                # Too late for an error answer: the server breaks the connection, which no client takes for
                # an end.
                raise
            await self.fail(StageError("fault in the proxy; its log has the details", code=500, stage="proxy"))

    async def _run(self, raw: bytes) -> None:
        answer = await self.answer(raw)
        try:
            with self.timed("decode"):
                await self.hand_on(answer)
        finally:
            answer.close()

    async def check_media(self, items: list[MediaItem]) -> None:
        """Refuses items that the policy does not allow."""
        policy = self.route.policy
        for item in items:
            if item.url is not None:
                await policy.check_url(item.url, item.index)
            else:
                policy.check_size(item.encoded_bytes, item.index)

    async def send(self, body: bytes, *, more: bool = False) -> None:
        """Sends a piece of the body. Raises StageError where the client does not take it for `timeout_s`."""
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if not more and len(body) < BUFFERED_BYTES:
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self.config.timeout_s):
                await self._send(message)
        except TimeoutError:
            raise bad_request(f"the client took nothing for {self.config.timeout_s:g} s", 408) from None

    async def fail(self, error: StageError) -> None:
        """Ends the exchange with an error: a JSON answer, or the last event of a stream that has begun."""
        self.failed_stage = error.stage
        body = json.dumps(error.envelope(self.request_id)).encode()
        if self.sent == "plain head":
            # The length is promised: all that is left is to end short of it, which no client takes for an end.
            return
        if self.sent == "stream head":
            # Half an event may have been sent: a blank line parts the error from it.
            start = b"" if not self.tail or self.tail.endswith(b"\n\n") else b"\n\n"
            body = start + b"data: " + body + b"\n\n"
        else:
            # The client may still be sending: its connection cannot be used for another request.
            closing = error.code in (408, 413) and error.stage == "proxy"
            await self.head(
                error.code, [("content-type", "application/json")] + [("connection", "close")] * closing, len(body)
            )
        await self._send({"type": "http.response.body", "body": body})

    async def head(self, status: int, headers: list[tuple[str, str]], length: int | None) -> None:
        """Begins the answer; without a length it is a stream."""
        self.status = status
        self.sent = "stream head" if length is None else "plain head"
        headers = [*headers, ("x-request-id", self.request_id)]
        if length is not None:
            headers.append(("content-length", str(length)))
        if self.bypassed:
            headers.append(("x-epd-bypassed", self.bypassed))
        if header(self.request, "x-epd-debug") == "1":
            total = (time.perf_counter() - self.started) * 1000
            timings = {stage: round(ms, 3) for stage, ms in {**self.ms, "total": total}.items()}
            headers += [("x-epd-timings", json.dumps(timings)), ("x-epd-legs", _legs_json(self.legs))]
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers],
            }
        )

    def ended(self) -> None:
        """One log line: id, status, legs and milliseconds of each stage, the total, which stage failed; and the metrics."""
        total = time.perf_counter() - self.started
        parts = []
        for stage, ms in self.ms.items():
            count = sum(leg.stage == stage for leg in self.legs)
            parts.append(f"{stage}={count}x{ms:.1f}ms")
            self.metrics.stage_seconds.labels(stage).observe(ms / 1000)
        parts.append(f"total={total * 1000:.1f}ms")
        if self.bypassed:
            parts.append(f"bypassed={self.bypassed!r}")
        if self.failed_stage:
            parts.append(f"failed={self.failed_stage}")
        log.info("%s %d %s", self.request_id, self.status, " ".join(parts))
        self.metrics.requests.labels(self.route.name, self.status).inc()
        self.metrics.request_seconds.labels(self.route.name).observe(total)


class Generation(Exchange):
    """A chat or completion request: all stages, and the decode server's answer."""

    async def answer(self, raw: bytes) -> Answer:
        call = self._parse(raw)
        urls = self.stages.upstreams.urls
        if call.items:
            # What is fetched is checked there, by the addresses that are connected to.
            await self._fetch(call)
            await self.check_media(call.items)
            for item in call.items:
                self.metrics.items.labels(item.kind).inc()
            if urls["encode"]:
                with self.timed("encode"):
                    await self.stages.encode(call, call.items)
        prefilled = None
        if urls["prefill"]:
            if self.route.path == COMPLETIONS_PATH and not one_prompt(call.body):
                self.bypassed = "prefill: several prompts have no single KV hand-over"
                self.metrics.bypasses.labels("several prompts").inc()
            else:
                with self.timed("prefill"):
                    prefilled = await self.stages.prefill(call)
                await self.stages.prefilled(call)
        with self.timed("decode"):
            return await self.stages.decode(call, prefilled)

    def _parse(self, raw: bytes) -> Call:
        """The client's request as a call. Raises StageError (400) where id, JSON or shape is wrong."""
        given = header(self.request, "x-request-id")
        if given and given != self.request_id:
            raise bad_request("X-Request-Id must be 1 to 128 visible ASCII characters")
        try:
            wire = Wire(raw)
        except RecursionError:
            raise bad_request("the request body is nested too deeply") from None
        except ValueError as error:
            raise bad_request(f"the request body is not valid JSON: {error}") from None
        body = wire.body
        if not isinstance(body, dict):
            raise bad_request("the request body must be a JSON object")
        items: list[MediaItem] = []
        if self.route.path == CHAT_PATH:
            messages = body.get("messages")
            if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
                raise bad_request("'messages' must be a list of objects")
            items = extract_items(body)
        return Call(
            self.request_id,
            body,
            forwarded_headers(self.request),
            self.legs,
            items,
            self.route.path,
            wire,
            self.deadline,
        )

    async def _fetch(self, call: Call) -> None:
        """With `media_fetch`, puts the content in the place of every http URL; equal URLs are fetched once."""
        fetcher = self.route.fetcher
        if fetcher is None:
            return
        wanted = {item.url: item.index for item in reversed(call.items) if item.url and item.url[:4].lower() == "http"}
        if not wanted:
            return
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(fetcher.data_url(url, index)) for url, index in wanted.items()}
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        parts: dict[tuple[int, int], dict[str, Any]] = {}
        for item in call.items:
            if item.url in tasks:
                key = "image_url" if item.kind == "input_image" else item.kind
                content = tasks[item.url].result()
                before = item.item[key]
                parts[item.message, item.part] = {
                    **item.item,
                    key: {**before, "url": content} if isinstance(before, dict) else content,
                }
        call.body = replace_parts(call.body, parts)
        call.items = extract_items(call.body)

    async def hand_on(self, answer: Answer) -> None:
        if answer.is_stream:
            await self._stream(answer)
            return
        # Kept whole before it is passed on, so that one that is cut becomes an error instead of half an answer.
        body = await answer.read()
        await self.head(200, [("content-type", answer.content_type)], len(body))
        await self.send(body)

    async def _stream(self, answer: Answer) -> None:
        """Hands a stream on, byte for byte; where it ends too early, ends it with an error event."""
        await self.head(200, [("content-type", answer.content_type)], None)
        async for chunk in answer.chunks():
            self.tail = (self.tail + chunk[-TAIL_BYTES:])[-TAIL_BYTES:]
            await self.send(chunk, more=True)
        if not self.tail.rstrip().endswith(b"data: [DONE]"):
            raise answer.leg.error("ended its stream without [DONE]", code=502, kind="broken")
        await self.send(b"")


class PassThrough(Exchange):
    """Any other request: as it is to the first decode server, and its answer, whatever it is, as it is to the client."""

    async def answer(self, raw: bytes) -> Answer:
        scope = self.request.scope
        target = scope["raw_path"].decode("latin-1") + (
            f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        )
        if not target.startswith("/"):
            # Behind an address it would be read as a part of that.
            raise bad_request("the request target must be a path")
        await self._check(raw)
        headers = {
            name.decode("latin-1"): utf8_header(name, value)
            for name, value in self.request.headers.raw
            if name.decode("latin-1") not in HOP_BY_HOP
        }
        # The first and always the same: requests here may refer to each other (/v1/responses/ID), and the turns of the
        # orchestrated ones stay theirs.
        leg = Leg("decode", self.config.decode[0], f"{self.request_id}-d")
        self.legs.append(leg)
        method = self.request.method
        with self.timed("decode"):
            return await self.stages.upstreams.open(method, leg, target, headers, raw or None)

    async def _check(self, raw: bytes) -> None:
        """The media policy, for any API: no server shall fetch through us what it must not fetch for a chat request. Media pass the
        encode servers by, and the answer says so."""
        if b'"' not in raw or b":" not in raw:
            return
        try:
            value = json.loads(raw)
        except (ValueError, RecursionError):
            # No server can read it as JSON either.
            return
        for url in urls_in(value):
            await self.route.policy.check_url(url)
        if self.config.encode and holds_media(value):
            self.bypassed = f"encode: {self.request.url.path} is not disaggregated"
            self.metrics.bypasses.labels("other api").inc()

    async def hand_on(self, answer: Answer) -> None:
        headers = answer.headers
        named = {name.lower() for name, _ in headers}
        skipped = HOP_BY_HOP | {"content-encoding", "date", "server"}
        kept = [(name.lower(), value) for name, value in headers if name.lower() not in skipped]
        if "content-length" in named and "content-encoding" not in named:
            kept += [("content-length", value) for name, value in headers if name.lower() == "content-length"]
        assert answer.leg.status is not None
        await self.head(answer.leg.status, kept, None)
        # It may be a stream of any form, so an end that comes too early can only be shown by breaking the connection.
        self.sent = "plain head"
        async for chunk in answer.chunks():
            await self.send(chunk, more=True)
        await self.send(b"")


class Endpoint:
    """ASGI endpoint of one kind of request.

    Plain ASGI, because a client that goes away must end the work on its request in every stage, not only
    while a stream is being sent. `open` holds the tasks of the requests in flight, of all routes.
    """

    def __init__(
        self,
        name: str,
        path: str,
        kind: type[Exchange],
        stages: Stages,
        policy: MediaPolicy,
        open_: set[asyncio.Task[Any]],
    ) -> None:
        self.name = name
        self.path = path
        self.kind = kind
        self.stages = stages
        self.policy = policy
        self.open = open_
        self.fetcher: Fetcher | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        config = self.stages.config
        in_flight = self.stages.upstreams.metrics.requests_in_flight.labels(self.name)
        in_flight.inc()
        try:
            try:
                raw = await read_body(request, receive, config.max_body_bytes, config.timeout_s)
            except StageError as error:
                exchange = self.kind(self, request, send)
                await exchange.fail(error)
                exchange.ended()
                return
            if raw is not None:
                await self._serve(self.kind(self, request, send), raw, receive)
        finally:
            in_flight.dec()

    async def _serve(self, exchange: Exchange, raw: bytes, receive: Receive) -> None:
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
        exchange.ended()
        if not work.cancelled():
            work.result()
