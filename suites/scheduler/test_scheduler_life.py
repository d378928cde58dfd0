"""Area LIFE: requests come to their end, and entries go when they may."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-LIFE-014", PLANS)
def test_items_that_do_not_fit_together(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-015", PLANS)
def test_more_requests_than_room(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-016", PLANS)
def test_no_part_of_an_item_without_room(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-017", PLANS)
def test_whole_items_where_asked_for(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-018", PLANS)
def test_released_late_and_freed_on_need(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-019", PLANS)
def test_a_repeated_item_stays_to_its_end(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-020", PLANS)
def test_what_is_under_way_frees_nothing(cell: CellUnderTest) -> None:
    cell.check()
