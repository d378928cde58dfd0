"""Area LIFE: allocation, deferral, preemption, release and the end."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS, directed
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-LIFE-001", directed("growth"))
def test_nothing_grows(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-002", PLANS)
def test_an_item_is_allocated_twice(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-003", PLANS)
def test_the_end_delays_no_release(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-004", PLANS)
def test_any_request_may_end(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-005", PLANS)
def test_parameters_can_be_serialized(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-006", PLANS)
def test_a_deferral_ends(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-007", PLANS)
def test_a_request_is_deferred_alone(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-008", PLANS)
def test_decode_waits_for_no_item(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-009", PLANS)
def test_an_idle_connector_says_so(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-LIFE-010", PLANS)
def test_shutdown_comes_twice(cell: CellUnderTest) -> None:
    cell.check()
