"""The token oracle: equal or not, and if not, where first, and what the place usually means."""

from __future__ import annotations

from collections.abc import Sequence

from epd_conformance.oracle.answers import Answer
from epd_conformance.report.failure import Divergence


def first_divergence(
    sequence: str, expected: Sequence[int], observed: Sequence[int], margins: Sequence[float] = ()
) -> Divergence | None:
    """The first index at which two sequences of ids differ (a shorter one differs at its end), or None.

    `sequence` says which they are, `prompt` or `output`; `margins` are the baseline's, by index, in nats.
    """
    for index in range(max(len(expected), len(observed))):
        if index >= len(expected) or index >= len(observed) or expected[index] != observed[index]:
            margin = margins[index] if index < len(margins) else None
            return Divergence(index, tuple(expected), tuple(observed), margin, sequence)
    return None


def compare(baseline: Answer, observed: Answer) -> Divergence | None:
    """Prompt ids first: where the prompts differ already, the outputs answer different questions."""
    return first_divergence("prompt", baseline.prompt_ids, observed.prompt_ids) or first_divergence(
        "output", baseline.ids, observed.ids, baseline.margins
    )


def hint(divergence: Divergence) -> str:
    """What the place of a divergence usually means."""
    if divergence.sequence == "prompt":
        return "the stack built another prompt: the proxy changed the request, or the servers' processors differ"
    if divergence.index == 0:
        return "different from the first token on: other embeddings or other KV were used, not just rounded ones"
    return "a shared beginning and a later drift: numerics (batch shape, dtype, kernels), or slightly wrong embeddings"
