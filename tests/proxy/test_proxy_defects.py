"""Stages can be replaced to plant a defect, and a planted defect shows in what the servers see."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from conftest import FakeStack, MakeStack
from proxy_fakes import Reply, chat, image, text

from epd_conformance.proxy.media import MediaItem
from epd_conformance.proxy.stages import Call, Stages
from epd_conformance.proxy.upstreams import Answer


class SkipsThePrimer(Stages):
    """Answers look right, and nothing was disaggregated."""

    async def encode(self, call: Call, items: list[MediaItem]) -> None:
        return


class SkipsOneItem(Stages):
    """Forgets the second item."""

    async def encode_item(self, call: Call, item: MediaItem, url: str) -> None:
        if item.index != 1:
            await super().encode_item(call, item, url)


class SwapsTwoImages(Stages):
    """The decode server gets the first two images in the wrong order."""

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        body = copy.deepcopy(call.body)
        content = body["messages"][0]["content"]
        content[0], content[1] = content[1], content[0]
        return await super().decode(replace(call, body=body), prefill_response)


class LosesTheHandover(Stages):
    """The decode server is not told where its KV blocks are."""

    async def decode(self, call: Call, prefill_response: dict[str, Any] | None) -> Answer:
        return await super().decode(call, None)


class Breaks(Stages):
    """Has a fault of its own."""

    async def prefill(self, call: Call) -> dict[str, Any]:
        raise KeyError("planted")


def observe(make_stack: MakeStack, stages: type[Stages]) -> tuple[int, list[str], list[Any], list[Any]]:
    """Status, primed pictures, and what decode servers saw: pictures and handover."""
    stack: FakeStack = make_stack(stages=stages)
    answer = stack.chat(chat(image("a"), image("b"), text("compare")), {"X-Request-Id": "r", "x-epd-debug": "1"})
    primed = sorted(s.body["messages"][0]["content"][0]["image_url"]["url"][-1] for f in stack.encode for s in f.seen)
    decoded = [s.body["messages"][0]["content"][:2] for s in stack.decode[0].seen]
    handover = [s.body.get("kv_transfer_params") for s in stack.decode[0].seen]
    return answer.status_code, primed, decoded, handover


GOOD = (200, ["a", "b"], [[image("a"), image("b")]], [{"remote_port": 7}])


def test_the_real_stages_are_the_reference(make_stack: MakeStack) -> None:
    assert observe(make_stack, Stages) == GOOD


def test_skipped_primers_show(make_stack: MakeStack) -> None:
    assert observe(make_stack, SkipsThePrimer) == (200, [], *GOOD[2:])
    assert observe(make_stack, SkipsOneItem) == (200, ["a"], *GOOD[2:])


def test_swapped_images_show(make_stack: MakeStack) -> None:
    assert observe(make_stack, SwapsTwoImages) == (200, GOOD[1], [[image("b"), image("a")]], GOOD[3])


def test_a_lost_handover_shows(make_stack: MakeStack) -> None:
    assert observe(make_stack, LosesTheHandover) == (*GOOD[:3], [None])


def test_a_fault_of_the_stages_is_an_error_answer_and_not_the_end(make_stack: MakeStack) -> None:
    stack = make_stack(stages=Breaks)
    for _ in range(2):
        answer = stack.chat(chat("hi"))
        assert (answer.status_code, answer.json()["error"]["stage"]) == (500, "proxy")
    # The reason is in the log, not in the answer: it may hold what is none of the client's business.
    assert "planted" not in answer.text


def test_replaced_calls_still_book_their_legs(make_stack: MakeStack) -> None:
    stack = make_stack(stages=SwapsTwoImages)
    stack.decode[0].reply = lambda seen: Reply(body={})
    answer = stack.chat(chat(image("a"), image("b")), {"x-epd-debug": "1"})
    assert answer.headers["x-epd-legs"].count('"stage"') == 4
