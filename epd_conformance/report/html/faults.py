"""Which fault led to what: the victim of every fault cell, by kind of fault and by what became of it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from epd_conformance.oracle import fault_judges
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.plans.steps import sent


class Fate(StrEnum):
    """What became of a request whose stored object was damaged; in the order of the columns, from best to worst.

    Which of the first three are allowed is the requirement's affair, and the colour of the cell says it. The others never are.
    """

    RECOMPUTED = "encoded again, right ids"
    UNHARMED = "right bytes, right ids"
    FAILED_ALONE = "failed alone"
    NOT_MET = "fault not met"
    NOT_PROVEN = "fault not proven"
    RIGHT_BY_LUCK = "damaged bytes used, right ids"
    DAMAGED = "damaged bytes used"
    WRONG = "wrong ids"
    NO_ANSWER = "no answer"
    DIED = "a server died"


def fates(cell: CellEvidence) -> Iterator[tuple[str, Fate]]:
    """(kind of fault, fate of its victim) for every victim of a cell: one of a cell with a twin, any number of a scripted one."""
    if cell.plan.fault is not None:
        record = fault_judges.fault_record(cell)
        proven = record is not None and bool(record.verified) and fault_judges.misplaced(cell) is None
        yield cell.plan.fault, _fate(cell, fault_judges.VICTIM, proven)
        return
    kind, proven, index = "", False, 0
    for number, step in enumerate(cell.plan.steps):
        records = cell.facts.get("steps") or ()
        if step["do"] == "damage":
            kind, proven = step["kind"], number < len(records) and bool(records[number]["done"])
        elif step["do"] == "heal":
            kind = ""
        for _ in range(sent(step)):
            if kind:
                yield kind, _fate(cell, index, proven)
            index += 1


def _fate(cell: CellEvidence, index: int, proven: bool) -> Fate:
    if cell.deaths:
        return Fate.DIED
    if not proven or index >= len(cell.answers):
        return Fate.NOT_PROVEN
    answer = cell.answers[index]
    proof = cell.transport(index)
    arms = cell.baseline.get(cell.plan.requests[index].digest(), {})
    right = any(base.ids == answer.ids for base in arms.values())
    if any(item.digest_wrong for item in proof.items):
        return Fate.RIGHT_BY_LUCK if answer.status == 200 and right else Fate.DAMAGED
    if answer.status >= 400:
        return Fate.FAILED_ALONE
    if answer.status != 200:
        return Fate.NO_ANSWER
    if not right:
        return Fate.WRONG
    if any(item.how == "encoded" for item in proof.items):
        return Fate.RECOMPUTED
    # Who stands in a window may have the bytes from before the fault.
    safe = cell.plan.window is not None and bool(proof.items)
    return Fate.UNHARMED if safe and all(item.how in ("loaded", "held") for item in proof.items) else Fate.NOT_MET
