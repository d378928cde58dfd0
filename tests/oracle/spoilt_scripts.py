"""Ways of spoiling the story of a scripted cell, and what its judge must say to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from made_evidence import digest_of, good_answer, with_answer, with_events, without
from spoilt_faults import Spoil, died, fails, key, lost, media_came, of, other_ids, says

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.verdict import Owner, Verdict

FIRST, AGAIN, UNJUDGED, ANEW, GONE, HOSTILE, REFERENCE, ALONE, REFUSED = range(9)
# Positions in made_evidence.SCRIPT.
RESTART, RESET, DAMAGE, EMPTIED = 1, 2, 5, 8


def record(position: int, **changes: Any) -> Spoil:
    """What was written down of a step is otherwise."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        steps = [dict(step) for step in cell.facts["steps"]]
        steps[position] |= changes
        return replace(cell, facts={**cell.facts, "steps": steps})

    return spoil


def receipt(**changes: Any) -> Spoil:
    return lambda cell: record(DAMAGE, receipt={**cell.facts["steps"][DAMAGE]["receipt"], **changes})(cell)


def whole_after_all(cell: CellEvidence) -> CellEvidence:
    """What was damaged is loaded with the bytes that were saved: the probe reaches another store."""

    def change(events: list[dict[str, Any]]) -> None:
        for event in filter(of(cell, UNJUDGED), events):
            if event["ev"] == "lookup":
                event["found"] = True
            elif event["ev"] == "step":
                event["encode"] = {}
            elif event["ev"] == "encoded":
                event["ev"] = "load"

    return with_events(cell, change)


def without_the_last(cell: CellEvidence) -> CellEvidence:
    return replace(cell, facts={**cell.facts, "steps": cell.facts["steps"][:-1]})


def never_started(cell: CellEvidence) -> CellEvidence:
    """The consumer's journal has no sign of the restart."""
    (consumer,) = cell.roles.consumers

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events if event["ev"] != "init" or event["server"] != consumer]

    return with_events(cell, change)


def refused(cell: CellEvidence) -> CellEvidence:
    (consumer,) = cell.roles.consumers
    statuses = {**cell.facts["steps"][RESET]["statuses"], consumer: 404}
    return record(RESET, statuses=statuses)(cell)


def saved_before_only(cell: CellEvidence) -> CellEvidence:
    """The item that was purged is loaded although nobody has saved it again."""
    since = cell.facts["steps"][EMPTIED]["ended"]

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events if not (event["ev"] == "save" and event["t"] > since)]

    return with_events(cell, change)


def still_held(cell: CellEvidence) -> CellEvidence:
    """The consumer had the item of the second request in its own cache: it does not load it."""
    about = of(cell, AGAIN)
    start, stop = cell.answers[AGAIN].started, cell.answers[UNJUDGED].started

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events
                if not (about(event) and event["ev"] in ("load", "lookup") and start <= event["t"] < stop)]  # fmt: skip

    return with_events(cell, change)


def wrong_load(cell: CellEvidence) -> CellEvidence:
    start = cell.answers[AGAIN].started

    def change(events: list[dict[str, Any]]) -> None:
        next(event for event in events if event["ev"] == "load" and event["t"] > start)["digest"] = digest_of("stale")

    return with_events(cell, change)


def encoded_by_the_consumer(index: int) -> Callable[[CellEvidence], CellEvidence]:
    """One request's item is encoded by the consumer, though other requests have the same item."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        start = cell.answers[index].started
        stop = cell.answers[index + 1].started
        about = of(cell, index)

        def change(events: list[dict[str, Any]]) -> None:
            for event in events:
                if not (about(event) and start <= event["t"] < stop):
                    continue
                if event["ev"] == "lookup":
                    event["found"] = False
                elif event["ev"] == "step" and event["new"]:
                    event["encode"] = {event["new"][0]["req"]: [key(cell, index)]}
                elif event["ev"] == "load":
                    event["ev"] = "encoded"

        return with_events(cell, change)

    return spoil


def contained(index: int, *spoils: Spoil) -> Spoil:
    """A request is one that may fail alone, and something else is spoilt."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        sends = [position for position, step in enumerate(cell.plan.steps) if step["do"] == "send"]
        steps = [dict(step) for step in cell.plan.steps]
        steps[sends[index]]["how"] = "contained"
        cell = replace(cell, plan=replace(cell.plan, steps=tuple(steps)))
        for one in spoils:
            cell = one(cell)
        return cell

    return spoil


def answers(index: int) -> Spoil:
    """A request that must fail is answered."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        good = good_answer(cell.plan.requests[index])
        return with_answer(cell, index, status=200, ids=good.ids, prompt_ids=good.prompt_ids, error=None)

    return spoil


def unanswered(index: int) -> Spoil:
    return lambda cell: with_answer(cell, index, status=0, ids=(), prompt_ids=())


def answers_empty(cell: CellEvidence) -> CellEvidence:
    """A stream that begins and ends, and says nothing."""
    return with_answer(cell, REFERENCE, status=200, streamed=True, error="the stream ended without [DONE]")


def never_given_up(cell: CellEvidence) -> CellEvidence:
    return without(cell, ev="unavailable")


def refers_with_media(cell: CellEvidence) -> CellEvidence:
    return media_came(REFERENCE)(answers(REFERENCE)(cell))


def touches(cell: CellEvidence) -> CellEvidence:
    return record(-1, outside={"stack/config": digest_of("config"), "stack/x": "folder"})(cell)


# As in test_judges.NEGATIVE.
SPOILT_STORIES = [
    (wrong_load, Verdict.FAIL, "digest-differs", "digest", None),
    (other_ids(AGAIN), Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
    (fails(FIRST), Verdict.FAIL, "request-failed", "status", None),
    (fails(GONE), Verdict.FAIL, "request-failed", "status", None),
    (encoded_by_the_consumer(AGAIN), Verdict.FAIL, "encoded-again", "counters", None),
    # What may fail alone must do so with a status, or else be answered rightly, with the right rows.
    (contained(AGAIN, unanswered(AGAIN)), Verdict.FAIL, "request-failed", "status", None),
    (contained(AGAIN, other_ids(AGAIN)), Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
    (contained(AGAIN, wrong_load), Verdict.FAIL, "digest-differs", "digest", None),
    (saved_before_only, Verdict.FAIL, "not-saved-anew", "counters", None),
    (still_held, Verdict.INCONCLUSIVE, "not-loaded", None, None),
    (record(RESTART, done=False, problem="StackError: x"), Verdict.ERROR, "step-not-done", None, None),
    (record(RESTART, do="reset"), Verdict.ERROR, "step-not-done", None, None),
    (never_started, Verdict.ERROR, "step-not-done", None, None),
    (refused, Verdict.ERROR, "step-not-done", None, None),
    (receipt(before=1, after=1), Verdict.ERROR, "step-not-done", None, None),
    (receipt(kind="deleted"), Verdict.ERROR, "step-not-done", None, None),
    (receipt(key="another"), Verdict.ERROR, "step-not-done", None, None),
    (record(EMPTIED, removed=0), Verdict.ERROR, "step-not-done", None, None),
    (record(EMPTIED, ended=0.0), Verdict.ERROR, "step-not-done", None, None),
    (record(0, at=1.0, ended=2.0), Verdict.ERROR, "step-not-done", None, None),
    (whole_after_all, Verdict.INCONCLUSIVE, "fault-not-met", None, None),
    (without_the_last, Verdict.ERROR, "step-not-done", None, None),
    (other_ids(HOSTILE), Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
    (fails(HOSTILE, 0), Verdict.FAIL, "request-failed", "status", None),
    (answers(REFERENCE), Verdict.FAIL, "not-failed", "status", None),
    (answers_empty, Verdict.FAIL, "not-failed", "status", None),
    (fails(REFERENCE, 0), Verdict.FAIL, "request-failed", "status", None),
    (never_given_up, Verdict.INCONCLUSIVE, "not-given-up", None, None),
    (refers_with_media, Verdict.INCONCLUSIVE, "media-sent", None, None),
    (answers(REFUSED), Verdict.FAIL, "not-refused", "status", None),
    (fails(REFUSED, 500), Verdict.FAIL, "not-refused", "status", None),
    (fails(REFUSED, 0), Verdict.FAIL, "request-failed", "status", None),
    (touches, Verdict.FAIL, "wrote-outside", "store", None),
    (record(-1, done=False, problem="OSError: x"), Verdict.ERROR, "step-not-done", None, None),
    (died(1), Verdict.FAIL, "server-died", "liveness", None),
    (says("health", "encode-0", 503), Verdict.FAIL, "not-healthy", "liveness", None),
    (says("busy", "encode-0", 1), Verdict.FAIL, "request-left", "residue", None),
    (lost, Verdict.INCONCLUSIVE, "journal-lost", None, None),
    (lambda c: replace(c, answers=c.answers[:4]), Verdict.ERROR, "incomplete-evidence", None, None),
]
SPOILT = [("scripted", topology, *row) for topology in ("e-pd", "e-p-d") for row in SPOILT_STORIES]

#: What a request that may fail alone may also do.
ALLOWED = [contained(AGAIN), contained(AGAIN, fails(AGAIN)), contained(AGAIN, encoded_by_the_consumer(AGAIN))]
