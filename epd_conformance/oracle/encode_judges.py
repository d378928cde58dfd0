"""The judges of what an encode server answers to whom it is asked directly. Pure.

`facts["said"]`: for each request of the plan, in order, `request_id`, `status`, and of the answer `completion_tokens` (of its
usage), `content` (of its message) and `params` (its `ec_transfer_params`); null for what it does not hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.fault_judges import seen_items
from epd_conformance.oracle.rungs import first_of, inconclusive, passed
from epd_conformance.verdict import Verdict


def ended(cell: CellEvidence) -> Judgement:
    """Every request ends with status 200 and no token, whatever it asks for."""
    found = _unasked(cell) or first_of(*(_not_ended(cell, index) for index in range(len(cell.plan.requests))))
    return found or passed("200 and 0 completion tokens", f"so it was, {len(cell.facts['said'])} times")


def text_ended(cell: CellEvidence) -> Judgement:
    """A text ends at once, without content, and the item of the request behind it is encoded."""
    found = _unasked(cell) or _not_ended(cell, 0) or _not_ended(cell, 1)
    if found is None:
        keys = [item["id"] for item in _items(cell, 1)]
        encoded = {
            key
            for event in cell.during
            if event["ev"] == "step" and event["server"] in cell.roles.encode
            for several in event["encode"].values()
            for key in several
        }
        if not keys:
            found = inconclusive("not-journalled", "the journal of an encode server shows the item", "it does not")
        elif not encoded.issuperset(keys):
            found = Judgement(
                Verdict.FAIL,
                reason="nothing-encoded",
                rung="counters",
                expected=f"after a text the item of the next request is encoded: {keys[0]}",
                observed=f"encoded: {', '.join(sorted(encoded)) or 'nothing'}",
            )
    return found or passed("no content, and the next item is encoded", "so it was")


def named(cell: CellEvidence) -> Judgement:
    """The answer names the identifier and the positions of every item, as the server itself knows them."""
    found = _unasked(cell) or _not_ended(cell, 0)
    if found is not None:
        return found
    positions: dict[str, list[int]] = {}
    for position, item in enumerate(_items(cell, 0)):
        positions.setdefault(item["id"], []).append(position)
    said = cell.facts["said"][0]["params"]
    told = {
        key: sorted(entry["item_indices"])
        for key, entry in (said if isinstance(said, Mapping) else {}).items()
        if isinstance(entry, Mapping) and _indices(entry.get("item_indices"))
    }
    if sum(map(len, positions.values())) != len(cell.plan.requests[0].images):
        return inconclusive(
            "not-journalled", "the journal of an encode server shows every item", f"it shows {positions or 'none'}"
        )
    if told != positions:
        return Judgement(
            Verdict.FAIL,
            reason="not-named",
            rung="counters",
            expected=f"identifiers and positions of all items: {positions}",
            observed=f"`ec_transfer_params` {said}"[:2000],
            causes=("the connector gives no parameters when a request is finished, or leaves some items out",),
        )
    return passed("every item by identifier and positions", f"{len(told)} identifiers, all positions")


def _indices(value: Any) -> bool:
    return isinstance(value, list) and all(type(index) is int for index in value)


def _items(cell: CellEvidence, index: int) -> list[Mapping[str, Any]]:
    return seen_items(cell, cell.roles.encode, cell.facts["said"][index]["request_id"], ("",))


def _unasked(cell: CellEvidence) -> Judgement | None:
    said, wanted = cell.facts["said"], len(cell.plan.requests)
    if wanted and len(said) == wanted:
        return None
    return Judgement(
        Verdict.ERROR,
        reason="incomplete-evidence",
        expected=f"an answer to each of {wanted} requests",
        observed=f"{len(said)} answers",
    )


def _not_ended(cell: CellEvidence, index: int) -> Judgement | None:
    label, said = cell.plan.requests[index].label, cell.facts["said"][index]
    if said["status"] != 200:
        return Judgement(
            Verdict.FAIL,
            reason="request-failed",
            rung="status",
            expected=f"an encode server answers request {label!r} with 200",
            observed=f"status {said['status']}",
        )
    if said["completion_tokens"] is None:
        return inconclusive("not-counted", "the usage in the answer of an encode server", f"none for {label!r}")
    if said["completion_tokens"] or said["content"]:
        return Judgement(
            Verdict.FAIL,
            reason="token-on-encode",
            rung="counters",
            expected=f"0 completion tokens and no content for request {label!r}",
            observed=f"{said['completion_tokens']} completion tokens, content {said['content']!r}"[:500],
        )
    return None
