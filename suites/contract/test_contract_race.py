"""Area RACE: what happens at the same time, or in between."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS, directed
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-RACE-001", PLANS)
def test_an_object_goes_before_allocation(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-002", PLANS)
def test_an_object_goes_before_the_load(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-006", directed("race-of-two"))
def test_two_producers_save_one_key(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-007", PLANS)
def test_every_rank_saves_one_key(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-008", directed("race"))
def test_readers_see_whole_objects(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-RACE-011", PLANS)
def test_a_step_is_scheduled_ahead(cell: CellUnderTest) -> None:
    cell.check()
