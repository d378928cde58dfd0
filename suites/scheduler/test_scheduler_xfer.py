"""Area XFER: where the scheduler takes an item from, and what it tells the connector."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-XFER-016", PLANS)
def test_local_then_remote_then_encode(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-017", PLANS)
def test_a_load_takes_room_and_no_budget(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-018", PLANS)
def test_every_allocation_is_told(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-019", PLANS)
def test_metadata_is_asked_on_every_step(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-020", PLANS)
def test_covered_items_are_left_alone(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-021", PLANS)
def test_a_payload_may_be_left_out(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-022", PLANS)
def test_rows_are_counted_and_not_tokens(cell: CellUnderTest) -> None:
    cell.check()
