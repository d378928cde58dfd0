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
import xxhash
from yarl import URL

from epd_conformance.proxy.config import ProxyConfig
from epd_conformance.proxy.metrics import Metrics

Stage = Literal["encode", "prefill", "decode"]

# What went wrong with a leg, for the metrics and for who decides about sending it again.
Kind = Literal["refused", "unreachable", "hung-up", "silent", "broken", "malformed"]

CHAT_PATH = "/v1/chat/completions"

# vLLM's servers close a socket that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE and uvicorn's own
# default). A request sent at that moment fails without a line in any log. With 3 s both event loops may lag
# by 2 s together.
KEEP_ALIVE_S = 3.0

# Of an upstream's reason in our message; the whole of it is in `upstream_body`.
REASON_CHARACTERS = 300

# A vLLM front end answers /health from its event loop in milliseconds; 5 s bridges a burst of image decoding
# on a small machine, and is short enough for a prober that asks every 10 s.
HEALTH_TIMEOUT_S = 5.0


class StageError(Exception):
    """A stage did not do its work; holds all that the client is told.

    `code` is the HTTP status for the client: the upstream's own when it refused (>= 400), 504 when it was
    silent too long, 502 for everything else that went wrong with it, 4xx for a bad request and 500 for a
    fault of the proxy (both with stage "proxy"). `kind` is None where no upstream failed.
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
        kind: Kind | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.stage = stage
        self.upstream = upstream
        self.upstream_status = upstream_status
        self.upstream_body = upstream_body
        self.item = item
        self.kind = kind

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
    """One request to one upstream; `status` is None until the head of its answer came.

    `item` is the media item that an encode leg is about, the first of them where several share it.
    """

    stage: Stage
    upstream: str
    request_id: str
    item: int | None = None
    status: int | None = None

    def error(self, what: str, *, code: int, kind: Kind, body: Any = None) -> StageError:
        """A StageError about this leg; `what` continues the sentence that begins with stage and address."""
        about = "" if self.item is None else f" (media item {self.item})"
        said = _reason(body)
        return StageError(
            f"{self.stage} server {self.upstream} {what}{about}{f': {said}' if said else ''}",
            code=code,
            stage=self.stage,
            upstream=self.upstream,
            upstream_status=self.status,
            upstream_body=body,
            item=self.item,
            kind=kind,
        )


def _reason(body: Any) -> str:
    """What an upstream's error says, for the one line that most clients show of ours; empty where it says nothing readable."""
    error = body.get("error", body) if isinstance(body, dict) else body
    said = error.get("message") if isinstance(error, dict) else error
    return " ".join(said.split())[:REASON_CHARACTERS] if isinstance(said, str) else ""


class Answer:
    """An upstream's answer whose head has arrived. Whoever holds it must call `close`."""

    def __init__(self, leg: Leg, response: Any, upstreams: Upstreams) -> None:
        self.leg = leg
        self._response = response
        self._upstreams = upstreams
        self._ahead = b""
        self._open = True

    @property
    def content_type(self) -> str:
        """The Content-Type header as the upstream sent it."""
        return str(self._response.headers.get("Content-Type", "application/octet-stream"))

    @property
    def headers(self) -> list[tuple[str, str]]:
        """All headers of the answer."""
        return list(self._response.headers.items())

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of server-sent events."""
        return self.content_type.startswith("text/event-stream")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, piece by piece as it arrives. Raises StageError where it breaks off or falls silent."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            yield ahead
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except TimeoutError:
            raise self._failed(
                f"fell silent for {self._upstreams.timeout_s:g} s in the middle of its answer", 504, "silent"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._failed(
                f"broke off in the middle of its answer ({type(error).__name__})", 502, "broken"
            ) from error

    def _failed(self, what: str, code: int, kind: Kind, body: Any = None) -> StageError:
        self._upstreams.count_failure(self.leg, kind)
        return self.leg.error(what, code=code, kind=kind, body=body)

    async def refuse_stream_error(self) -> None:
        """Waits for the first piece of a stream; raises StageError where it is an error event, as vLLM sends one when the
        engine gives a request up that its front end has accepted. Reads nothing of other answers."""
        if not self.is_stream:
            return
        async for chunk in self.chunks():
            self._ahead = chunk
            break
        first, _, _ = self._ahead.partition(b"\n")
        event = parsed(first.removeprefix(b"data:"))
        error = event.get("error") if isinstance(event, dict) else None
        if error:
            code = error.get("code") if isinstance(error, dict) else None
            if not isinstance(code, int) or not 400 <= code <= 599:
                code = 502
            raise self._failed("began its stream with an error", code, "refused", event)

    async def read(self) -> bytes:
        """The whole body. Raises StageError as `chunks` does."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def json_object(self) -> dict[str, Any]:
        """The body as a JSON object. Raises StageError (502) where it is something else."""
        raw = await self.read()
        value = parsed(raw)
        if not isinstance(value, dict):
            raise self._failed("answered 200 with a body that is no JSON object", 502, "malformed", value)
        return value

    def close(self) -> None:
        """Gives the connection back to the pool, or closes it where the answer was not read to its end."""
        if self._open:
            self._open = False
            self._response.release()
            self._upstreams.leg_ended(self.leg)


def parsed(raw: bytes) -> Any:
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
    makes the requests. Nothing is sent twice here: whether to is decided by `Stages`.
    """

    def __init__(self, config: ProxyConfig, metrics: Metrics | None = None) -> None:
        self.config = config
        self.metrics = metrics or Metrics()
        self.urls: dict[Stage, list[str]] = {
            "encode": config.encode,
            "prefill": config.prefill,
            "decode": config.decode,
        }
        self.timeout_s = config.timeout_s
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

    def ranked(self, role: Stage, key: str) -> list[str]:
        """The servers of this role as `key` prefers them, always in the same order.

        Highest random weight: when a server is added or taken away, only the keys that prefer it move.
        """
        # A lone surrogate is legal in JSON and no UTF-8.
        text = key.encode("utf-8", "surrogatepass")
        digest = xxhash.xxh3_128_digest(text)
        return sorted(self.urls[role], key=lambda url: xxhash.xxh3_64_intdigest(url.encode() + digest), reverse=True)

    async def post(
        self, leg: Leg, body: dict[str, Any] | bytes, headers: dict[str, str], path: str = CHAT_PATH
    ) -> Answer:
        """Sends one request, the leg's id as X-Request-Id, and waits for the head of the answer.

        Raises StageError for any status but 200, an unreachable server, and silence longer than `timeout_s`.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._accepted("POST", leg, path, {**headers, "Content-Type": "application/json"}, data)

    async def get(self, leg: Leg, path: str, headers: dict[str, str]) -> Answer:
        """As `post`, for a GET of `path`."""
        return await self._accepted("GET", leg, path, headers, None)

    async def _accepted(self, method: str, leg: Leg, path: str, headers: dict[str, str], data: bytes | None) -> Answer:
        answer = await self.open(method, leg, path, headers, data)
        if leg.status == 200:
            return answer
        try:
            refusal = parsed(await answer.read())
        except StageError:
            # The status is the news; what its body would have said is lost with the connection.
            refusal = None
        finally:
            answer.close()
        assert leg.status is not None
        self.count_failure(leg, "refused")
        raise leg.error(
            f"answered {leg.status}", code=leg.status if leg.status >= 400 else 502, kind="refused", body=refusal
        )

    async def open(self, method: str, leg: Leg, target: str, headers: dict[str, str], data: bytes | None) -> Answer:
        """Sends a request to `target` (path and query, as they stand on the wire) and waits for the head of any answer."""
        # `sock_read` starts only when the request is sent; the timeout here also bounds connecting and a peer that does
        # not read.
        self.metrics.legs_in_flight.labels(leg.stage, leg.upstream).inc()
        response = None
        try:
            async with asyncio.timeout(self.timeout_s):
                response = await self._session.request(
                    method,
                    URL(leg.upstream + target, encoded=True),
                    data=data,
                    headers={**headers, "X-Request-Id": leg.request_id},
                    allow_redirects=False,
                )
            leg.status = response.status
            return Answer(leg, response, self)
        except TimeoutError:
            self.count_failure(leg, "silent")
            raise leg.error(f"gave no answer within {self.timeout_s:g} s", code=504, kind="silent") from None
        except aiohttp.ClientConnectorError as error:
            self.count_failure(leg, "unreachable")
            raise leg.error(f"cannot be reached ({error.strerror or error})", code=502, kind="unreachable") from error
        except (aiohttp.ClientError, OSError) as error:
            self.count_failure(leg, "hung-up")
            raise leg.error(f"hung up before it answered ({type(error).__name__})", code=502, kind="hung-up") from error
        finally:
            if response is None:
                self.leg_ended(leg)

    def leg_ended(self, leg: Leg) -> None:
        """Counts a leg that is over; status "none" where no answer came."""
        self.metrics.legs_in_flight.labels(leg.stage, leg.upstream).dec()
        self.metrics.legs.labels(leg.stage, leg.upstream, leg.status or "none").inc()

    def count_failure(self, leg: Leg, kind: Kind) -> None:
        """Counts a failure of an upstream."""
        self.metrics.failures.labels(leg.stage, leg.upstream, kind).inc()

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
