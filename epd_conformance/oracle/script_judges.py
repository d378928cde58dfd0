"""The judge of scripted cells: what became of each request, given what was done to servers, caches and store before it. Pure.

Every step must provably have happened; every request must be answered as the baseline does, and its items must have come to the
consumer in the way that the plan says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain, repeat
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
from epd_conformance.plans.steps import AS_AGGREGATED, MUST_FAIL
from epd_conformance.verdict import Verdict


def scripted(cell: CellEvidence) -> Judgement:
    """`facts`: `steps` (a record for each of the plan's steps, see live/scripted.py), and what `went_on` needs."""
    sends = [position for position, step in enumerate(cell.plan.steps) if step["do"] == "send"]
    if len(sends) != len(cell.plan.requests) or len(cell.answers) != len(sends):
        return Judgement(
            Verdict.ERROR,
            reason="incomplete-evidence",
            expected="one answer for each request, and one step that sends it",
            observed=f"{len(cell.plan.requests)} requests, {len(sends)} steps that send, {len(cell.answers)} answers",
        )
    proofs = [cell.transport(index) for index in range(len(sends))]
    kvs = [cell.kv(index) for index in range(len(sends))]
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
        *(_way(cell, position, proof) for position, proof in zip(sends, proofs, strict=True)),
        *(_not_met(proof) for how, proof in zip(hows, proofs, strict=True) if how == "unjudged"),
        _left_outside(cell),
        went_on(cell),
        _not_done(cell),
        unproven([], [kvs[index] for index in answered]),
        _no_power(cell),
    )
    script = ", ".join(_words(step) for step in cell.plan.steps)
    verdict = found or passed(f"right answers, and items where they should come from: {script}", "so it was")
    return replace(verdict, evidence=counted(proofs, kvs))


def _may_fail(cell: CellEvidence, index: int) -> bool:
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
    if cell.plan.steps[position]["way"] not in ("reference", "uuid-alone"):
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


def _way(cell: CellEvidence, position: int, proof: Transport) -> Judgement | None:
    """Whether the items of a request came to the consumer as its step says."""
    how = cell.plan.steps[position]["how"]
    if how not in ("loaded", "saved"):
        return None
    if not proof.items:
        return inconclusive(
            "not-journalled", "the consumer's journal shows the request", proof.problem or "it does not"
        )
    after = next((step["ended"] for step in reversed(cell.facts["steps"][:position]) if step["do"] != "send"), 0.0)
    for item in proof.items:
        wrong = _loaded(cell, item, after, how == "saved")
        if wrong is not None:
            return wrong
    return None


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
    for number, record in enumerate(cell.facts["steps"]):
        if not previous <= record["at"] <= record["ended"]:
            return f"the times of step {number} ({record['do']}) do not follow those of the one before"
        previous = record["ended"]
        if record["do"] == "send" and record["done"]:
            answer = next(answers, None)
            if answer is not None and not record["at"] <= answer.started <= record["ended"]:
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
    if step["do"] == "store" and step["how"] == "emptied":
        return None if record["removed"] else "no object was removed"
    return None


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
