"""The token strip: the ids of both arms side by side around the first place where they part. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from epd_conformance.oracle import tokens
from epd_conformance.oracle.answers import Answer
from epd_conformance.report.failure import Divergence

# Ids shown before and behind the first divergence: what stands before it is equal, so little of it is enough.
BEFORE, BEHIND = 8, 16


@dataclass(frozen=True)
class Column:
    """One place of both sequences; an id is empty behind a sequence's end, a margin (nats) where none is known."""

    index: int
    expected: str
    observed: str
    margin: float | None
    first: bool = False

    @property
    def differs(self) -> bool:
        return self.expected != self.observed


@dataclass(frozen=True)
class Strip:
    """One request against one arm of its baseline. `columns` is empty where all ids are equal: then `summary` says it all."""

    request: str
    arm: str
    summary: str
    equal: bool
    columns: tuple[Column, ...] = ()


def strip(request: str, arm: str, base: Answer, answer: Answer) -> Strip:
    """Prompt ids before output ids, as the oracle compares them."""
    found = tokens.compare(base, answer)
    if found is None:
        least = f", smallest margin {min(base.margins):.4g} nats" if base.margins else ""
        summary = f"{len(answer.ids)} output ids and {len(answer.prompt_ids)} prompt ids equal{least}"
        return Strip(request, arm, summary, equal=True)
    margin = f", margin {found.margin:.4g} nats" if found.margin is not None else ""
    summary = f"first divergence: {found.sequence} token {found.index}{margin}"
    return Strip(request, arm, summary, equal=False, columns=tuple(_columns(found, base)))


def _columns(found: Divergence, base: Answer) -> Iterator[Column]:
    start = max(0, found.index - BEFORE)
    stop = min(max(len(found.expected), len(found.observed)), found.index + BEHIND + 1)
    margins = base.margins if found.sequence == "output" else ()
    for index in range(start, stop):
        yield Column(
            index,
            str(found.expected[index]) if index < len(found.expected) else "",
            str(found.observed[index]) if index < len(found.observed) else "",
            margins[index] if index < len(margins) else None,
            index == found.index,
        )


def strips(label: str, answer: Answer, arms: Mapping[str, Answer]) -> list[Strip]:
    """One request against every arm of its baseline; none where either side has no ids."""
    if not answer.ids and not answer.prompt_ids:
        return []
    return [strip(label, arm, base, answer) for arm, base in arms.items() if base.ids or base.prompt_ids]
