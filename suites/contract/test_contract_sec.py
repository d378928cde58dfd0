"""Area SEC: hostile keys, parameters and objects."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-SEC-001", PLANS)
def test_a_key_does_not_leave_the_store(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-SEC-004", PLANS)
def test_parameters_may_be_anything(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-SEC-005", PLANS)
def test_an_object_runs_no_code(cell: CellUnderTest) -> None:
    cell.check()
