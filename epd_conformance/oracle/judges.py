"""The judges of live cells: pure functions from the raw evidence of a cell to its verdict.

A cell's evidence is written down as it is (plan, answers, baseline answers, journal lines), and a verdict is always computed
from it; so whoever has the evidence can compute the verdict again and need not believe ours.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epd_conformance.oracle import tokens, transport
from epd_conformance.oracle.answers import NO_IDS, Answer
from epd_conformance.oracle.noise import MARGIN_FACTOR, unusable
from epd_conformance.oracle.transport import KVTransfer, Roles, Transport, leg_of
from epd_conformance.plans.plan import Plan
from epd_conformance.report.failure import Divergence
from epd_conformance.report.schema import Evidence
from epd_conformance.verdict import Owner, Verdict, blame_by_rung

SCHEMA = "epd-conformance/cell/v1"
# A log-probability is printed as a decimal and summed in float32: this much is not a difference of computation. One changed
# element of an embedding moves it by orders of magnitude more, and the digest shows that anyhow.
LOGPROB_SLACK = 1e-5


@dataclass(frozen=True)
class CellEvidence:
    """Everything that a judge may look at.

    `answers`: those of the plan's requests, in order. `baseline`: by request digest, then by arm (`aggregated`, `p-d`), the
    first answer of that arm. `admitted`: request digests that may be compared exactly; `floor` the noise floor in nats, and
    `floor_enough` whether enough prompts were admitted at all. `before`: earlier journal lines that matter for the cell's
    keys; `during`: all lines of the cell. `deaths`: obituaries of servers that ended during the cell, `{name, status, text}`.
    `facts`: what a judge of a special case needs besides (for instance which status a planted error must have).
    """

    cell: str
    judge: str
    topology: str
    owner: Owner
    plan: Plan
    answers: tuple[Answer, ...]
    baseline: Mapping[str, Mapping[str, Answer]]
    admitted: frozenset[str]
    floor: float
    floor_enough: bool
    roles: Roles
    before: tuple[Mapping[str, Any], ...] = ()
    during: tuple[Mapping[str, Any], ...] = ()
    deaths: tuple[Mapping[str, Any], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "cell": self.cell,
            "judge": self.judge,
            "topology": self.topology,
            "owner": str(self.owner),
            "plan": self.plan.to_json(),
            "answers": [answer.to_json() for answer in self.answers],
            "baseline": {
                digest: {arm: answer.to_json() for arm, answer in arms.items()}
                for digest, arms in self.baseline.items()
            },
            "admitted": sorted(self.admitted),
            "floor": self.floor,
            "floor_enough": self.floor_enough,
            "roles": self.roles.to_json(),
            "before": list(self.before),
            "during": list(self.during),
            "deaths": list(self.deaths),
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellEvidence:
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a cell of schema {SCHEMA}: {data.get('schema')!r}")
        return cls(
            cell=data["cell"],
            judge=data["judge"],
            topology=data["topology"],
            owner=Owner(data["owner"]),
            plan=Plan.from_json(data["plan"]),
            answers=tuple(Answer.from_json(answer) for answer in data["answers"]),
            baseline={
                digest: {arm: Answer.from_json(answer) for arm, answer in arms.items()}
                for digest, arms in data["baseline"].items()
            },
            admitted=frozenset(data["admitted"]),
            floor=data["floor"],
            floor_enough=data["floor_enough"],
            roles=Roles.from_json(data["roles"]),
            before=tuple(data["before"]),
            during=tuple(data["during"]),
            deaths=tuple(data["deaths"]),
            facts=data["facts"],
        )

    def events(self, index: int) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
        """Journal lines before and during one request; the requests of a cell are sent one after the other."""
        start = self.answers[index].started if index else 0.0
        stop = self.answers[index + 1].started if index + 1 < len(self.answers) else float("inf")
        earlier = [event for event in self.during if event["t"] < start]
        return [*self.before, *earlier], [event for event in self.during if start <= event["t"] < stop]

    def transport(self, index: int) -> Transport:
        """Proof of transport of one request of the plan."""
        proof = transport.transport(*self.events(index), self.answers[index].request_id, self.roles)
        wanted = len(self.plan.requests[index].images)
        if proof.problem is None and len(proof.items) != wanted:
            problem = f"item-missing: the consumer saw {len(proof.items)} of the request's {wanted} items"
            return replace(proof, problem=problem, digests_equal=None if proof.digests_equal else proof.digests_equal)
        return proof

    def kv(self, index: int) -> KVTransfer | None:
        """Proof of KV of one request; None in a topology without a decode server."""
        if not self.roles.decode:
            return None
        before, during = self.events(index)
        return transport.kv_transfer(before, during, self.answers[index].request_id, self.roles)


@dataclass(frozen=True)
class Judgement:
    """A verdict with what a person needs to understand it."""

    verdict: Verdict
    reason: str = ""
    rung: str | None = None
    expected: str = ""
    observed: str = ""
    divergence: Divergence | None = None
    causes: tuple[str, ...] = ()
    blame: Owner | None = None
    evidence: Evidence = field(default_factory=Evidence)


Judge = Callable[[CellEvidence], Judgement]


def judge(evidence: CellEvidence) -> Judgement:
    """The verdict of a cell, from its evidence alone. Raises KeyError for a judge that this version does not know."""
    verdict = JUDGES[evidence.judge]
    early = _deaths(evidence) or _incomplete(evidence)
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
            observed=f"{death['name']} ended with {death.get('status')}\n{death.get('text', '')}",
            causes=("something outside the run killed it, or the kernel for want of memory",) if outside else (),
            blame=None if outside else _other(cell, _killer(cell, str(death["name"]))),
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


def _other(cell: CellEvidence, owner: Owner) -> Owner | None:
    """`Judgement.blame`: None where a failure points at the requirement's owner."""
    return None if owner is cell.owner else owner


# How many requests a judge needs, where not one; those that need none send theirs themselves and keep facts instead.
_LEAST = {"warm": 2, "both": 2, "constructed": 0, "encode-only": 0}


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


def _bad_status(cell: CellEvidence, index: int) -> Judgement | None:
    answer = cell.answers[index]
    arms = cell.baseline.get(cell.plan.requests[index].digest(), {})
    if answer.status != 200:
        for arm, base in arms.items():
            if base.status == answer.status:
                return _inconclusive(
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


def _inconclusive(reason: str, expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.INCONCLUSIVE, reason=reason, expected=expected, observed=observed)


def _wrong_tokens(
    cell: CellEvidence, index: int, digests_equal: bool | None, order_kept: bool | None
) -> Judgement | None:
    """Compare one answer with every arm of its baseline: ids, then log-probabilities within the noise floor."""
    request, answer = cell.plan.requests[index], cell.answers[index]
    for arm, base in cell.baseline[request.digest()].items():
        divergence = tokens.compare(base, answer)
        blame = _other(cell, _answerable(cell, divergence, digests_equal, order_kept))
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


def _comparable(cell: CellEvidence, index: int) -> Judgement | None:
    """Whether rules 4 and 5 allow to compare this request exactly: admitted, and with an answer of every matched baseline."""
    request = cell.plan.requests[index]
    arms = cell.baseline.get(request.digest(), {})
    if not cell.floor_enough:
        return _inconclusive(
            "noise",
            "enough prompts on which the baseline agrees with itself",
            "too few prompts were admitted; see the noise floor in the report",
        )
    if request.digest() not in cell.admitted:
        return _inconclusive(
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


def _no_power(cell: CellEvidence) -> Judgement | None:
    """Rule 2: the baseline must tell the contents of the case apart."""
    for position, contrast in enumerate(cell.plan.contrasts):
        request = cell.plan.requests[position % len(cell.plan.requests)]
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
    if not cell.plan.contrasts:
        return Judgement(
            Verdict.ERROR,
            reason="no-contrast",
            expected="another content that the case tells apart",
            observed="the plan names none, so equal answers would show nothing",
        )
    return None


def _wrong_digest(cell: CellEvidence, proofs: Sequence[Transport]) -> Judgement | None:
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
                    blame=_other(cell, Owner.CONNECTOR),
                )
    return None


def _unproven(proofs: Sequence[Transport], kvs: Sequence[KVTransfer | None]) -> Judgement | None:
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


def _evidence(proofs: Sequence[Transport], kvs: Sequence[KVTransfer | None]) -> Evidence:
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


def _first(*steps: Judgement | None) -> Judgement | None:
    return next((step for step in steps if step is not None), None)


def _passed(expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.PASS, expected=expected, observed=observed)


def equality(cell: CellEvidence) -> Judgement:
    """Every request is answered with the baseline's ids, after its items provably crossed.

    A wrong digest or wrong ids are a failure also where the path was not proven: nothing excuses a wrong answer.
    """
    count = range(len(cell.plan.requests))
    proofs = [cell.transport(index) for index in count]
    kvs = [cell.kv(index) for index in count]
    found = _first(
        *(_bad_status(cell, index) for index in count),
        _wrong_digest(cell, proofs),
        *(
            _comparable(cell, index)
            or _wrong_tokens(cell, index, proofs[index].digests_equal, proofs[index].order_kept)
            for index in count
        ),
        _unproven(proofs, kvs),
        _no_power(cell),
    )
    verdict = found or _passed("the baseline's token ids", "the same ids, over the proven path")
    return replace(verdict, evidence=_evidence(proofs, kvs))


def text_only(cell: CellEvidence) -> Judgement:
    """Equal ids for text, and in `e-p-d` proof of KV; no item, so no transport."""
    count = range(len(cell.plan.requests))
    if any(request.images for request in cell.plan.requests):
        return Judgement(
            Verdict.ERROR, reason="not-text", observed="the plan has items: their transport is not judged here"
        )
    kvs = [cell.kv(index) for index in count]
    found = _first(
        *(_bad_status(cell, index) for index in count),
        *(_comparable(cell, index) or _wrong_tokens(cell, index, None, None) for index in count),
        _unproven([], kvs),
        _no_power(cell),
    )
    verdict = found or _passed("the baseline's token ids", "the same ids")
    return replace(verdict, evidence=_evidence([], kvs))


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
                blame=_other(cell, Owner.CONNECTOR),
            )
    found = _first(
        *(_bad_status(cell, i) for i in count),
        form,
        _wrong_digest(cell, proofs),
        _unproven(proofs, []),
        *(_not_loaded(proof) for proof in proofs),
    )
    verdict = found or _passed("loaded = saved, for every item", f"{sum(p.loads for p in proofs)} loads, all equal")
    return replace(verdict, evidence=_evidence(proofs, kvs))


def _not_loaded(proof: Transport) -> Judgement | None:
    """For judges of the load itself: an item that is only held says nothing about it."""
    odd = [item for item in proof.items if item.how != "loaded"]
    if not odd and proof.items:
        return None
    observed = f"item {odd[0].key}: {odd[0].how}" if odd else "no item at all"
    return _inconclusive("not-loaded", "every item is loaded by this very request", observed)


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
            again = _inconclusive("other-server", "one consumer serves both requests", f"{proofs[1].server} served one")
        elif evicted.intersection(item.key for item in proofs[1].items):
            again = _inconclusive(
                "evicted", "the consumer still holds the items", "its encoder cache had let go of one"
            )
    found = _first(
        *(_bad_status(cell, index) for index in (0, 1)),
        _wrong_digest(cell, proofs),
        *(
            _comparable(cell, index)
            or _wrong_tokens(cell, index, proofs[index].digests_equal, proofs[index].order_kept)
            for index in (0, 1)
        ),
        _unproven(proofs[:1], kvs),
        again,
        _unproven(proofs[1:], []),
        _no_power(cell),
    )
    verdict = found or _passed("no load, no encode, the baseline's ids", "0 loads and 0 encodes for the second request")
    return replace(verdict, evidence=_evidence(proofs, kvs))


def miss(cell: CellEvidence) -> Judgement:
    """What nobody saved is encoded by the consumer itself, and the answer is the baseline's."""
    proof = cell.transport(0)
    kv = cell.kv(0)
    found = _bad_status(cell, 0)
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
            blame=_other(cell, Owner.CONNECTOR),
        )
    if found is None and odd is not None:
        found = _inconclusive(
            "prefix-hit" if odd.how == "prefix-hit" else "not-encoded",
            "each item is encoded by the consumer",
            f"item {odd.key}: {odd.how}",
        )
    if found is None and len(proof.items) != len(cell.plan.requests[0].images):
        found = _inconclusive("not-journalled", "the consumer's journal shows each item", proof.problem or "")
    found = _first(
        found,
        _comparable(cell, 0) or _wrong_tokens(cell, 0, None, None),
        _unproven([], [kv]),
        _no_power(cell),
    )
    verdict = found or _passed(
        "a local encode and the baseline's ids", f"{proof.local_encodes} local encodes, equal ids"
    )
    return replace(verdict, evidence=_evidence([proof], [kv]))


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
    found = _first(
        _bad_status(cell, 0), _wrong_digest(cell, [proof]), _unproven([proof], []), counts, _not_loaded(proof)
    )
    verdict = found or _passed("one transfer", "1 key, 1 save, 1 load")
    return replace(verdict, evidence=_evidence([proof], [cell.kv(0)]))


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
    found = _first(_bad_status(cell, 0), short)
    verdict = found or _passed(f"{kv.expected} tokens of KV", f"{kv.tokens} tokens taken, 0 encodes on decode")
    return replace(verdict, evidence=_evidence([proof], [kv]))


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
    found = _bad_status(cell, 0)
    if found is None and touched:
        found = Judgement(
            Verdict.FAIL,
            reason="encoder-touched",
            rung="counters",
            expected="no encode server sees the request",
            observed=f"{', '.join(touched)} saw it",
        )
    if found is None and not (cell.roles.encode and recorded >= cell.roles.encode):
        found = _inconclusive("not-journalled", "a journal of every encode server", f"journals of {sorted(recorded)}")
    if found is None and not any(leg_of(event["req"], rid) is not None for event in requests):
        found = _inconclusive("not-journalled", "a server that takes the request", "no journal shows it at all")
    return found or _passed("no encode server sees the request", "none did")


def primed_once(cell: CellEvidence) -> Judgement:
    """Each item was primed exactly once, all of them before the consumer began."""
    proof = cell.transport(0)
    indices = sorted(index for index, _ in proof.primed)
    wanted = list(range(len(cell.plan.requests[0].images)))
    found = _bad_status(cell, 0)
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
        found = _inconclusive(
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
    verdict = found or _passed(f"{len(wanted)} primers, before prefill", f"{len(indices)} primers, before prefill")
    return replace(verdict, evidence=_evidence([proof], [cell.kv(0)]))


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
    return _passed("one clear JSON error", "stage, upstream status and request id were all there")


def constructed(cell: CellEvidence) -> Judgement:
    """Each server that has the connector wrote the first line of both of its objects. `facts`: `servers`."""
    if not cell.facts["servers"]:
        return _inconclusive("no-server", "a server that is configured with the connector", "none is")
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
    return _passed("both objects in every server", f"{len(cell.facts['servers'])} servers, both objects each")


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
        found = _inconclusive(
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
    return found or _passed("one null block, no token", f"blocks {blocks}, 0 completion tokens")


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
    found = _first(
        *(_bad_status(cell, index) for index in (0, 1)),
        _wrong_digest(cell, [second]),
        _comparable(cell, 0) or _wrong_tokens(cell, 0, None, None),
        _comparable(cell, 1) or _wrong_tokens(cell, 1, second.digests_equal, None),
        unsaved,
        _unproven([second], []),
        _not_loaded(second),
        _no_power(cell),
    )
    verdict = found or _passed("the aggregated ids, encoded and then loaded", "equal ids both times")
    # The counts of the second request, which loads, with the saves of the first, which encodes.
    return replace(verdict, evidence=_evidence([second], []).model_copy(update={"saves": first.saves}))


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
}
