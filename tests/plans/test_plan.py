"""Plans: the same seed and cell draw the same contents, two cells never share one, and a plan survives being written down."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.errors import UsageError
from epd_conformance.plans.media import ImageSpec
from epd_conformance.plans.plan import (
    TAIL,
    Draw,
    Image,
    Message,
    Plan,
    Request,
    Text,
    lengthen,
    replace_images,
    swap_images,
)
from epd_conformance.plans.steps import send, step

SEEDS = st.integers(0, 2**31)
CELLS = st.text(min_size=1, max_size=20)


def drawn(seed: int, cell: str) -> Plan:
    draw = Draw(seed, cell)
    request = draw.request("r", draw.image(), Text("and"), draw.image(140, 112))
    return Plan((request, replace(request, label="s", stream=True)), (swap_images(request, [1, 0], "c"),))


@given(SEEDS, CELLS)
def test_a_plan_is_the_same_whenever_it_is_drawn(seed: int, cell: str) -> None:
    assert drawn(seed, cell) == drawn(seed, cell)


@given(SEEDS, CELLS, SEEDS, CELLS)
def test_two_cells_share_no_content(seed: int, cell: str, other_seed: int, other_cell: str) -> None:
    if (seed, cell) == (other_seed, other_cell):
        return
    mine, other = drawn(seed, cell).requests[0], drawn(other_seed, other_cell).requests[0]
    assert not {spec.seed for spec in mine.images} & {spec.seed for spec in other.images}
    assert mine.messages[0].parts[0] != other.messages[0].parts[0]


def test_the_seed_and_the_cell_do_not_run_together() -> None:
    """Seed 1 of cell `1/x` is not seed 11 of cell `/x`: the base must say where one ends."""
    assert Draw(1, "1/x").number() != Draw(11, "/x").number()
    numbers = [Draw(1, "x").number(), *[draw.number() for draw in [Draw(2, "x")] for _ in range(50)]]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 2**48 for number in numbers)


@given(SEEDS, CELLS)
def test_a_plan_survives_json(seed: int, cell: str) -> None:
    plan = drawn(seed, cell)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_a_uuid_and_a_salt_survive_json() -> None:
    message = Message("user", (Image(ImageSpec(1), uuid="mine"), Text("t")))
    plan = Plan((Request("r", (message,), max_tokens=3, stream=True, salt="s"),))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_options_and_requests_at_once_survive_json() -> None:
    request = replace(drawn(0, "x").requests[0], options={"n": 2, "stop": ["e"], "logprobs": None})
    plan = Plan((request,), at_once=True)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    # A plan without them is written as it was before there were any.
    plain = json.dumps(drawn(0, "x").to_json())
    assert "options" not in plain
    assert "at_once" not in plain


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="not a plan"):
        Plan.from_json({"schema": "epd-conformance/plan/v2", "requests": [], "contrasts": []})


class TestDigest:
    request = drawn(0, "x").requests[0]

    def test_label_salt_and_stream_do_not_matter(self) -> None:
        for other in (
            replace(self.request, label="other"),
            replace(self.request, salt="s"),
            replace(self.request, stream=True),
        ):
            assert other.digest() == self.request.digest()

    def test_everything_that_changes_the_answer_does(self) -> None:
        parts = self.request.messages[0].parts
        assert isinstance(parts[1], Image)
        named = replace(parts[1], uuid="u")
        others = [
            replace(self.request, max_tokens=3),
            replace(self.request, options={"n": 2}),
            lengthen(self.request),
            swap_images(self.request, [1, 0], "r"),
            replace(self.request, messages=(Message("user", (parts[0], named, *parts[2:])),)),
            replace(self.request, messages=(*self.request.messages, Message("assistant", (Text("x"),)))),
            replace(self.request, messages=(Message("system", (Text("x"),)),)),
        ]
        assert len({self.request.digest(), *(other.digest() for other in others)}) == len(others) + 1


class TestBody:
    def test_asks_for_what_the_oracles_need(self) -> None:
        body = drawn(0, "x").requests[0].body("served")
        assert body["model"] == "served"
        assert {
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": True,
        }.items() <= body.items()
        assert body["top_logprobs"] == 2
        assert body["stream"] is False
        assert "cache_salt" not in body

    def test_options_stand_in_the_place_of_other_fields(self) -> None:
        request = replace(drawn(0, "x").requests[0], options={"temperature": 1, "n": 2, "logprobs": None})
        body = request.body("m", "salt")
        assert (body["temperature"], body["n"], body["cache_salt"]) == (1, 2, "salt")
        assert "logprobs" not in body

    def test_a_salt_that_is_given_wins(self) -> None:
        request = replace(drawn(0, "x").requests[0], salt="own")
        assert request.body("m")["cache_salt"] == "own"
        assert request.body("m", "given")["cache_salt"] == "given"

    def test_an_assistants_turn_is_a_string(self) -> None:
        request = Request("r", (Message("user", (Text("a"),)), Message("assistant", (Text("b"), Text("c")))))
        first, second = request.body("m")["messages"]
        assert first["content"] == [{"type": "text", "text": "a"}]
        assert second["content"] == "bc"

    def test_an_image_outside_a_users_message_is_refused(self) -> None:
        """Such a turn is sent as text, so the image would vanish, and the plan still speak of it."""
        with pytest.raises(UsageError, match="assistant"):
            Message("assistant", (Image(ImageSpec(1)),))

    def test_images_are_sent_in_order_with_their_names(self) -> None:
        request = Request("r", (Message("user", (Image(ImageSpec(1), "a"), Text("t"), Image(ImageSpec(2)))),))
        first, _, last = request.body("m")["messages"][0]["content"]
        assert first["uuid"] == "a"
        assert "uuid" not in last
        assert first["image_url"] != last["image_url"]


def test_a_request_ends_with_the_tail_and_opens_with_fresh_words() -> None:
    draw = Draw(0, "x")
    first, second = draw.request("a", draw.image()), draw.request("b")
    for request in (first, second):
        assert request.messages[0].parts[-1] == Text(TAIL)
    assert first.messages[0].parts[0] != second.messages[0].parts[0]
    assert draw.user(Text("x"), tail=False).parts == (Text("x"),)


class TestContrasts:
    request = Request("r", (Message("user", (Image(ImageSpec(1), "a"), Text("t"), Image(ImageSpec(2), "b"))),))

    def test_a_swap_takes_the_names_along(self) -> None:
        """A name that stayed behind would stand for the other content: another case, and a nasty one."""
        swapped = swap_images(self.request, [1, 0], "s")
        assert swapped.messages[0].parts == (Image(ImageSpec(2), "b"), Text("t"), Image(ImageSpec(1), "a"))
        assert swap_images(swapped, [1, 0], "r") == self.request

    @pytest.mark.parametrize("order", [[], [0], [0, 0], [0, 2], [0, 1, 2]])
    def test_what_is_no_order_is_refused(self, order: list[int]) -> None:
        with pytest.raises(ValueError, match="no order"):
            swap_images(self.request, order, "s")

    def test_images_are_replaced_one_by_one(self) -> None:
        fresh = [Image(ImageSpec(3)), Image(ImageSpec(4))]
        replaced = replace_images(self.request, fresh, "n")
        assert [spec.seed for spec in replaced.images] == [3, 4]
        assert replaced.label == "n"
        assert replaced.messages[0].parts[1] == Text("t")
        for wrong in (fresh[:1], [*fresh, fresh[0]]):
            with pytest.raises(ValueError, match="images for the"):
                replace_images(self.request, wrong, "n")

    def test_lengthening_keeps_the_items_and_the_beginning(self) -> None:
        longer = lengthen(self.request)
        assert longer.images == self.request.images
        assert longer.messages[0].parts[:-1] == self.request.messages[0].parts
        assert lengthen(self.request, 0) == self.request
        assert lengthen(self.request, 2) == lengthen(longer)


def test_options_are_part_of_a_request() -> None:
    plain = Draw(0, "options").request("r", Draw(0, "image").image())
    asked = replace(plain, options={"mm_processor_kwargs": {"max_pixels": 9}, "max_tokens": 3})
    assert asked.body("m")["mm_processor_kwargs"] == {"max_pixels": 9}
    assert asked.body("m")["max_tokens"] == 3
    assert asked.digest() != plain.digest()
    assert Request.from_json(json.loads(json.dumps(asked.to_json()))) == asked
    assert "options" not in plain.to_json(), "a request without them keeps its digest and its form"


def test_what_a_baseline_is_asked_of_a_script() -> None:
    draw = Draw(0, "script")
    requests = tuple(draw.request(label) for label in "abcd")
    steps = (send("loaded"), step("look"), send("contained"), send("refused"), send("given-up", "reference"))
    plan = Plan(requests, steps=steps)
    assert plan.hows == ("loaded", "contained", "refused", "given-up")
    assert plan.compared == requests[:2]
    assert not plan.sequence
    assert Plan(requests).compared == requests
    assert Plan(requests[:1], steps=(send("as-aggregated"),)).sequence
