"""Areas ERR, INTEG, SEC: what servers answer when a stored object is gone, torn or wrong, and when a name is hostile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.live.faulting import OUTSIDE
from epd_conformance.plans.plan import Draw, Image, Plan, Request, replace_images
from epd_conformance.pytest_plugin import CellUnderTest


def damaged(fault: str, *, metadata_only: bool = False) -> Callable[[Draw], Plan]:
    """A first item, a twin that nothing happens to, the victim, and a fresh item afterwards: each one image of one size."""

    def build(draw: Draw) -> Plan:
        def image() -> Image:
            # Without media nothing but the client's own name says which item it is.
            return (
                replace(draw.image(), uuid=f"epd-conformance-{draw.number():012x}") if metadata_only else draw.image()
            )

        requests = tuple(draw.request(label, image()) for label in ("first", "twin", "victim", "fresh"))
        # The victim's contrast has the first image: that is what it would show if the first object took its place.
        others = [draw.image().spec, draw.image().spec, requests[0].images[0], draw.image().spec]
        contrasts = tuple(
            replace_images(request, [replace(draw.image(), spec=spec)], f"{request.label}, other content")
            for request, spec in zip(requests, others, strict=True)
        )
        return Plan(requests, contrasts, fault, metadata_only)

    return build


def hostile(prefix: str) -> Callable[[Draw], Plan]:
    """A harmless uuid, then two that lead out of the store: one to a bait, one over the whole path."""

    def build(draw: Draw) -> Plan:
        def request(label: str, uuid: str) -> Request:
            return draw.request(label, replace(draw.image(), uuid=uuid))

        return Plan(
            (
                request("harmless", f"epd-conformance-{draw.number():012x}"),
                request("baited", f"{prefix}{draw.number():012x}"),
                request("hostile", f"{prefix}{draw.number():012x}"),
            )
        )

    return build


def cases(*faults: str, metadata_only: bool = False) -> tuple[Case, ...]:
    """One case for each kind of damage that the victim must survive or fail of alone, or without media fail of alone."""
    judge = "fails-alone" if metadata_only else "contained"
    return tuple(Case(fault, judge, damaged(fault, metadata_only=metadata_only)) for fault in faults)


@requirement("EPD-ERR-001", Case("deleted", "recomputed", damaged("deleted")))
def test_a_deleted_object_is_encoded_again(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ERR-002", *cases("deleted", metadata_only=True))
def test_a_lost_object_without_media_fails_one_request(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-ERR-013",
    *cases("truncated", "garbage", "replaced", "one-row", "rows-missing", "width-one", "dtype", "flipped-bit", "zero-tail",
           metadata_only=True),
)  # fmt: skip
def test_a_damaged_object_without_media_fails_one_request(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-001", *cases("truncated", "last-byte-missing", "header-only"))
def test_a_truncated_object_harms_nobody_else(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-002", *cases("replaced"))
def test_another_items_object_is_not_taken(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-003", *cases("one-row"))
def test_one_row_is_not_spread_over_all(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-004", *cases("rows-missing", "no-rows"))
def test_missing_rows_end_no_server(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-005", *cases("rows-added"))
def test_more_rows_than_places_are_not_cut_off(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-006", *cases("width", "width-one"))
def test_rows_of_another_width_are_not_merged(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-007", *cases("dtype", "half", "eight-bit"))
def test_rows_of_another_dtype_are_not_cast(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-009", *cases("flipped-bit", "not-a-number"))
def test_damage_that_no_shape_shows_is_found(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-010", *cases("zero-tail"))
def test_zeros_are_not_taken_for_rows(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-011", *cases("empty", "garbage"))
def test_what_is_no_object_harms_nobody(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-013", *cases("folder"))
def test_an_object_that_cannot_be_opened_harms_nobody(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-SEC-001",
    Case("parent", "confined", hostile("../epd-conformance-outside-"), exact=False),
    Case("absolute", "confined", hostile(OUTSIDE), exact=False),
    # More steps up than any store is deep.
    Case("root", "confined", hostile("../" * 40 + OUTSIDE[1:]), exact=False),
)
def test_a_uuid_does_not_leave_the_store(cell: CellUnderTest) -> None:
    cell.check()
