"""Area ROLE: what an object of each role does and leaves alone."""

from __future__ import annotations

from epd_conformance.engine.case import PLANS, directed
from epd_conformance.live.case import requirement
from epd_conformance.pytest_plugin import CellUnderTest


@requirement("EPD-ROLE-008", directed("encoder-decoder"))
def test_an_encoder_decoder_model_is_promised_nothing(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ROLE-010", PLANS)
def test_what_a_producer_reports_may_be_dropped(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ROLE-011", PLANS)
def test_a_consumer_publishes_nothing(cell: CellUnderTest) -> None:
    cell.check()
