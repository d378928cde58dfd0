"""Each fault of a stage, and what exactly the client gets to know of it."""

from __future__ import annotations

import http.client
import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from conftest import FakeStack, MakeStack
from proxy_fakes import Fake, Reply, chat, closed_port_url, image, sse, stream_reply, wait_for

REFUSAL = {"error": {"message": "no such model", "code": 404}}


def error_of(answer: requests.Response, **expected: Any) -> dict[str, Any]:
    """The envelope of an error answer; what is the same in all of them is checked here."""
    assert answer.headers["content-type"] == "application/json"
    (key,) = answer.json()
    assert key == "error"
    error: dict[str, Any] = answer.json()["error"]
    fields = "message type stage upstream upstream_status upstream_body request_id item code"
    assert list(error) == fields.split()
    assert error["type"] == "epd_stage_error"
    assert error["code"] == answer.status_code
    assert error["request_id"] == answer.headers["X-Request-Id"]
    assert {name: error[name] for name in expected} == expected
    return error


def refuse(fake: Fake, status: int, body: Any = REFUSAL) -> None:
    fake.reply = lambda seen: Reply(status=status, body=body)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_keeps_its_status_and_body(make_stack: MakeStack, stage: str, status: int, stream: bool) -> None:
    stack = make_stack(encode=1)
    fake: Fake = getattr(stack, stage)[0]
    refuse(fake, status)
    answer = stack.chat(chat(image("a"), stream=stream))
    assert answer.status_code == status
    error = error_of(
        answer,
        stage=stage,
        upstream=fake.url,
        upstream_status=status,
        upstream_body=REFUSAL,
        item=0 if stage == "encode" else None,
    )
    # All that most clients show of an error.
    assert error["message"].endswith(": no such model")
    later = {"encode": stack.prefill + stack.decode, "prefill": stack.decode, "decode": []}[stage]
    assert [f.seen for f in later] == [[] for _ in later]


def test_a_refusal_that_is_no_json_is_told_as_text(make_stack: MakeStack) -> None:
    stack = make_stack()
    refuse(stack.decode[0], 500, b"Internal \xff Server Error")
    error = error_of(stack.chat(chat("hi")), upstream_body="Internal � Server Error", upstream_status=500)
    assert error["message"].endswith(": Internal � Server Error")
    for odd in ([1], {"error": {"message": 7}}, {"error": None}, None):
        refuse(stack.decode[0], 500, odd)
        assert error_of(stack.chat(chat("hi")))["message"].endswith(" answered 500")


@pytest.mark.parametrize("status", [204, 302])
def test_a_status_that_is_neither_200_nor_an_error_is_a_bad_gateway(make_stack: MakeStack, status: int) -> None:
    stack = make_stack(encode=1)
    # Followed, the redirect would look like a success.
    stack.encode[0].reply = lambda seen: Reply(status=status, body=b"", location="/health")
    answer = stack.chat(chat(image("a")))
    assert answer.status_code == 502
    error_of(answer, stage="encode", upstream_status=status)


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_server_that_is_not_there(make_stack: MakeStack, stage: str) -> None:
    nobody = closed_port_url()
    stack = make_stack(urls={stage: [nobody]})
    answer = stack.chat(chat(image("a"), stream=True))
    assert answer.status_code == 502
    error = error_of(answer, stage=stage, upstream=nobody, upstream_status=None, upstream_body=None)
    assert "cannot be reached" in error["message"]
    health = requests.get(f"{stack.url}/health", timeout=5)
    assert health.status_code == 503
    assert health.json()[stage][0]["error"]


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_server_that_does_not_answer(make_stack: MakeStack, stage: str) -> None:
    stack = make_stack(encode=1, timeout_s=0.3)
    fake: Fake = getattr(stack, stage)[0]
    fake.reply = lambda seen: Reply(hang=True)
    answer = stack.chat(chat(image("a"), stream=True))
    assert answer.status_code == 504
    assert "within 0.3 s" in error_of(answer, stage=stage, upstream=fake.url, upstream_status=None)["message"]
    wait_for(lambda: fake.abandoned == 1, "the call to be given up")


def test_a_server_that_does_not_even_read(make_stack: MakeStack) -> None:
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        stack = make_stack(urls={"encode": [f"http://127.0.0.1:{deaf.getsockname()[1]}"]}, timeout_s=0.3)
        # More than the kernel buffers for a peer, so that sending it never ends.
        answer = stack.chat(chat(image("x" * 10_000_000)))
        assert answer.status_code == 504
        error_of(answer, stage="encode", upstream_status=None)


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_server_that_cuts_its_answer(make_stack: MakeStack, stage: str) -> None:
    stack = make_stack(encode=1)
    fake: Fake = getattr(stack, stage)[0]
    fake.reply = lambda seen: Reply(chunks=[b'{"half": '], breaks=True)
    answer = stack.chat(chat(image("a")))
    assert answer.status_code == 502
    error_of(answer, stage=stage, upstream=fake.url, upstream_status=200)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{not json", b"[" * 100_000])
def test_a_prefill_answer_that_is_no_object(make_stack: MakeStack, body: bytes) -> None:
    stack = make_stack()
    stack.prefill[0].reply = lambda seen: Reply(body=body)
    answer = stack.chat(chat("hi"))
    assert answer.status_code == 502
    error_of(answer, stage="prefill", upstream_status=200)
    assert stack.decode[0].seen == []


def test_the_failing_item_is_named_and_its_siblings_are_cancelled(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2, timeout_s=30)
    stack.encode[0].reply = lambda seen: Reply(hang=True)
    stack.encode[1].reply = lambda seen: Reply(status=400, body=REFUSAL, wait_s=0.1)
    start = time.monotonic()
    answer = stack.chat(chat(image("a"), image("b")))
    assert (answer.status_code, time.monotonic() - start < 2) == (400, True)
    error_of(answer, stage="encode", item=1, upstream=stack.encode[1].url)
    wait_for(lambda: stack.encode[0].abandoned == 1, "the sibling to be cancelled")
    assert stack.prefill[0].seen == []


def test_a_failure_is_not_retried_and_the_next_request_works(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    refuse(stack.encode[0], 500)
    assert stack.chat(chat(image("a"))).status_code == 500
    assert len(stack.encode[0].seen) == 1
    stack.encode[0].reply = lambda seen: Reply()
    assert stack.chat(chat(image("a"))).status_code == 200


@pytest.mark.parametrize(
    ("chunks", "glue"), [(sse({"token_ids": [1]}, done=False), b""), ([b'data: {"token_'], b"\n\n")]
)
@pytest.mark.parametrize("how", ["cut", "end", "silence"])
def test_a_stream_that_ends_too_early_ends_with_an_error_event(
    make_stack: MakeStack, how: str, chunks: list[bytes], glue: bytes
) -> None:
    stack = make_stack(timeout_s=0.3)
    stack.decode[0].reply = lambda seen: Reply(
        content_type="text/event-stream", chunks=chunks, breaks=how == "cut", hang_after=how == "silence"
    )
    answer = stack.chat(chat(image("a"), stream=True), {"X-Request-Id": "r"})
    assert answer.status_code == 200
    sent = b"".join(chunks) + glue
    assert answer.content.startswith(sent)
    event = answer.content[len(sent) :]
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    error = json.loads(event[6:])["error"]
    assert (error["stage"], error["upstream"], error["upstream_status"]) == (
        "decode",
        stack.decode[0].url,
        200,
    )
    assert (error["code"], error["request_id"]) == (504 if how == "silence" else 502, "r")
    if how == "silence":
        wait_for(lambda: stack.decode[0].abandoned == 1, "the silent stream to be given up")


def test_a_whole_stream_gets_no_error_event(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.decode[0].reply = lambda seen: stream_reply({"x": 1})
    assert stack.chat(chat("hi", stream=True)).content == b"".join(sse({"x": 1}))


def hang_up_after_sending(
    stack: FakeStack, body: dict[str, Any], wait: Any, first_bytes: int = 0, path: str = "/v1/chat/completions"
) -> None:
    """A client that sends a request, reads `first_bytes` of the answer, waits, and closes its socket."""
    address = urlsplit(stack.url)
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port or 80), 5) as client:
        client.sendall(head.encode() + raw)
        while first_bytes > 0:
            first_bytes -= len(client.recv(first_bytes))
        wait()


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_whatever_runs(make_stack: MakeStack, stage: str, stream: bool) -> None:
    stack = make_stack(encode=1, timeout_s=30)
    fake: Fake = getattr(stack, stage)[0]
    fake.reply = lambda seen: Reply(hang=True)
    body = chat(image("a"), stream=stream)
    hang_up_after_sending(stack, body, lambda: wait_for(lambda: len(fake.seen) == 1, "the call"))
    wait_for(lambda: fake.abandoned == 1, "the upstream call to be cancelled", 2)


def test_a_client_that_goes_away_in_a_stream_cancels_it(make_stack: MakeStack) -> None:
    stack = make_stack(timeout_s=30)
    fake = stack.decode[0]
    fake.reply = lambda seen: stream_reply(*range(1000), pause_s=0.02)
    hang_up_after_sending(stack, chat("hi", stream=True), lambda: time.sleep(0.1), first_bytes=300)
    wait_for(lambda: fake.abandoned == 1, "the stream to be cancelled", 2)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"messages": [', "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'"messages"', "must be a JSON object"),
        (b"{}", "'messages' must be"),
        (b'{"messages": null}', "'messages' must be"),
        (b'{"messages": {"role": "user"}}', "'messages' must be"),
        (b'{"messages": ["hi"]}', "'messages' must be"),
    ],
)
def test_a_bad_request_is_refused_by_the_proxy_itself(make_stack: MakeStack, raw: bytes, says: str) -> None:
    stack = make_stack()
    answer = requests.post(f"{stack.url}/v1/chat/completions", data=raw, timeout=5)
    assert answer.status_code == 400
    error = error_of(answer, stage="proxy", upstream=None, upstream_status=None, item=None)
    assert says in error["message"]
    assert [f.seen for f in (*stack.encode, *stack.prefill, *stack.decode)] == [[], [], [], []]


@pytest.mark.parametrize("value", ["a b", "x" * 129, "é"])
def test_an_id_that_cannot_stand_in_a_log_is_refused(make_stack: MakeStack, value: str) -> None:
    stack = make_stack()
    address = urlsplit(stack.url)
    client = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    client.request("POST", "/v1/chat/completions", json.dumps(chat("hi")), {"X-Request-Id": value})
    answer = client.getresponse()
    error = json.loads(answer.read())["error"]
    client.close()
    assert (answer.status, error["stage"]) == (400, "proxy")
    assert len(error["request_id"]) == 32


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("POST", "/metrics", "GET, HEAD"),
    ],
)
def test_a_wrong_method_says_so_in_the_same_form(make_stack: MakeStack, method: str, path: str, allowed: str) -> None:
    answer = requests.request(method, make_stack().url + path, timeout=5)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    error_of(answer, stage="proxy")


def test_models_of_a_dead_server(make_stack: MakeStack) -> None:
    stack = make_stack(urls={"decode": [closed_port_url()]})
    answer = requests.get(f"{stack.url}/v1/models", timeout=5)
    assert answer.status_code == 502
    error_of(answer, stage="decode")
