"""Area PROXY on fake servers: what the encode servers get."""

from __future__ import annotations

from epd_conformance.live.case import requirement
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.plan import (
    COMPLETIONS,
    Act,
    Plan,
    Send,
    Step,
    audio,
    chat,
    image,
    images,
    mark,
    once,
    video,
)
from epd_conformance.pytest_plugin import CellUnderTest


def completion(label: str, **fields: object) -> Send:
    body = {"model": "fake-model", "prompt": f"go on {mark(label)}", "max_tokens": 4} | fields
    return Send(label, body, path=COMPLETIONS)


# Long enough that a consumer that is asked too early is asked while a primer runs.
SLOW = Act("encode", wait_s=0.05)

KINDS = {
    "model": "fake-model",
    "messages": [
        {"role": "user", "content": [image("kinds-0"), {"type": "text", "text": mark("kinds")}, audio("kinds-1")]},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": [video("kinds-2"), image("kinds-3")]},
    ],
}

AGAIN = Plan(tuple(Step((Send(label, chat(label, image("again"))),)) for label in ("first", "second", "third")))


@requirement(
    "EPD-PROXY-001",
    ProxyCase(
        "text",
        "untouched",
        once(Send("plain", chat("plain")), Send("streamed", chat("streamed", stream=True)), completion("completion")),
    ),
)
def test_text_touches_no_encode_server(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-002",
    ProxyCase("img3", "primed-once", once(Send("three", chat("three", *images("three", 3))), acts=(SLOW,))),
    ProxyCase("kinds", "primed-once", once(Send("kinds", KINDS), acts=(SLOW,))),
    ProxyCase("repeated", "primed-and-right", AGAIN),
)
def test_each_item_is_primed_once(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-008",
    ProxyCase(
        "img2-text",
        "media-only",
        once(
            Send("words", chat("words", *images("words", 2), tools=[{"type": "function", "function": {"name": "f"}}]))
        ),
    ),
)
def test_a_primer_holds_media_only(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-009",
    ProxyCase(
        "second-of-three",
        "half-primed",
        once(
            Send("half", chat("half", *images("half", 3))),
            Send("stream", chat("stream", *images("half", 2), stream=True)),
            acts=(Act("encode", holding=image("half-1")["image_url"]["url"], status=422, reason="no such picture"),),
        ),
    ),
)
def test_one_failed_primer_fails_all(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-022",
    ProxyCase(
        "first-down",
        "another-server",
        # A proxy that never uses the server would show nothing while it is down: it has its turns before.
        Plan(
            (
                *(Step((Send(f"u{i}", chat(f"u{i}", image(f"u{i}"))),)) for i in range(4)),
                *(Step((Send(f"r{i}", chat(f"r{i}", image(f"r{i}"))),), down=("encode-0",)) for i in range(3)),
            )
        ),
        options={"retries": 2},
    ),
)
def test_another_encode_server_is_used(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-025",
    ProxyCase(
        "img4",
        "side-by-side",
        once(Send("four", chat("four", *images("four", 4))), acts=(Act("encode", wait_s=0.2),)),
    ),
)
def test_items_are_primed_side_by_side(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-026", ProxyCase("repeated", "right", AGAIN, options={"affinity": True}))
def test_a_repeated_item_changes_no_answer(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-027",
    ProxyCase(
        "unknown",
        "adapter",
        once(
            Send("plain", chat("plain", image("plain"), model="adapter-x")),
            Send("streamed", chat("streamed", image("streamed"), model="adapter-x", stream=True)),
            acts=(Act("encode", holding="adapter-x", status=404, reason="The model `adapter-x` does not exist."),),
        ),
    ),
)
def test_an_adapter_that_encode_does_not_know(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-030",
    ProxyCase("six", "in-turn", Plan(tuple(Step((Send(f"t{i}", chat(f"t{i}", image(f"t{i}"))),)) for i in range(6)))),
)
def test_every_encode_server_works(cell: CellUnderTest) -> None:
    cell.check()
