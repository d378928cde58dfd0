"""What the proxy does on demand: affinity, grouped primers, hand-over, parameters, metadata only, retries, deadlines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from conftest import FakeStack, MakeStack
from proxy_fakes import Fake, Reply, Seen, chat, closed_port_url, hanging_up, image, sse, stream_reply, text, wait_for
from test_proxy_apis import complete, series
from test_proxy_faults import hang_up_after_sending

from epd_conformance.proxy import stages as stages_module
from epd_conformance.proxy.media import MediaItem, extract_items, item_metadata, merged_params
from epd_conformance.proxy.stages import Call, RetryBudget, Stages
from epd_conformance.proxy.upstreams import Stage


def audio(name: str, **extra: Any) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": name, "format": "wav"}, **extra}


def primed(fake: Fake) -> list[list[dict[str, Any]]]:
    """The parts of each primer, in the order of arrival."""
    return [body["messages"][0]["content"] for body in fake.bodies]


# --- affinity ----------------------------------------------------------------------------------------------------------------


def test_an_item_meets_its_encode_server_again(make_stack: MakeStack) -> None:
    stack = make_stack(encode=3, affinity=True)
    names = [f"item{n}" for n in range(12)]
    for round_ in range(2):
        for name in names[:: 1 if round_ else -1]:
            stack.chat(chat(image("pad"), image(name)))
    homes = {name: [n for n, fake in enumerate(stack.encode) if [image(name)] in primed(fake)] for name in names}
    assert all(len(found) == 1 for found in homes.values())
    assert {found[0] for found in homes.values()} == {0, 1, 2}


def test_the_form_of_an_item_and_the_request_around_it_do_not_move_it(make_stack: MakeStack) -> None:
    stack = make_stack(encode=3, affinity=True)
    for part in (image("a"), {"image_url": image("a")["image_url"]["url"]}, image("a", detail="high")):
        stack.chat(chat(text("x"), part, temperature=1, cache_salt="s"))
    assert sorted(len(fake.seen) for fake in stack.encode) == [0, 0, 3]


def test_an_item_that_is_only_a_uuid_meets_the_server_that_knows_it(make_stack: MakeStack) -> None:
    stack = make_stack(encode=4, affinity=True)
    for number in range(6):
        stack.chat(chat(image(f"{number}", uuid=f"u{number}")))
        stack.chat(chat({"type": "image_url", "image_url": None, "uuid": f"u{number}"}))
    for fake in stack.encode:
        uuids = [parts[0]["uuid"] for parts in primed(fake)]
        assert uuids[::2] == uuids[1::2]


def test_keys_with_lone_surrogates_are_no_fault(make_stack: MakeStack) -> None:
    stack = make_stack(affinity=True, metadata_only=True)
    assert (
        stack.chat(chat({"type": "image_url", "image_url": {"url": "data:,\ud800"}, "uuid": "\udfff"})).status_code
        == 200
    )


def test_when_a_server_goes_only_its_items_move() -> None:
    from epd_conformance.proxy.config import make_config
    from epd_conformance.proxy.upstreams import Upstreams

    urls = [f"http://h{n}" for n in range(4)]
    before = Upstreams(make_config(encode=urls, decode=["http://d"]))
    after = Upstreams(make_config(encode=urls[:3], decode=["http://d"]))
    keys = [str(n) for n in range(400)]
    firsts = [before.ranked("encode", key)[0] for key in keys]
    assert [after.ranked("encode", key)[0] for key, first in zip(keys, firsts, strict=True) if first != urls[3]] == [
        first for first in firsts if first != urls[3]
    ]
    assert all(60 < firsts.count(url) < 140 for url in urls)


# --- grouped primers ---------------------------------------------------------------------------------------------------------


def test_items_of_one_kind_share_a_primer_up_to_the_limit(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1, group_items=2)
    parts = [image("a"), audio("b"), image("c"), image("d"), audio("e")]
    assert stack.chat(chat(*parts), {"X-Request-Id": "r"}).status_code == 200
    found = {seen.headers["x-request-id"]: seen.body["messages"][0]["content"] for seen in stack.encode[0].seen}
    assert found == {"r-e0": [image("a"), image("c")], "r-e1": [audio("b"), audio("e")], "r-e3": [image("d")]}
    assert stack.decode[0].bodies[0]["messages"][0]["content"] == parts


def test_groups_are_dealt_to_all_servers(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2, group_items=8)
    stack.chat(chat(*(image(str(n)) for n in range(5))))
    assert [primed(fake) for fake in stack.encode] == [
        [[image("0"), image("2"), image("4")]],
        [[image("1"), image("3")]],
    ]


# --- what encode servers report ------------------------------------------------------------------------------------------------


def reports(*rows: Sequence[int], **extra: Any) -> Any:
    """A reply that reports the items of its primer as vLLM does; `rows` is what each says about its grid."""

    def reply(seen: Seen) -> Reply:
        parts = seen.body["messages"][0]["content"]
        params: dict[str, Any] = {}
        for index, part in enumerate(parts):
            key = part.get("uuid") or part["image_url"]["url"][-1]
            entry = params.setdefault(key, {"item_indices": [], "metadata": {"image_grid_thw": [1, 2, 2]}, **extra})
            entry["item_indices"].append(index)
        return Reply(body={"choices": [], "ec_transfer_params": params})

    return reply


def test_reports_reach_the_stage_that_loads_and_no_other(make_stack: MakeStack) -> None:
    stack = make_stack(encode=2)
    for fake in stack.encode:
        fake.reply = reports(peer_host="h")
    stack.chat(chat(image("a"), text("x"), image("b"), image("a"), ec_transfer_params={"mine": 1}))
    entry = {"metadata": {"image_grid_thw": [1, 2, 2]}, "peer_host": "h"}
    expected = {"mine": 1, "a": {**entry, "item_indices": [0, 2]}, "b": {**entry, "item_indices": [1]}}
    assert stack.prefill[0].bodies[0]["ec_transfer_params"] == expected
    assert stack.decode[0].bodies[0]["ec_transfer_params"] == {"mine": 1}


def test_reports_reach_decode_where_there_is_no_prefill(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1, prefill=0)
    stack.encode[0].reply = reports()
    body = chat(image("a" * 50_000))
    stack.chat(body)
    assert stack.decode[0].bodies[0] == {
        **body,
        "ec_transfer_params": {"a": {"item_indices": [0], "metadata": {"image_grid_thw": [1, 2, 2]}}},
    }


@pytest.mark.parametrize("params", [None, {}, [], 3, "x"])
def test_an_empty_report_adds_nothing(make_stack: MakeStack, params: Any) -> None:
    stack = make_stack(encode=1, prefill=0)
    stack.encode[0].reply = lambda seen: Reply(body={"ec_transfer_params": params})
    stack.chat(chat(image("a")))
    assert stack.decode[0].bodies == [chat(image("a"))]


def test_reports_of_other_forms_are_joined() -> None:
    items = extract_items(chat(image("a"), image("b")))
    answers = [
        ([items[0]], {"ec_items": [1], "x": {"a": 1}, "y": 1}),
        ([items[1]], {"ec_items": [2], "x": {"b": 2}, "y": 2}),
    ]
    assert merged_params(answers) == {"ec_items": [1, 2], "x": {"a": 1, "b": 2}, "y": 2}


@pytest.mark.parametrize(
    "entry", [7, {}, {"metadata": 1}, {"metadata": {}, "item_indices": [0, 1]}, {"metadata": {}, "item_indices": ["0"]}]
)
def test_reports_about_unknown_items_are_not_understood(entry: Any) -> None:
    (item,) = extract_items(chat(image("a")))
    assert item_metadata({"good": {"metadata": {"m": 1}, "item_indices": [0]}, "k": entry}, [item]) in (
        {},
        {0: {"m": 1}},
    )
    assert item_metadata({"k": entry}, [item]) == {}


# --- a connector's own parameters ----------------------------------------------------------------------------------------------


class Pushes(Stages):
    """A connector that pushes: the encode server must know where to, and both sides a transfer's name."""

    def parameters(self, stage: Stage, call: Call, items: Sequence[MediaItem], upstream: str) -> Mapping[str, Any]:
        if stage == "decode" and self.upstreams.urls["prefill"]:
            return {}
        names = [{"transfer_id": f"{call.request_id}-{item.index}"} for item in items]
        return {"ec_transfer_params": {"ec_items": names, "to": self.consumer(call), "at": upstream, "stage": stage}}


@pytest.mark.parametrize("prefill", [0, 2])
def test_parameters_of_a_connector_are_in_each_leg(make_stack: MakeStack, prefill: int) -> None:
    stack = make_stack(encode=1, prefill=prefill, decode=2, stages=Pushes)
    consumers = stack.prefill if prefill else stack.decode
    for number in range(2):
        stack.chat(chat(image("a"), image("b"), ec_transfer_params={"mine": 1}), {"X-Request-Id": f"r{number}"})
        (consumed,) = consumers[number].bodies
        transfers = [{"transfer_id": f"r{number}-0"}, {"transfer_id": f"r{number}-1"}]
        url = consumers[number].url
        role = "prefill" if prefill else "decode"
        assert consumed["ec_transfer_params"] == {"mine": 1, "ec_items": transfers, "to": url, "at": url, "stage": role}
        sent = [body["ec_transfer_params"] for body in stack.encode[0].bodies[2 * number :]]
        assert sorted(p["ec_items"][0]["transfer_id"] for p in sent) == [f"r{number}-0", f"r{number}-1"]
        assert {p["to"] for p in sent} == {url}
    if prefill:
        assert [body["ec_transfer_params"] for fake in stack.decode for body in fake.bodies] == [{"mine": 1}] * 2


# --- metadata only ---------------------------------------------------------------------------------------------------------------


def metadata_stack(make_stack: MakeStack, **options: Any) -> FakeStack:
    stack = make_stack(**{"encode": 1, "prefill": 0, "metadata_only": True, **options})
    stack.encode[0].reply = reports()
    return stack


def contents(fake: Fake) -> list[list[dict[str, Any]]]:
    return [body["messages"][0]["content"] for body in fake.bodies]


def short(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 2, 2]}, "uuid": part["uuid"]}


@pytest.mark.parametrize("group_items", [1, 4])
def test_the_consumer_gets_what_was_said_under_the_key_that_was_primed(make_stack: MakeStack, group_items: int) -> None:
    stack = metadata_stack(make_stack, group_items=group_items)
    stack.chat(chat(image("a" * 50_000), text("x"), image("b", uuid="mine"), image("a" * 50_000)))
    keys = {part["image_url"]["url"]: part["uuid"] for parts in primed(stack.encode[0]) for part in parts}
    a, b = keys[image("a" * 50_000)["image_url"]["url"]], keys[image("b")["image_url"]["url"]]
    assert (len(a), b) == (64, "mine")
    (content,) = contents(stack.decode[0])
    assert content == [short({"uuid": a}), text("x"), short({"uuid": "mine"}), short({"uuid": a})]


def test_the_key_names_model_and_content(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack)
    for body in (chat(image("a")), chat(image("b")), {**chat(image("a")), "model": "other"}, chat(image("a"), x=1)):
        stack.chat(body)
    uuids = [parts[0]["uuid"] for parts in primed(stack.encode[0])]
    assert uuids[0] == uuids[3]
    assert len(set(uuids)) == 3


def test_decode_after_prefill_keeps_the_media_under_the_same_key(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack, prefill=1)
    stack.chat(chat(image("a")))
    (content,), (kept,) = contents(stack.prefill[0]), contents(stack.decode[0])
    assert kept == [image("a", uuid=content[0]["uuid"])]
    assert content == [short(content[0])]


def test_media_of_which_nothing_was_said_stay_with_all_of_their_kind(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack)
    replies = iter([reports(), lambda seen: Reply(), reports(), reports(), reports()])
    stack.encode[0].reply = lambda seen: next(replies)(seen)
    stack.chat(chat(image("a"), image("b")))
    assert [part["type"] for part in contents(stack.decode[0])[0]] == ["image_url", "image_url"]
    # What lies behind an address may change, so nothing but the address names it.
    url = {"type": "image_url", "image_url": {"url": "http://93.184.216.34/a"}}
    stack.chat(chat(url))
    assert contents(stack.decode[0])[1] == [url]
    stack.chat(chat(image("c"), {**url, "uuid": "u"}))
    assert [part["type"] for part in contents(stack.decode[0])[2]] == ["image_embeds", "image_embeds"]


def test_without_the_option_nothing_is_rewritten_or_named(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack, metadata_only=False)
    stack.chat(chat(image("a")))
    assert contents(stack.decode[0]) == [[image("a")]]
    assert primed(stack.encode[0]) == [[image("a")]]


def refuses_metadata(seen: Seen) -> Reply:
    """A consumer that has lost the object."""
    if seen.body["messages"][0]["content"][0]["type"] == "image_embeds":
        return Reply(status=500, body={"error": {"message": "gone"}})
    return Reply(body={"ok": True, "kv_transfer_params": {"remote_port": 7}})


@pytest.mark.parametrize("prefill", [0, 1])
def test_a_refused_request_gets_the_media_once(make_stack: MakeStack, prefill: int) -> None:
    stack = metadata_stack(make_stack, prefill=prefill)
    consumer = (stack.prefill if prefill else stack.decode)[0]
    consumer.reply = refuses_metadata
    assert stack.chat(chat(image("a"))).status_code == 200
    assert [content[0]["type"] for content in contents(consumer)] == ["image_embeds", "image_url"]
    assert contents(consumer)[0][0]["uuid"] == contents(consumer)[1][0]["uuid"]
    assert series(stack)["epd_proxy_fallbacks_total", "prefill" if prefill else "decode"] == 1


def test_media_that_are_refused_too_end_the_request(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack)
    stack.decode[0].reply = lambda seen: Reply(status=500, body={"n": len(stack.decode[0].seen)})
    answer = stack.chat(chat(image("a")))
    assert (answer.status_code, answer.json()["error"]["upstream_body"]) == (500, {"n": 2})
    assert len(stack.decode[0].seen) == 2


def test_a_server_that_dies_of_it_is_not_asked_again(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack, timeout_s=0.3)
    stack.decode[0].reply = lambda seen: Reply(hang=True)
    assert stack.chat(chat(image("a"))).status_code == 504
    assert len(stack.decode[0].seen) == 1


def test_an_error_as_the_first_event_of_a_stream_is_a_refusal(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack)

    def reply(seen: Seen) -> Reply:
        if seen.body["messages"][0]["content"][0]["type"] == "image_embeds":
            return stream_reply({"error": {"message": "gone", "code": 500}})
        return stream_reply(1, 2)

    stack.decode[0].reply = reply
    answer = stack.chat(chat(image("a"), stream=True))
    assert (answer.status_code, answer.content) == (200, b"".join(sse(1, 2)))
    assert len(stack.decode[0].seen) == 2


def test_a_stream_that_fails_later_is_not_asked_again(make_stack: MakeStack) -> None:
    stack = metadata_stack(make_stack)
    stack.decode[0].reply = lambda seen: stream_reply(1, {"error": {"message": "gone"}}, pause_s=0.05)
    answer = stack.chat(chat(image("a"), stream=True))
    assert answer.content == b"".join(sse(1, {"error": {"message": "gone"}}))
    assert len(stack.decode[0].seen) == 1


# --- retries -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("how", ["unreachable", "hung-up", "500", "503"])
def test_a_leg_that_got_no_answer_is_sent_to_the_next_server(make_stack: MakeStack, stage: str, how: str) -> None:
    counts = {"encode": 2, "prefill": 2, "decode": 2}
    stack = make_stack(**counts, retries=1)
    bad: Fake = getattr(stack, stage)[0]
    with hanging_up() as hangs_up:
        if how.isdecimal():
            bad.reply = lambda seen: Reply(status=int(how))
        else:
            first = closed_port_url() if how == "unreachable" else hangs_up
            stack = make_stack(**counts, retries=1, urls={stage: [first, bad.url]})
        answer = stack.chat(chat(image("a")), {"X-Request-Id": "r", "x-epd-debug": "1"})
    assert answer.status_code == 200
    legs = [leg for leg in json.loads(answer.headers["x-epd-legs"]) if leg["stage"] == stage]
    assert len({leg["upstream"] for leg in legs}) == 2
    assert len({leg["request_id"] for leg in legs}) == 1
    assert legs[1]["status"] == 200


@pytest.mark.parametrize("status", [400, 404, 429, 501])
def test_an_answer_that_blames_the_request_is_not_asked_for_again(make_stack: MakeStack, status: int) -> None:
    stack = make_stack(decode=2, retries=3)
    stack.decode[0].reply = lambda seen: Reply(status=status)
    assert stack.chat(chat("hi")).status_code == status
    assert stack.decode[1].seen == []


def test_nothing_is_sent_again_after_the_head_of_an_answer_or_a_silence(make_stack: MakeStack) -> None:
    stack = make_stack(decode=2, retries=3, timeout_s=0.3)
    stack.decode[0].reply = lambda seen: Reply(content_type="text/event-stream", chunks=[b"data: 1\n\n"], breaks=True)
    assert b'"broke off' not in (answer := stack.chat(chat("hi", stream=True))).content
    assert b"broke off in the middle" in answer.content
    stack.decode[1].reply = lambda seen: Reply(hang=True)
    assert stack.chat(chat("hi")).status_code == 504
    assert [len(fake.seen) for fake in stack.decode] == [1, 1]


def test_retries_with_affinity_follow_the_ranking(make_stack: MakeStack) -> None:
    stack = make_stack(encode=3, affinity=True, retries=2)
    tried: list[str] = []
    for fake in stack.encode:
        fake.reply = lambda seen, fake=fake: (tried.append(fake.url), Reply(status=500 if len(tried) % 3 else 200))[1]
    for _ in range(2):
        assert stack.chat(chat(image("a"))).status_code == 200
    assert len(set(tried[:3])) == 3
    assert tried[3:] == tried[:3]


def test_a_budget_bounds_the_retries_of_all_requests(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages_module, "RETRIES_IN_RESERVE", 2.0)
    stack = make_stack(encode=0, prefill=0, decode=1, retries=1)
    stack.decode[0].reply = lambda seen: Reply(status=503)
    for _ in range(10):
        assert stack.chat(chat("hi")).status_code == 503
    # Ten requests, two retries in reserve, and one more that ten legs have earned.
    assert len(stack.decode[0].seen) in (12, 13)


def test_the_budget_fills_up_again() -> None:
    budget = RetryBudget()
    spent = 0
    while budget.spend():
        spent += 1
    assert spent == stages_module.RETRIES_IN_RESERVE
    for _ in range(11):
        budget.earn()
    assert (budget.spend(), budget.spend()) == (True, False)


# --- deadlines -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
def test_a_deadline_ends_the_work_of_every_stage(make_stack: MakeStack, stage: str) -> None:
    stack = make_stack(encode=1, timeout_s=30)
    fake: Fake = getattr(stack, stage)[0]
    fake.reply = lambda seen: Reply(hang=True)
    start = time.monotonic()
    answer = stack.chat(chat(image("a"), stream=True), {"x-epd-deadline-s": "1"})
    assert (answer.status_code, time.monotonic() - start < 5) == (504, True)
    error = answer.json()["error"]
    assert (error["stage"], error["code"]) == (stage, 504)
    assert "deadline of 1 s" in error["message"]
    wait_for(lambda: fake.abandoned == 1, "the call to be given up")


def test_a_deadline_within_a_stream_ends_it_with_an_error_event(make_stack: MakeStack) -> None:
    stack = make_stack(prefill=0, deadline_s=1)
    stack.decode[0].reply = lambda seen: stream_reply(*range(1000), pause_s=0.02)
    answer = stack.chat(chat("hi", stream=True))
    event = json.loads(answer.content.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert event["error"]["code"] == 504
    wait_for(lambda: stack.decode[0].abandoned == 1, "the stream to be cancelled")


def test_every_stage_is_told_what_is_left(make_stack: MakeStack) -> None:
    stack = make_stack(encode=1, deadline_s=60)
    stack.encode[0].reply = lambda seen: Reply(wait_s=0.1)
    stack.chat(chat(image("a")), {"x-epd-deadline-s": "10"})
    stack.chat(chat("hi"), {"x-epd-deadline-s": "1000"})
    encode, prefill, decode = (
        float(f[0].seen[0].headers["x-epd-deadline-s"]) for f in (stack.encode, stack.prefill, stack.decode)
    )
    assert 10 >= encode > prefill >= decode > 0
    assert prefill <= encode - 0.1
    assert float(stack.decode[0].seen[1].headers["x-epd-deadline-s"]) <= 60


def test_without_a_deadline_none_is_told(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.chat(chat(image("a")))
    assert "x-epd-deadline-s" not in stack.decode[0].seen[0].headers


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf", ""])
def test_a_deadline_that_is_none(make_stack: MakeStack, value: str) -> None:
    answer = make_stack().chat(chat("hi"), {"x-epd-deadline-s": value})
    assert (answer.status_code, answer.json()["error"]["stage"]) == (400, "proxy")


# --- completions and pass-through share it -----------------------------------------------------------------------------------


def test_a_client_that_leaves_a_completion_or_a_passed_request_frees_the_work(make_stack: MakeStack) -> None:
    stack = make_stack(timeout_s=30)
    fake = stack.decode[0]
    fake.reply = lambda seen: Reply(hang=True)
    for number, path in enumerate(("/v1/completions", "/v1/responses"), 1):
        hang_up_after_sending(
            stack, {"prompt": "x"}, lambda n=number: wait_for(lambda: len(fake.seen) == n, "the call"), path=path
        )
        wait_for(lambda n=number: fake.abandoned == n, "the call to be cancelled", 2)


def test_a_refused_completion_keeps_status_and_body(make_stack: MakeStack) -> None:
    stack = make_stack()
    stack.decode[0].reply = lambda seen: Reply(status=422, body={"why": 1})
    answer = complete(stack, {"prompt": "x", "stream": True})
    assert (answer.status_code, answer.json()["error"]["upstream_body"]) == (422, {"why": 1})
