"""Carries out the cells that ask a proxy on real servers more than whether an answer is right. Decides nothing.

What came back goes into the cell's facts as it is (`oracle.exchanges`), for the judges in `oracle.proxy_judges`.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import requests

from epd_conformance.live import client, faulting
from epd_conformance.live import http as plain_http
from epd_conformance.oracle.exchanges import DIRECT, PROXY, Exchange
from epd_conformance.oracle.proxy_judges import LEFT_S, LEFT_SLACK_S
from epd_conformance.plans.plan import Request
from epd_conformance.topology.spec import Role
from epd_conformance.topology.stack import Server

if TYPE_CHECKING:
    from epd_conformance.live.session import Runner

CHAT = "/v1/chat/completions"
# Until a server works on a request whose client is about to leave: the encode stage comes before, on a machine that may be busy.
WORKING_S = 60.0
# Of the headers of an answer, those that a judge may ask for.
_HEADERS = ("content-type", "x-request-id")


def exchange(
    base_url: str, to: str, label: str, *, path: str = CHAT, body: Any = None, rid: str | None = None
) -> Exchange:
    """Send one request (GET where `body` is None); never raises for what the other side does. `rid` empty: without an id."""
    sent = uuid.uuid4().hex if rid is None else rid
    headers = {"X-Request-Id": sent} if sent else {}
    started, clock = time.time(), time.monotonic()
    found = Exchange(label, to, sent, 0)
    try:
        asked = plain_http.get if body is None else plain_http.post
        more = {} if body is None else {"json": body}
        answer = asked(f"{base_url}{path}", headers=headers, timeout=client.DEADLINE_S, **more)
        told = {name: answer.headers[name] for name in _HEADERS if name in answer.headers}
        # Whole, whatever its size: an answer of a cell has some tens of tokens.
        text = answer.content.decode("utf-8", errors="replace")
        found = replace(found, status=answer.status_code, headers=told, body=text)
    except requests.RequestException as error:
        found = replace(found, error=f"{type(error).__name__}: {error}"[:1000])
    return replace(found, started=started, seconds=time.monotonic() - clock)


def _body(runner: Runner, request: Request, salt: str) -> dict[str, Any]:
    return request.body(runner.stack.served_name, request.salt or salt)


def asked(runner: Runner, directly: int) -> None:
    """Send each request through the proxy, and so many times to the baseline's server, each time under another salt."""
    found: list[Exchange] = []
    for request in runner.plan.requests:
        for to, url in ((PROXY, runner.stack.base_url), *[(DIRECT, runner.stage.direct)] * directly):
            body = _body(runner, request, f"cell-{uuid.uuid4().hex}")
            found.append(exchange(url, to, request.label, body=body))
    runner.facts["exchanges"] = [one.to_json() for one in found]


def identified(runner: Runner) -> None:
    """Send the first request with an id of the client's, the others without."""
    found = []
    for index, request in enumerate(runner.plan.requests):
        body = _body(runner, request, f"cell-{uuid.uuid4().hex}")
        found.append(exchange(runner.stack.base_url, PROXY, request.label, body=body, rid=None if index == 0 else ""))
    runner.facts["exchanges"] = [one.to_json() for one in found]


def passed_on(runner: Runner) -> None:
    """Ask for the models, and for the tokens of the first request's messages, through the proxy and directly."""
    (request,) = runner.plan.requests
    whole = _body(runner, request, "")
    body = {name: whole[name] for name in ("model", "messages")}
    runner.facts["exchanges"] = [
        exchange(url, to, label, path=path, body=content).to_json()
        for label, path, content in (("models", "/v1/models", None), ("tokenize", "/tokenize", body))
        for to, url in ((PROXY, runner.stack.base_url), (DIRECT, runner.stage.direct))
    ]


def at_once(runner: Runner) -> None:
    """Send all requests of the plan side by side."""
    ready = threading.Barrier(len(runner.plan.requests))

    def one(request: Request) -> Any:
        ready.wait(client.DEADLINE_S)
        rid = uuid.uuid4().hex
        salt = runner.salt(request, rid)
        return client.send(runner.stack.base_url, request, rid, salt=salt, model=runner.stack.served_name)

    with ThreadPoolExecutor(len(runner.plan.requests)) as pool:
        runner.answers += pool.map(one, runner.plan.requests)


# -- what the servers' own metrics say -----------------------------------------------------------------------------------


def _counted(server: Server, *names: str) -> float | None:
    """The sum of a server's metrics with these names; None where it does not say."""
    try:
        text = plain_http.get(f"{server.url}/metrics", timeout=10).text
    except requests.RequestException:
        return None
    starts = tuple(f"{name}{{" for name in names)
    values = [float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(starts)]
    return sum(values) if values else None


def _generated(server: Server) -> float | None:
    return _counted(server, "vllm:generation_tokens_total")


def _running(server: Server) -> float | None:
    return _counted(server, "vllm:num_requests_running", "vllm:num_requests_waiting")


def one_token(runner: Runner) -> None:
    """Send each request, and write down how many tokens each prefill server has generated for it."""
    prefills = runner.stack.of(Role.PREFILL)
    found, counts = [], []
    for request in runner.plan.requests:
        before = {server.name: _generated(server) for server in prefills}
        body = _body(runner, request, f"cell-{uuid.uuid4().hex}")
        found.append(exchange(runner.stack.base_url, PROXY, request.label, body=body))

        def counted(before: dict[str, float | None] = before) -> dict[str, list[float | None]]:
            return {server.name: [before[server.name], _generated(server)] for server in prefills}

        # A server writes its counters down a moment after it has answered.
        if None not in before.values():
            faulting.soon(lambda: any(pair[0] != pair[1] for pair in counted().values()))
        faulting.busy(runner.stack)
        counts.append(counted())
    runner.facts |= {"exchanges": [one.to_json() for one in found], "generated": counts}


def work_ends(runner: Runner) -> None:
    """For each request: send it, leave as soon as a server works on it (of a stream: after its first event), and look how long it
    goes on."""
    servers = [server for server in runner.stack.servers if server.role is not Role.ENCODE]
    last = runner.stack.of(Role.DECODE, Role.PREFILL_DECODE)
    found = []
    for request in runner.plan.requests:
        before = [_generated(server) for server in last]
        record: dict[str, Any] = {"label": request.label, "status": None, "working": False}
        where, sent = urlsplit(runner.stack.base_url), time.monotonic()
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=client.DEADLINE_S)
        try:
            body = json.dumps(_body(runner, request, f"cell-{uuid.uuid4().hex}"))
            headers = {"Content-Type": "application/json", "X-Request-Id": uuid.uuid4().hex}
            connection.request("POST", f"{where.path}{CHAT}", body, headers)
            if request.stream:
                answer = connection.getresponse()
                record["status"] = answer.status
                answer.readline()
            while not record["working"] and None not in before and time.monotonic() - sent < WORKING_S:
                record["working"] = bool(sum(_running(server) or 0 for server in last))
        except (OSError, http.client.HTTPException) as error:
            record["error"] = f"{type(error).__name__}: {error}"[:1000]
        finally:
            connection.close()
        left = time.monotonic()
        record["idle_s"] = None
        while record["idle_s"] is None and time.monotonic() - left < LEFT_S + LEFT_SLACK_S:
            if not any(_running(server) for server in servers):
                record["idle_s"] = time.monotonic() - left
            time.sleep(0.05)
        record["running"] = {server.name: _running(server) for server in servers}
        record["generated"] = [
            None if one is None else (_generated(server) or 0) - one for server, one in zip(last, before, strict=True)
        ]
        found.append(record)
        if record["idle_s"] is None:
            break  # it goes on working: nothing that comes now would show anything
    runner.facts["left"] = found
