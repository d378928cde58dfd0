"""Completions, metrics, and the requests that only pass through."""

from __future__ import annotations

import asyncio
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from conftest import FakeStack, MakeStack
from prometheus_client.parser import text_string_to_metric_families
from proxy_fakes import Reply, chat, closed_port_url, image, sse, stream_reply, text, wait_for

from epd_conformance.proxy.app import ProxyConfig, create_app
from epd_conformance.proxy.stages import one_prompt

ANSWER = {"choices": [{"text": "x"}]}


def complete(stack: FakeStack, body: dict[str, Any], **headers: str) -> requests.Response:
    return requests.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=30)


# --- completions -------------------------------------------------------------------------------------------------------------


def test_a_completion_goes_through_prefill_and_decode(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.decode[0].reply = lambda seen: Reply(body=ANSWER)
    body = {
        "model": "tiny",
        "prompt": "hi",
        "max_tokens": 9,
        "n": 2,
        "logprobs": 3,
        "echo": True,
        "stream_options": None,
    }
    answer = complete(stack, body, **{"X-Request-Id": "r"})
    assert (answer.status_code, answer.json()) == (200, ANSWER)
    assert [f.seen for f in stack.encode] == [[], []]
    (prefill,), (decode,) = stack.prefill[0].seen, stack.decode[0].seen
    assert (prefill.path, decode.path) == ("/v1/completions", "/v1/completions")
    assert (prefill.headers["x-request-id"], decode.headers["x-request-id"]) == ("r-p", "r-d")
    assert prefill.body == {
        "model": "tiny",
        "prompt": "hi",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": prefill.body["kv_transfer_params"],
    }
    assert decode.body == {**body, "kv_transfer_params": {"remote_port": 7}}


def test_a_completion_can_be_streamed(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.decode[0].reply = lambda seen: stream_reply(1, 2)
    assert complete(stack, {"prompt": "hi", "stream": True}).content == b"".join(sse(1, 2))


@pytest.mark.parametrize(
    ("prompt", "one"),
    [
        ("hi", True),
        (["hi"], True),
        ([1, 2, 3], True),
        ([[1, 2]], True),
        (None, True),
        (["a", "b"], False),
        ([[1], [2]], False),
        ([1, "a"], False),
    ],
)
def test_what_is_one_prompt(make_stack: MakeStack, prompt: Any, one: bool) -> None:
    assert one_prompt({"prompt": prompt}) is one


def test_several_prompts_have_no_hand_over_and_it_is_said(make_stack: MakeStack) -> None:
    stack = make_stack()
    body = {"prompt": ["a", "b"]}
    answer = complete(stack, body)
    assert answer.status_code == 200
    assert answer.headers["x-epd-bypassed"].startswith("prefill")
    assert (stack.prefill[0].seen, stack.decode[0].bodies) == ([], [body])
    assert "x-epd-bypassed" not in complete(stack, {"prompt": "a"}).headers


def test_several_prompts_without_prefill_servers_are_nothing_special(make_stack: MakeStack) -> None:
    answer = complete(make_stack(prefill=0), {"prompt": ["a", "b"]})
    assert "x-epd-bypassed" not in answer.headers


# --- bytes that nothing was added to ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_decode_gets_the_clients_very_bytes_where_nothing_is_added(make_stack: MakeStack, size: int, path: str) -> None:
    stack = make_stack(prefill=0)
    part = json.dumps(image("a" * size))
    raw = f'{{ "messages" : [{{"role":"user","content":[{part}]}}], "prompt": "é", "temperature":1.50 }}'.encode()
    assert requests.post(stack.url + path, data=raw, timeout=30).status_code == 200
    assert stack.decode[0].seen[0].raw == raw


def test_a_key_reaches_every_server_byte_for_byte_or_is_refused(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    address = urlsplit(stack.url)
    raw = json.dumps(chat(image("a"))).encode()

    def ask(key: bytes, path: bytes) -> bytes:
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: %s\r\nContent-Length: %d\r\n\r\n"
        with socket.create_connection((address.hostname, address.port or 80), 5) as client:
            client.sendall(head % (path, key, len(raw)) + raw)
            return b"".join(iter(lambda: client.recv(4096), b"")).split()[1]

    for path in (b"/v1/chat/completions", b"/v1/other"):
        assert ask("Bearer é".encode(), path) == b"200"
        assert ask(b"Bearer \xff", path) == b"400"
    # Starlette shows the bytes of a header as Latin-1.
    keys = {
        seen.headers["authorization"].encode("latin-1").decode()
        for f in (stack.encode, stack.decode)
        for seen in f[0].seen
    }
    assert keys == {"Bearer é"}


# --- everything else ---------------------------------------------------------------------------------------------------------


def test_other_paths_pass_to_the_first_decode_server_as_they_are(make_stack: MakeStack) -> None:
    stack = make_stack(decode=2)
    raw = b'{ "prompt" : "hi" , "x":1.50 }'
    for _ in range(2):
        requests.post(
            f"{stack.url}/tokenize?a=b%2Fc&d",
            data=raw,
            headers={
                "X-Request-Id": "r",
                "Authorization": "Bearer k",
                "X-Vendor": "v",
                "Content-Type": "application/json",
            },
            timeout=30,
        )
    first, second = stack.decode[0].seen
    assert (first.raw, first.path, first.query, first.method) == (raw, "/tokenize", "a=b%2Fc&d", "POST")
    assert {name: first.headers[name] for name in ("x-request-id", "authorization", "x-vendor", "content-type")} == {
        "x-request-id": "r-d",
        "authorization": "Bearer k",
        "x-vendor": "v",
        "content-type": "application/json",
    }
    assert first.headers["accept-encoding"] == "identity"
    assert first.headers["host"] == stack.decode[0].url.removeprefix("http://")
    assert second.raw == raw
    assert stack.decode[1].seen == []
    # The turns of orchestrated requests are theirs.
    stack.chat(chat("hi"))
    assert len(stack.decode[0].seen) == 3


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_every_method_passes(make_stack: MakeStack, method: str) -> None:
    stack = make_stack()
    answer = requests.request(method, f"{stack.url}/v1/responses/resp_1%20x", timeout=30)
    assert answer.status_code == 200
    assert (stack.decode[0].seen[0].method, stack.decode[0].seen[0].path) == (method, "/v1/responses/resp_1%20x")


def test_head_passes(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.decode[0].reply = lambda seen: Reply(status=204, chunks=[])
    assert requests.head(f"{stack.url}/version", timeout=30).status_code == 204


@pytest.mark.parametrize("status", [201, 302, 404, 500])
def test_an_answer_passes_whatever_it_is(make_stack: MakeStack, status: int) -> None:
    stack = make_stack()
    stack.decode[0].reply = lambda seen: Reply(
        status=status,
        body=b"raw \xff",
        content_type="text/odd",
        headers=[(b"x-of-server", b"1"), (b"connection", b"close")],
    )
    answer = requests.get(f"{stack.url}/v1/other", headers={"X-Request-Id": "r"}, timeout=30, allow_redirects=False)
    assert (answer.status_code, answer.content, answer.headers["content-type"]) == (status, b"raw \xff", "text/odd")
    assert (answer.headers["x-of-server"], answer.headers["x-request-id"]) == ("1", "r")
    assert "connection" not in answer.headers


def test_a_stream_passes_and_one_that_breaks_is_broken(make_stack: MakeStack) -> None:
    stack = make_stack()
    body = b'{"stream": true}'
    stack.decode[0].reply = lambda seen: stream_reply(1, 2, 3)
    assert requests.post(f"{stack.url}/v1/responses", data=body, timeout=30).content == b"".join(sse(1, 2, 3))
    stack.decode[0].reply = lambda seen: Reply(chunks=[b"half"], breaks=True)
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        requests.post(f"{stack.url}/v1/responses", data=body, timeout=30)


def test_a_decode_server_that_is_not_there(make_stack: MakeStack) -> None:
    stack = make_stack(urls={"decode": [closed_port_url()]})
    answer = requests.get(f"{stack.url}/version", timeout=30)
    assert (answer.status_code, answer.json()["error"]["stage"]) == (502, "decode")


@pytest.mark.parametrize(
    "target",
    ["@evil.invalid/x", "http://evil.invalid/x", "*", "//evil.invalid/x", ":80@evil.invalid/", "/%2e%2e/x", "/a b"],
)
def test_no_request_target_leads_to_another_server(make_stack: MakeStack, target: str) -> None:
    stack = make_stack()
    address = urlsplit(stack.url)
    with socket.create_connection((address.hostname, address.port or 80), 5) as client:
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    # Refused, or the decode server's: with a 502 it would have been sent elsewhere.
    assert int(answer.split()[1]) in (200, 400, 404)
    if b" 200 " in answer[:20]:
        assert len(stack.decode[0].seen) == 1


@pytest.mark.parametrize("target", [b"@127.0.0.1:9/x", b":9/x", b"*", b""])
def test_a_target_that_is_no_path_is_refused_whatever_the_server_lets_through(target: bytes) -> None:
    sent: list[Any] = []
    scope = {"type": "http", "method": "GET", "path": "/x", "raw_path": target, "query_string": b"", "headers": []}

    async def receive() -> Any:
        return {"type": "http.request"} if not sent else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    # Its servers cannot be asked: it has not been started.
    asyncio.run(create_app(ProxyConfig(decode=["http://127.0.0.1:1"]))(scope, receive, send))
    assert sent[0]["status"] == 400


# --- metrics -----------------------------------------------------------------------------------------------------------------


def series(stack: FakeStack) -> dict[tuple[str, ...], float]:
    answer = requests.get(f"{stack.url}/metrics", timeout=30)
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_metrics_tell_stages_failures_and_health(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    assert stack.chat(chat(image("a"), image("b"), text("x"))).status_code == 200
    complete(stack, {"prompt": ["a", "b"]})
    requests.get(f"{stack.url}/version", timeout=30)
    stack.encode[0].reply = lambda seen: Reply(status=400)
    stack.encode[0].healthy = False
    assert stack.chat(chat(image("c"))).status_code == 400
    found = series(stack)
    encode, prefill, decode = stack.encode[0].url, stack.prefill[0].url, stack.decode[0].url
    expected = {
        ("epd_proxy_requests_total", "chat", "200"): 1,
        ("epd_proxy_requests_total", "chat", "400"): 1,
        ("epd_proxy_requests_total", "completions", "200"): 1,
        ("epd_proxy_requests_total", "other", "200"): 1,
        ("epd_proxy_request_seconds_count", "chat"): 2,
        ("epd_proxy_requests_in_flight", "chat"): 0,
        ("epd_proxy_items_total", "image_url"): 3,
        ("epd_proxy_legs_total", "encode", "200", encode): 2,
        ("epd_proxy_legs_total", "encode", "400", encode): 1,
        ("epd_proxy_legs_total", "prefill", "200", prefill): 1,
        ("epd_proxy_legs_total", "decode", "200", decode): 3,
        ("epd_proxy_legs_in_flight", "encode", encode): 0,
        ("epd_proxy_legs_in_flight", "decode", decode): 0,
        ("epd_proxy_stage_seconds_count", "encode"): 2,
        ("epd_proxy_stage_seconds_count", "decode"): 3,
        ("epd_proxy_upstream_failures_total", "refused", "encode", encode): 1,
        ("epd_proxy_bypasses_total", "several prompts"): 1,
        ("epd_proxy_upstream_healthy", "encode", encode): 0,
        ("epd_proxy_upstream_healthy", "decode", decode): 1,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_what_is_in_flight_shows(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    seen: list[dict[tuple[str, ...], float]] = []

    def reply(_: Any) -> Reply:
        return Reply(wait_until=lambda: len(seen) > 0)

    stack.decode[0].reply = reply
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stack.chat, chat("hi"))
        wait_for(lambda: len(stack.decode[0].seen) == 1, "the call")
        seen.append(series(stack))
        assert running.result(5).status_code == 200
    assert seen[0]["epd_proxy_requests_in_flight", "chat"] == 1
    assert seen[0]["epd_proxy_legs_in_flight", "decode", stack.decode[0].url] == 1
    assert series(stack)["epd_proxy_requests_in_flight", "chat"] == 0


@pytest.mark.parametrize(
    ("how", "kind"), [("gone", "unreachable"), ("hang", "silent"), ("cut", "broken"), ("junk", "malformed")]
)
def test_the_kind_of_a_failure_is_counted(make_stack: MakeStack, how: str, kind: str) -> None:
    urls = {"prefill": [closed_port_url()]} if how == "gone" else None
    stack = make_stack(timeout_s=0.3, urls=urls)
    replies = {"hang": Reply(hang=True), "cut": Reply(chunks=[b"{"], breaks=True), "junk": Reply(body=b"junk")}
    stack.prefill[0].reply = lambda seen: replies.get(how, Reply())
    url = urls["prefill"][0] if urls else stack.prefill[0].url
    assert stack.chat(chat("hi")).status_code >= 500
    assert series(stack)["epd_proxy_upstream_failures_total", kind, "prefill", url] == 1
