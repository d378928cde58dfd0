"""The text of a cell that did not pass: what was asked, what came, where they part, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from epd_conformance.catalogue import Requirement

# Ids on each side of the first divergence: enough to recognise a shift by a few places, few enough for one
# line.
AROUND = 4


@dataclass(frozen=True)
class Divergence:
    """The first place where two sequences of token ids part.

    `margin` is the distance, in nats, between the baseline's first and second choice at that place: a small
    one points at numerics, a large one at wrong input. None where no logprobs were asked for.
    """

    index: int
    expected: Sequence[int]
    observed: Sequence[int]
    margin: float | None = None
    sequence: str = "output"

    def lines(self) -> list[str]:
        """The place, and the ids around it with the diverging one in angle brackets."""
        margin = "" if self.margin is None else f", margin {self.margin:.4g} nats"
        return [
            f"first divergence: {self.sequence} token {self.index}{margin}",
            f"  expected {_window(self.expected, self.index)}",
            f"  observed {_window(self.observed, self.index)}",
        ]


def failure_text(
    requirement: Requirement,
    cell: str,
    *,
    expected: str,
    observed: str,
    divergence: Divergence | None = None,
    rung: str | None = None,
    causes: Iterable[str] = (),
    reproduce: str = "",
    artifacts: Iterable[str] = (),
) -> str:
    """The text that a cell prints when it did not pass; parts that are not known are left out.

    `cell` is the cell's id, `rung` the rung of the oracle ladder that failed, `causes` what is likely, most
    likely first, `reproduce` the command that runs the cell again, `artifacts` where the evidence lies.
    """
    lines = [
        f"{requirement.id} ({requirement.level}, {requirement.owner}): {requirement.sentence}",
        f"cell: {cell}",
        f"expected: {expected}",
        f"observed: {observed}",
    ]
    if divergence:
        lines += divergence.lines()
    if rung:
        lines.append(f"rung: {rung}")
    lines += _listed("likely cause", "likely causes", causes)
    if reproduce:
        lines.append(f"run again: {reproduce}")
    lines += _listed("artifacts", "artifacts", artifacts)
    return "\n".join(lines)


def _listed(one: str, many: str, values: Iterable[str]) -> list[str]:
    items = list(values)
    if len(items) <= 1:
        return [f"{one}: {item}" for item in items]
    return [f"{many}:", *(f"  - {item}" for item in items)]


def _window(ids: Sequence[int], index: int) -> str:
    start = max(0, index - AROUND)
    parts = [f"<{ids[i]}>" if i == index else str(ids[i]) for i in range(start, min(len(ids), index + AROUND + 1))]
    if index >= len(ids):
        parts.append("<end>")
    return ("… " if start else "") + " ".join(parts) + (" …" if index + AROUND + 1 < len(ids) else "")
