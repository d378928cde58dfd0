"""Sends one request and keeps what came back, as evidence. Decides nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import requests

from epd_conformance.live import http
from epd_conformance.oracle.answers import NO_IDS, TOLD, Answer, from_completion, read_ids, read_logprobs
from epd_conformance.plans.plan import Request
from epd_conformance.topology.stack import SERVED_NAME

# A request of a cell takes a tenth of a second on CPU; one that takes this long hangs, and hanging is a finding.
DEADLINE_S = 120.0


def send(
    base_url: str,
    request: Request,
    request_id: str,
    *,
    salt: str | None = None,
    overrides: dict[str, Any] | None = None,
    model: str = SERVED_NAME,
    begun: Callable[[], None] = lambda: None,
) -> Answer:
    """Send a request to a server or proxy; never raises for what the other side does.

    `salt` replaces the request's own `cache_salt`; `overrides` are laid over the body (None removes a field). `model` is what
    the other side calls it (`Stack.served_name`). `begun` is called when the answer's `started` is fixed, right before it is sent.
    """
    body = request.body(model, salt)
    for name, value in (overrides or {}).items():
        if value is None:
            body.pop(name, None)
        else:
            body[name] = value
    stream = bool(body.get("stream"))
    started = time.time()
    clock = time.monotonic()
    begun()
    try:
        # Read piece by piece in both cases: the timeout of `requests` starts anew with every piece.
        with http.post(
            f"{base_url}/v1/chat/completions",
            json=body,
            headers={"X-Request-Id": request_id},
            timeout=DEADLINE_S,
            stream=True,
        ) as response:
            answer = _read(request, request_id, response, stream, clock + DEADLINE_S)
    except (requests.RequestException, TimeoutError) as error:
        answer = Answer(request.label, request_id, 0, error=f"{type(error).__name__}: {error}"[:1000])
    return replace(answer, started=started, seconds=time.monotonic() - clock, streamed=stream)


def _read(request: Request, request_id: str, response: requests.Response, stream: bool, deadline: float) -> Answer:
    if response.status_code == 200 and stream:
        return _read_stream(request, request_id, response, deadline)
    text = b"".join(_pieces(response, deadline)).decode("utf-8", errors="replace")
    if response.status_code != 200:
        return Answer(request.label, request_id, response.status_code, body=text[:20000])
    try:
        return from_completion(request.label, request_id, json.loads(text))
    except ValueError as error:
        return Answer(
            request.label, request_id, 200, error=f"the body cannot be read: {error}"[:1000], body=text[:20000]
        )


def _pieces(response: requests.Response, deadline: float) -> Iterator[bytes]:
    # Chunks as they come, as every server here sends a stream; without chunks a read waits until it is full or the end is
    # there, so it must be small for the deadline to be looked at.
    for piece in response.iter_content(None if response.headers.get("Transfer-Encoding") == "chunked" else 256):
        yield piece
        if time.monotonic() > deadline:
            raise TimeoutError(f"no end of the answer within {DEADLINE_S:g} s")


def _lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Whole lines; what a stream breaks off within is none."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _read_stream(request: Request, request_id: str, response: requests.Response, deadline: float) -> Answer:
    """Put a server-sent stream together; an error event, an event of another form or a missing `[DONE]` makes it an error."""
    ids: list[int] = []
    asked = False
    prompt: tuple[int, ...] = ()
    content: list[dict[str, Any]] = []
    finish = None
    error: str | None = "the stream ended without [DONE]"
    try:
        for raw in _lines(_pieces(response, deadline)):
            if not raw.startswith(b"data:"):
                continue
            data = raw[5:].strip()
            if data == b"[DONE]":
                error = None if asked and prompt else NO_IDS
                break
            event = json.loads(data)
            if "error" in event:
                error = f"{TOLD}{event['error']}"[:1000]
                break
            prompt = read_ids(event.get("prompt_token_ids")) or prompt
            for choice in event.get("choices") or ():
                asked = asked or choice.get("token_ids") is not None
                ids += read_ids(choice.get("token_ids"))
                content += (choice.get("logprobs") or {}).get("content") or ()
                finish = choice.get("finish_reason") or finish
        logprobs, margins = read_logprobs(content)
    except (ValueError, TypeError, KeyError, AttributeError) as wrong:
        return Answer(request.label, request_id, 200, error=f"an event of the stream is none: {wrong!r}"[:1000])
    except requests.RequestException as broke:
        return Answer(request.label, request_id, 200, error=f"the stream broke: {broke}"[:1000])
    return Answer(
        label=request.label,
        request_id=request_id,
        status=200,
        prompt_ids=prompt,
        ids=tuple(ids),
        logprobs=logprobs,
        margins=margins,
        finish_reason=finish,
        error=error,
    )
