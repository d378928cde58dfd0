"""Sends one request and keeps what came back, as evidence. Decides nothing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import requests

from epd_conformance.oracle.answers import Answer, from_completion, read_logprobs
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
) -> Answer:
    """Send a request to a server or proxy; never raises for what the other side does.

    `salt` replaces the request's own `cache_salt`; `overrides` are laid over the body (None removes a field).
    """
    body = request.body(SERVED_NAME, salt)
    for name, value in (overrides or {}).items():
        if value is None:
            body.pop(name, None)
        else:
            body[name] = value
    started = time.time()
    clock = time.monotonic()
    try:
        response = requests.post(
            f"{base_url}/v1/chat/completions",
            json=body,
            headers={"X-Request-Id": request_id},
            timeout=DEADLINE_S,
            stream=bool(body.get("stream")),
        )
        answer = _read(request, request_id, response, bool(body.get("stream")))
    except requests.RequestException as error:
        answer = Answer(request.label, request_id, 0, error=f"{type(error).__name__}: {error}"[:1000])
    return replace(answer, started=started, seconds=time.monotonic() - clock, streamed=bool(body.get("stream")))


def _read(request: Request, request_id: str, response: requests.Response, stream: bool) -> Answer:
    if response.status_code != 200:
        return Answer(request.label, request_id, response.status_code, body=response.text[:20000])
    if not stream:
        try:
            return from_completion(request.label, request_id, response.json())
        except ValueError:
            return Answer(request.label, request_id, 200, error="the body is no JSON", body=response.text[:20000])
    return _read_stream(request, request_id, response)


def _read_stream(request: Request, request_id: str, response: requests.Response) -> Answer:
    """Put a server-sent stream together; an error event or a missing `[DONE]` makes it an error."""
    ids: list[int] = []
    prompt: list[int] = []
    content: list[dict[str, Any]] = []
    finish = None
    done = False
    for raw in response.iter_lines():
        if not raw.startswith(b"data:"):
            continue
        data = raw[5:].strip()
        if data == b"[DONE]":
            done = True
            break
        event = json.loads(data)
        if "error" in event:
            return Answer(request.label, request_id, 200, error=f"the stream broke: {event['error']}"[:1000])
        if event.get("prompt_token_ids"):
            prompt = event["prompt_token_ids"]
        for choice in event.get("choices") or ():
            ids += choice.get("token_ids") or ()
            content += (choice.get("logprobs") or {}).get("content") or ()
            finish = choice.get("finish_reason") or finish
    logprobs, margins = read_logprobs(content)
    error = None if done else "the stream ended without [DONE]"
    if done and not (ids and prompt):
        error = "the stream holds no token ids"
    return Answer(
        label=request.label,
        request_id=request_id,
        status=200,
        prompt_ids=tuple(prompt),
        ids=tuple(ids),
        logprobs=logprobs,
        margins=margins,
        finish_reason=finish,
        error=error,
    )
