"""Area PROXY on fake servers: what each leg holds, and that the answer is the right one."""

from __future__ import annotations

from epd_conformance.live.case import requirement
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.plan import (
    COMPLETIONS,
    MEDIA_HOST,
    Act,
    Plan,
    Send,
    Step,
    chat,
    image,
    images,
    mark,
    once,
    png,
)
from epd_conformance.pytest_plugin import CellUnderTest

EPD = ("proxy-e-p-d",)

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}

ENCODED = {
    "mm_processor_kwargs": {"max_pixels": 50176},
    "media_io_kwargs": {"image": {"rgba_background_color": [1, 2, 3]}},
    "chat_template_kwargs": {"thinking": False},
    "cache_salt": "salt-1",
    "priority": 3,
    "model": "adapter-y",
}


def sent(label: str, count: int = 1, **fields: object) -> Send:
    return Send(label, chat(label, *images(label, count), **fields))


def completion(label: str, **fields: object) -> Send:
    return Send(label, {"model": "fake-model", "prompt": f"go on {mark(label)}"} | fields, path=COMPLETIONS)


@requirement(
    "EPD-PROXY-010",
    ProxyCase(
        "fields",
        "prefill-fields",
        once(
            sent("plain", 2),
            sent("many", tools=TOOLS, response_format=SCHEMA, seed=5, temperature=0.5, stop=["x"], **ENCODED),
            sent("streamed", stream=True, stream_options={"include_usage": True}, n=2, logprobs=True, top_logprobs=2),
            completion("completion", max_tokens=7, seed=5),
        ),
        EPD,
    ),
)
def test_prefill_changes_its_own_fields(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-011",
    ProxyCase(
        "limits",
        "one-token",
        once(
            sent("tokens", max_tokens=50),
            sent("completion-tokens", max_tokens=None, max_completion_tokens=50),
            sent("both", max_tokens=40, max_completion_tokens=50),
            sent("none", max_tokens=None),
            sent("choices", n=3, min_tokens=4),
            sent("streamed", stream=True, stream_options={"include_usage": True}),
            completion("text", max_tokens=50, n=2),
            completion("unlimited"),
        ),
        EPD,
    ),
)
def test_prefill_makes_one_token(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-013",
    ProxyCase(
        "fields",
        "encoding-options",
        once(
            Send("fields", chat("fields", image("fields-0", uuid="item-7"), image("fields-1"), **ENCODED)),
            Send(
                "detail",
                chat("detail", {"type": "image_url", "image_url": {"url": png("detail-0"), "detail": "high"}}),
            ),
        ),
    ),
)
def test_options_of_the_encoding_reach_each_stage(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-014",
    ProxyCase(
        "options",
        "answer-options",
        once(
            sent("choices", n=3),
            sent("logprobs", logprobs=True, top_logprobs=3),
            sent("schema", response_format=SCHEMA),
            sent("tools", tools=TOOLS, tool_choice="auto"),
            sent("seed", seed=11, temperature=0.7),
            sent("stop", stop=["end"], max_tokens=None, max_completion_tokens=3),
            sent("streamed", stream=True, n=2, logprobs=True, stream_options={"include_usage": True}),
            completion("completion", n=2, seed=3, max_tokens=5),
        ),
    ),
)
def test_options_of_the_answer_count(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-015", ProxyCase("img3", "prompt-tokens", once(sent("three", 3), sent("one", stream=True))))
def test_no_leg_loses_the_media(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-016",
    ProxyCase(
        "changed",
        "changed-content",
        Plan(
            tuple(
                Step(
                    (
                        Send(
                            label,
                            chat(label, {"type": "image_url", "image_url": {"url": f"{MEDIA_HOST}/media/pic"}}),
                        ),
                    ),
                    media={"pic": f"content {label}"},
                )
                for label in ("before", "after")
            ),
            # Where a proxy sends what encode reported instead of the media, that has to be about this content.
            (Act("encode", reports=True),),
        ),
        options={"media_hosts": ["localhost"]},
    ),
)
def test_content_behind_a_url_may_change(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-017",
    ProxyCase(
        "refused",
        "way-back",
        Plan(
            (Step((sent("lost"), sent("streamed", stream=True))), Step((Send("good", chat("good")),))),
            (
                Act("encode", reports=True),
                Act("prefill", holding='"image_embeds"', status=400, reason="nothing there"),
                Act("decode", holding='"image_embeds"', status=400, reason="nothing there"),
            ),
        ),
        options={"metadata_only": True},
    ),
)
def test_references_have_a_way_back(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-018",
    ProxyCase(
        "one-of-two",
        "not-mixed",
        # Of the other request each item has a reference: it shows that the proxy sends such at all.
        once(
            sent("half", 2),
            sent("whole", 2),
            acts=(
                Act("encode", holding=png("half-0"), reports=True, reported=png("half-0")),
                Act("encode", holding=png("half-1")),
                Act("encode", reports=True),
            ),
        ),
        options={"metadata_only": True},
    ),
)
def test_media_and_references_are_not_mixed(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-024",
    ProxyCase(
        "named",
        "one-id",
        once(sent("named", 2), Send("unnamed", chat("unnamed", image("unnamed")), named=False)),
    ),
)
def test_one_id_through_all_stages(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-031",
    ProxyCase(
        "four",
        "handed-over",
        # The later ones are quicker, so that what is shared by mistake is another's.
        once(
            *(sent(f"kv{i}", i % 2) for i in range(4)),
            acts=tuple(Act("prefill", holding=mark(f"kv{i}"), wait_s=0.04 * (3 - i)) for i in range(4)),
        ),
        EPD,
    ),
)
def test_kv_parameters_are_handed_over(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-032",
    ProxyCase(
        "img2",
        "reported",
        once(sent("one"), sent("two", 2), Send("text", chat("text")), acts=(Act("encode", reports=True),)),
    ),
)
def test_what_encode_says_is_handed_over(cell: CellUnderTest) -> None:
    cell.check()


ORDER = {
    "model": "fake-model",
    "messages": [
        {"role": "user", "content": [image("o0"), {"type": "text", "text": mark("order")}, image("o1")]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [image("o2"), image("o3"), {"type": "text", "text": "and now?"}]},
    ],
}


@requirement(
    "EPD-PROXY-033",
    ProxyCase("four", "order", once(Send("order", ORDER), acts=(Act("encode", holding=png("o0"), wait_s=0.05),))),
)
def test_items_keep_their_order(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-034",
    ProxyCase(
        "sixteen",
        "right",
        once(
            *(sent(f"c{i}", i % 3, stream=i % 4 == 1) for i in range(16)),
            acts=tuple(Act("decode", holding=mark(f"c{i}"), wait_s=0.01 * (16 - i)) for i in range(16)),
        ),
    ),
)
def test_requests_are_kept_apart(cell: CellUnderTest) -> None:
    cell.check()
