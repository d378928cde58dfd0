"""Areas INIT, XFER, KV, ROLE: what the servers did with the items, by their journals."""

from __future__ import annotations

from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Plan, replace_images
from epd_conformance.pytest_plugin import CellUnderTest


def one(draw: Draw) -> Plan:
    return Plan((draw.request("one image", draw.image()),))


def three(draw: Draw) -> Plan:
    """Three images, one of another size, so that rows differ."""
    return Plan((draw.request("three images", draw.image(), draw.image(140, 112), draw.image()),))


def nothing(draw: Draw) -> Plan:
    return Plan(())


def same_items_again(draw: Draw) -> Plan:
    """Two requests with other words over the same two images."""
    images = [draw.image(), draw.image()]
    first = draw.request("cold", *images)
    return Plan((first, draw.request("warm", *images)), (replace_images(first, [draw.image(), draw.image()], "other"),))


def missed(draw: Draw) -> Plan:
    request = draw.request("never primed", draw.image())
    return Plan((request,), (replace_images(request, [draw.image()], "other"),))


def twice(draw: Draw) -> Plan:
    image = draw.image()
    return Plan((draw.request("the same image twice", image, image),))


def cold_twice(draw: Draw) -> Plan:
    """The same request again, asked under another salt after the server's encoder cache was reset."""
    request = draw.request("first", draw.image())
    return Plan(
        (request, replace(request, label="after the reset")), (replace_images(request, [draw.image()], "other"),)
    )


@requirement("EPD-INIT-001", Case("init", "constructed", nothing, exact=False))
def test_constructed_in_both_roles(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ROLE-001", Case("encode", "encode-only", one, exact=False))
def test_encode_server_generates_nothing(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ROLE-002", Case("ec-both", "both", cold_twice))
def test_ec_both(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-XFER-001", Case("img1", "transported", one, exact=False), Case("img3", "transported", three, exact=False)
)
def test_loaded_is_what_was_saved(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-002", Case("warm", "warm", same_items_again))
def test_warm_items_stay(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-003", Case("miss", "miss", missed))
def test_a_miss_is_encoded(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-004", Case("img-twice", "twice", twice, exact=False))
def test_twice_in_a_request_is_one_transfer(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-KV-001", Case("img1", "kv-taken", one, exact=False), Case("img3", "kv-taken", three, exact=False))
def test_decode_takes_the_kv(cell: CellUnderTest) -> None:
    cell.check()
