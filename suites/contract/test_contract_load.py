"""Area LOAD: what one request costs the others."""

from __future__ import annotations

from epd_conformance.engine.case import directed
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-LOAD-008", directed("slow-store"))
def test_a_slow_store_stalls_no_step(cell: CellUnderTest) -> None:
    cell.check()
