"""The proxy's HTTP face: routes, health, metrics, and the process that serves them."""

from __future__ import annotations

import asyncio
import importlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from epd_conformance.errors import UsageError
from epd_conformance.proxy.config import ProxyConfig, make_config
from epd_conformance.proxy.exchange import (
    COMPLETIONS_PATH,
    LEGS_HEADER_BYTES,
    Endpoint,
    Generation,
    PassThrough,
    forwarded_headers,
    request_id_of,
)
from epd_conformance.proxy.metrics import CONTENT_TYPE
from epd_conformance.proxy.policy import MediaPolicy
from epd_conformance.proxy.stages import Stages
from epd_conformance.proxy.upstreams import CHAT_PATH, Leg, StageError, Upstreams

__all__ = ["LEGS_HEADER_BYTES", "ProxyConfig", "create_app", "load_stages", "make_config", "serve"]

log = logging.getLogger(__name__)

# Longer than the usual clients keep an idle socket (httpx 5 s, aiohttp 15 s), so that it is always they who
# close first.
CLIENT_KEEP_ALIVE_S = 30

# Time that open requests have after SIGTERM; with uvicorn's 0.1 s tick and the closing of sockets the process
# ends in 2 s.
GRACE_S = 1

# Then they are told that the proxy was stopped; a client that does not even read that is not waited for.
LAST_WORDS_S = 0.3


def create_app(config: ProxyConfig, stages_factory: Callable[[Upstreams], Stages] = Stages) -> Starlette:
    """The proxy as an ASGI application; its upstream connections live from lifespan start to lifespan end.

    `stages_factory` is `Stages` or a subclass of it.
    """
    upstreams = Upstreams(config)
    stages = stages_factory(upstreams)
    policy = MediaPolicy(config)
    open_: set[asyncio.Task[Any]] = set()
    chat = Endpoint("chat", CHAT_PATH, Generation, stages, policy, open_)
    completions = Endpoint("completions", COMPLETIONS_PATH, Generation, stages, policy, open_)
    other = Endpoint("other", "", PassThrough, stages, policy, open_)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(upstreams)
            if config.media_fetch:
                chat.fetcher = await stack.enter_async_context(policy.fetcher())
            yield
            if open_:
                # Lets the requests that the server has cancelled say so to their clients.
                await asyncio.wait(open_, timeout=LAST_WORDS_S)

    async def models(request: Request) -> Response:
        request_id = request_id_of(request)
        # Every decode server serves the same models; asking the first leaves the turns of the chat requests
        # alone.
        leg = Leg("decode", config.decode[0], request_id)
        try:
            answer = await upstreams.get(leg, "/v1/models", forwarded_headers(request))
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

    async def metrics(_: Request) -> Response:
        text = upstreams.metrics.render(await upstreams.health())
        return Response(text, headers={"Content-Type": CONTENT_TYPE})

    async def no_route(request: Request, error: Exception) -> Response:
        code = error.status_code if isinstance(error, HTTPException) else 500
        request_id = request_id_of(request)
        what = f"{request.method} {request.url.path}: no such route; see POST {CHAT_PATH}"
        failure = StageError(what, code=code, stage="proxy")
        headers = dict(getattr(error, "headers", None) or {}) | {"X-Request-Id": request_id}
        return JSONResponse(failure.envelope(request_id), code, headers)

    own = [
        Route(CHAT_PATH, chat, methods=["POST"]),
        Route(COMPLETIONS_PATH, completions, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    return Starlette(
        # The first that fits serves: own routes, then their paths with another method, then everything else.
        routes=[*own, *(Route(route.path, _WrongMethod(route)) for route in own), Mount("/", other)],
        exception_handlers={HTTPException: no_route},
        lifespan=lifespan,
    )


class _WrongMethod:
    """ASGI endpoint of an own route's path for all other methods; Starlette lets an endpoint that is no function have any."""

    def __init__(self, route: Route) -> None:
        self._allowed = ", ".join(sorted(route.methods or ()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise HTTPException(405, headers={"Allow": self._allowed})


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
