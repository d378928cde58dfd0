"""Ways of spoiling the story of a cell with a window, and what its judge must say to each."""

from __future__ import annotations

from typing import Any

from made_evidence import digest_of, edited, inserted, with_events, without
from spoilt_faults import (
    Spoil,
    both,
    died,
    encodes,
    fails,
    fault,
    key,
    loads,
    lost,
    moved,
    other_ids,
    raised,
    receipt,
    says,
)

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.fault_judges import FIRST, FRESH, TWIN, VICTIM
from epd_conformance.verdict import Owner, Verdict

DAMAGE = digest_of("damage")


def at(index: int, ev: str, **changes: Any) -> Spoil:
    """What the journal says of holding a request, or of letting it go, is otherwise."""
    return lambda cell: edited(cell, changes, ev=ev, id=key(cell, index))


def not_held(index: int) -> Spoil:
    return both(lambda c: without(c, ev="held", id=key(c, index)), lambda c: without(c, ev="opened", id=key(c, index)))


def never_let_go(cell: CellEvidence) -> CellEvidence:
    return without(cell, ev="opened", id=key(cell, VICTIM))


def moved_line(index: int, ev: str, seconds: float) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        def change(events: list[dict[str, Any]]) -> None:
            for event in events:
                if event["ev"] == ev and event.get("id") == key(cell, index):
                    event["t"] += seconds

        return with_events(cell, change)

    return spoil


def without_injection(cell: CellEvidence) -> CellEvidence:
    """Held and let go, and nothing was done meanwhile."""
    return fault(receipt=None, verified=False, began_at=None, injected_at=None, healed=False, healed_at=None)(cell)


def allocated_early(cell: CellEvidence) -> CellEvidence:
    """The step that takes the victim's item was made before it was let go."""
    rid = cell.answers[VICTIM].request_id

    def change(events: list[dict[str, Any]]) -> None:
        opened = next(e for e in events if e["ev"] == "opened" and e["id"] == key(cell, VICTIM))
        step = next(e for e in events if e["ev"] == "step" and any(rid in new["req"] for new in e["new"])
                    and e["server"] in cell.roles.consumers)  # fmt: skip
        step |= {"allocated": [{"req": rid, "id": key(cell, VICTIM), "external": True}], "t": opened["t"] - 0.001}

    return with_events(cell, change)


def wrong_load(index: int) -> Spoil:
    return lambda cell: edited(cell, {"digest": DAMAGE}, ev="load", id=key(cell, index))


# As in test_judges.NEGATIVE.
SPOILT: list[tuple[str, str, Spoil, Verdict, str, str | None, Owner | None]] = [
    ("in-window", topology, spoil, *rest)
    for topology, consumer in (("e-pd", "prefill_decode-0"), ("e-p-d", "prefill-0"))
    for spoil, *rest in (
        # what became of the victim
        (wrong_load(VICTIM), Verdict.FAIL, "digest-differs", "digest", None),
        (both(encodes(VICTIM), loads(VICTIM, DAMAGE)), Verdict.FAIL, "digest-differs", "digest", None),
        (other_ids(VICTIM), Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
        (fails(VICTIM, 0, error="no end within 120 s"), Verdict.FAIL, "request-failed", "status", None),
        (died(1), Verdict.FAIL, "server-died", "liveness", None),
        (both(died(1), raised), Verdict.FAIL, "server-died", "liveness", None),
        (died(-9), Verdict.ERROR, "killed-from-outside", "liveness", None),
        (says("health", consumer, 503), Verdict.FAIL, "not-healthy", "liveness", None),
        (says("busy", consumer, 1), Verdict.FAIL, "request-left", "residue", None),
        (encodes(FRESH), Verdict.FAIL, "not-recovered", "counters", None),
        (encodes(FIRST), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (encodes(TWIN), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (wrong_load(TWIN), Verdict.INCONCLUSIVE, "twin: digest-differs", None, None),
        (lost, Verdict.INCONCLUSIVE, "journal-lost", None, None),
        # whether it was held where it should be
        (not_held(VICTIM), Verdict.ERROR, "barrier", None, None),
        (not_held(TWIN), Verdict.ERROR, "barrier", None, None),
        (never_let_go, Verdict.ERROR, "barrier", None, None),
        (at(VICTIM, "opened", why="timeout", seconds=10.0), Verdict.ERROR, "barrier", None, None),
        (at(VICTIM, "opened", why="closed"), Verdict.ERROR, "barrier", None, None),
        (at(TWIN, "opened", why="timeout", seconds=10.0), Verdict.ERROR, "barrier", None, None),
        (at(VICTIM, "held", point="loaded"), Verdict.ERROR, "barrier", None, None),
        (lambda c: inserted(c, {"ev": "opened", "id": key(c, VICTIM)},
                            {"ev": "held", "point": "allocated", "id": key(c, VICTIM), "req": None}),
         Verdict.ERROR, "barrier", None, None),
        # The connector had it already when the fault was done.
        (moved_line(VICTIM, "load", -0.005), Verdict.ERROR, "barrier", None, None),
        (allocated_early, Verdict.ERROR, "barrier", None, None),
        # whether the fault was done meanwhile
        (without_injection, Verdict.ERROR, "barrier", None, None),
        (moved("began_at", -0.1), Verdict.ERROR, "barrier", None, None),
        (moved("injected_at", 0.1), Verdict.ERROR, "barrier", None, None),
        (both(died(1), moved("began_at", 0.1)), Verdict.ERROR, "barrier", None, None),
        (both(wrong_load(VICTIM), moved("began_at", -0.1)), Verdict.ERROR, "barrier", None, None),
        (fault(verified=False), Verdict.ERROR, "fault-not-proven", None, None),
        (fault(healed=False), Verdict.ERROR, "fault-not-proven", None, None),
        (receipt(kind="deleted"), Verdict.ERROR, "fault-not-proven", None, None),
        (moved("healed_at", -1.0), Verdict.ERROR, "fault-not-proven", None, None),
    )
]  # fmt: skip
