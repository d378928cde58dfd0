"""Area ERR: what the connector gives up."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-ERR-011", PLANS)
def test_unknown_requests_are_ignored(cell: CellUnderTest) -> None:
    cell.check()
