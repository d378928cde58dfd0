"""The noise floor: how much the baseline differs from itself, and which prompts are steady enough for exact comparison.

Design, rule 5 of a fair comparison: the admitted set is fixed before the subject's arm runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epd_conformance.oracle.answers import Answer
from epd_conformance.report.schema import MIN_ADMITTED, MIN_ADMITTED_SHARE

# A margin must exceed what the noise could close: each of the two best tokens may move by the floor, towards the other.
MARGIN_FACTOR = 2.0


@dataclass(frozen=True)
class NoiseFloor:
    """`floor` is the largest difference of a log-probability between two runs of the baseline, `least_margin` the smallest
    top-1 margin among the admitted prompts (None when there are none), both in nats."""

    repetitions: int
    floor: float
    least_margin: float | None
    offered: int
    admitted: frozenset[str]
    rejected: Mapping[str, str]

    @property
    def enough(self) -> bool:
        """Whether the admitted set allows exact comparison at all."""
        return len(self.admitted) >= max(MIN_ADMITTED, MIN_ADMITTED_SHARE * self.offered)

    def words(self) -> str:
        return (
            f"noise floor {self.floor:.2g} nats over {self.repetitions} repetitions, {len(self.admitted)} of {self.offered} "
            "prompts admitted"
        )


def spread(runs: Sequence[Answer]) -> float:
    """The largest difference of a log-probability at one position between runs with equal ids."""
    return max(
        (max(column) - min(column) for column in zip(*(run.logprobs for run in runs), strict=False)),
        default=0.0,
    )


def measure(arms: Sequence[Mapping[str, Sequence[Answer]]], unproven: Mapping[str, str] | None = None) -> NoiseFloor:
    """Admit or reject each prompt.

    `arms`: for each baseline (aggregated; for e-p-d also p-d) the answers of every repetition, by request digest; the prompts
    offered are those of the first. `unproven`: digests whose baseline did not take the path that makes it a baseline, with
    the reason.
    """
    reasons = dict(unproven or {})
    stable: dict[str, list[list[Answer]]] = {}
    digests = list(arms[0])
    for digest in digests:
        per_arm = [list(arm.get(digest, ())) for arm in arms]
        complaint = unsteady(per_arm)
        if complaint is None:
            stable[digest] = per_arm
        else:
            reasons.setdefault(digest, complaint)
    floor = max((spread(runs) for per_arm in stable.values() for runs in per_arm), default=0.0)
    admitted = set()
    margins = []
    for digest, per_arm in stable.items():
        margin = min((m for runs in per_arm for answer in runs for m in answer.margins), default=0.0)
        if digest in reasons:
            continue
        if margin <= MARGIN_FACTOR * floor:
            reasons[digest] = (
                f"smallest margin {margin:.4g} nats is not above {MARGIN_FACTOR:g} × the noise floor {floor:.4g}"
            )
        else:
            admitted.add(digest)
            margins.append(margin)
    repetitions = min((len(runs) for arm in arms for runs in arm.values()), default=0)
    return NoiseFloor(repetitions, floor, min(margins, default=None), len(digests), frozenset(admitted), reasons)


def unsteady(per_arm: Sequence[Sequence[Answer]]) -> str | None:
    """Why the answers of the baselines to one prompt, by arm, are nothing to compare exactly with; None if they are."""
    every = [answer for runs in per_arm for answer in runs]
    if any(len(runs) < 2 for runs in per_arm):
        return "a baseline was not asked twice, so its noise is not known"
    for answer in every:
        if (complaint := unusable(answer)) is not None:
            return f"the baseline: {complaint}"[:300]
    if any(len({(a.prompt_ids, a.ids) for a in runs}) > 1 for runs in per_arm):
        return "the baseline gives different ids when asked again"
    if len({(a.prompt_ids, a.ids) for a in every}) > 1:
        return "the baselines differ from each other"
    return None


def unusable(answer: Answer) -> str | None:
    """Why a baseline's answer cannot be compared with at all; None if it can."""
    if answer.status != 200 or answer.error:
        return f"status {answer.status}: {answer.error or answer.body or ''}"
    if not answer.ids or not answer.prompt_ids:
        return "an answer without a token"
    if not len(answer.ids) == len(answer.logprobs) == len(answer.margins):
        return "an answer without a log-probability and a margin for every token"
    # A comparison with NaN is never true, and would find no difference.
    if not all(map(math.isfinite, (*answer.logprobs, *answer.margins))):
        return "an answer with a log-probability that is no number"
    return None
