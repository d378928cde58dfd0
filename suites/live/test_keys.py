"""Areas ERR, KEY, SEC: what becomes of items under uuids that nobody expects, and of references to what nobody has saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Image, Plan, Request, other_images, replace_images
from epd_conformance.plans.steps import send, step
from epd_conformance.pytest_plugin import CellUnderTest

# -- uuids -------------------------------------------------------------------------------------------------------------


def hostile(*tails: str) -> Callable[[Draw], Plan]:
    """A harmless uuid; then, for each tail, the same uuid with it behind; and a fresh item. The first of them also goes past
    the encode servers: where these refuse it, the consumer meets it all the same."""

    def build(draw: Draw) -> Plan:
        first = _named(draw, "first", _harmless(draw))
        requests, steps = [first], [step("look"), send("loaded")]
        for tail in tails:
            # Behind the harmless one, so that it can be the name of something that exists.
            image = replace(draw.image(), uuid=f"{first.uuids[0]}{tail}")
            label = repr(tail if len(tail) < 40 else f"{tail[:8]}… ({len(tail)})")
            for way in ("proxy", "past-encode") if tail == tails[0] else ("proxy",):
                requests.append(draw.request(f"{label} by {way}", image))
                steps.append(send("contained", way))
        requests.append(_named(draw, "fresh", _harmless(draw)))
        steps += [send("loaded"), step("look")]
        return Plan(tuple(requests), other_images(draw, requests), steps=tuple(steps))

    return build


def alike(**pairs: tuple[str, str]) -> Callable[[Draw], Plan]:
    """A harmless uuid; pairs of uuids, by what they differ in, that have these endings behind one number, for two images each;
    and a fresh item."""

    def build(draw: Draw) -> Plan:
        requests = [_named(draw, "first", _harmless(draw))]
        contrasts = list(other_images(draw, requests))
        for kind, endings in pairs.items():
            name = _harmless(draw)
            images = [replace(draw.image(), uuid=f"{name}{ending}") for ending in endings]
            both = [draw.request(f"{kind}, {number}", image) for number, image in enumerate(images, 1)]
            requests += both
            contrasts += [
                replace_images(request, [Image(image.spec)], f"{request.label}, the other's image")
                for request, image in zip(both, reversed(images), strict=True)
            ]
        fresh = _named(draw, "fresh", _harmless(draw))
        middle = [send("contained")] * (len(requests) - 1)
        steps = [step("look"), send("loaded"), *middle, send("loaded"), step("look")]
        return Plan((*requests, fresh), (*contrasts, *other_images(draw, [fresh])), steps=tuple(steps))

    return build


def not_a_string(draw: Draw) -> Plan:
    """Straight to the consumer, since a proxy may have its own mind about it."""
    requests = [_named(draw, "first", _harmless(draw))]
    number = draw.number()
    values: dict[str, Any] = {"a number": number, "a boolean": True, "a list": [number], "an object": {"a": number}}
    requests += [_named(draw, f"{label} for a uuid", value) for label, value in values.items()]
    requests.append(_named(draw, "fresh", _harmless(draw)))
    steps = (send("loaded"), *[send("refused", "past-encode")] * len(values), send("loaded"))
    return Plan(tuple(requests), other_images(draw, requests), steps=steps)


# -- one uuid for two images --------------------------------------------------------------------------------------------

# Rows of the two sizes differ by 32 on the Qwen-VL families: a prompt with the one is then as good for blocks of 32 tokens as
# one with the other (`transport.kv_servable`), whichever of them the servers take it for.
SMALL, LARGE = (112, 84), (112, 308)


def reused(
    *caches: str,
    how: str = "as-aggregated",
    sizes: tuple[tuple[int, int], ...] = (SMALL, SMALL),
    uuid: str | None = None,
) -> Callable[[Draw], Plan]:
    """One uuid for two images, one after the other, and, where the second may fail, a fresh item. Caches are emptied before the
    script, so that it begins alike on every server, and `caches` between the two."""

    def build(draw: Draw) -> Plan:
        name = _harmless(draw) if uuid is None else uuid
        images = [replace(draw.image(*size), uuid=name) for size in sizes]
        first, second = (draw.request(label, image) for label, image in zip(("one", "other"), images, strict=True))
        fresh = [_named(draw, "fresh", _harmless(draw))] if how == "as-aggregated-or-fails" else []
        other, *rest = other_images(draw, [first, *fresh])
        own, former = (
            replace_images(second, [Image(image.spec)], f"{second.label}, the {words} image alone")
            for image, words in ((images[1], "second"), (images[0], "first"))
        )
        steps = [step("reset", cache="mm"), step("reset", cache="encoder"), send("loaded")]
        steps += [*(step("reset", cache=cache) for cache in caches), send(how), *[send("loaded") for _ in fresh]]
        return Plan((first, second, *fresh), (other, own, *rest, other, former), steps=tuple(steps))

    return build


def reused_for_another_size(
    *caches: str, sizes: tuple[tuple[int, int], ...] = (SMALL, LARGE)
) -> Callable[[Draw], Plan]:
    return reused(*caches, how="as-aggregated-or-fails", sizes=sizes)


# -- what enters an identifier ------------------------------------------------------------------------------------------


def last_row(draw: Draw) -> Plan:
    """Two images that differ in the last row of their pixels only."""
    image = draw.image()
    other = Image(replace(image.spec, last=draw.number()))
    return Plan((draw.request("an image", image), draw.request("with another last row", other)))


def processor_options(draw: Draw) -> Plan:
    """One image, made smaller by the processor to one size and to another."""
    image = draw.image(224, 168)
    return Plan(
        tuple(
            replace(
                draw.request(f"at most {width} × {height} pixels", image),
                options={"mm_processor_kwargs": {"max_pixels": width * height}},
            )
            for width, height in (SMALL, (168, 140))
        )
    )


# -- references --------------------------------------------------------------------------------------------------------


def referred(how: str, way: str, *, streamed: bool = False) -> Callable[[Draw], Plan]:
    """An item over the whole path; references to one that nobody has saved, also streamed; and a fresh item."""

    def build(draw: Draw) -> Plan:
        requests = [_named(draw, label, _harmless(draw)) for label in ("first", "nobody's", "fresh")]
        steps = [send("loaded"), send(how, way), send("loaded")]
        if streamed:
            requests.insert(2, replace(_named(draw, "nobody's, streamed", _harmless(draw)), stream=True))
            steps.insert(2, send(how, way))
        return Plan(tuple(requests), other_images(draw, requests), steps=tuple(steps))

    return build


def _harmless(draw: Draw) -> str:
    return f"epd-conformance-{draw.number():012x}"


def _named(draw: Draw, label: str, uuid: Any) -> Request:
    return draw.request(label, replace(draw.image(), uuid=uuid))


@requirement(
    "EPD-SEC-002",
    Case("long", "scripted", hostile("x" * 300, "x" * 10_000)),
    Case("nul", "scripted", hostile("\0x")),
    Case("slashes", "scripted", hostile("//a//b", "\\a", "/./a")),
    # The first is where vLLM's example connector has the rows of the harmless one; the second leads there, the third beside it.
    Case("exists", "scripted", hostile("/encoder_cache.safetensors", "/", "/x")),
    Case("alike", "scripted", alike(case=("-Ab", "-aB"), form=("-\u00e9", "-e\u0301"))),
    Case("ending", "scripted", alike(ending=(f"{'x' * 300}a", f"{'x' * 300}b"))),
)
def test_no_uuid_ends_a_server(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-SEC-003",
    Case("metadata", "scripted", referred("fails", "reference")),
    Case("uuid-alone", "scripted", referred("fails", "uuid-alone")),
)
def test_no_reference_ends_a_server(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ERR-009", Case("not-a-string", "scripted", not_a_string))
def test_a_uuid_that_is_no_string_is_refused(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ERR-010", Case("given-up", "scripted", referred("given-up", "reference", streamed=True)))
def test_what_was_given_up_is_an_error(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-KEY-010",
    Case("warm", "scripted", reused()),
    Case("cold", "scripted", reused("mm", "encoder")),
    Case("empty", "scripted", reused(uuid="")),
)
def test_one_uuid_for_two_images_of_one_size(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-KEY-011",
    Case("warm", "scripted", reused_for_another_size()),
    # The engine still holds the rows of the first, and the processor has forgotten it.
    Case("processor-cold", "scripted", reused_for_another_size("mm")),
    Case("cold-larger", "scripted", reused_for_another_size("mm", "encoder")),
    Case("cold-smaller", "scripted", reused_for_another_size("mm", "encoder", sizes=(LARGE, SMALL))),
)
def test_one_uuid_for_two_images_of_two_sizes(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-KEY-004", Case("last-row", "distinct", last_row, exact=False))
def test_all_pixels_enter_the_key(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-KEY-005", Case("max-pixels", "distinct", processor_options, exact=False))
def test_processor_options_enter_the_key(cell: CellUnderTest) -> None:
    cell.check()
