"""The judge of scripted cells: what became of each request, given what was done to servers, caches and store before it. Pure.

Every step must provably have happened; every request must be answered as the baseline does, and its items must have come to the
consumer in the way that the plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, islice, repeat
from math import inf
from typing import Any

from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.fault_judges import fields, went_on, wrote_outside
from epd_conformance.oracle.rungs import (
    bad_status,
    comparable,
    counted,
    first_of,
    inconclusive,
    no_power,
    not_told_apart,
    passed,
    unproven,
    worst,
    wrong_digest,
    wrong_tokens,
)
from epd_conformance.oracle.transport import Item, Transport, leg_of
from epd_conformance.plans.steps import AS_AGGREGATED, MUST_FAIL, sent
from epd_conformance.verdict import Verdict


def scripted(cell: CellEvidence) -> Judgement:
    """`facts`: `steps` (a record for each of the plan's steps, see live/scripted.py), and what `went_on` needs."""
    sends = [position for position, step in enumerate(cell.plan.steps) for _ in range(sent(step))]
    if len(sends) != len(cell.plan.requests) or len(cell.answers) != len(sends):
        return Judgement(
            Verdict.ERROR,
            reason="incomplete-evidence",
            expected="one answer for each request, and one step that sends it",
            observed=f"{len(cell.plan.requests)} requests, {len(sends)} steps that send, {len(cell.answers)} answers",
        )
    spans = _spans(cell, sends)
    proofs = [cell.transport(index, span) for index, span in enumerate(spans)]
    kvs = [cell.kv(index, span) for index, span in enumerate(spans)]
    hows = cell.plan.hows
    judged = [index for index, how in enumerate(hows) if how not in (*MUST_FAIL, "unjudged")]
    answered = [index for index in judged if not (cell.answers[index].failed and _may_fail(cell, index))]
    found = worst(
        wrong_digest(cell, [proofs[index] for index in judged]),
        *(_answer(cell, index, proofs[index]) for index in answered),
        *(
            _not_referred(cell, index, sends[index]) or _not_failed(cell, index)
            for index, how in enumerate(hows)
            if how in MUST_FAIL
        ),
        *(
            _way(cell, position, proof, _beside(position, sends, proofs))
            for position, proof in zip(sends, proofs, strict=True)
        ),
        *(_not_met(proof) for how, proof in zip(hows, proofs, strict=True) if how == "unjudged"),
        _left_outside(cell),
        went_on(cell),
        _not_done(cell),
        unproven([], [kvs[index] for index in answered]),
        _no_power(cell),
    )
    script = ", ".join(_words(step) for step in cell.plan.steps)
    verdict = found or passed(f"right answers, and items where they should come from: {script}", "so it was")
    evidence = counted(proofs, kvs)
    if any(span is not None for span in spans):
        # Requests that ran at once share what happened.
        keys = {item.key for proof in proofs for item in proof.items}
        evidence = evidence.model_copy(
            update={
                name: sum(event["ev"] == kind and event["id"] in keys for event in cell.during)
                for name, kind in (("saves", "save"), ("loads", "load"), ("local_encodes", "encoded"))
            }
        )
    return replace(verdict, evidence=evidence)


def _spans(cell: CellEvidence, sends: list[int]) -> list[tuple[float, float] | None]:
    """From when to when the requests ran, where several ran at once: from their step to the next that sends."""
    if all(cell.plan.steps[position]["do"] == "send" for position in sends):
        return [None] * len(sends)
    began = {position: record["at"] for position, record in enumerate(cell.facts["steps"]) if position in set(sends)}
    stops = {position: min((at for at in began.values() if at > began[position]), default=inf) for position in began}
    return [(began[position], stops[position]) if position in began else None for position in sends]


def _may_fail(cell: CellEvidence, index: int) -> bool:
    # To fail is to be told so: a client that waits for ever, or whose connection breaks, has no answer.
    how = cell.plan.hows[index]
    return how in ("contained", "as-aggregated-or-fails") or (how == "as-aggregated" and _refuses(cell, index))


def _refuses(cell: CellEvidence, index: int) -> bool:
    """Whether the aggregated server, asked the same sequence, failed this request."""
    base = cell.baseline.get(cell.plan.requests[index].digest(), {}).get("aggregated")
    return base is not None and base.failed


def _answer(cell: CellEvidence, index: int, proof: Transport) -> Judgement | None:
    if cell.plan.hows[index] in AS_AGGREGATED and cell.answers[index].status == 200 and _refuses(cell, index):
        return Judgement(
            Verdict.FAIL,
            reason="not-failed",
            rung="status",
            expected=f"request {cell.answers[index].label!r} fails, as it does on the aggregated server after the same requests",
            observed=f"token ids {list(cell.answers[index].ids)}",
        )
    return (
        bad_status(cell, index)
        or comparable(cell, index)
        or wrong_tokens(cell, index, proof.digests_equal, proof.order_kept)
    )


def _no_power(cell: CellEvidence) -> Judgement | None:
    """As `no_power`; what a request of a sequence is answered about is open, so its two contents must be told apart."""
    if not cell.plan.sequence:
        return no_power(cell)
    requests, contrasts = cell.plan.requests, cell.plan.contrasts
    pairs = []
    for index, how in enumerate(cell.plan.hows):
        if how in AS_AGGREGATED:
            both = contrasts[index], contrasts[len(requests) + index]
            pairs += [both, both[::-1]]
        else:
            pairs.append((requests[index], contrasts[index]))
    return first_of(*(not_told_apart(cell, *pair) for pair in pairs))


def _not_failed(cell: CellEvidence, index: int) -> Judgement | None:
    """Whether a request that must fail did, in the way that its step asks for, and its client was told."""
    how, answer = cell.plan.hows[index], cell.answers[index]
    right = 400 <= answer.status < 500 if how == "refused" else answer.failed
    if right:
        return _not_given_up(cell, index) if how == "given-up" else None
    hung = answer.status == 0
    status = f"status {answer.status}"
    return Judgement(
        Verdict.FAIL,
        reason="request-failed" if hung else "not-refused" if how == "refused" else "not-failed",
        rung="status",
        expected=f"request {answer.label!r} is answered with " + ("a 4xx status" if how == "refused" else "an error"),
        observed=f"{status}: {answer.error or answer.body or f'{len(answer.ids)} tokens'}"[:2000],
    )


def _not_given_up(cell: CellEvidence, index: int) -> Judgement | None:
    rid = cell.answers[index].request_id
    named = [name for event in cell.during if event["ev"] == "unavailable" for name in event["reqs"]]
    if any(leg_of(name, rid) is not None for name in named):
        return None
    return inconclusive("not-given-up", "the connector names the request as unavailable", f"it named {named or 'none'}")


def _not_referred(cell: CellEvidence, index: int, position: int) -> Judgement | None:
    """Whether a reference reached the consumer as one, or was refused before it did: else nothing was tested."""
    if cell.plan.steps[position].get("way") not in ("reference", "uuid-alone"):
        return None
    answer = cell.answers[index]
    whole = fields(cell, cell.roles.encode, cell.answers[0].request_id, ("e0",))
    got = fields(cell, cell.roles.consumers, answer.request_id, ("d", "p", ""))
    if got < whole and (got or answer.failed):
        return None
    return inconclusive(
        "media-sent",
        "the consumer gets a reference in place of the media",
        f"request {answer.label!r} reached it with {', '.join(sorted(got)) or 'nothing'}",
    )


def _left_outside(cell: CellEvidence) -> Judgement | None:
    """Whether something beside the store is otherwise than at the first look."""
    looks = [record["outside"] for record in cell.facts["steps"] if record["do"] == "look" and record["done"]]
    return wrote_outside(looks[0], looks[-1]) if looks else None


def _beside(position: int, sends: list[int], proofs: list[Transport]) -> list[Transport]:
    """The requests that were sent by the same step."""
    return [proof for other, proof in zip(sends, proofs, strict=True) if other == position]


def _way(cell: CellEvidence, position: int, proof: Transport, beside: list[Transport]) -> Judgement | None:
    """Whether the items of a request came to the consumer as its step says."""
    how = cell.plan.steps[position]["how"]
    if how not in ("loaded", "saved", "crossed", "once"):
        return None
    if not proof.items:
        return inconclusive(
            "not-journalled", "the consumer's journal shows the request", proof.problem or "it does not"
        )
    if how in ("crossed", "once"):
        # Which of them loads it is open; the others find it in their server's cache, or the KV that the first has just made of it.
        first = next((one for one in beside if one.items and all(item.how == "loaded" for item in one.items)), proof)
        shared = bool(proof.items) and all(item.how in ("held", "prefix-hit") for item in proof.items)
        return unproven([first if shared else proof], []) or (_saved_often(cell, proof) if how == "once" else None)
    after = next((step["ended"] for step in reversed(cell.facts["steps"][:position]) if step["do"] != "send"), 0.0)
    for item in proof.items:
        wrong = _loaded(cell, item, after, how == "saved")
        if wrong is not None:
            return wrong
    return None


def _saved_often(cell: CellEvidence, proof: Transport) -> Judgement | None:
    keys = {item.key for item in proof.items}
    saves = Counter(
        (event["server"], event["id"]) for event in cell.during if event["ev"] == "save" and event["id"] in keys
    )
    if all(count == 1 for count in saves.values()):
        return None
    return Judgement(
        Verdict.FAIL,
        reason="not-once",
        rung="counters",
        expected="each encode server encodes and saves the item once at most",
        observed=", ".join(f"{count} saves on {server}" for (server, _), count in sorted(saves.items())),
    )


def _loaded(cell: CellEvidence, item: Item, after: float, anew: bool) -> Judgement | None:
    saves = [
        event
        for event in cell.during
        if event["ev"] == "save" and event["id"] == item.key and event["server"] in cell.roles.encode
    ]
    if anew and not any(event["t"] > after for event in saves):
        return Judgement(
            Verdict.FAIL,
            reason="not-saved-anew",
            rung="counters",
            expected="the item is encoded and saved once more, then loaded",
            observed=f"item {item.key}: {item.how}, and nothing was saved since",
            causes=("the connector keeps a copy elsewhere, or takes the key for published",),
        )
    if item.how == "encoded":
        return Judgement(
            Verdict.FAIL,
            reason="encoded-again",
            rung="counters",
            expected="the consumer loads what is in the store",
            observed=f"item {item.key}: the consumer encoded it itself",
            causes=("the connector does not find what was saved before",),
        )
    if item.how != "loaded":
        return inconclusive("not-loaded", "the item is loaded by this very request", f"item {item.key}: {item.how}")
    if not item.saved:
        return inconclusive(
            "not-saved", "a producer saved what was loaded", f"item {item.key}: no save in the journals"
        )
    return None


def _not_met(proof: Transport) -> Judgement | None:
    """Whether a request that is not judged met what was done to its object: else nothing was tested."""
    if any(item.digest_wrong or item.how in ("encoded", "nothing") for item in proof.items):
        return None
    how = ", ".join(item.how for item in proof.items) or "the consumer never saw the item"
    return inconclusive(
        "fault-not-met", "the consumer meets the damaged object", f"{how}: the connector reads something else"
    )


def _not_done(cell: CellEvidence) -> Judgement | None:
    """The first step that did not provably happen."""
    records = cell.facts["steps"]
    disordered = _disordered(cell)
    if disordered is not None:
        return Judgement(
            Verdict.ERROR,
            reason="step-not-done",
            expected="steps happen one after the other, and each request is sent within its own",
            observed=disordered,
        )
    for step, record in zip(cell.plan.steps, chain(records, repeat(None)), strict=False):
        wrong = "it was never carried out" if record is None else _undone(cell, step, record)
        if wrong is not None:
            return Judgement(
                Verdict.ERROR,
                reason="step-not-done",
                expected=f"the step provably happens: {_words(step)}",
                observed=wrong,
            )
    return None


def _disordered(cell: CellEvidence) -> str | None:
    previous = 0.0
    answers = iter(cell.answers)
    for number, (step, record) in enumerate(zip(cell.plan.steps, cell.facts["steps"], strict=False)):
        if not previous <= record["at"] <= record["ended"]:
            return f"the times of step {number} ({record['do']}) do not follow those of the one before"
        previous = record["ended"]
        for answer in islice(answers, sent(step) if record["done"] else 0):
            if not record["at"] <= answer.started <= record["ended"]:
                return f"request {answer.label!r} was sent at another time than its step says"
    return None


def _undone(cell: CellEvidence, step: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    if record["do"] != step["do"]:
        return f"another step stands in its place: {record['do']}"
    if not record["done"]:
        return str(record["problem"] or "it was not finished")
    if step["do"] == "reset":
        servers = cell.roles.encode | cell.roles.consumers | cell.roles.decode
        other = {name: record["statuses"].get(name) for name in sorted(servers) if record["statuses"].get(name) != 200}
        return f"not every server did so: {other}" if other else None
    if step["do"] == "restart":
        return _not_restarted(cell, step, record)
    if step["do"] == "damage":
        receipt = record["receipt"]
        if receipt["kind"] != step["kind"]:
            return f"the receipt is of another fault, {receipt['kind']!r}"
        seen = {
            item["id"]
            for event in cell.during
            if event["ev"] == "request" and event["server"] in cell.roles.encode and event["t"] <= record["ended"]
            for item in event["items"]
        }
        if receipt["key"] not in seen:
            return f"the receipt is for {receipt['key']}, which no encode server had seen"
        return "nothing changed" if receipt["before"] == receipt["after"] else None
    if step["do"] == "together":
        return _not_together(cell, record["at"], record["ended"])
    if step["do"] == "prime-together":
        return _not_primed_together(record, int(step["count"]))
    if step["do"] == "prime-held":
        return _not_held(cell, step["point"], record["at"])
    if step["do"] == "purge" and step["how"] == "end":
        return _not_purged(cell, record)
    if step["do"] == "store" and step["how"] == "emptied":
        return None if record["removed"] else "no object was removed"
    return None


def _not_together(cell: CellEvidence, began: float, ended: float) -> str | None:
    """The requests of a step were all under way at one moment, since the encode server was held until they had been sent."""
    mine = [answer for answer in cell.answers if began <= answer.started <= ended]
    opened = [
        event
        for event in cell.during
        if event["ev"] == "opened"
        and event["why"] == "released"
        and event["server"] in cell.roles.encode
        and event["req"] in {answer.request_id for answer in mine}
    ]
    if len(opened) != 1:
        return "no encode server was held until all had been sent"
    ends = {answer.label: answer.started + answer.seconds for answer in mine}
    first = min(opened[0]["t"], *ends.values())
    alone = [answer.label for answer in mine if answer.started > first]
    return f"one was over, or let go, before others were sent: {', '.join(alone)}" if alone else None


def _not_primed_together(record: Mapping[str, Any], count: int) -> str | None:
    """As `_not_together`, of primers. `primers`: when each was sent and answered."""
    opened, primers = record["opened_at"], record["primers"]
    if opened is None or len(primers) != count:
        return "no encode server was held until all had been sent"
    late = [one for one in primers if one["started"] > min(other["ended"] for other in primers)]
    return f"one was over before {len(late)} others were sent" if late else None


def _not_held(cell: CellEvidence, point: str, began: float) -> str | None:
    """An encode server was held with an item until it was released, and a consumer was asked for that item meanwhile."""
    at = [event for event in cell.during if event["ev"] in ("held", "opened") and event["point"] == point]
    at = [event for event in at if event["server"] in cell.roles.encode and event["t"] >= began]
    if [event["ev"] for event in at] != ["held", "opened"] or at[1]["why"] != "released":
        return f"no encode server was held there until it was released: {[event.get('why', 'held') for event in at]}"
    reader = any(
        event["ev"] == "request"
        and event["server"] in cell.roles.consumers
        and at[0]["t"] <= event["t"] <= at[1]["t"]
        and any(item["id"] == at[0]["id"] for item in event["items"])
        for event in cell.during
    )
    return None if reader else "no request for the item came to the consumer while it was held"


def _not_purged(cell: CellEvidence, record: Mapping[str, Any]) -> str | None:
    """Something that a request of the cell asks for was removed while requests were under way. `removed`: key and time of each."""
    keys = {item["id"] for event in cell.during if event["ev"] == "request" for item in event["items"]}
    met = [
        key
        for key, at in record["removed"]
        if key in keys and any(answer.started <= at <= answer.started + answer.seconds for answer in cell.answers)
    ]
    return None if met else f"{len(record['removed'])} objects were removed, none of them under a request"


def _not_restarted(cell: CellEvidence, step: Mapping[str, Any], record: Mapping[str, Any]) -> str | None:
    """A server that starts makes its connector anew, and its journal says so."""
    wanted = {
        "encode": cell.roles.encode,
        "consumer": cell.roles.consumers,
        "all": cell.roles.encode | cell.roles.consumers | cell.roles.decode,
    }[step["servers"]]
    started = {
        event["server"]
        for event in cell.during
        if event["ev"] == "init" and record["at"] <= event["t"] <= record["ended"]
    }
    missing = sorted(wanted - started)
    return f"no journal shows that they started: {', '.join(missing)}" if missing else None


def _words(step: Mapping[str, str]) -> str:
    fields = ", ".join(value for name, value in step.items() if name != "do")
    return f"{step['do']} ({fields})" if fields else step["do"]
