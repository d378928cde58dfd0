"""Area OBS: what ranks report."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-OBS-002", PLANS)
def test_reports_of_ranks_add_up(cell: CellUnderTest) -> None:
    cell.check()
