"""The rungs that judges share: status, digest, token ids, log-probabilities, proof, power. Each finds what is wrong, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from epd_conformance.oracle import tokens
from epd_conformance.oracle.answers import NO_IDS
from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.noise import MARGIN_FACTOR, unusable
from epd_conformance.oracle.transport import KVTransfer, Transport
from epd_conformance.plans.plan import Request
from epd_conformance.report.failure import Divergence
from epd_conformance.report.schema import Evidence
from epd_conformance.verdict import Owner, Verdict, blame_by_rung

# A log-probability is printed as a decimal and summed in float32: this much is not a difference of computation. One changed
# element of an embedding moves it by orders of magnitude more, and the digest shows that anyhow.
LOGPROB_SLACK = 1e-5


def other(cell: CellEvidence, owner: Owner) -> Owner | None:
    """`Judgement.blame`: None where a failure points at the requirement's owner."""
    return None if owner is cell.owner else owner


def bad_status(cell: CellEvidence, index: int) -> Judgement | None:
    answer = cell.answers[index]
    arms = cell.baseline.get(cell.plan.requests[index].digest(), {})
    if answer.status != 200:
        for arm, base in arms.items():
            if base.status == answer.status:
                return inconclusive(
                    "not-admitted",
                    f"the {arm} server answers request {answer.label!r}",
                    f"status {base.status} from both: {base.error or base.body or ''}"[:2000],
                )
        return Judgement(
            Verdict.FAIL,
            reason="request-failed",
            rung="status",
            expected=f"request {answer.label!r} is answered with 200",
            observed=f"status {answer.status}: {answer.error or answer.body or ''}"[:2000],
        )
    if answer.error == NO_IDS:
        return Judgement(
            Verdict.ERROR,
            reason="no-ids",
            expected="the answer holds token ids of prompt and output",
            observed=answer.error,
            causes=("the server does not know `return_token_ids`, or the proxy dropped it",),
        )
    if answer.error or not answer.ids or not answer.prompt_ids:
        return Judgement(
            Verdict.FAIL,
            reason="request-failed",
            rung="status",
            expected=f"request {answer.label!r} is answered whole: a completion, a stream up to its end",
            observed=answer.error or "a 200 without a single token",
        )
    return None


def inconclusive(reason: str, expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.INCONCLUSIVE, reason=reason, expected=expected, observed=observed)


def wrong_tokens(
    cell: CellEvidence, index: int, digests_equal: bool | None, order_kept: bool | None
) -> Judgement | None:
    """Compare one answer with every arm of its baseline: ids, then log-probabilities within the noise floor."""
    request, answer = cell.plan.requests[index], cell.answers[index]
    for arm, base in cell.baseline[request.digest()].items():
        divergence = tokens.compare(base, answer)
        blame = other(cell, _answerable(cell, divergence, digests_equal, order_kept))
        if divergence is not None:
            causes = [tokens.hint(divergence)]
            if order_kept is False:
                causes.insert(
                    0, "the consumer got the items in another order than the client gave: the proxy swapped them"
                )
            elif digests_equal:
                causes.append("the loaded bytes are those that were saved, so the connector carried them rightly")
            causes += [
                f"these are the ids that {contrast.label!r} should get: the contents were mixed up"
                for contrast in cell.plan.contrasts
                if any(other.ids == answer.ids for other in cell.baseline.get(contrast.digest(), {}).values())
            ]
            return Judgement(
                Verdict.FAIL,
                reason="tokens-differ",
                rung="tokens",
                expected=f"request {answer.label!r}: the {arm} server's token ids {list(base.ids)}",
                observed=f"token ids {list(answer.ids)}",
                divergence=divergence,
                causes=tuple(causes),
                blame=blame,
            )
        if len(answer.logprobs) != len(answer.ids):
            return Judgement(
                Verdict.ERROR,
                reason="no-logprobs",
                expected="a log-probability for every token",
                observed=f"{len(answer.logprobs)} log-probabilities for {len(answer.ids)} tokens",
                causes=("the server or the proxy dropped `logprobs`",),
            )
        limit = MARGIN_FACTOR * cell.floor + LOGPROB_SLACK
        # Asked this way round, a NaN is a difference.
        over = [abs(a - b) for a, b in zip(base.logprobs, answer.logprobs, strict=True) if not abs(a - b) <= limit]
        if over:
            return Judgement(
                Verdict.FAIL,
                reason="logprobs-differ",
                rung="logprobs",
                expected=f"log-probabilities of the {arm} server within {MARGIN_FACTOR:g} × {cell.floor:.2g} nats",
                observed=f"largest difference {max(over):.4g} nats, with equal ids",
                causes=("the ids agree by luck: rows were rounded, cast or slightly wrong",),
                blame=blame,
            )
    return None


def _answerable(
    cell: CellEvidence, divergence: Divergence | None, digests_equal: bool | None, order_kept: bool | None
) -> Owner:
    """Who a wrong answer points at. No connector has a hand in the ids of a prompt."""
    if order_kept is False:
        return Owner.PROXY
    if divergence is not None and divergence.sequence == "prompt":
        return Owner.PROXY if cell.roles.encode else Owner.ENGINE
    return blame_by_rung(cell.owner, digests_equal)


def comparable(cell: CellEvidence, index: int) -> Judgement | None:
    """Whether rules 4 and 5 allow to compare this request exactly: admitted, and with an answer of every matched baseline."""
    request = cell.plan.requests[index]
    arms = cell.baseline.get(request.digest(), {})
    if not cell.floor_enough:
        return inconclusive(
            "noise",
            "enough prompts on which the baseline agrees with itself",
            "too few prompts were admitted; see the noise floor in the report",
        )
    if request.digest() not in cell.admitted:
        return inconclusive(
            "not-admitted",
            "the baseline agrees with itself on this prompt",
            "the prompt was rejected before the run; see the noise floor in the report",
        )
    for arm in ("aggregated", "p-d") if cell.roles.decode else ("aggregated",):
        complaint = "it was never asked" if arm not in arms else unusable(arms[arm])
        if complaint is not None:
            return Judgement(
                Verdict.ERROR,
                reason="no-baseline",
                expected=f"an answer of the {arm} baseline to {request.label!r}",
                observed=complaint,
            )
    return None


def no_power(cell: CellEvidence) -> Judgement | None:
    """Rule 2: the baseline must tell the contents of the case apart."""
    for position, contrast in enumerate(cell.plan.contrasts):
        found = not_told_apart(cell, cell.plan.requests[position % len(cell.plan.requests)], contrast)
        if found is not None:
            return found
    if not cell.plan.contrasts:
        return Judgement(
            Verdict.ERROR,
            reason="no-contrast",
            expected="another content that the case tells apart",
            observed="the plan names none, so equal answers would show nothing",
        )
    return None


def not_told_apart(cell: CellEvidence, request: Request, contrast: Request) -> Judgement | None:
    """Whether the aggregated server answers a contrast, and otherwise than it answers a request."""
    base = cell.baseline.get(request.digest(), {}).get("aggregated")
    other = cell.baseline.get(contrast.digest(), {}).get("aggregated")
    complaint = "it was never asked" if other is None else unusable(other)
    if other is None or complaint is not None:
        return Judgement(
            Verdict.ERROR,
            reason="no-contrast",
            expected=f"an answer of the aggregated server to {contrast.label!r}",
            observed=complaint or "",
        )
    if base is not None and base.ids == other.ids:
        return Judgement(
            Verdict.INCONCLUSIVE,
            reason="no power",
            expected=f"the aggregated server answers {request.label!r} and {contrast.label!r} differently",
            observed=f"both get {list(base.ids)}",
            causes=("too few tokens, or a model that does not look at the item",),
        )
    return None


def wrong_digest(cell: CellEvidence, proofs: Sequence[Transport]) -> Judgement | None:
    for proof in proofs:
        for item in proof.items:
            if item.digest_wrong:
                return Judgement(
                    Verdict.FAIL,
                    reason="digest-differs",
                    rung="digest",
                    expected=f"under key {item.key} the bytes that a producer saved last: {', '.join(sorted(set(item.saved)))}",
                    observed=f"bytes with digest {item.digest}",
                    causes=(
                        "the connector gave another item's rows, changed the bytes, or read a stale or torn object",
                    ),
                    blame=other(cell, Owner.CONNECTOR),
                )
    return None


def unproven(proofs: Sequence[Transport], kvs: Sequence[KVTransfer | None]) -> Judgement | None:
    for problem in [proof.problem for proof in proofs] + [kv.problem for kv in kvs if kv is not None]:
        if problem is not None:
            reason, _, detail = problem.partition(": ")
            return Judgement(
                Verdict.INCONCLUSIVE,
                reason=reason,
                expected="every item crossed from a producer to the consumer, and nobody after the encode stage encoded it",
                observed=detail,
                causes=_UNPROVEN_CAUSES.get(reason, ()),
            )
    return None


_UNPROVEN_CAUSES = {
    "local-encode": (
        "the connector does not find what was saved (another key, another store, connector off)",
        "the proxy did not prime the encode server",
    ),
    "prefix-hit": ("the same prompt was sent before without a cache_salt of its own",),
    "kv-recompute": (
        "the KV connector did not find the KV: another store, a deletion, or a prompt length it cannot serve",
    ),
}


def counted(proofs: Sequence[Transport], kvs: Sequence[KVTransfer | None]) -> Evidence:
    """Counts over all requests of the cell."""
    equal = [proof.digests_equal for proof in proofs if proof.digests_equal is not None]
    present = [kv for kv in kvs if kv is not None]
    return Evidence(
        saves=sum(proof.saves for proof in proofs),
        loads=sum(proof.loads for proof in proofs),
        local_encodes=sum(proof.local_encodes for proof in proofs),
        digests_equal=all(equal) if equal else None,
        kv_tokens=sum(kv.tokens for kv in present) if present else None,
        kv_tokens_expected=sum(kv.expected for kv in present) if present else None,
        decode_encodes=sum(kv.decode_encodes for kv in present) if present else None,
    )


def first_of(*steps: Judgement | None) -> Judgement | None:
    return next((step for step in steps if step is not None), None)


def worst(*steps: Judgement | None) -> Judgement | None:
    """The first failure, else the first that keeps the cell from a pass: what is proven wrong stands, whatever is open."""
    found = [step for step in steps if step is not None]
    return first_of(*(step for step in found if step.verdict is Verdict.FAIL), *found)


def passed(expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.PASS, expected=expected, observed=observed)


def not_loaded(proof: Transport) -> Judgement | None:
    """For judges of the load itself: an item that is only held says nothing about it."""
    odd = [item for item in proof.items if item.how != "loaded"]
    if not odd and proof.items:
        return None
    observed = f"item {odd[0].key}: {odd[0].how}" if odd else "no item at all"
    return inconclusive("not-loaded", "every item is loaded by this very request", observed)
