"""The clients of a plan: each sends one request to the proxy and writes down what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp

from epd_conformance.proxycheck.evidence import Got
from epd_conformance.proxycheck.fakes import Ground
from epd_conformance.proxycheck.plan import MEDIA_HOST, Send, marks

# A client that leaves waits so long for its request to reach the server it waits for.
REACH_S = 10.0

KEPT_HEADERS = ("content-type", "x-request-id")
# Any proxy's own way to say that a stage was left out.
BYPASS = "bypass"


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client whose every request has a connection of its own: closing it must not touch another request."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=True) as made:
        yield made


async def carry_out(send: Send, url: str, ground: Ground, client: aiohttp.ClientSession, longest_s: float) -> Got:
    """Send one request and wait for its end, at most `longest_s` seconds."""
    at = ground.now()
    request_id = f"epd-{send.label}" if send.named else ""
    found = _Answer()
    work = asyncio.create_task(_request(send, url, request_id, ground, client, found))
    waited = True
    end = ""
    if send.leaves:
        reached = asyncio.create_task(ground.until(send.leaves, marks(send)))
        await asyncio.wait({work, reached}, timeout=REACH_S, return_when=asyncio.FIRST_COMPLETED)
        waited = reached.done()
        reached.cancel()
        if not work.done():
            end = "left"
    else:
        await asyncio.wait({work}, timeout=longest_s)
        if not work.done():
            end = "timeout"
    if not work.done():
        work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        end = end or await work
    return Got(
        send.label,
        request_id,
        at,
        found.status,
        found.headers,
        b"".join(found.pieces).decode(errors="replace"),
        found.head,
        ground.now(),
        end,
        waited,
    )


class _Answer:
    """What has come of an answer so far."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.head: float | None = None


async def _request(
    send: Send, url: str, request_id: str, ground: Ground, client: aiohttp.ClientSession, found: _Answer
) -> str:
    headers = {"X-Request-Id": request_id} if request_id else {}
    data = None
    if send.method == "POST":
        headers["Content-Type"] = "application/json"
        data = send.content().replace(MEDIA_HOST.encode(), ground.host.encode())
    try:
        async with client.request(send.method, url + send.path, data=data, headers=headers) as answer:
            found.status, found.head = answer.status, ground.now()
            for name, value in answer.headers.items():
                if name.lower() in KEPT_HEADERS or BYPASS in name.lower():
                    found.headers[name.lower()] = value
            async for piece in answer.content.iter_any():
                found.pieces.append(piece)
    except (aiohttp.ClientError, OSError):
        return "refused" if found.status is None else "broken"
    return "whole"


async def answers(url: str, seconds: float) -> bool:
    """Whether somebody answers HTTP at an address, within so many seconds."""
    end = time.monotonic() + seconds
    async with session() as client:
        while True:
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(5), client.get(f"{url}/health"):
                    return True
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.1)
