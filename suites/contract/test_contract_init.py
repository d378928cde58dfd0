"""Area INIT: both objects are made, and live apart."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS, directed
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-INIT-001", PLANS)
def test_both_objects_are_made(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INIT-002", directed("import"))
def test_an_import_opens_nothing(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INIT-004", directed("unknown-setting"))
def test_an_unknown_setting_is_reported(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INIT-005", directed("unusable-store"))
def test_an_unusable_store_is_named(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-INIT-006", PLANS)
def test_objects_live_in_processes_of_their_own(cell: CellUnderTest) -> None:
    cell.check()
