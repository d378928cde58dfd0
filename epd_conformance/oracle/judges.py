"""The judges of live cells: pure functions from the raw evidence of a cell to its verdict."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

from epd_conformance.oracle import encode_judges, fault_judges, key_judges, proxy_judges, script_judges
from epd_conformance.oracle.cell import CellEvidence, Judge, Judgement
from epd_conformance.oracle.rungs import (
    bad_status,
    comparable,
    counted,
    first_of,
    inconclusive,
    no_power,
    not_loaded,
    other,
    passed,
    unproven,
    wrong_digest,
    wrong_tokens,
)
from epd_conformance.oracle.transport import leg_of
from epd_conformance.verdict import Owner, Verdict


def judge(evidence: CellEvidence) -> Judgement:
    """The verdict of a cell, from its evidence alone. Raises KeyError for a judge that this version does not know."""
    verdict = JUDGES[evidence.judge]
    early = fault_judges.misplaced(evidence) or _deaths(evidence) or _incomplete(evidence)
    return early if early is not None else _seen_whole(evidence, verdict(evidence))


def _deaths(cell: CellEvidence) -> Judgement | None:
    """Deaths come before everything else: after one, no answer means what it seems to mean.

    One kill from outside explains the other deaths, so it goes first.
    """
    outside = [death for death in cell.deaths if death.get("status") in (-9, -15)]
    for death in (*outside, *cell.deaths):
        return Judgement(
            Verdict.ERROR if outside else Verdict.FAIL,
            reason="killed-from-outside" if outside else "server-died",
            rung="liveness",
            expected="every server lives through the cell",
            observed=str(death.get("text") or f"{death['name']} ended with {death.get('status')}"),
            causes=("something outside the run killed it, or the kernel for want of memory",) if outside else (),
            blame=None if outside else other(cell, _killer(cell, str(death["name"]))),
        )
    return None


def _killer(cell: CellEvidence, name: str) -> Owner:
    """Who a death points at; `name` is `<stack>.<server>`, as processes are called."""
    server = name.rpartition(".")[2]
    if server in ("proxy", "bypass"):
        return Owner.PROXY
    if any(
        event["ev"] == "raise" and event["server"] == server and not event["side"].startswith("kv-")
        for event in cell.during
    ):
        return Owner.CONNECTOR
    # A server must outlive whatever a proxy sends.
    return Owner.ENGINE if cell.owner is Owner.PROXY else cell.owner


# How many requests a judge needs, where not one; those that need none send theirs themselves and keep facts instead.
_LEAST = {"warm": 2, "both": 2, "distinct": 2, "constructed": 0, "encode-only": 0}
_LEAST |= {"ended": 0, "text-ended": 0, "named": 0}
# The first, the twin, the victim and a fresh one; the harmless, the baited and the hostile one.
_LEAST |= {"recomputed": 4, "contained": 4, "fails-alone": 4, "in-window": 4, "confined": 3}
# These keep what came back in the facts.
_LEAST |= dict.fromkeys(("as-direct", "refused", "not-begun", "passed-on", "one-token", "one-id", "work-ends"), 0)


def _incomplete(cell: CellEvidence) -> Judgement | None:
    """A judge looks at all answers; it must not pass because some, or all, were never asked for."""
    least = _LEAST.get(cell.judge, 1)
    asked = [request.label for request in cell.plan.requests]
    answered = [answer.label for answer in cell.answers]
    if least and (len(asked) < least or asked != answered):
        return Judgement(
            Verdict.ERROR,
            reason="incomplete-evidence",
            expected=f"an answer to each request of the plan, at least {least}: {asked}",
            observed=f"answers to {answered}",
        )
    return None


def _seen_whole(cell: CellEvidence, judgement: Judgement) -> Judgement:
    """Where journal lines were lost, neither a pass nor a failure that rests on counting lines stands.

    Wrong bytes, wrong ids and wrong statuses do: a lost line does not undo them.
    """
    lost = [event for event in cell.during if event["ev"] == "lost"]
    if not lost or (judgement.verdict is not Verdict.PASS and judgement.rung != "counters"):
        return judgement
    return replace(
        judgement,
        verdict=Verdict.INCONCLUSIVE,
        reason="journal-lost",
        rung=None,
        expected="every journal line of the cell",
        observed=f"{lost[0]['server']} ({lost[0]['side']}) lost lines: {lost[0].get('error', '')}",
        causes=("the disk is full, the run's folder was touched, or the recorder met a form that it does not know",),
        blame=None,
    )


def equality(cell: CellEvidence) -> Judgement:
    """Every request is answered with the baseline's ids, after its items provably crossed.

    A wrong digest or wrong ids are a failure also where the path was not proven: nothing excuses a wrong answer.
    """
    count = range(len(cell.plan.requests))
    proofs = [cell.transport(index) for index in count]
    kvs = [cell.kv(index) for index in count]
    found = first_of(
        *(bad_status(cell, index) for index in count),
        wrong_digest(cell, proofs),
        *(
            comparable(cell, index) or wrong_tokens(cell, index, proofs[index].digests_equal, proofs[index].order_kept)
            for index in count
        ),
        unproven(proofs, kvs),
        no_power(cell),
    )
    verdict = found or passed("the baseline's token ids", "the same ids, over the proven path")
    return replace(verdict, evidence=counted(proofs, kvs))


def text_only(cell: CellEvidence) -> Judgement:
    """Equal ids for text, and in `e-p-d` proof of KV; no item, so no transport."""
    count = range(len(cell.plan.requests))
    if any(request.images for request in cell.plan.requests):
        return Judgement(
            Verdict.ERROR, reason="not-text", observed="the plan has items: their transport is not judged here"
        )
    kvs = [cell.kv(index) for index in count]
    found = first_of(
        *(bad_status(cell, index) for index in count),
        *(comparable(cell, index) or wrong_tokens(cell, index, None, None) for index in count),
        unproven([], kvs),
        no_power(cell),
    )
    verdict = found or passed("the baseline's token ids", "the same ids")
    return replace(verdict, evidence=counted([], kvs))


def transported(cell: CellEvidence) -> Judgement:
    """Rows, width, dtype and digest of every load equal those of a save under the same key."""
    count = range(len(cell.plan.requests))
    proofs = [cell.transport(index) for index in count]
    kvs = [cell.kv(index) for index in count]
    form = None
    every = [*cell.before, *cell.during]
    producers = cell.roles.encode | cell.roles.both
    for load in (event for event in cell.during if event["ev"] == "load" and event["server"] in cell.roles.consumers):
        saves = [
            event
            for event in every
            if event["ev"] == "save" and event["id"] == load["id"] and event["server"] in producers
        ]
        fields = ("rows", "width", "dtype", "shape")
        if saves and not any(all(save[name] == load[name] for name in fields) for save in saves):
            form = Judgement(
                Verdict.FAIL,
                reason="form-differs",
                rung="digest",
                expected=f"{ {name: saves[-1][name] for name in fields} }",
                observed=f"{ {name: load[name] for name in fields} }",
                causes=("the connector cast, cut or reshaped the tensor",),
                blame=other(cell, Owner.CONNECTOR),
            )
    found = first_of(
        *(bad_status(cell, i) for i in count),
        form,
        wrong_digest(cell, proofs),
        unproven(proofs, []),
        *(not_loaded(proof) for proof in proofs),
    )
    verdict = found or passed("loaded = saved, for every item", f"{sum(p.loads for p in proofs)} loads, all equal")
    return replace(verdict, evidence=counted(proofs, kvs))


def warm(cell: CellEvidence) -> Judgement:
    """The second request over the same items loads nothing and encodes nothing, and both answer as the baseline."""
    proofs = [cell.transport(index) for index in (0, 1)]
    kvs = [cell.kv(index) for index in (0, 1)]
    again = None
    if proofs[1].loads or proofs[1].local_encodes:
        again = Judgement(
            Verdict.FAIL,
            reason="not-warm",
            rung="counters",
            expected="no load and no encode for items that the consumer holds",
            observed=f"{proofs[1].loads} loads, {proofs[1].local_encodes} local encodes",
        )
        evicted = {
            key
            for event in cell.during
            if event["ev"] == "step" and event["server"] == proofs[0].server
            for key in event["free"]
        }
        if proofs[0].server != proofs[1].server:
            again = inconclusive("other-server", "one consumer serves both requests", f"{proofs[1].server} served one")
        elif evicted.intersection(item.key for item in proofs[1].items):
            again = inconclusive("evicted", "the consumer still holds the items", "its encoder cache had let go of one")
    found = first_of(
        *(bad_status(cell, index) for index in (0, 1)),
        wrong_digest(cell, proofs),
        *(
            comparable(cell, index) or wrong_tokens(cell, index, proofs[index].digests_equal, proofs[index].order_kept)
            for index in (0, 1)
        ),
        unproven(proofs[:1], kvs),
        again,
        unproven(proofs[1:], []),
        no_power(cell),
    )
    verdict = found or passed("no load, no encode, the baseline's ids", "0 loads and 0 encodes for the second request")
    return replace(verdict, evidence=counted(proofs, kvs))


def miss(cell: CellEvidence) -> Judgement:
    """What nobody saved is encoded by the consumer itself, and the answer is the baseline's."""
    proof = cell.transport(0)
    kv = cell.kv(0)
    found = bad_status(cell, 0)
    odd = next((item for item in proof.items if item.how != "encoded"), None)
    if found is None and (proof.saves or any(item.saved for item in proof.items)):
        found = Judgement(
            Verdict.ERROR, reason="not-a-miss", observed="a producer had saved the item: this cell shows nothing"
        )
    if found is None and proof.loads:
        found = Judgement(
            Verdict.FAIL,
            reason="invented",
            rung="counters",
            expected="each item is encoded by the consumer",
            observed=f"{proof.loads} loads of what nobody saved",
            causes=("the connector says True for what nobody saved",),
            blame=other(cell, Owner.CONNECTOR),
        )
    if found is None and odd is not None:
        found = inconclusive(
            "prefix-hit" if odd.how == "prefix-hit" else "not-encoded",
            "each item is encoded by the consumer",
            f"item {odd.key}: {odd.how}",
        )
    if found is None and len(proof.items) != len(cell.plan.requests[0].images):
        found = inconclusive("not-journalled", "the consumer's journal shows each item", proof.problem or "")
    found = first_of(
        found,
        comparable(cell, 0) or wrong_tokens(cell, 0, None, None),
        unproven([], [kv]),
        no_power(cell),
    )
    verdict = found or passed(
        "a local encode and the baseline's ids", f"{proof.local_encodes} local encodes, equal ids"
    )
    return replace(verdict, evidence=counted([proof], [kv]))


def twice(cell: CellEvidence) -> Judgement:
    """One item that stands twice in a request has one key, is saved once and loaded once."""
    proof = cell.transport(0)
    keys = {item.key for item in proof.items}
    counts = None
    if len(keys) != 1 or proof.saves != 1 or proof.loads != 1:
        counts = Judgement(
            Verdict.FAIL,
            reason="not-once",
            rung="counters",
            expected="1 key, 1 save, 1 load",
            observed=f"{len(keys)} keys, {proof.saves} saves, {proof.loads} loads",
        )
    found = first_of(bad_status(cell, 0), wrong_digest(cell, [proof]), unproven([proof], []), counts, not_loaded(proof))
    verdict = found or passed("one transfer", "1 key, 1 save, 1 load")
    return replace(verdict, evidence=counted([proof], [cell.kv(0)]))


def kv_taken(cell: CellEvidence) -> Judgement:
    """The decode server took all KV that the connector can give, and encoded nothing.

    Taking less is no failure of an answer, but of this very requirement.
    """
    kv = cell.kv(0)
    proof = cell.transport(0)
    if kv is None:
        return Judgement(Verdict.ERROR, reason="no-decode-server", observed="this topology has no decode server")
    short = None
    if kv.problem is not None:
        reason, _, detail = kv.problem.partition(": ")
        proven = reason in ("kv-recompute", "decode-encode")
        short = Judgement(
            Verdict.FAIL if proven else Verdict.INCONCLUSIVE,
            reason=reason,
            rung="counters",
            expected=f"{kv.expected} tokens of KV taken, nothing encoded",
            observed=detail,
        )
    found = first_of(bad_status(cell, 0), short)
    verdict = found or passed(f"{kv.expected} tokens of KV", f"{kv.tokens} tokens taken, 0 encodes on decode")
    return replace(verdict, evidence=counted([proof], [kv]))


def untouched(cell: CellEvidence) -> Judgement:
    """A request without media reached no encode server."""
    rid = cell.answers[0].request_id
    requests = [event for event in cell.during if event["ev"] in ("request", "kv-new")]
    # Under any id: nothing else asks an encode server anything while the cell runs.
    touched = sorted({event["server"] for event in requests if event["server"] in cell.roles.encode})
    # Without these the cell could not fail: a journal that records nothing shows no touch either.
    recorded = {
        event["server"]
        for event in (*cell.before, *cell.during)
        if event["ev"] == "init" and event["side"] == "scheduler"
    }
    found = bad_status(cell, 0)
    if found is None and touched:
        found = Judgement(
            Verdict.FAIL,
            reason="encoder-touched",
            rung="counters",
            expected="no encode server sees the request",
            observed=f"{', '.join(touched)} saw it",
        )
    if found is None and not (cell.roles.encode and recorded >= cell.roles.encode):
        found = inconclusive("not-journalled", "a journal of every encode server", f"journals of {sorted(recorded)}")
    if found is None and not any(leg_of(event["req"], rid) is not None for event in requests):
        found = inconclusive("not-journalled", "a server that takes the request", "no journal shows it at all")
    return found or passed("no encode server sees the request", "none did")


def primed_once(cell: CellEvidence) -> Judgement:
    """Each item was primed exactly once, all of them before the consumer began."""
    proof = cell.transport(0)
    indices = sorted(index for index, _ in proof.primed)
    wanted = list(range(len(cell.plan.requests[0].images)))
    found = bad_status(cell, 0)
    if found is None and (
        indices != wanted
        or (proof.items and Counter(key for _, key in proof.primed) != Counter(item.key for item in proof.items))
    ):
        found = Judgement(
            Verdict.FAIL,
            reason="not-primed-once",
            rung="counters",
            expected=f"items {wanted} primed once each: {[item.key for item in proof.items]}",
            observed=f"items {indices} primed: {[key for _, key in proof.primed]}",
        )
    if found is None and len(proof.items) != len(wanted):
        found = inconclusive(
            "not-journalled", "the consumer's journal shows each item", f"it shows {len(proof.items)} of {len(wanted)}"
        )
    if found is None and proof.primed_late:
        found = Judgement(
            Verdict.FAIL,
            reason="primed-late",
            rung="counters",
            expected="every item primed before the consumer begins",
            observed="an encode server was not done with an item when the consumer began",
        )
    verdict = found or passed(f"{len(wanted)} primers, before prefill", f"{len(indices)} primers, before prefill")
    return replace(verdict, evidence=counted([proof], [cell.kv(0)]))


def stage_error(cell: CellEvidence) -> Judgement:
    """A failing stage is one JSON error with stage, upstream status and request id, streamed or not.

    `facts`: `stage` (the stage that is made to fail), `status` (the upstream's status).
    """
    for answer in cell.answers:
        stage, status = cell.facts["stage"], cell.facts["status"]
        expected = f"status {status} and a JSON error with stage {stage!r}, upstream_status {status} and the request id"
        try:
            error = json.loads(answer.body or "")["error"]
            complaint = [
                f"{name} is {error.get(name)!r}"
                for name, want in (("stage", stage), ("upstream_status", status), ("request_id", answer.request_id))
                if error.get(name) != want
            ]
        except (ValueError, KeyError, TypeError, AttributeError):
            complaint = [f"the body is {(answer.body or '')[:300]!r}"]
        if answer.status != status:
            complaint.insert(0, f"status {answer.status}")
        if complaint:
            return Judgement(
                Verdict.FAIL, reason="unclear-error", rung="status", expected=expected, observed=", ".join(complaint)
            )
    return passed("one clear JSON error", "stage, upstream status and request id were all there")


def constructed(cell: CellEvidence) -> Judgement:
    """Each server that has the connector wrote the first line of both of its objects. `facts`: `servers`."""
    if not cell.facts["servers"]:
        return inconclusive("no-server", "a server that is configured with the connector", "none is")
    missing = [
        f"{server} ({side})"
        for server in cell.facts["servers"]
        for side in ("scheduler", "worker")
        if not any(
            event["ev"] == "init" and event["server"] == server and event["side"] == side
            for event in (*cell.before, *cell.during)
        )
    ]
    if missing:
        return Judgement(
            Verdict.FAIL,
            reason="not-constructed",
            rung="counters",
            expected="a SCHEDULER and a WORKER object in every server that has the connector",
            observed=f"none in {', '.join(missing)}",
        )
    return passed("both objects in every server", f"{len(cell.facts['servers'])} servers, both objects each")


def encode_only(cell: CellEvidence) -> Judgement:
    """The encode server has one null block and no tokens to give.

    `facts`: `blocks` by server, `status` and `completion_tokens` of a primer that asks for more than none.
    """
    blocks, status = dict(cell.facts["blocks"]), cell.facts["status"]
    generated = cell.facts["completion_tokens"]
    found = None
    if status != 200:
        found = Judgement(
            Verdict.FAIL,
            reason="request-failed",
            rung="status",
            expected="a primer is answered with 200",
            observed=f"status {status}",
        )
    elif not blocks or set(blocks) != cell.roles.encode or None in (generated, *blocks.values()):
        found = inconclusive(
            "not-journalled",
            "the blocks of every encode server, and the usage of the answer",
            f"blocks {blocks}, {generated} completion tokens",
        )
    elif any(count != 1 for count in blocks.values()):
        found = Judgement(
            Verdict.FAIL,
            reason="kv-cache-on-encode",
            rung="counters",
            expected="one block (the null block) on each encode server",
            observed=f"blocks: {blocks}",
        )
    if found is None and generated != 0:
        found = Judgement(
            Verdict.FAIL,
            reason="token-on-encode",
            rung="counters",
            expected="0 completion tokens from an encode server",
            observed=f"{generated} completion tokens",
        )
    return found or passed("one null block, no token", f"blocks {blocks}, 0 completion tokens")


def both(cell: CellEvidence) -> Judgement:
    """`ec_both`: the first request encodes and saves, the second, after a reset of the server's cache, loads; both equal."""
    first, second = cell.transport(0), cell.transport(1)
    unsaved = None
    if cell.facts["reset_status"] != 200:
        unsaved = Judgement(
            Verdict.ERROR,
            reason="not-reset",
            expected="the server resets its encoder cache",
            observed=f"/reset_encoder_cache answered {cell.facts['reset_status']}",
            causes=("the server was started without VLLM_SERVER_DEV_MODE=1",),
        )
    elif not first.saves or not first.local_encodes:
        unsaved = Judgement(
            Verdict.INCONCLUSIVE,
            reason="not-saved",
            expected="the first request is encoded and saved",
            observed=f"{first.saves} saves and {first.local_encodes} encodes",
        )
    found = first_of(
        *(bad_status(cell, index) for index in (0, 1)),
        wrong_digest(cell, [second]),
        comparable(cell, 0) or wrong_tokens(cell, 0, None, None),
        comparable(cell, 1) or wrong_tokens(cell, 1, second.digests_equal, None),
        unsaved,
        unproven([second], []),
        not_loaded(second),
        no_power(cell),
    )
    verdict = found or passed("the aggregated ids, encoded and then loaded", "equal ids both times")
    # The counts of the second request, which loads, with the saves of the first, which encodes.
    return replace(verdict, evidence=counted([second], []).model_copy(update={"saves": first.saves}))


JUDGES: dict[str, Judge] = {
    "equality": equality,
    "text-only": text_only,
    "transported": transported,
    "warm": warm,
    "miss": miss,
    "twice": twice,
    "kv-taken": kv_taken,
    "untouched": untouched,
    "primed-once": primed_once,
    "stage-error": stage_error,
    "constructed": constructed,
    "encode-only": encode_only,
    "both": both,
    "recomputed": fault_judges.recomputed,
    "fails-alone": fault_judges.fails_alone,
    "in-window": fault_judges.in_window,
    "scripted": script_judges.scripted,
    "contained": fault_judges.contained,
    "confined": fault_judges.confined,
    "as-direct": proxy_judges.as_direct,
    "refused": proxy_judges.refused,
    "not-begun": proxy_judges.not_begun,
    "passed-on": proxy_judges.passed_on,
    "order": proxy_judges.order,
    "prompt-tokens": proxy_judges.prompt_tokens,
    "kept-apart": proxy_judges.kept_apart,
    "media-only": proxy_judges.media_only,
    "encoding-options": proxy_judges.encoding_options,
    "one-token": proxy_judges.one_token,
    "one-id": proxy_judges.one_id,
    "work-ends": proxy_judges.work_ends,
    "distinct": key_judges.distinct,
    "ended": encode_judges.ended,
    "text-ended": encode_judges.text_ended,
    "named": encode_judges.named,
}
