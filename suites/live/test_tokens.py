"""Area TOK: token ids of prompt and answer equal those of the matched baseline, after the items provably crossed."""

from __future__ import annotations

from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Message, Plan, Text, replace_images, swap_images
from epd_conformance.pytest_plugin import CellUnderTest

OTHER = "other content"


def text(draw: Draw) -> Plan:
    """Two texts that differ in their first words."""
    request = draw.request("text")
    return Plan((request,), (draw.request(OTHER),))


def one(draw: Draw) -> Plan:
    """Text, one image, text."""
    request = draw.request("one image", draw.image())
    return Plan((request,), (replace_images(request, [draw.image()], OTHER),))


def several(count: int, reverse: bool):
    """`count` different images of one size; the contrast has them in another order."""

    def build(draw: Draw) -> Plan:
        request = draw.request(f"{count} images", *[draw.image() for _ in range(count)])
        order = list(reversed(range(count)))
        swapped = swap_images(request, order, f"{count} images, other order")
        return Plan((swapped,), (request,)) if reverse else Plan((request,), (swapped,))

    return build


def twice(draw: Draw) -> Plan:
    """One image twice; the contrast has another image in the second place."""
    image = draw.image()
    request = draw.request("the same image twice", image, image)
    return Plan((request,), (replace_images(request, [image, draw.image()], OTHER),))


def adjacent(draw: Draw) -> Plan:
    """Two images next to each other."""
    request = draw.request("adjacent", draw.image(), draw.image())
    return Plan((request,), (swap_images(request, [1, 0], OTHER),))


def between(draw: Draw) -> Plan:
    """Two images with text between them."""
    request = draw.request("text between", draw.image(), Text("Now compare it with this one: "), draw.image())
    return Plan((request,), (swap_images(request, [1, 0], OTHER),))


def first(draw: Draw) -> Plan:
    """The message opens with the image."""
    from epd_conformance.plans.plan import Request

    request = Request("image first", (draw.user(draw.image(), draw.words(" Request")),))
    return Plan((request,), (replace_images(request, [draw.image()], OTHER),))


def last(draw: Draw) -> Plan:
    """The message ends with the image; a later turn of text keeps it inside whole KV blocks."""
    from epd_conformance.plans.plan import Request

    request = Request(
        "image last",
        (
            draw.user(draw.words(), draw.image(), tail=False),
            Message("assistant", (Text("I see it."),)),
            draw.user(),
        ),
    )
    return Plan((request,), (replace_images(request, [draw.image()], OTHER),))


def sizes(draw: Draw) -> Plan:
    """A small and a larger, not square, image; the contrast has them in the other order."""
    request = draw.request("two sizes", draw.image(112, 84), draw.image(168, 140))
    return Plan((request,), (swap_images(request, [1, 0], OTHER),))


def turns(draw: Draw) -> Plan:
    """Three turns, images in the first and the last."""
    from epd_conformance.plans.plan import Request

    request = Request(
        "several turns",
        (
            draw.user(draw.words(), draw.image(), Text("What is this? "), tail=False),
            Message("assistant", (Text("A picture of coloured squares."),)),
            draw.user(Text("And this one? "), draw.image()),
        ),
    )
    return Plan((request,), (swap_images(request, [1, 0], OTHER),))


def streamed(build):
    """The same plan, its request streamed."""

    def wrapped(draw: Draw) -> Plan:
        plan = build(draw)
        return replace(plan, requests=tuple(replace(request, stream=True) for request in plan.requests))

    return wrapped


@requirement("EPD-TOK-001", Case("text", "text-only", text))
def test_text_only(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-TOK-002", Case("img1", "equality", one))
def test_one_image(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-TOK-003",
    Case("img2", "equality", several(2, False)),
    Case("img2-reversed", "equality", several(2, True)),
    Case("img3", "equality", several(3, False)),
    Case("img3-reversed", "equality", several(3, True)),
)
def test_several_images(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-TOK-004", Case("img-twice", "equality", twice))
def test_same_image_twice(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-TOK-005", Case("adjacent", "equality", adjacent), Case("text-between", "equality", between))
def test_adjacent_and_apart(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-TOK-006", Case("first", "equality", first), Case("last", "equality", last))
def test_first_and_last(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-TOK-007", Case("two-sizes", "equality", sizes))
def test_two_sizes(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-TOK-008", Case("turns", "equality", turns))
def test_several_turns(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-TOK-009",
    Case("text-stream", "text-only", streamed(text)),
    Case("img1-stream", "equality", streamed(one)),
    Case("img2-stream", "equality", streamed(several(2, False))),
)
def test_streaming(cell: CellUnderTest) -> None:
    cell.check()
