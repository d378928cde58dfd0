"""Area PROXY: what the orchestrator owes to the servers and to the client."""

from __future__ import annotations

from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Message, Plan, Request, Text, swap_images
from epd_conformance.pytest_plugin import CellUnderTest


def text(draw: Draw) -> Plan:
    return Plan((draw.request("text"),))


def three(draw: Draw) -> Plan:
    return Plan((draw.request("three images", draw.image(), draw.image(), draw.image()),))


def image_plain_and_streamed(draw: Draw) -> Plan:
    request = draw.request("image", draw.image())
    return Plan((request, replace(request, label="image, streamed", stream=True)))


def text_plain_and_streamed(draw: Draw) -> Plan:
    request = draw.request("text")
    return Plan((request, replace(request, label="text, streamed", stream=True)))


@requirement("EPD-PROXY-001", Case("text", "untouched", text, exact=False))
def test_text_touches_no_encode_server(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-002", Case("img3", "primed-once", three, exact=False))
def test_each_item_is_primed_once(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-003",
    Case("encode-404", "stage-error", image_plain_and_streamed, exact=False),
    Case("text-404", "stage-error", text_plain_and_streamed, exact=False),
)
def test_a_failing_stage_is_one_clear_error(cell: CellUnderTest) -> None:
    cell.check()


# -- what a server refuses -----------------------------------------------------------------------------------------------

# More words than any model here takes (2048 tokens, of one letter at the least).
TOO_LONG = "too long " * 2000
NO_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,bm8gcGljdHVyZQ=="}}


def too_long(draw: Draw, label: str, stream: bool = False) -> Request:
    """An image, which the encode server takes, and a text that no server takes."""
    return draw.request(label, draw.image(), Text(TOO_LONG), stream=stream)


def refusals(draw: Draw) -> Plan:
    """What each stage refuses: a text that is too long, also streamed and with an image; and options that no server takes."""
    words = draw.words()
    return Plan(
        (
            draw.request("long text", Text(TOO_LONG)),
            too_long(draw, "image and long text"),
            too_long(draw, "image and long text, streamed", stream=True),
            # The encode stage refuses it.
            replace(
                draw.request("no picture"),
                options={"messages": [{"role": "user", "content": [words.part(), NO_PICTURE]}]},
            ),
            # A proxy that keeps an option to itself would have it answered.
            replace(draw.request("a temperature below zero", draw.image()), options={"temperature": -1}),
        )
    )


def refused_streams(draw: Draw) -> Plan:
    return Plan(
        (
            draw.request("long text", Text(TOO_LONG), stream=True),
            too_long(draw, "image and long text", stream=True),
        )
    )


@requirement("EPD-PROXY-004", Case("refused", "refused", refusals, exact=False))
def test_a_refusal_keeps_status_and_reason(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-005", Case("refused", "not-begun", refused_streams, exact=False))
def test_a_refused_stream_has_not_begun(cell: CellUnderTest) -> None:
    cell.check()


# -- what a leg holds ----------------------------------------------------------------------------------------------------


def short_and_long(draw: Draw) -> Plan:
    """Images of one size; the second request has far more text."""
    return Plan(
        (draw.request("short", draw.image()), draw.request("long", draw.image(), Text("And more of it. " * 20)))
    )


@requirement("EPD-PROXY-008", Case("short-long", "media-only", short_and_long, exact=False))
def test_a_primer_holds_media_only(cell: CellUnderTest) -> None:
    cell.check()


def limits(draw: Draw) -> Plan:
    """The limits of an answer in each form that the API has."""
    forms = {
        "tokens": {},
        "completion tokens": {"max_tokens": None, "max_completion_tokens": 6},
        "choices": {"n": 2, "temperature": 0.5, "min_tokens": 3},
    }
    return Plan(
        tuple(
            replace(draw.request(label, draw.image()), max_tokens=6, options=options)
            for label, options in forms.items()
        )
    )


@requirement("EPD-PROXY-011", Case("limits", "one-token", limits, exact=False))
def test_prefill_makes_one_token(cell: CellUnderTest) -> None:
    cell.check()


def named_and_salted(draw: Draw) -> Plan:
    """One prompt with a client's name for its image: twice under one salt, so that the prefix cache knows it, and under another."""
    salts = [f"{draw.number():012x}" for _ in range(2)]
    request = draw.request("first", replace(draw.image(), uuid=f"epd-conformance-{draw.number():012x}"))
    return Plan(
        (
            replace(request, salt=salts[0]),
            replace(request, label="same salt", salt=salts[0]),
            replace(request, label="other salt", salt=salts[1]),
        )
    )


@requirement("EPD-PROXY-013", Case("uuid-salt", "encoding-options", named_and_salted, exact=False))
def test_options_of_the_encoding_reach_each_stage(cell: CellUnderTest) -> None:
    cell.check()


SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "seen",
        "schema": {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]},
    },
}
# vLLM takes four.
STOPS = ["e", "a", "t", "\n"]
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}},
}


def options(draw: Draw) -> Plan:
    """Each option of an answer once, with an image and without, streamed and not."""
    forms: dict[str, tuple[int, dict[str, object]]] = {
        "choices": (1, {"n": 2, "temperature": 0.7, "seed": 5}),
        "log-probabilities": (1, {"top_logprobs": 4}),
        "schema": (0, {"response_format": SCHEMA}),
        # Whoever wants them called has to start the servers with a parser of this model's own form of calls.
        "tools": (1, {"tools": [TOOL], "tool_choice": "none"}),
        # Strings that stop a model of words, ids that stop one of bytes.
        "stop": (
            1,
            {"stop": STOPS, "stop_token_ids": [*range(0, 256, 2)], "max_tokens": None, "max_completion_tokens": 8},
        ),
        "streamed": (1, {"n": 2, "temperature": 0.7, "seed": 6, "stream_options": {"include_usage": True}}),
    }
    return Plan(
        tuple(
            replace(
                draw.request(label, *[draw.image() for _ in range(images)], stream=label == "streamed"),
                # Enough to tell answers apart.
                max_tokens=8,
                # A schema ends an answer by itself.
                options={"ignore_eos": False, **more},
            )
            for label, (images, more) in forms.items()
        )
    )


@requirement("EPD-PROXY-014", Case("options", "as-direct", options, exact=False))
def test_options_of_the_answer_count(cell: CellUnderTest) -> None:
    cell.check()


def two(draw: Draw) -> Plan:
    return Plan(
        (
            draw.request("three images", *[draw.image() for _ in range(3)]),
            draw.request("one, streamed", draw.image(), stream=True),
        )
    )


@requirement("EPD-PROXY-015", Case("img3", "prompt-tokens", two))
def test_no_leg_loses_the_media(cell: CellUnderTest) -> None:
    cell.check()


def sizes_over_turns(draw: Draw) -> Plan:
    """Images of three sizes in two turns, with text between; the contrast has them in another order."""
    request = Request(
        "three sizes",
        (
            draw.user(draw.words(), draw.image(112, 84), Text("What is this? "), draw.image(168, 140), tail=False),
            Message("assistant", (Text("Coloured squares."),)),
            draw.user(Text("And this? "), draw.image(140, 112)),
        ),
    )
    return Plan((request,), (swap_images(request, [2, 0, 1], "other order"),))


@requirement("EPD-PROXY-033", Case("three-sizes", "order", sizes_over_turns))
def test_items_keep_their_order(cell: CellUnderTest) -> None:
    cell.check()


# -- requests ------------------------------------------------------------------------------------------------------------


def long_answers(draw: Draw) -> Plan:
    """Answers that take far longer than five seconds where nobody ends them."""
    requests = (draw.request("streamed", draw.image(), stream=True), draw.request("plain", draw.image()))
    # Many choices: they fill each step, and wait in turn; eight of them are over in eight seconds on two cores.
    more = {"n": 32, "temperature": 1.0, "return_token_ids": None, "logprobs": None, "top_logprobs": None}
    return Plan(tuple(replace(request, max_tokens=1500, options=more) for request in requests))


@requirement("EPD-PROXY-021", Case("decode", "work-ends", long_answers, exact=False))
def test_a_client_that_leaves_frees_the_work(cell: CellUnderTest) -> None:
    cell.check()


def named_and_unnamed(draw: Draw) -> Plan:
    return Plan((draw.request("named", draw.image(), draw.image()), draw.request("unnamed", draw.image())))


@requirement("EPD-PROXY-024", Case("named", "one-id", named_and_unnamed, exact=False))
def test_one_id_through_all_stages(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-029", Case("models-tokenize", "passed-on", text, exact=False))
def test_other_paths_reach_decode(cell: CellUnderTest) -> None:
    cell.check()


def six_at_once(draw: Draw) -> Plan:
    """Up to two images each, every third one streamed: all in one batch of the servers here."""
    requests = tuple(
        draw.request(f"request {number}", *[draw.image() for _ in range(number % 3)], stream=number % 3 == 1)
        for number in range(6)
    )
    return Plan(requests, at_once=True)


@requirement("EPD-PROXY-034", Case("six", "kept-apart", six_at_once))
def test_requests_are_kept_apart(cell: CellUnderTest) -> None:
    cell.check()
