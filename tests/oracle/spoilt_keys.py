"""Ways of spoiling the stories of cells about identifiers and about what an encode server says, and what their judges must say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from made_evidence import inserted, item_key, with_answer, with_events, without
from spoilt_faults import Spoil

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.verdict import Verdict


def same_key_on(side: str) -> Spoil:
    """One side takes the two requests' items for one."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        one, other = (item_key(request.images[0], None) for request in cell.plan.requests)
        (server,) = getattr(cell.roles, side)

        def change(events: list[dict[str, Any]]) -> None:
            for event in events:
                for item in event.get("items", ()) if event["server"] == server else ():
                    if item["id"] == other:
                        item["id"] = one

        return with_events(cell, change)

    return spoil


def unseen_by(side: str) -> Spoil:
    return lambda cell: with_events(
        cell, lambda events: [e for e in events if e["ev"] != "request" or e["server"] not in getattr(cell.roles, side)]
    )


def options_refused(cell: CellEvidence) -> CellEvidence:
    first, second = cell.plan.requests
    with_options = replace(second, options={"mm_processor_kwargs": {"max_pixels": 9}})
    return with_answer(replace(cell, plan=replace(cell.plan, requests=(first, with_options))), 1, status=400)


def says(index: int = -1, **changes: Any) -> Spoil:
    """An answer of the encode server is otherwise."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        said = [dict(one) for one in cell.facts["said"]]
        said[index] |= changes
        return replace(cell, facts={"said": said})

    return spoil


def params(change: Any) -> Spoil:
    """What the answer says of the items is otherwise."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        told = {key: {**entry} for key, entry in cell.facts["said"][0]["params"].items()}
        change(told)
        return says(0, params=told)(cell)

    return spoil


def of_twice(cell: CellEvidence) -> str:
    return item_key(cell.plan.requests[0].images[0], None)


def swapped(told: dict[str, Any]) -> None:
    one, *_, other = told
    told[one], told[other] = told[other], told[one]


def idle(cell: CellEvidence) -> CellEvidence:
    """The encode server encodes nothing any more."""
    return with_events(
        cell, lambda events: [event.update(encode={}) for event in events if event["ev"] == "step"] and None
    )


def unsaid(cell: CellEvidence) -> CellEvidence:
    return replace(cell, facts={"said": cell.facts["said"][:-1]})


def one_more_item(cell: CellEvidence) -> CellEvidence:
    event = next(event for event in cell.during if event["ev"] == "request")
    return inserted(cell, {"ev": "request"}, {**event, "items": event["items"][:1]})


FAIL, INCONCLUSIVE, ERROR = Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR
# As in test_judges.NEGATIVE.
SPOILT_STORIES = [
    ("distinct", same_key_on("consumers"), FAIL, "same-identifier", "counters", None),
    ("distinct", same_key_on("encode"), FAIL, "same-identifier", "counters", None),
    ("distinct", unseen_by("consumers"), INCONCLUSIVE, "not-journalled", None, None),
    ("distinct", unseen_by("encode"), INCONCLUSIVE, "not-journalled", None, None),
    ("distinct", options_refused, INCONCLUSIVE, "options-refused", None, None),
    ("distinct", lambda c: with_answer(c, 1, status=400), FAIL, "request-failed", "status", None),
    *[
        row
        for judge in ("ended", "text-ended", "named")
        for row in (
            (judge, says(status=500), FAIL, "request-failed", "status", None),
            (judge, says(status=0), FAIL, "request-failed", "status", None),
            (judge, says(completion_tokens=1), FAIL, "token-on-encode", "counters", None),
            (judge, says(content="!"), FAIL, "token-on-encode", "counters", None),
            (judge, says(completion_tokens=None), INCONCLUSIVE, "not-counted", None, None),
            (judge, unsaid, ERROR, "incomplete-evidence", None, None),
        )
    ],
    ("text-ended", says(0, status=500), FAIL, "request-failed", "status", None),
    ("text-ended", says(0, content="words"), FAIL, "token-on-encode", "counters", None),
    ("text-ended", idle, FAIL, "nothing-encoded", "counters", None),
    ("text-ended", lambda c: without(c, ev="request"), INCONCLUSIVE, "not-journalled", None, None),
    ("named", says(0, params=None), FAIL, "not-named", "counters", None),
    ("named", says(0, params={}), FAIL, "not-named", "counters", None),
    ("named", says(0, params=["x"]), FAIL, "not-named", "counters", None),
    ("named", params(swapped), FAIL, "not-named", "counters", None),
    ("named", params(lambda told: told.popitem()), FAIL, "not-named", "counters", None),
    ("named", params(lambda told: told.update(other={"item_indices": [9]})), FAIL, "not-named", "counters", None),
    ("named", lambda c: params(lambda told: told[of_twice(c)].update(item_indices=[0]))(c), FAIL, "not-named", "counters", None),
    ("named", lambda c: params(lambda told: told[of_twice(c)].update(item_indices=0))(c), FAIL, "not-named", "counters", None),
    ("named", lambda c: without(c, ev="request"), INCONCLUSIVE, "not-journalled", None, None),
    ("named", one_more_item, INCONCLUSIVE, "not-journalled", None, None),
]  # fmt: skip
SPOILT = [(judge, topology, *row) for topology in ("e-pd", "e-p-d") for judge, *row in SPOILT_STORIES]
