"""The judges of cells with a fault: what the victim may answer, whether it met the fault, and whether the stack went on.

Rule 7 of a fair comparison. A cell sends four requests: a *first* one over the whole path; the *twin*, which goes the victim's
way, whose object goes through the probe as well, undamaged, and which must load; the *victim*, whose stored object is damaged
between its encode and its prefill; and a *fresh* one over the whole path, afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.rungs import (
    bad_status,
    comparable,
    counted,
    first_of,
    inconclusive,
    no_power,
    passed,
    unproven,
    worst,
    wrong_digest,
    wrong_tokens,
)
from epd_conformance.oracle.transport import KVTransfer, Transport, leg_of
from epd_conformance.plans.windows import WINDOWS, Window
from epd_conformance.report.schema import Evidence, FaultRecord
from epd_conformance.verdict import Verdict

FIRST, TWIN, VICTIM, FRESH, AGAIN = range(5)


def recomputed(cell: CellEvidence) -> Judgement:
    """The victim is encoded by the consumer and answered as the baseline does: its media are at hand."""
    return _damaged(cell, may_fail=False)


def contained(cell: CellEvidence) -> Judgement:
    """The victim is encoded by the consumer and answered as the baseline does, or fails alone."""
    return _damaged(cell, may_fail=True)


def fails_alone(cell: CellEvidence) -> Judgement:
    """The victim fails alone: it came without media, so nobody can encode it."""
    return _damaged(cell, may_fail=True, references=True)


def in_window(cell: CellEvidence) -> Judgement:
    """The victim is held in the plan's window while the fault is done. It gets the right bytes or is encoded, and is answered as
    the baseline does, or, as long as the item was not loaded, fails alone."""
    assert cell.plan.window is not None, "a plan of this judge names its window"
    may_fail = WINDOWS[cell.plan.window].loads_later
    return _not_held(cell) or _damaged(cell, may_fail, references=cell.plan.metadata_only)


def _damaged(cell: CellEvidence, may_fail: bool, references: bool = False) -> Judgement:
    """`facts`: `fault` (see `_unproven_fault`), and what `went_on` needs."""
    proofs = [cell.transport(index) for index in range(len(cell.plan.requests))]
    kvs = [cell.kv(index) for index in range(len(cell.plan.requests))]
    victim = proofs[VICTIM]
    status = cell.answers[VICTIM].status
    answered = status == 200
    # To fail is to be told so: a client that waits for ever, or whose connection breaks, has no answer.
    wrong = None
    if not (may_fail and status >= 400):
        wrong = (
            bad_status(cell, VICTIM)
            or comparable(cell, VICTIM)
            or wrong_tokens(cell, VICTIM, victim.digests_equal, None)
        )
    twin, nothing_done = _twin(cell, proofs), _unproven_fault(cell)
    found = worst(
        _taken(cell, victim),
        wrong,
        *([_again(cell, proofs[AGAIN])] if len(proofs) > AGAIN else []),
        went_on(cell),
        twin,
        nothing_done,
        # It says something about the fault only if there was one, and the path was whole before.
        _not_recovered(cell, proofs[FRESH]) if twin is None and nothing_done is None else None,
        _media_sent(cell) if references else None,
        None if cell.plan.window else _not_met(cell, victim),
        unproven([], kvs[VICTIM : VICTIM + 1]) if answered else None,
        no_power(cell),
    )
    expected = "the victim is encoded locally and gets the baseline's ids" + (", or fails alone" if may_fail else "")
    expected = "the victim fails alone" if references else expected
    observed = "encoded locally, equal ids" if answered else f"status {status} for that request"
    if cell.plan.window is not None:
        expected = (
            f"whatever is done to the object {WINDOWS[cell.plan.window].words}, the victim gets the baseline's ids"
        )
        expected += " or fails alone" if may_fail else ""
        how = ", ".join(item.how for item in victim.items)
        observed = f"{how}, equal ids" if answered else observed
    verdict = found or passed(expected, f"{observed}; a fresh item crossed")
    return replace(verdict, evidence=_counted(cell, proofs, kvs))


def _media_sent(cell: CellEvidence) -> Judgement | None:
    """Twin and victim reached the consumer with less than an encode server got of the same item."""
    for index in sorted(cell.plan.primed):
        rid = cell.answers[index].request_id
        encode = fields(cell, cell.roles.encode, rid, ("e0",))
        consumer = fields(cell, cell.roles.consumers, rid, ("d", "p", ""))
        if not consumer < encode:
            return inconclusive(
                "media-sent",
                "the consumer gets a reference in place of the media",
                f"request {cell.answers[index].label!r} reached it with {', '.join(sorted(consumer)) or 'nothing'}",
            )
    return None


def fields(cell: CellEvidence, servers: Set[str], rid: str, legs: Collection[str]) -> set[str]:
    """The processed fields of all items of a request, as servers got it on these legs."""
    return {name for item in seen_items(cell, servers, rid, legs) for name in item["data"]}


def seen_items(cell: CellEvidence, servers: Set[str], rid: str, legs: Collection[str]) -> list[Mapping[str, Any]]:
    """The items of a request as these servers got it on these legs."""
    return [
        item
        for event in cell.during
        if event["ev"] == "request" and event["server"] in servers and leg_of(event["req"], rid) in legs
        for item in event["items"]
    ]


def _counted(cell: CellEvidence, proofs: Sequence[Transport], kvs: Sequence[KVTransfer | None]) -> Evidence:
    """Counts over all requests; what was primed by hand was saved before its request was sent."""
    keys = {item.key for proof in proofs for item in proof.items}
    saves = [
        event
        for event in cell.during
        if event["ev"] == "save" and event["server"] in cell.roles.encode and event["id"] in keys
    ]
    return counted(proofs, kvs).model_copy(update={"saves": len(saves)})


def _taken(cell: CellEvidence, victim: Transport) -> Judgement | None:
    """The victim's consumer loaded the damaged object; with what its client got, since that is what somebody will see."""
    found = wrong_digest(cell, [victim])
    if found is None:
        return None
    answer = cell.answers[VICTIM]
    ids = {base.ids for base in cell.baseline.get(cell.plan.requests[VICTIM].digest(), {}).values()}
    got = f"status {answer.status}"
    if answer.status == 200:
        got += " and the right token ids, by luck" if answer.ids in ids else " and wrong token ids, without a word"
    return replace(found, observed=f"{found.observed}; the client got {got}")


def _crossed(cell: CellEvidence, index: int, proof: Transport) -> Judgement | None:
    """What keeps a request from being one that crossed the path and was answered rightly."""
    return first_of(
        bad_status(cell, index),
        wrong_digest(cell, [proof]),
        comparable(cell, index) or wrong_tokens(cell, index, proof.digests_equal, proof.order_kept),
        # Its content is the cell's own, so what is held was loaded in this cell, before the request was scheduled.
        unproven([proof], [cell.kv(index)]),
    )


def _twin(cell: CellEvidence, proofs: Sequence[Transport]) -> Judgement | None:
    """What the victim met can be told only if the same without the fault goes well, over the whole path and the victim's."""
    for index in (FIRST, TWIN):
        bad = _crossed(cell, index, proofs[index])
        if bad is not None:
            expected = f"request {cell.answers[index].label!r}, without a fault, is loaded: {bad.expected}"
            return inconclusive(f"twin: {bad.reason}", expected, bad.observed)
    return None


def _not_recovered(cell: CellEvidence, fresh: Transport) -> Judgement | None:
    """The first item crossed, so a fresh one must cross as well, once the fault is over."""
    bad = _crossed(cell, FRESH, fresh)
    if bad is None:
        return None
    missed = bad.reason == "local-encode" and bool(fresh.primed)
    if bad.verdict is not Verdict.FAIL and not missed:
        return inconclusive(f"fresh: {bad.reason}", bad.expected, bad.observed)
    return Judgement(
        Verdict.FAIL,
        reason="not-recovered",
        rung="counters" if missed else "liveness",
        expected="after the fault a fresh item crosses as the first did before it",
        observed=f"{bad.reason}: {bad.observed}",
        blame=bad.blame,
    )


def _unproven_fault(cell: CellEvidence) -> Judgement | None:
    """`facts["fault"]`: `rehearsed` (the twin's object went through the probe), `receipt` (see `Receipt.to_json`), `verified`
    and `healed` (the store showed it), `injected_at` and `healed_at` (seconds since the epoch), and the first `problem`."""
    fault = cell.facts["fault"]
    wrong = _not_done(cell, fault) or (None if fault["healed"] else "the store could not be put back as it was")
    if wrong is None:
        return None
    return Judgement(
        Verdict.ERROR,
        reason="fault-not-proven",
        expected=f"the fault {cell.plan.fault!r} provably happens, and is healed afterwards",
        observed=f"{wrong}: {fault['problem']}" if fault["problem"] else wrong,
        causes=("the subject's probe does not reach the store that its connector uses",),
    )


def _not_done(cell: CellEvidence, fault: Mapping[str, Any]) -> str | None:
    """Why the plan's fault was not provably done to the victim's object between its encode and its prefill."""
    receipt = fault["receipt"]
    if not fault["rehearsed"]:
        return "the twin's object did not go through the probe"
    if receipt is None:
        return "it was not injected"
    if not fault["verified"] or receipt["before"] == receipt["after"]:
        return "it was injected, and the store does not show it"
    if receipt["kind"] != cell.plan.fault:
        return f"the receipt is of another fault, {receipt['kind']!r}"
    victim = cell.answers[VICTIM]
    encode = [event for event in cell.during if event["server"] in cell.roles.encode]
    primed = {
        item["id"]
        for event in encode
        if event["ev"] == "request" and leg_of(event["req"], victim.request_id) == "e0"
        for item in event["items"]
    }
    if receipt["key"] not in primed:
        return f"the receipt is for {receipt['key']}, which no encode server saw as the victim's item"
    saved = min(
        (event["t"] for event in encode if event["ev"] == "save" and event["id"] == receipt["key"]), default=None
    )
    if cell.plan.window is not None:
        # Whether it was done in the window is asked by `_not_held`.
        ended = victim.started + victim.seconds
        if saved is None or not saved <= fault["began_at"] or not ended <= fault["healed_at"]:
            return "it was not in force between the victim's encode and its answer"
        return None
    if saved is None or not saved <= fault["injected_at"] <= victim.started <= fault["healed_at"]:
        return "it was not in force between the victim's encode and its answer"
    return None


def _not_held(cell: CellEvidence) -> Judgement | None:
    """Whether twin and victim were held in the plan's window, and the fault done meanwhile: else an error."""
    window = WINDOWS[cell.plan.window or ""]
    for index in (TWIN, VICTIM):
        wrong = _unheld(cell, window, index)
        if wrong is not None:
            problem = cell.facts["fault"]["problem"]
            return Judgement(
                Verdict.ERROR,
                reason="barrier",
                expected=f"request {cell.answers[index].label!r} is held {window.words}, and let go",
                observed=f"{wrong}: {problem}" if problem else wrong,
                causes=(
                    "the connector does not go that way (it waits, encodes or refuses instead), or the harness was too slow",
                ),
            )
    return None


def misplaced(cell: CellEvidence) -> Judgement | None:
    """A fault that was done outside of its window: then not even a death says anything about the window."""
    fault = cell.facts.get("fault")
    done = cell.plan.window is not None and fault is not None and fault["receipt"] is not None
    return _not_held(cell) if done and len(cell.answers) > VICTIM else None


def _unheld(cell: CellEvidence, window: Window, index: int) -> str | None:
    """What keeps a request from having provably been held in a window, the victim with the fault done meanwhile."""
    rid, lines = cell.answers[index].request_id, cell.events(index)[1]
    places = [
        item
        for event in lines
        if event["ev"] == "request" and event["server"] in cell.roles.consumers
        for item in event["items"]
        if leg_of(event["req"], rid) is not None
    ]
    items = {item["id"] for item in places}
    at = [
        event
        for event in lines
        if event["ev"] in ("held", "opened")
        and event["point"] == window.point
        and (event["id"] in items or event["req"] == rid)
    ]
    if [event["ev"] for event in at] != ["held", "opened"]:
        return "it was never held there" if not at else "it was held and let go otherwise than once"
    held, opened = at
    if opened["why"] != "released":
        return f"it was not let go by the harness but by itself ({opened['why']}), after {opened['seconds']:.1f} s"
    took = [
        event
        for event in lines
        if event["server"] in cell.roles.consumers
        and event["t"] <= opened["t"]
        and (
            (event["ev"] == "load" and event["id"] in items)
            or (event["ev"] == "step" and any(one["id"] in items for one in event["allocated"]))
        )
    ]
    loaded = any(event["ev"] == "load" and event["t"] <= held["t"] for event in took)
    if window.loads_later and took:
        return "its item was allocated or loaded before it was let go"
    if not window.loads_later and not loaded:
        return "its item had not been loaded when it was held"
    if window.point == "scheduled":
        mine = [item for item in places if item["id"] == held["id"]]
        first, last = min(item["offset"] for item in mine), max(item["offset"] + item["length"] for item in mine)
        if not first < held["computed"] < last:
            return f"the step began with token {held['computed']}, and the item's places are {first} to {last}"
    if window.point == "prefilled" and any(
        event["ev"] == "kv-new" and event["server"] in cell.roles.decode and event["t"] <= opened["t"]
        for event in lines
    ):
        return "the decode server had begun when it was let go"
    fault = cell.facts["fault"]
    if index == VICTIM and not _during(held["t"], fault["began_at"], fault["injected_at"], opened["t"]):
        return "the fault was not done while it was held"
    return None


def _during(*moments: float | None) -> bool:
    """Whether all of these happened, in this order."""
    times = [moment for moment in moments if moment is not None]
    return len(times) == len(moments) and times == sorted(times)


def _again(cell: CellEvidence, proof: Transport) -> Judgement | None:
    """A later request asks for the victim's item, whose object is not as it was: its consumer holds the right bytes.

    Without media it may fail alone: nobody can promise it that the engine will still hold them.
    """
    if cell.plan.metadata_only and cell.answers[AGAIN].status >= 400:
        return None
    wrong = first_of(
        bad_status(cell, AGAIN),
        wrong_digest(cell, [proof]),
        comparable(cell, AGAIN) or wrong_tokens(cell, AGAIN, proof.digests_equal, None),
    )
    if wrong is not None or [item.how for item in proof.items] == ["held"]:
        return wrong
    how = ", ".join(item.how for item in proof.items) or "the consumer never saw the item"
    return inconclusive("evicted", "the consumer still holds the victim's item when it is asked for again", how)


def met(cell: CellEvidence) -> bool:
    """Whether the victim met the fault: first and twin loaded what was saved, the victim did not, or stood in its window."""
    return _twin(cell, [cell.transport(index) for index in range(4)]) is None and _met(cell, cell.transport(VICTIM))


def _met(cell: CellEvidence, victim: Transport) -> bool:
    """Whether the consumer came to the damaged object, and did not use it as if it were whole; or stood in its window."""
    if cell.plan.window is not None:
        return _not_held(cell) is None
    key = (cell.facts["fault"]["receipt"] or {}).get("key")
    unused = ("encoded",) if cell.answers[VICTIM].status == 200 else ("encoded", "nothing")
    return any(item.digest_wrong or item.how in unused for item in victim.items if item.key == key)


def _not_met(cell: CellEvidence, victim: Transport) -> Judgement | None:
    if _met(cell, victim):
        return None
    how = ", ".join(item.how for item in victim.items) or "the consumer never saw the item"
    return inconclusive(
        "fault-not-met",
        "the consumer's look-up, load or answer differs from the twin's",
        f"{how}: the damaged object is not what the connector reads",
    )


def fault_record(cell: CellEvidence) -> FaultRecord | None:
    """How often the cell's fault was injected, provably happened, and was met; None for a cell without one."""
    if cell.plan.fault is None:
        return None
    whole = len(cell.answers) > FRESH
    fault: Mapping[str, Any] = cell.facts.get("fault") or {}
    injected = fault.get("receipt") is not None
    verified = injected and whole and _not_done(cell, fault) is None
    return FaultRecord(
        kind=cell.plan.fault,
        injected=int(injected),
        verified=int(verified),
        met_by_victim=int(verified and met(cell)),
    )


def went_on(cell: CellEvidence) -> Judgement | None:
    """Every server answers afterwards, and none still works for a request that is over.

    `facts`: `health` and `busy`, by server: the status of `/health`, and how many requests are running or waiting.
    """
    servers = cell.roles.encode | cell.roles.consumers | cell.roles.decode
    health, busy = cell.facts["health"], cell.facts["busy"]
    sick = {name: health.get(name) for name in sorted(servers) if health.get(name) != 200}
    if sick:
        return Judgement(
            Verdict.FAIL,
            reason="not-healthy",
            rung="liveness",
            expected="every server answers /health with 200 afterwards",
            observed=str(sick),
        )
    left = {name: busy.get(name) for name in sorted(servers) if busy.get(name) != 0}
    if any(left.values()):
        return Judgement(
            Verdict.FAIL,
            reason="request-left",
            rung="residue",
            expected="no request is running or waiting once all have been answered",
            observed=str(left),
        )
    if left:
        return inconclusive("not-counted", "every server says how many requests it works on", str(left))
    return None


PLAIN, BAITED, HOSTILE = 0, 1, 2


def confined(cell: CellEvidence) -> Judgement:
    """Nothing outside the store is read or written for a hostile uuid.

    Requests: one with a harmless uuid, which must load; one with a hostile uuid at whose place outside the store a copy of
    that object lies as bait, past the encode servers; one with another hostile uuid over the whole path. `facts`: `before` and
    `after` (what lies outside, path to digest, before the hostile requests and after them), `bait` (paths of the bait), and
    what `went_on` needs.
    """
    proofs = [cell.transport(index) for index in (PLAIN, BAITED, HOSTILE)]
    before, after, bait = cell.facts["before"], cell.facts["after"], cell.facts["bait"]
    wrote = wrote_outside(before, after)
    uuids = [cell.plan.requests[index].uuids[0] for index in (BAITED, HOSTILE)]
    lines, invented = cell.events(BAITED)[1], None
    found_outside = [
        event
        for event in lines
        if event["ev"] in ("lookup", "load") and event.get("id") == uuids[0] and event.get("found", True)
    ]
    if found_outside:
        event = found_outside[0]
        invented = Judgement(
            Verdict.FAIL,
            reason="read-outside",
            rung="store",
            expected="what nobody saved is not found, also where a file of that name lies outside the store",
            observed=f"{event['server']}: {event['ev']} of {uuids[0]}",
            causes=("the uuid is joined to a path as the client wrote it",),
        )
    reached = {item["id"] for event in cell.during if event["ev"] == "request" for item in event["items"]}
    unseen = None
    for position, index in enumerate((BAITED, HOSTILE)):
        # A server may refuse such a uuid before anything looks at the item.
        if uuids[position] not in reached and not 400 <= cell.answers[index].status < 500:
            unseen = inconclusive(
                "not-reached",
                "the connector is asked for the item under its uuid",
                f"nobody asked for {uuids[position]}",
            )
    plain = _path_of(cell, proofs[PLAIN])
    # A file store that does not name its files by the uuid leaves no pattern to make a bait after; nothing to read, then.
    found = worst(wrote, invented, went_on(cell), plain, unseen)
    statuses = [cell.answers[index].status for index in (BAITED, HOSTILE)]
    verdict = found or passed(
        "nothing outside the store is read or written",
        f"nothing was; statuses {statuses}, {len(bait)} files of bait left alone",
    )
    return replace(verdict, evidence=counted(proofs, []))


def wrote_outside(before: Mapping[str, str], after: Mapping[str, str]) -> Judgement | None:
    """Whether what lies outside the store (path to digest) is another after hostile uuids than before them."""
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    if not changed:
        return None
    return Judgement(
        Verdict.FAIL,
        reason="wrote-outside",
        rung="store",
        expected="nothing outside the connector's store is made, changed or removed",
        observed=", ".join(changed[:6]),
        causes=("the uuid is joined to a path as the client wrote it",),
    )


def _path_of(cell: CellEvidence, proof: Transport) -> Judgement | None:
    """Whether the harmless request went through the connector: else nothing was tested."""
    if cell.answers[PLAIN].status != 200:
        return inconclusive(
            "twin: request-failed",
            "an item with a harmless uuid is answered",
            f"status {cell.answers[PLAIN].status}: {cell.answers[PLAIN].error or cell.answers[PLAIN].body or ''}"[:500],
        )
    problem = unproven([proof], []) or wrong_digest(cell, [proof])
    if problem is not None:
        return inconclusive(f"twin: {problem.reason}", "an item with a harmless uuid is loaded", problem.observed)
    return None
