"""Area RACE: what happens within one scheduling pass."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-RACE-012", PLANS)
def test_preempted_in_the_pass_that_chose_its_item(cell: CellUnderTest) -> None:
    cell.check()
