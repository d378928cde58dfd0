"""Area RACE: what servers answer while several requests, producers, readers and a purge are at one item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Plan, Request, replace_images
from epd_conformance.plans.steps import step
from epd_conformance.pytest_plugin import CellUnderTest


def _plan(draw: Draw, requests: list[Request], *steps: dict[str, str]) -> Plan:
    """With a contrast for each prompt that is asked: equal requests need one."""
    contrasts = {
        request.digest(): replace_images(request, [draw.image() for _ in request.images], f"{request.label}, other")
        for request in requests
    }
    return Plan(
        tuple(requests), tuple(contrasts[request.digest()] for request in requests), steps=tuple(map(dict, steps))
    )


def at_once(count: int, how: str) -> Callable[[Draw], Plan]:
    """The same request many times at once, and a fresh one afterwards."""

    def build(draw: Draw) -> Plan:
        request = draw.request("new image", draw.image())
        requests = [replace(request, label=f"new image, {number}") for number in range(count)]
        return _plan(
            draw,
            [*requests, draw.request("fresh", draw.image())],
            dict(step("together", count=str(count), how=how)),
            dict(step("send", way="proxy", how="loaded")),
        )

    return build


def purged(draw: Draw) -> Plan:
    """Sixteen requests over four images at once, while everything in the store is removed again and again."""
    four = [draw.request(f"item {number}", draw.image()) for number in range(4)]
    requests = [replace(four[number % 4], label=f"item {number % 4}, {number // 4}") for number in range(16)]
    return _plan(
        draw,
        [*requests, draw.request("fresh", draw.image())],
        dict(step("purge", how="begin")),
        dict(step("together", count="16", how="contained")),
        dict(step("purge", how="end")),
        dict(step("send", way="proxy", how="loaded")),
    )


def primed_often(draw: Draw) -> Plan:
    """Four primers of one item at once, then a request for it, and a fresh one."""
    return _plan(
        draw,
        [draw.request("primed", draw.image()), draw.request("fresh", draw.image())],
        dict(step("prime-together", count="4")),
        dict(step("send", way="past-encode", how="loaded")),
        dict(step("send", way="proxy", how="loaded")),
    )


def read_at(point: str) -> Callable[[Draw], Plan]:
    """A request for an item while its producer stands before, or behind, its save; another one later, and a fresh one."""

    def build(draw: Draw) -> Plan:
        # The producer's worker knows the item by the client's name for it.
        image = replace(draw.image(), uuid=f"epd-conformance-{draw.number():012x}")
        return _plan(
            draw,
            [draw.request("reader", image), draw.request("later", image), draw.request("fresh", draw.image())],
            dict(step("prime-held", point=point)),
            dict(step("send", way="past-encode", how="any")),
            dict(step("release")),
            dict(step("reset", cache="encoder")),
            dict(step("send", way="past-encode", how="loaded")),
            dict(step("send", way="proxy", how="loaded")),
        )

    return build


@requirement("EPD-RACE-009", Case("purged", "scripted", purged))
def test_a_purge_under_load_harms_nobody_else(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-010", Case("img32", "scripted", at_once(32, "crossed")))
def test_many_requests_for_one_new_image(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-016", Case("img8", "scripted", at_once(8, "once")))
def test_many_requests_cost_one_encode(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-017", Case("primed4", "scripted", primed_often))
def test_primed_often_at_once(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-018", Case("saving", "scripted", read_at("saving")), Case("saved", "scripted", read_at("saved")))
def test_read_while_it_is_written(cell: CellUnderTest) -> None:
    cell.check()
