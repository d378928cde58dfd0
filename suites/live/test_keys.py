"""Areas ERR, SEC: what becomes of items under uuids that nobody expects, and of references to what nobody has saved."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Image, Plan, Request, other_images, replace_images
from epd_conformance.plans.steps import send, step
from epd_conformance.pytest_plugin import CellUnderTest

# -- uuids -------------------------------------------------------------------------------------------------------------


def hostile(*tails: str) -> Callable[[Draw], Plan]:
    """A harmless uuid; then, for each tail, one that has it behind a number, over the whole path and past the encode servers:
    where the encode server refuses it, the consumer meets it all the same; and a fresh item."""

    def build(draw: Draw) -> Plan:
        first = _named(draw, "first", _harmless(draw))
        requests, steps = [first], [step("look"), send("loaded")]
        for tail in tails:
            # With the number of the harmless one, so that the name of something that exists can be meant.
            image = replace(draw.image(), uuid=f"{first.uuids[0]}{tail}")
            label = repr(tail if len(tail) < 40 else f"{tail[:8]}… ({len(tail)})")
            requests += [draw.request(f"{label} by {way}", image) for way in ("proxy", "consumer")]
            steps += [send("contained"), send("contained", "past-encode")]
        requests.append(_named(draw, "fresh", _harmless(draw)))
        steps += [send("loaded"), step("look")]
        return Plan(tuple(requests), other_images(draw, requests), steps=tuple(steps))

    return build


def alike(draw: Draw) -> Plan:
    """Pairs of uuids that are one name where case, Unicode form, or all behind the 255th byte is lost; other images each."""
    name = _harmless(draw)
    pairs = [
        (f"{name}-Ab", f"{name}-aB"),
        *[tuple(unicodedata.normalize(form, f"{name}-é") for form in ("NFC", "NFD"))],
        *[tuple(f"{name:x<300}{letter}" for letter in "ab")],
    ]
    requests = [_named(draw, "first", _harmless(draw))]
    contrasts = list(other_images(draw, requests))
    for kind, pair in zip(("case", "form", "ending"), pairs, strict=True):
        images = [replace(draw.image(), uuid=uuid) for uuid in pair]
        both = [draw.request(f"{kind}, {place}", image) for place, image in zip(("one", "other"), images, strict=True)]
        requests += both
        contrasts += [
            replace_images(request, [Image(image.spec)], f"{request.label}, the other's image")
            for request, image in zip(both, reversed(images), strict=True)
        ]
    fresh = _named(draw, "fresh", _harmless(draw))
    steps = [step("look"), send("loaded"), *[send("contained")] * 6, send("loaded"), step("look")]
    return Plan((*requests, fresh), (*contrasts, *other_images(draw, [fresh])), steps=tuple(steps))


def not_a_string(draw: Draw) -> Plan:
    """Straight to the consumer, since a proxy may have its own mind about it."""
    requests = [_named(draw, "first", _harmless(draw))]
    number = draw.number()
    values: dict[str, Any] = {"a number": number, "a boolean": True, "a list": [number], "an object": {"a": number}}
    requests += [_named(draw, f"{label} for a uuid", value) for label, value in values.items()]
    requests.append(_named(draw, "fresh", _harmless(draw)))
    steps = (send("loaded"), *[send("refused", "past-encode")] * len(values), send("loaded"))
    return Plan(tuple(requests), other_images(draw, requests), steps=steps)


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
    Case("long", "scripted", hostile("x" * 300)),
    Case("longest", "scripted", hostile("x" * 10_000)),
    Case("nul", "scripted", hostile("\0", "\0x")),
    Case("slashes", "scripted", hostile("//a//b", "\\a", "/./a")),
    # The first is where vLLM's example connector has the rows of the harmless one; the others lead there, or into its folder.
    Case("exists", "scripted", hostile("/encoder_cache.safetensors", "/", "/.", "/x")),
    Case("alike", "scripted", alike),
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
