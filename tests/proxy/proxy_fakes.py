"""Made-up servers for the proxy's tests: they record what they get and fail on demand."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send


class _Server(uvicorn.Server):
    """Remembers its event loop, so that a test can count the tasks in it."""

    loop: asyncio.AbstractEventLoop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)


class Running:
    """Serves an ASGI app from a thread on a free port, at `url`."""

    def __init__(self, app: Any, **settings: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1, **settings)
        self.server = _Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()

    def wait_until_started(self) -> None:
        wait_for(lambda: self.server.started, "the server to start")


def stop_all(servers: list[Running]) -> None:
    """Stops servers together: uvicorn looks at its exit flag ten times a second, one by one would add up."""
    for running in servers:
        running.server.should_exit = True
    for running in servers:
        running.thread.join(5)
        assert not running.thread.is_alive()


@contextmanager
def one_server(app: Any) -> Iterator[str]:
    """One running server; yields its URL."""
    running = Running(app)
    try:
        running.wait_until_started()
        yield running.url
    finally:
        stop_all([running])


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 5.0) -> None:
    """Polls until the condition holds; fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.01)


def closed_port_url() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def hanging_up() -> Iterator[str]:
    """A server that reads a request and closes the connection without a word; yields its URL."""

    def serve(listener: socket.socket) -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # Closing alone does not wake up who waits in accept.
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)


@dataclass
class Seen:
    """One request that a fake received."""

    body: Any
    headers: dict[str, str]
    port: int
    at: float
    raw: bytes = b""
    method: str = "POST"
    path: str = "/v1/chat/completions"
    query: str = ""


@dataclass
class Fake:
    """A fake server of one role. `reply` decides about each request; `peak` is the most it had at a time."""

    url: str = ""
    seen: list[Seen] = field(default_factory=list)
    abandoned: int = 0
    flying: int = 0
    peak: int = 0
    healthy: bool = True
    reply: Callable[[Seen], Reply] = field(default_factory=lambda: lambda seen: Reply())

    def app(self) -> Starlette:
        """The fake as an ASGI app."""

        async def health(_: Request) -> JSONResponse:
            return JSONResponse({}, 200 if self.healthy else 503)

        async def models(request: Request) -> JSONResponse:
            return JSONResponse({"object": "list", "auth": request.headers.get("authorization")})

        return Starlette(
            routes=[
                Route("/v1/chat/completions", _FakeChat(self), methods=["POST"]),
                Route("/v1/models", models),
                Route("/health", health),
                Mount("/", _FakeChat(self)),
            ]
        )

    @property
    def ids(self) -> list[str]:
        return [seen.headers["x-request-id"] for seen in self.seen]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [seen.body for seen in self.seen]


@dataclass
class Reply:
    """What a fake does: waits, then answers.

    `chunks` are sent one by one with `pause_s` between; without them `body` is sent whole. `hang` never answers,
    `hang_after` never ends the answer, `breaks` cuts the connection instead of ending the answer.
    """

    status: int = 200
    body: Any = None
    content_type: str = "application/json"
    location: str | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    chunks: list[bytes] | None = None
    wait_until: Callable[[], bool] = lambda: True
    wait_s: float = 0.0
    pause_s: float = 0.0
    breaks: bool = False
    hang: bool = False
    hang_after: bool = False


class _Cut(Exception):
    """Makes the fake's server cut the connection."""


class _FakeChat:
    def __init__(self, fake: Fake) -> None:
        self.fake = fake

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        raw = await request.body()
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        path = scope["raw_path"].decode()
        query = scope["query_string"].decode()
        seen = Seen(body, dict(request.headers), scope["client"][1], time.monotonic(), raw, request.method, path, query)
        self.fake.seen.append(seen)
        self.fake.flying += 1
        self.fake.peak = max(self.fake.peak, self.fake.flying)
        landed = False

        def land() -> None:
            nonlocal landed
            self.fake.flying -= not landed
            landed = True

        work = asyncio.create_task(self._answer(self.fake.reply(seen), send, land))
        gone = asyncio.create_task(self._gone(receive))
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            self.fake.abandoned += 1
            work.cancel()
        gone.cancel()
        await asyncio.wait({work, gone})
        land()
        if not work.cancelled():
            work.result()

    @staticmethod
    async def _gone(receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    @staticmethod
    async def _answer(reply: Reply, send: Send, land: Callable[[], None]) -> None:
        if reply.hang:
            await asyncio.Event().wait()
        while not reply.wait_until():
            await asyncio.sleep(0.01)
        await asyncio.sleep(reply.wait_s)
        headers = [(b"content-type", reply.content_type.encode()), *reply.headers]
        if reply.location:
            headers.append((b"location", reply.location.encode()))
        whole = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body or {}).encode()
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        for chunk in reply.chunks if reply.chunks is not None else [whole]:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await asyncio.sleep(reply.pause_s)
        if reply.hang_after:
            await asyncio.Event().wait()
        if reply.breaks:
            raise _Cut
        # Before the last byte: once a proxy has that, it may well send its next request before this task goes on.
        land()
        await send({"type": "http.response.body", "body": b""})


def sse(*values: Any, done: bool = True) -> list[bytes]:
    """Values as server-sent events, one chunk each, as vLLM frames them."""
    events = [f"data: {json.dumps(value)}\n\n".encode() for value in values]
    return [*events, b"data: [DONE]\n\n"] if done else events


def stream_reply(*values: Any, **settings: Any) -> Reply:
    """A well-formed stream of these values."""
    return Reply(content_type="text/event-stream; charset=utf-8", chunks=sse(*values), **settings)


def image(name: str, **extra: Any) -> dict[str, Any]:
    """A media part; the name stands in for the picture."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}, **extra}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    """A chat request with one user message."""
    return {"model": "tiny", "messages": [{"role": "user", "content": list(parts)}], **fields}
