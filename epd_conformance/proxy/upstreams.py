"""The servers behind the proxy: whose turn it is, one pooled client for all, and how failures are told."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

import aiohttp

Stage = Literal["encode", "prefill", "decode"]

CHAT_PATH = "/v1/chat/completions"

# vLLM's servers close a socket that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE and uvicorn's own
# default). A request sent at that moment fails without a line in any log. With 3 s both event loops may lag
# by 2 s together.
KEEP_ALIVE_S = 3.0

# A vLLM front end answers /health from its event loop in milliseconds; 5 s bridges a burst of image decoding
# on a small machine, and is short enough for a prober that asks every 10 s.
HEALTH_TIMEOUT_S = 5.0


class StageError(Exception):
    """A stage did not do its work; holds all that the client is told.

    `code` is the HTTP status for the client: the upstream's own when it refused (>= 400), 504 when it was
    silent too long, 502 for everything else that went wrong with it, 400 for a bad request and 500 for a
    fault of the proxy (both with stage "proxy").
    """

    def __init__(
        self,
        message: str,
        *,
        code: int,
        stage: Stage | Literal["proxy"],
        upstream: str | None = None,
        upstream_status: int | None = None,
        upstream_body: Any = None,
        item: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.stage = stage
        self.upstream = upstream
        self.upstream_status = upstream_status
        self.upstream_body = upstream_body
        self.item = item

    def envelope(self, request_id: str) -> dict[str, Any]:
        """The JSON body that the client gets."""
        return {
            "error": {
                "message": str(self),
                "type": "epd_stage_error",
                "stage": self.stage,
                "upstream": self.upstream,
                "upstream_status": self.upstream_status,
                "upstream_body": self.upstream_body,
                "request_id": request_id,
                "item": self.item,
                "code": self.code,
            }
        }


@dataclass
class Leg:
    """One request to one upstream; `status` is None until the head of its answer came."""

    stage: Stage
    upstream: str
    request_id: str
    item: int | None = None
    status: int | None = None

    def error(self, what: str, *, code: int, body: Any = None) -> StageError:
        """A StageError about this leg; `what` continues the sentence that begins with stage and address."""
        about = "" if self.item is None else f" (media item {self.item})"
        return StageError(
            f"{self.stage} server {self.upstream} {what}{about}",
            code=code,
            stage=self.stage,
            upstream=self.upstream,
            upstream_status=self.status,
            upstream_body=body,
            item=self.item,
        )


class Answer:
    """An upstream's answer whose head has arrived. Whoever holds it must call `close`."""

    def __init__(self, leg: Leg, response: Any, timeout_s: float) -> None:
        self.leg = leg
        self._response = response
        self._timeout_s = timeout_s

    @property
    def content_type(self) -> str:
        """The Content-Type header as the upstream sent it."""
        return str(self._response.headers.get("Content-Type", "application/octet-stream"))

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as it arrives. Raises StageError where it breaks off or falls silent."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except TimeoutError:
            raise self.leg.error(
                f"fell silent for {self._timeout_s:g} s in the middle of its answer", code=504
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self.leg.error(f"broke off in the middle of its answer ({type(error).__name__})", code=502) from error

    async def read(self) -> bytes:
        """The whole body. Raises StageError as `chunks` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def json_object(self) -> dict[str, Any]:
        """The body as a JSON object. Raises StageError (502) where it is something else."""
        raw = await self.read()
        value = _parsed(raw)
        if not isinstance(value, dict):
            raise self.leg.error("answered 200 with a body that is no JSON object", code=502, body=value)
        return value

    def close(self) -> None:
        """Gives the connection back to the pool, or closes it where the answer was not read to its end."""
        self._response.release()


def _parsed(raw: bytes) -> Any:
    """JSON where it is JSON, else text."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return raw.decode(errors="replace")


class Upstreams:
    """The servers of a stack by role, and the pooled client to reach them.

    In `e-pd` `prefill` is empty and `decode` holds the prefill+decode servers; in `p-d` `encode` is empty.
    Addresses are base URLs without a trailing slash. `timeout_s` bounds every silence: until an answer's
    head, and between two pieces of its body. Use as an async context manager, inside the event loop that
    makes the requests. Nothing is ever sent twice: a retry would hide the fault that the harness looks for.
    """

    def __init__(self, encode: list[str], prefill: list[str], decode: list[str], timeout_s: float) -> None:
        self.urls: dict[Stage, list[str]] = {"encode": encode, "prefill": prefill, "decode": decode}
        self.timeout_s = timeout_s
        # One cursor a role for the life of the proxy, so that requests with one item each use all encode
        # servers too. `next` on a C iterator is one step for the interpreter: no two tasks or threads get the
        # same turn.
        self._turns: dict[Stage, itertools.cycle[str]] = {
            role: itertools.cycle(urls) for role, urls in self.urls.items()
        }
        self._session: Any = None

    async def __aenter__(self) -> Upstreams:
        self._session = aiohttp.ClientSession(
            # limit=0: the client decides how much is in flight; a wait for a free socket inside the proxy
            # would count as the upstream's silence.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_read=self.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            # What arrives is handed on as it is, so it must not be compressed for us alone.
            headers={"Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    def next_url(self, role: Stage) -> str:
        """The server of this role whose turn it is (round-robin over the life of the proxy)."""
        return next(self._turns[role])

    async def post(self, leg: Leg, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """Sends one chat request, the leg's id as X-Request-Id, and waits for the head of the answer.

        Raises StageError for any status but 200, an unreachable server, and silence longer than `timeout_s`.
        """
        return await self._open("POST", leg, CHAT_PATH, headers, json.dumps(body).encode())

    async def get(self, leg: Leg, path: str, headers: dict[str, str]) -> Answer:
        """As `post`, for a GET of `path`."""
        return await self._open("GET", leg, path, headers, None)

    async def _open(self, method: str, leg: Leg, path: str, headers: dict[str, str], data: bytes | None) -> Answer:
        headers = {**headers, "X-Request-Id": leg.request_id}
        if data is not None:
            headers["Content-Type"] = "application/json"
        try:
            # `sock_read` starts only when the request is sent; this also bounds connecting and a peer that
            # does not read.
            async with asyncio.timeout(self.timeout_s):
                response = await self._session.request(
                    method, leg.upstream + path, data=data, headers=headers, allow_redirects=False
                )
        except TimeoutError:
            raise leg.error(f"gave no answer within {self.timeout_s:g} s", code=504) from None
        except aiohttp.ClientConnectorError as error:
            raise leg.error(f"cannot be reached ({error.strerror or error})", code=502) from error
        except (aiohttp.ClientError, OSError) as error:
            raise leg.error(f"hung up before it answered ({type(error).__name__})", code=502) from error
        leg.status = response.status
        answer = Answer(leg, response, self.timeout_s)
        if response.status == 200:
            return answer
        try:
            refusal = _parsed(await answer.read())
        except StageError:
            # The status is the news; what its body would have said is lost with the connection.
            refusal = None
        finally:
            answer.close()
        raise leg.error(
            f"answered {response.status}",
            code=response.status if response.status >= 400 else 502,
            body=refusal,
        )

    async def health(self) -> dict[Stage, list[dict[str, Any]]]:
        """Asks every server's /health at once: for each role a list of {url, healthy, status, error, ms}."""

        async def probe(url: str) -> dict[str, Any]:
            start = time.perf_counter()
            status: int | None = None
            error: str | None = None
            try:
                async with (
                    asyncio.timeout(HEALTH_TIMEOUT_S),
                    self._session.get(f"{url}/health", allow_redirects=False) as response,
                ):
                    status = response.status
            except TimeoutError:
                error = f"no answer within {HEALTH_TIMEOUT_S:g} s"
            except (aiohttp.ClientError, OSError) as problem:
                error = str(problem)
            return {
                "url": url,
                "healthy": status == 200,
                "status": status,
                "error": error,
                "ms": round((time.perf_counter() - start) * 1000, 1),
            }

        pairs = [(role, url) for role, urls in self.urls.items() for url in urls]
        answers = await asyncio.gather(*(probe(url) for _, url in pairs))
        report: dict[Stage, list[dict[str, Any]]] = {role: [] for role in self.urls}
        for (role, _), answer in zip(pairs, answers, strict=True):
            report[role].append(answer)
        return report
