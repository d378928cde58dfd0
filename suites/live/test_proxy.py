"""Area PROXY: what the orchestrator owes to the servers and to the client."""

from __future__ import annotations

from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Plan
from epd_conformance.pytest_plugin import CellUnderTest


def text(draw: Draw) -> Plan:
    return Plan((draw.request("text"),))


def three(draw: Draw) -> Plan:
    return Plan((draw.request("three images", draw.image(), draw.image(), draw.image()),))


def image_plain_and_streamed(draw: Draw) -> Plan:
    request = draw.request("image", draw.image())
    return Plan((request, replace(request, label="image, streamed", stream=True)))


def text_plain_and_streamed(draw: Draw) -> Plan:
    request = draw.request("text")
    return Plan((request, replace(request, label="text, streamed", stream=True)))


@requirement("EPD-PROXY-001", Case("text", "untouched", text, exact=False))
def test_text_touches_no_encode_server(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-PROXY-002", Case("img3", "primed-once", three, exact=False))
def test_each_item_is_primed_once(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-PROXY-003",
    Case("encode-404", "stage-error", image_plain_and_streamed, exact=False),
    Case("text-404", "stage-error", text_plain_and_streamed, exact=False),
)
def test_a_failing_stage_is_one_clear_error(cell: CellUnderTest) -> None:
    cell.check()
