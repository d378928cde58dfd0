"""What a healthy proxy does: which server gets what, in which order, and what the client gets back."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests
from conftest import MakeStack
from proxy_fakes import Reply, chat, image, sse, stream_reply, text, wait_for

from epd_conformance.proxy import upstreams
from epd_conformance.proxy.app import LEGS_HEADER_BYTES
from epd_conformance.proxy.stages import PRIMERS_IN_FLIGHT

BODY = {"id": "x", "choices": [{"token_ids": [1, 2]}]}


def test_stages_run_in_order_with_their_bodies_and_ids(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    # Encoding takes a moment, so that a proxy that did not wait for it would be seen.
    stack.encode[0].reply = lambda seen: Reply(wait_s=0.05)
    stack.decode[0].reply = lambda seen: Reply(body=BODY)
    body = chat(text("look"), image("a"), image("b", uuid="u"), max_tokens=9, vendor_field={"x": [1, None]})
    answer = stack.chat(body, {"X-Request-Id": "r1", "Authorization": "Bearer k", "traceparent": "t"})

    assert (answer.status_code, answer.json(), answer.headers["X-Request-Id"]) == (200, BODY, "r1")
    assert {s.headers["x-request-id"]: s.body["messages"] for s in stack.encode[0].seen} == {
        "r1-e0": [{"role": "user", "content": [image("a")]}],
        "r1-e1": [{"role": "user", "content": [image("b", uuid="u")]}],
    }
    assert (stack.prefill[0].ids, stack.decode[0].ids) == (["r1-p"], ["r1-d"])
    assert stack.prefill[0].bodies[0]["messages"] == body["messages"]
    assert stack.prefill[0].bodies[0]["max_tokens"] == 1
    # Unknown fields and media reach the decode server as the client sent them, with what prefill handed over.
    assert stack.decode[0].bodies == [{**body, "kv_transfer_params": {"remote_port": 7}}]
    everyone = [*stack.encode[0].seen, *stack.prefill[0].seen, *stack.decode[0].seen]
    assert {(s.headers["authorization"], s.headers["traceparent"]) for s in everyone} == {("Bearer k", "t")}
    # Compressed for the proxy alone, the bytes could not be handed on as they came.
    assert {s.headers["accept-encoding"] for s in everyone} == {"identity"}
    arrivals = [s.at for s in everyone]
    assert arrivals[2] - max(arrivals[:2]) >= 0.05
    assert arrivals[3] >= arrivals[2]


def test_items_of_one_request_are_encoded_in_parallel(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2)
    for fake in stack.encode:
        fake.reply = lambda seen: Reply(wait_s=0.2)
    start = time.monotonic()
    assert stack.chat(chat(*(image(str(i)) for i in range(8)))).status_code == 200
    assert time.monotonic() - start < 0.8


def test_equal_items_are_each_primed(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    stack.chat(chat(image("a"), image("a"), image("a")), {"X-Request-Id": "r"})
    assert sorted(stack.encode[0].ids) == ["r-e0", "r-e1", "r-e2"]


@pytest.mark.parametrize("content", [[text("hi")], "hi"])
def test_text_only_never_touches_an_encoder(make_stack: MakeStack, content: object) -> None:
    stack = make_stack()
    answer = stack.chat({"model": "tiny", "messages": [{"role": "user", "content": content}]})
    assert answer.status_code == 200
    assert [fake.seen for fake in stack.encode] == [[], []]
    assert (len(stack.prefill[0].seen), len(stack.decode[0].seen)) == (1, 1)


def test_e_pd_has_no_prefill_leg_and_leaves_the_body_alone(make_stack: MakeStack) -> None:
    stack = make_stack(prefill=0)
    body = chat(image("a"), n=2, stream_options=None)
    assert stack.chat(body, {"X-Request-Id": "r"}).status_code == 200
    assert (stack.decode[0].bodies, stack.decode[0].ids) == ([body], ["r-d"])


def test_p_d_sends_media_to_both_without_any_encoder(make_stack: MakeStack) -> None:
    stack = make_stack(encode=0)
    assert stack.chat(chat(image("a"))).status_code == 200
    assert [s.body["messages"][0]["content"] for s in (*stack.prefill[0].seen, *stack.decode[0].seen)] == [
        [image("a")],
        [image("a")],
    ]


def test_turns_go_on_across_requests_in_every_role(make_stack: MakeStack) -> None:
    stack = make_stack(encode=3, prefill=2, decode=2)
    for number in range(6):
        stack.chat(chat(image("a"), image("b")), {"X-Request-Id": f"r{number}"})
    assert [len(fake.seen) for fake in (*stack.encode, *stack.prefill, *stack.decode)] == [
        4,
        4,
        4,
        3,
        3,
        3,
        3,
    ]
    # Items take turns in their order: request 0 uses servers 0 and 1, request 1 goes on with 2 and 0.
    assert sorted(stack.encode[0].ids)[:2] == ["r0-e0", "r1-e1"]
    assert stack.decode[1].ids == ["r1-d", "r3-d", "r5-d"]


def test_64_clients_at_once_are_all_served_and_each_item_is_primed_once(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2, prefill=1, decode=1)

    def one(number: int) -> int:
        return stack.chat(chat(image(f"{number}a"), image(f"{number}b")), {"X-Request-Id": f"r{number}"}).status_code

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(one, range(64))) == {200}
    primed = [*stack.encode[0].ids, *stack.encode[1].ids]
    assert sorted(primed) == sorted(f"r{n}-e{i}" for n in range(64) for i in (0, 1))
    assert sorted(stack.decode[0].ids) == sorted(f"r{n}-d" for n in range(64))


def test_a_request_with_1000_items(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2)
    answer = stack.chat(chat(*(image(str(i)) for i in range(1000))), {"X-Request-Id": "r" * 128, "x-epd-debug": "1"})
    assert answer.status_code == 200
    assert sorted(s.body["messages"][0]["content"][0]["image_url"]["url"] for s in stack.encode[0].seen) == sorted(
        image(str(i))["image_url"]["url"] for i in range(0, 1000, 2)
    )
    # Far fewer sockets than items.
    assert len({s.port for fake in stack.encode for s in fake.seen}) <= 2 * PRIMERS_IN_FLIGHT
    # The debug header stays small enough for any client, and keeps the legs that are not encodes.
    assert len(answer.headers["x-epd-legs"]) <= LEGS_HEADER_BYTES
    assert [leg["stage"] for leg in json.loads(answer.headers["x-epd-legs"])][-2:] == ["prefill", "decode"]


def test_the_primers_of_one_request_in_flight_are_bounded(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    fake = stack.encode[0]
    fake.reply = lambda seen: Reply(wait_until=lambda: len(fake.seen) >= PRIMERS_IN_FLIGHT, wait_s=0.2)
    assert stack.chat(chat(*(image(str(i)) for i in range(PRIMERS_IN_FLIGHT + 8)))).status_code == 200
    assert fake.peak == PRIMERS_IN_FLIGHT


def test_a_plain_answer_is_passed_through_byte_for_byte(make_stack: MakeStack) -> None:
    stack = make_stack(prefill=0)
    raw = b'{ "a":1.50,\n"b": "\\u00e9\xc3\xa9", "a": 2 } '
    stack.decode[0].reply = lambda seen: Reply(body=raw, content_type="application/json; odd=1")
    answer = stack.chat(chat("hi"))
    assert (answer.content, answer.headers["content-type"]) == (raw, "application/json; odd=1")


def test_a_stream_is_passed_through_as_it_comes(make_stack: MakeStack) -> None:
    stack = make_stack()
    values = [{"token_ids": [i]} for i in range(4)]
    stack.decode[0].reply = lambda seen: stream_reply(*values, pause_s=0.1)
    answer = stack.chat(chat(image("a"), stream=True), stream=True)
    arrivals, got = [], b""
    for chunk in answer.iter_content(None):
        arrivals.append(time.monotonic())
        got += chunk
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert got == b"".join(sse(*values))
    assert arrivals[-1] - arrivals[0] > 0.25
    assert stack.prefill[0].bodies[0]["stream"] is False
    assert stack.decode[0].bodies[0]["stream"] is True


def test_debug_headers_only_on_request(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1)
    stack.encode[0].reply = lambda seen: Reply(wait_s=0.05)
    plain = stack.chat(chat(image("a")))
    assert "x-epd-timings" not in plain.headers
    assert "x-epd-legs" not in plain.headers
    answer = stack.chat(chat(image("a")), {"x-epd-debug": "1", "X-Request-Id": "r"})
    timings = json.loads(answer.headers["x-epd-timings"])
    assert list(timings) == ["encode", "prefill", "decode", "total"]
    assert timings["encode"] >= 50
    assert timings["total"] >= timings["encode"] + timings["prefill"] + timings["decode"] - 0.01
    assert json.loads(answer.headers["x-epd-legs"]) == [
        {"stage": "encode", "upstream": stack.encode[0].url, "request_id": "r-e0", "status": 200},
        {"stage": "prefill", "upstream": stack.prefill[0].url, "request_id": "r-p", "status": 200},
        {"stage": "decode", "upstream": stack.decode[0].url, "request_id": "r-d", "status": 200},
    ]


def test_a_request_without_id_gets_a_new_one_each_time(make_stack: MakeStack) -> None:
    stack = make_stack()
    ids = [stack.chat(chat("hi")).headers["X-Request-Id"] for _ in range(2)]
    assert ids[0] != ids[1]
    assert all(len(value) == 32 and int(value, 16) for value in ids)
    assert stack.decode[0].ids == [f"{value}-d" for value in ids]


def test_models_come_from_a_decode_server(make_stack: MakeStack) -> None:
    stack = make_stack()
    answer = requests.get(f"{stack.url}/v1/models", headers={"Authorization": "Bearer k"}, timeout=5)
    assert (answer.status_code, answer.json()) == (200, {"object": "list", "auth": "Bearer k"})


def test_health_names_every_server_and_is_200_only_if_all_are(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2)
    answer = requests.get(f"{stack.url}/health", timeout=5)
    assert (answer.status_code, answer.json()["status"]) == (200, "healthy")
    assert [[s["url"] for s in answer.json()[r]] for r in ("encode", "prefill", "decode")] == [
        [fake.url for fake in fakes] for fakes in (stack.encode, stack.prefill, stack.decode)
    ]
    stack.encode[1].healthy = False
    answer = requests.get(f"{stack.url}/health", timeout=5)
    assert (answer.status_code, answer.json()["status"]) == (503, "unhealthy")
    assert [(s["healthy"], s["status"]) for s in answer.json()["encode"]] == [(True, 200), (False, 503)]


def test_an_idle_socket_is_not_reused_too_late(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    assert upstreams.KEEP_ALIVE_S <= 5 - 2, "servers close idle sockets after 5 s; leave 2 s for busy event loops"
    monkeypatch.setattr(upstreams, "KEEP_ALIVE_S", 0.3)
    stack = make_stack(encode=1, prefill=0)
    for _ in range(2):
        stack.chat(chat(image("a")))
    time.sleep(0.5)
    stack.chat(chat(image("a")))
    first, second, third = (seen.port for seen in stack.encode[0].seen)
    assert first == second
    assert third != second


def test_a_server_that_closed_its_idle_socket_is_reached_again(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1, fake_settings={"timeout_keep_alive": 1})
    assert stack.chat(chat(image("a"))).status_code == 200
    time.sleep(1.2)
    assert stack.chat(chat(image("a"))).status_code == 200
    wait_for(lambda: len(stack.encode[0].seen) == 2, "both primers")
