"""Area KEY: what an item is called."""

from __future__ import annotations

from epd_conformance.engine.case import directed
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-KEY-015", directed("identities"))
def test_configuration_is_not_in_the_key(cell: CellUnderTest) -> None:
    cell.check()
