"""Area XFER: what is saved comes out of a load, at the right time and whole."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-XFER-001", PLANS)
def test_a_load_gives_what_was_saved(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-006", PLANS)
def test_a_tensor_fits_its_placeholder(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-007", PLANS)
def test_loaded_rows_keep_their_bytes(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-009", PLANS)
def test_an_output_need_not_be_contiguous(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-010", PLANS)
def test_an_object_is_what_was_there_when_it_was_saved(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-011", PLANS)
def test_a_load_ends_within_its_step(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-012", PLANS)
def test_there_is_metadata_on_every_step(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-013", PLANS)
def test_the_scheduler_output_stays_as_it_was(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-014", PLANS)
def test_two_requests_of_a_step_share_an_item(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-XFER-015", PLANS)
def test_what_was_evicted_is_loaded_again(cell: CellUnderTest) -> None:
    cell.check()
