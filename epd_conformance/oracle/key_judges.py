"""The judge of cells about identifiers: whether the engine tells two requests' items apart. Pure."""

from __future__ import annotations

from dataclasses import replace

from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.fault_judges import seen_items
from epd_conformance.oracle.rungs import bad_status, counted, first_of, inconclusive, passed
from epd_conformance.verdict import Verdict


def distinct(cell: CellEvidence) -> Judgement:
    """The items of two requests have two identifiers, on the encode server and on the consumer."""
    shared = None
    sides = ((cell.roles.encode, ("e0",)), (cell.roles.consumers, ("d", "p", "")))
    for servers, legs in sides:
        keys = [
            {item["id"] for item in seen_items(cell, servers, answer.request_id, legs)} for answer in cell.answers[:2]
        ]
        if not all(keys):
            shared = shared or inconclusive(
                "not-journalled",
                "the journals show each item on either side",
                f"they show {[len(found) for found in keys]}",
            )
        elif keys[0] & keys[1]:
            shared = Judgement(
                Verdict.FAIL,
                reason="same-identifier",
                rung="counters",
                expected=f"{cell.answers[0].label!r} and {cell.answers[1].label!r} have two identifiers",
                observed=f"both are {sorted(keys[0] & keys[1])[0]}",
                causes=(
                    "something that changes the rows does not enter the identifier: whoever comes second gets the first's",
                ),
            )
            break
    found = first_of(*(_refused(cell, index) or bad_status(cell, index) for index in (0, 1)), shared)
    verdict = found or passed("two identifiers", "two, on either side")
    return replace(verdict, evidence=counted([cell.transport(index) for index in (0, 1)], []))


def _refused(cell: CellEvidence, index: int) -> Judgement | None:
    """Whether a server takes no options of a request, which it may."""
    answer = cell.answers[index]
    if not cell.plan.requests[index].options or not 400 <= answer.status < 500:
        return None
    return inconclusive(
        "options-refused", "servers that take processor options", f"status {answer.status}: {answer.body or ''}"[:500]
    )
