"""Area ERR: objects that are gone, and stores that fail."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-ERR-001", PLANS)
def test_an_object_is_gone(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ERR-002", PLANS)
def test_an_object_is_gone_and_there_are_no_media(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ERR-003", PLANS)
def test_the_store_is_full(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ERR-004", PLANS)
def test_the_store_is_read_only_or_removed(cell: CellUnderTest) -> None:
    cell.check()
