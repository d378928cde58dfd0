"""Area INTEG: an object that was damaged behind the connector's back is a miss, or right."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-INTEG-001", PLANS)
def test_a_truncated_object(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-002", PLANS)
def test_another_items_object(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-003", PLANS)
def test_an_object_of_one_row(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-004", PLANS)
def test_rows_are_missing(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-005", PLANS)
def test_there_are_rows_too_many(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-006", PLANS)
def test_rows_of_another_width(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-007", PLANS)
def test_rows_of_another_dtype(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-009", PLANS)
def test_a_flipped_bit(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-010", PLANS)
def test_zeros_at_the_end(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-011", PLANS)
def test_nothing_that_is_an_object(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INTEG-014", PLANS)
def test_a_bad_object_is_replaced(cell: CellUnderTest) -> None:
    cell.check()
