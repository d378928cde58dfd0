"""Area RACE: what servers answer when an object changes while a request stands between two of its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Image, Plan, Request, Text, replace_images
from epd_conformance.plans.windows import WINDOWS
from epd_conformance.pytest_plugin import CellUnderTest

# One item in four places of 64 rows each (8 × 8 patches of 28 pixels on Qwen2.5-VL), behind so many digits that what the servers
# take of a prompt in one step (live.session.STEP_TOKENS) ends among them. Tokenizers take digits one by one; where they do
# not, the cell says so (`error: barrier`).
LARGE, PLACES, DIGITS = (224, 224), 4, 330


def held(window: str, fault: str, *, references: bool = False) -> Case:
    """First, twin, victim and fresh item, as for any fault; twin and victim are held in the window."""

    def build(draw: Draw) -> Plan:
        def image(size: tuple[int, int] = (112, 84)) -> Image:
            drawn = draw.image(*size)
            # Without media nothing but the client's own name says which item it is.
            return replace(drawn, uuid=f"epd-conformance-{draw.number():012x}") if references else drawn

        def asked(label: str) -> Request:
            return _cut(draw, label, image(LARGE)) if window == "chunk" else draw.request(label, image())

        requests = [draw.request("first", image()), asked("twin"), asked("victim"), draw.request("fresh", image())]
        (shown, *_) = [part for part in requests[2].messages[0].parts if isinstance(part, Image)]
        if WINDOWS[window].again:
            requests.append(draw.request("again", shown))
        return Plan(tuple(requests), tuple(_contrasts(draw, requests)), fault, references, window=window)

    return Case(f"{window}-{fault}", "in-window", build)


def _cut(draw: Draw, label: str, image: Image) -> Request:
    """A prompt that takes two steps, both with rows of the image."""
    digits = "".join(f"{draw.number():015d}" for _ in range(DIGITS // 15))
    return draw.request(label, Text(f"{digits} "), *[image] * PLACES)


def _contrasts(draw: Draw, requests: Sequence[Request]) -> list[Request]:
    """The victim's has the first image, where that has its size: it would show that if the first object took its place."""
    found = []
    for request in requests:
        image = request.images[0]
        other = draw.image(image.width, image.height).spec
        if request.label in ("victim", "again") and requests[0].images[0].width == image.width:
            other = requests[0].images[0]
        others = [replace(draw.image(), spec=other)] * len(request.images)
        found.append(replace_images(request, others, f"{request.label}, other content"))
    return found


def _cases(windows: Sequence[str], faults: Sequence[str], make: Callable[[str, str], Case]) -> tuple[Case, ...]:
    return tuple(make(window, fault) for window in windows for fault in faults)


def without_media(window: str, fault: str) -> Case:
    return held(window, fault, references=True)


BEFORE_THE_LOAD = ("looked-up", "allocated")


@requirement("EPD-RACE-001", held("looked-up", "deleted"))
def test_deleted_between_look_up_and_allocation(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-002", held("allocated", "deleted"))
def test_deleted_between_allocation_and_load(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-003", held("chunk", "deleted"))
def test_deleted_between_two_chunks(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-004", held("prefilled", "deleted"))
def test_deleted_between_prefill_and_decode(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-013", *_cases(BEFORE_THE_LOAD, ("replaced",), held), held("allocated", "one-row"))
def test_replaced_before_the_load(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-014", *_cases(("loaded",), ("deleted", "replaced"), held))
def test_a_loaded_item_needs_no_object(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-RACE-015",
    *_cases(BEFORE_THE_LOAD, ("deleted", "replaced"), without_media),
    without_media("loaded", "deleted"),
)
def test_without_media_a_window_harms_nobody_else(cell: CellUnderTest) -> None:
    cell.check()
