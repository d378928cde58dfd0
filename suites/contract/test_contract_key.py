"""Area KEY: any string names an item, and one only."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-KEY-001", PLANS)
def test_any_string_is_a_key(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-KEY-002", PLANS)
def test_a_lookup_changes_nothing(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-KEY-003", PLANS)
def test_near_keys_are_told_apart(cell: CellUnderTest) -> None:
    cell.check()
