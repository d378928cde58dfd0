"""Requests that nobody means: generated, malformed, huge, slow, half-closed; and nothing left over after thousands of them."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import requests
from conftest import FakeStack, MakeStack
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from proxy_fakes import Fake, Reply, Running, Seen, chat, image, stream_reply, wait_for
from test_proxy_apis import series
from test_proxy_wire import messages, parts, values

from epd_conformance.proxy.app import create_app, make_config
from epd_conformance.proxy.media import MEDIA_KINDS
from epd_conformance.proxy.stages import DEADLINE_HEADER

PATHS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def stack() -> Iterator[FakeStack]:
    """One proxy with every option on that rewrites something, in front of one server that answers 200 to everything."""
    fake = Fake(
        reply=lambda seen: Reply(body={"choices": [], "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"k": {}}})
    )
    server = Running(fake.app())
    roles = {role: [server.url] for role in ("encode", "prefill", "decode")}
    config = make_config(**roles, timeout_s=2, affinity=True, group_items=3, metadata_only=True, retries=1)
    app = create_app(config)
    proxy = Running(app)
    for running in (server, proxy):
        running.wait_until_started()
    yield FakeStack(proxy.url, decode=[fake], app=app)
    for running in (proxy, server):
        running.server.should_exit = True
        running.thread.join(5)


media_parts = st.sampled_from(sorted(MEDIA_KINDS)).flatmap(
    lambda kind: st.fixed_dictionaries(
        {kind: values | st.fixed_dictionaries({"url": st.text() | st.just("data:image/png;base64,AAAA") | values})},
        optional={"type": st.just(kind), "uuid": values},
    )
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "model": values,
        "messages": messages
        | st.lists(st.fixed_dictionaries({"content": st.lists(parts | media_parts, max_size=4)}), max_size=2),
        "prompt": values,
        "stream": values,
        "max_tokens": values,
        "max_completion_tokens": values,
        "min_tokens": values,
        "n": values,
        "stream_options": values,
        "kv_transfer_params": values,
        "ec_transfer_params": values,
        "mm_processor_kwargs": values,
        "prompt_embeds": values,
    },
)


@given(bodies | values, st.sampled_from(PATHS))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
def test_generated_requests_are_never_the_proxys_fault(stack: FakeStack, body: Any, path: str) -> None:
    answer = http.post(stack.url + path, data=json.dumps(body).encode(), timeout=30)
    assert answer.status_code in (200, 400, 413), answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["stage"] == "proxy"


@given(st.binary(max_size=80), st.sampled_from((*PATHS, "/tokenize", "/x")))
@settings(max_examples=150, deadline=None)
def test_bytes_that_are_no_json_are_never_the_proxys_fault(stack: FakeStack, raw: bytes, path: str) -> None:
    answer = http.post(stack.url + path, data=raw, timeout=30)
    assert answer.status_code in (200, 400)


@given(
    st.dictionaries(
        st.sampled_from(
            ["X-Request-Id", "Authorization", "traceparent", DEADLINE_HEADER, "X-Any", "x-epd-debug", "Accept"]
        ),
        st.binary(max_size=20).filter(lambda value: not set(value) & set(b"\r\n\0") and value == value.strip()),
    ),
    st.sampled_from((*PATHS, "/version")),
)
@settings(max_examples=150, deadline=None)
def test_headers_are_never_the_proxys_fault(stack: FakeStack, headers: dict[str, bytes], path: str) -> None:
    lines = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in headers.items())
    raw = json.dumps({**chat("hi"), "prompt": "x"}).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n" % (path.encode(), len(raw))
    answer = talk(stack, request + lines + b"\r\n" + raw)
    # A deadline may be a number that is over at once.
    allowed = (b"200", b"400", b"504") if DEADLINE_HEADER in headers else (b"200", b"400")
    assert answer.split()[1] in allowed, answer


http = requests.Session()
http.trust_env = False


def connect(stack: FakeStack) -> socket.socket:
    address = urlsplit(stack.url)
    return socket.create_connection((address.hostname, address.port or 80), 10)


def talk(stack: FakeStack, raw: bytes) -> bytes:
    """Sends bytes and reads until the proxy closes the connection."""
    with connect(stack) as client:
        client.sendall(raw)
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("depth", [100, *range(900, 1000, 2), 1200])
def test_any_depth_is_answered_or_refused(stack: FakeStack, depth: int) -> None:
    # About a thousand is Python's limit; just below it, what could be read may be too deep to be written.
    for inner in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        part = '{"type":"image_embeds","image_embeds":%s}' % inner  # noqa: UP031
        raw = f'{{"messages":[{{"content":[{part}]}}],"x":{inner}}}'
        for pad in ("", " " * 20_000):
            answer = http.post(stack.url + PATHS[0], data=raw + pad, timeout=30)
            assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize("number", ["1" * 5000, "-1e999", "NaN", "1" + "0" * 4000, "1e-999"])
def test_any_number_is_answered_or_refused(stack: FakeStack, number: str) -> None:
    for pad in ("", "x" * 20_000):
        raw = f'{{"messages":[],"pad":"{pad}","max_tokens":{number},"min_tokens":{number}}}'
        assert http.post(stack.url + PATHS[0], data=raw, timeout=30).status_code in (200, 400)


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 100,
    ],
)
def test_what_is_no_http_gets_400_or_no_answer(stack: FakeStack, raw: bytes) -> None:
    with connect(stack) as client:
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")


def head(length: int) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length


def test_a_client_that_stops_sending_is_told_and_let_go(make_stack: MakeStack) -> None:
    stack = make_stack(timeout_s=0.3)
    answer = talk(stack, head(1000) + b'{"messages":')
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in answer.lower()


def test_a_slow_client_is_served_as_long_as_it_sends(make_stack: MakeStack) -> None:
    stack = make_stack(timeout_s=0.5)
    raw = json.dumps(chat(image("a"))).encode()
    with connect(stack) as client:
        client.sendall(head(len(raw)))
        for byte in range(0, len(raw), 12):
            time.sleep(0.05)
            client.sendall(raw[byte : byte + 12])
        assert client.recv(100).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(make_stack: MakeStack, chunked: bool) -> None:
    stack = make_stack(max_body_bytes=100_000)
    if chunked:
        start = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        answer = talk(stack, start + b"186a0\r\n" + b"x" * 100_000 + b"\r\n1\r\nx\r\n")
    else:
        answer = talk(stack, head(10**12))
    assert answer.startswith(b"HTTP/1.1 413")
    assert stack.decode[0].seen == []
    assert stack.chat(chat("x" * 90_000)).status_code == 200


def test_a_client_that_does_not_read_its_stream_is_let_go(make_stack: MakeStack) -> None:
    stack = make_stack(timeout_s=0.5)
    fake = stack.decode[0]
    fake.reply = lambda seen: Reply(content_type="text/event-stream", chunks=[b"x" * 1_000_000] * 100)
    raw = json.dumps(chat("hi", stream=True)).encode()
    with connect(stack) as client:
        client.sendall(head(len(raw)) + raw)
        wait_for(lambda: fake.abandoned == 1, "the work to be given up")


def test_half_closed_connections_end_the_work_and_leave_nothing(make_stack: MakeStack) -> None:
    stack = make_stack(timeout_s=30)
    fake = stack.decode[0]
    fake.reply = lambda seen: Reply(hang=True)
    raw = json.dumps(chat("hi")).encode()
    for number in range(1, 4):
        with connect(stack) as client:
            client.sendall(head(len(raw)) + raw)
            wait_for(lambda n=number: len(fake.seen) == n, "the call")
            client.shutdown(socket.SHUT_WR)
            wait_for(lambda n=number: fake.abandoned == n, "the work to be given up")
    with connect(stack) as client:
        client.sendall(head(len(raw)) + raw[:-3])
        client.shutdown(socket.SHUT_WR)
        assert client.recv(100) in (b"", client.recv(1))
    fake.reply = lambda seen: Reply()
    assert stack.chat(chat("hi")).status_code == 200


# --- nothing is left over --------------------------------------------------------------------------------------------------------

MIXED = 5000


def mixed_reply(seen: Seen) -> Reply:
    """Chosen by the body, so that a run is the same each time."""
    kind = seen.body.get("x", 0) if isinstance(seen.body, dict) else 0
    return {
        1: Reply(status=400, body={"no": 1}),
        2: stream_reply(1, 2),
        3: Reply(content_type="text/event-stream", chunks=[b"data: 1\n\n"], breaks=True),
        4: Reply(wait_s=0.05),
        5: Reply(status=503),
    }.get(kind, Reply(body={"kv_transfer_params": {"a": 1}}))


async def mixed_clients(url: str, clients: int) -> Counter[str]:
    """All requests, by `clients` at once; outcomes by status, or what the client did instead of waiting."""
    outcomes: Counter[str] = Counter()
    numbers = iter(range(MIXED))

    async def one(session: aiohttp.ClientSession, number: int) -> str:
        kind = number % 10
        body: Any = chat(*(image(f"{number}-{i}") for i in range(number % 3)), x=kind, stream=kind == 2)
        path = "/v1/completions" if kind == 6 else "/tokenize" if kind == 7 else PATHS[0]
        raw = b"{" if kind == 8 else json.dumps({**body, "prompt": "x"}).encode()
        if kind == 4 and number % 20 == 4:
            # Gone before the answer.
            try:
                async with asyncio.timeout(0.02), session.post(url + path, data=raw):
                    return "late"
            except TimeoutError:
                return "gone"
        headers = {DEADLINE_HEADER: "0.02"} if kind == 4 else {}
        try:
            async with session.post(url + path, data=raw, headers=headers) as answer:
                if kind == 2 and number % 20 == 2:
                    # Gone within the stream.
                    await answer.content.readany()
                    answer.close()
                    return "left"
                await answer.read()
                return str(answer.status)
        except aiohttp.ClientError as error:
            return type(error).__name__

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            for number in numbers:
                outcomes[await one(session, number)] += 1

        await asyncio.gather(*(client() for _ in range(clients)))
    return outcomes


def test_5000_mixed_requests_end_with_as_many_sockets_and_tasks_as_they_began(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1, retries=1, affinity=True, timeout_s=10)
    stack.decode[0].reply = mixed_reply
    stack.encode[0].reply = lambda seen: mixed_reply(seen) if seen.body.get("x") in (4, 5) else Reply()
    loop = stack.running.server.loop
    process = psutil.Process()

    def left() -> tuple[int, int]:
        gc.collect()
        return process.num_fds(), len(asyncio.all_tasks(loop))

    before = left()
    outcomes = asyncio.run(mixed_clients(stack.url, 24))
    assert sum(outcomes.values()) == MIXED
    assert set(outcomes) <= {"200", "400", "503", "504", "gone", "left", "late"}, outcomes
    assert min(outcomes[kind] for kind in ("200", "400", "503", "504", "gone", "left")) > 50, outcomes
    # Pooled sockets go after 3 s of idleness, those of the fakes' own after 5 s.
    wait_for(
        lambda: all(now <= then for now, then in zip(left(), before, strict=True)), f"{before} files and tasks", 15
    )
    assert {value for key, value in series(stack).items() if "in_flight" in key[0]} == {0}
