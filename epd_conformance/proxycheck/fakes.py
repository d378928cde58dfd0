"""Fake encode, prefill and decode servers: they answer by `made`, fail as the plan says, and write down what they get.

Not vLLM, and named as what they are: the model that they list is called `fake-model`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from epd_conformance.errors import UsageError
from epd_conformance.proxycheck import made
from epd_conformance.proxycheck.evidence import Seen
from epd_conformance.proxycheck.plan import CHAT, COMPLETIONS, ROLES, Act, Plan, Role, Step

# vLLM's servers close a socket that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A request sent at that moment meets a closed
# connection; to hit the moment every time, a fake takes no request on a connection that was idle for a little less within a cell,
# and closes none by itself.
IDLE_LIMIT_S = 4.5
KEEP_ALIVE_S = 3600.0

# As much as a cell sends, and some: aiohttp's own limit is 1 MiB.
LARGEST_BODY = 64 << 20

#: Where a request is written down: a new list for each cell.
Place = tuple[list[Seen], int]


class Fake:
    """One server. Everything in it runs in one event loop."""

    def __init__(self, name: str, port: int, ground: Ground) -> None:
        self.name = name
        self.role, _, number = name.partition("-")
        self.number = int(number)
        self.ground = ground
        self.port = port
        self._runner: web.AppRunner | None = None
        self._site: web.SockSite | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Raises UsageError where the port is taken."""
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=KEEP_ALIVE_S, access_log=None, shutdown_timeout=0.2
        )
        await self._runner.setup()
        await self.listen()

    async def listen(self) -> None:
        """Take connections."""
        assert self._runner is not None, "started before"
        try:
            listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        except OSError as error:
            raise UsageError(
                f"{self.name} cannot listen on port {self.port} ({error.strerror}): name another port"
            ) from None
        self.port = listener.getsockname()[1]
        self._site = web.SockSite(self._runner, listener)
        await self._site.start()

    async def hide(self) -> None:
        """Take no connections any more, and close those that are open: the server is down."""
        assert self._runner is not None and self._runner.server is not None, "started before"
        if self._site is not None:
            site, self._site = self._site, None
            await site.stop()
        for connection in list(self._runner.server.connections):
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        ground = self.ground
        if request.path.startswith("/media/"):
            content = ground.media.get(request.path.removeprefix("/media/"))
            return web.Response(text=content or "", status=404 if content is None else 200, content_type="image/png")
        if request.path == "/health":
            return web.json_response({}, status=503 if self.role in ground.ill else 200)
        if time.monotonic() - ground.idle_since.get(request.transport, time.monotonic()) > IDLE_LIMIT_S:
            # As if the close had crossed the request on its way: the server never read it.
            return self._cut(request)
        raw = await request.read()
        place = ground.book(self.name, request, raw)
        try:
            return await self._answer(request, raw, place)
        except (asyncio.CancelledError, ConnectionResetError):
            ground.change(place, ended=ground.now(), abandoned=True)
            raise
        finally:
            if request.transport is not None:
                ground.idle_since[request.transport] = time.monotonic()

    @staticmethod
    def _cut(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _answer(self, request: web.Request, raw: bytes, place: Place) -> web.StreamResponse:
        ground = self.ground
        act = ground.act(self, raw.decode(errors="replace"))
        if act.end == "never":
            await asyncio.Event().wait()
        await asyncio.sleep(act.wait_s)
        if act.end == "hang-up":
            ground.change(place, ended=ground.now())
            return self._cut(request)
        status, body, told = self._made(request, raw, act)
        streamed = isinstance(body, list)
        pieces: list[bytes] = body if isinstance(body, list) else [json.dumps(body).encode()]
        if act.end == "short":
            pieces = pieces[:-1]
        elif act.end in ("cut", "silent"):
            # Of a stream two events, of anything else a half.
            pieces = pieces[:2] if streamed else [pieces[0][: len(pieces[0]) // 2]]
        response = web.StreamResponse(status=status)
        response.content_type = "text/event-stream" if streamed else "application/json"
        if streamed or act.end in ("cut", "silent"):
            response.enable_chunked_encoding()
        else:
            response.content_length = len(pieces[0])
        await response.prepare(request)
        ground.change(place, status=status, told=told, head=ground.now())
        for piece in pieces:
            await response.write(piece)
            if streamed:
                # Otherwise all events would arrive as one.
                await asyncio.sleep(0)
        if act.end == "silent":
            await asyncio.Event().wait()
        if act.end == "cut":
            # The pieces are sent before the connection is broken.
            await asyncio.sleep(0.02)
            ground.change(place, ended=ground.now())
            return self._cut(request)
        await response.write_eof()
        ground.change(place, ended=ground.now())
        return response

    def _made(self, request: web.Request, raw: bytes, act: Act) -> tuple[int, Any, Any]:
        """Status, body (a list of pieces for a stream), and the connector's parameters in it."""
        if act.status != 200:
            error = {"message": act.reason, "type": "FakeError", "code": act.status}
            return act.status, {"error": error}, None
        if request.path == "/v1/models":
            return 200, made.MODELS, None
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError):
            return 400, {"error": {"message": "the body is no JSON", "code": 400}}, None
        if request.path == "/tokenize":
            return 200, made.tokenized(body), None
        path = request.path if request.path in (CHAT, COMPLETIONS) else ""
        if not path:
            return 200, {"object": "fake", "path": request.path, "digest": made.digest(body)}, None
        try:
            whole = made.answer(body, path, self.ground.content, request.headers.get("X-Request-Id", ""))
        except made.Refused as refused:
            return refused.status, {"error": {"message": str(refused), "code": refused.status}}, None
        told = self._told(body, path, act, whole["id"])
        if told:
            whole |= told
        return 200, made.events(body, path, whole) if body.get("stream") is True else whole, told

    def _told(self, body: Mapping[str, Any], path: str, act: Act, request_id: str) -> dict[str, Any] | None:
        """What the connectors of a real server of this role would add to the answer."""
        content = self.ground.content
        asked = body.get("kv_transfer_params")
        if self.role == "prefill" and isinstance(asked, dict) and asked.get("do_remote_decode") is True:
            key = made.digest([made.prompt(body, path, content), request_id])
            params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": key}
            return {"kv_transfer_params": {**params, "remote_block_ids": [1, 2], "remote_host": self.name}}
        if self.role == "encode" and act.reports:
            found = {}
            for number, item in enumerate(made.items(body)):
                if act.reported in json.dumps(item.part):
                    grid = item.content(content)
                    metadata = {made.GRID: [grid]}
                    found[made.digest(grid)] = {
                        "item_indices": [number],
                        "metadata": metadata,
                        "peer_host": self.name,
                    }
            return {"ec_transfer_params": found}
        return None


class Ground:
    """What all fakes share: the plan, the media that they serve, and what they have seen."""

    def __init__(self) -> None:
        self.acts: tuple[Act, ...] = ()
        self.media: dict[str, str] = {}
        self.ill: tuple[Role, ...] = ()
        self.seen: list[Seen] = []
        self.began = time.monotonic()
        # When the last answer of this cell on a connection ended.
        self.idle_since: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
        self.host = ""
        self._uuids: dict[str, str] = {}
        self._news = asyncio.Event()

    def begin(self, plan: Plan) -> None:
        """Forget the cell before."""
        self.acts = plan.acts
        self.media, self.ill = {}, ()
        self.seen = []
        self._uuids = {}
        self.idle_since.clear()
        self.began = time.monotonic()

    def step(self, step: Step) -> None:
        self.media.update(step.media)
        self.ill = step.ill

    def now(self) -> float:
        """Seconds since the cell began."""
        return round(time.monotonic() - self.began, 4)

    def content(self, url: str, uuid: str | None) -> str:
        """The content behind a URL: what the fakes serve there, else the URL itself. As with vLLM, an item that has the `uuid` of
        one before is taken for that one, whatever it holds."""
        if url.startswith(f"{self.host}/media/"):
            url = self.media.get(url.removeprefix(f"{self.host}/media/"), url)
        return url if uuid is None else self._uuids.setdefault(uuid, url)

    def act(self, fake: Fake, body: str) -> Act:
        """What a fake does with a request."""
        for act in self.acts:
            if act.role == fake.role and act.holding in body and act.server in (None, fake.number):
                return act
        return Act(role=next(role for role in ROLES if role == fake.role))

    def book(self, server: str, request: web.Request, raw: bytes) -> Place:
        """Write a request down; returns its place."""
        try:
            body = json.loads(raw) if raw else None
        except (ValueError, RecursionError):
            body = raw.decode(errors="replace")
        request_id = request.headers.get("X-Request-Id", "")
        self.seen.append(Seen(server, self.now(), request.method, request.path, request_id, body))
        news, self._news = self._news, asyncio.Event()
        news.set()
        return self.seen, len(self.seen) - 1

    @staticmethod
    def change(place: Place, **changed: Any) -> None:
        """Write down how it went on; also of a request of a cell that is over."""
        seen, index = place
        seen[index] = replace(seen[index], **changed)

    async def until(self, role: str, texts: Sequence[str]) -> None:
        """Wait until a server of a role has a request with one of these texts in it."""
        while not any(seen.role == role and any(text in str(seen.body) for text in texts) for seen in self.seen):
            await self._news.wait()


@contextlib.asynccontextmanager
async def serving(names_and_ports: Mapping[str, int]) -> AsyncIterator[tuple[Ground, dict[str, Fake]]]:
    """Fakes of these names on these ports (0: a free one). Raises UsageError where a port is taken."""
    ground = Ground()
    fakes = {name: Fake(name, port, ground) for name, port in names_and_ports.items()}
    try:
        for fake in fakes.values():
            await fake.start()
        # By a name of its own, so that a proxy can be told to let clients name this host and no other of the machine.
        ground.host = f"http://localhost:{next(iter(fakes.values())).port}"
        yield ground, fakes
    finally:
        for fake in fakes.values():
            await fake.stop()
