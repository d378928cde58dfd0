"""Area KV: blocks of the KV cache."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-KV-010", PLANS)
def test_what_was_given_up_holds_no_blocks(cell: CellUnderTest) -> None:
    cell.check()
