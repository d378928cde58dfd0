"""Area ROLE: what an encode server answers to whom it is asked directly."""

from __future__ import annotations

from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.plan import Draw, Plan
from epd_conformance.pytest_plugin import CellUnderTest

SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
# None of these can be met without a token.
WISHES = {
    "many tokens": {"max_tokens": 50},
    "at least five tokens": {"max_tokens": 20, "min_tokens": 5},
    "a stop rule": {"max_tokens": 20, "stop": ["a"], "stop_token_ids": [0, 1, 2], "ignore_eos": False},
    "a JSON schema": {
        "max_tokens": 20,
        "response_format": {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}},
    },
}


def wishes(draw: Draw) -> Plan:
    return Plan(tuple(replace(draw.request(label, draw.image()), options=options) for label, options in WISHES.items()))


def text_first(draw: Draw) -> Plan:
    return Plan((draw.request("text"), draw.request("one image", draw.image())))


def one_twice(draw: Draw) -> Plan:
    image = draw.image()
    return Plan((draw.request("an image, another, and the first again", image, draw.image(), image),))


@requirement("EPD-ROLE-005", Case("wishes", "ended", wishes, exact=False))
def test_every_request_ends_without_a_token(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ROLE-006", Case("text", "text-ended", text_first, exact=False))
def test_a_text_does_no_harm(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-ROLE-007", Case("img-twice", "named", one_twice, exact=False))
def test_every_item_is_named(cell: CellUnderTest) -> None:
    cell.check()
