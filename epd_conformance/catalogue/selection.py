"""The expected set: which cells a run has to show, fixed before the first of them runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from epd_conformance.catalogue.model import Requirement, topology_kind
from epd_conformance.errors import UsageError

NotVerifiedKind = Literal["planned", "feature", "environment", "optional-method"]

_CELL_ID = re.compile(r"^(?P<requirement>EPD-[A-Z]+-\d{3})\[(?P<axes>[^\[\]/\x00-\x1f]+(?:/[^\[\]/\x00-\x1f]+)*)\]$")
# Such as test_one_image[EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]].
_TEST_ID = re.compile(r"\[(?P<cell>EPD-[A-Z]+-\d{3}\[[^\[\]]+\])\]$")


@dataclass(frozen=True)
class NotVerified:
    """Something that this run says nothing about, and why."""

    kind: NotVerifiedKind
    requirement: str
    detail: str


@dataclass(frozen=True)
class ExpectedCell:
    """A cell that has to run.

    `topology` may carry sizes; `model` and `case` are empty where nothing was collected for the requirement.
    """

    requirement: str
    topology: str
    model: str = ""
    case: str = ""

    @property
    def pair(self) -> tuple[str, str]:
        """Requirement and kind of topology: what a selection is made of."""
        return self.requirement, topology_kind(self.topology)

    @property
    def id(self) -> str:
        return cell_id(self.requirement, self.topology, self.model, self.case)


@dataclass(frozen=True)
class Selection:
    """The requirements that a run has to show, each with a topology, and what it does not verify."""

    pairs: tuple[tuple[Requirement, str], ...]
    not_verified: tuple[NotVerified, ...]

    def __contains__(self, pair: object) -> bool:
        """Whether `(requirement id, kind of topology)` is selected."""
        return any((item.id, topology) == pair for item, topology in self.pairs)

    def expected(self, collected: Iterable[ExpectedCell]) -> tuple[ExpectedCell, ...]:
        """The expected set: every collected cell that is selected, and a hole for each selected pair without
        one.

        Give all cells that were collected, before `-k` or anything else drops some. A pair for which no test
        was collected stays in as a cell without model and case, which nothing can run: a suite that lost a
        test is never conformant.
        """
        wanted = {(item.id, topology) for item, topology in self.pairs}
        cells = {cell.id: cell for cell in collected if cell.pair in wanted}
        covered = {cell.pair for cell in cells.values()}
        for requirement, topology in sorted(wanted - covered):
            hole = ExpectedCell(requirement, topology)
            cells[hole.id] = hole
        return tuple(cells[key] for key in sorted(cells))


def cell_id(requirement: str, topology: str, model: str = "", case: str = "") -> str:
    """The id of a cell, such as `EPD-XFER-003[e-pd/qwen2.5-vl/img2]`; empty axes at the end are left out.

    Raises `UsageError` where a part holds a slash, a bracket or a line break: no id could be read back.
    """
    axes = [topology, model, case]
    while axes and not axes[-1]:
        axes.pop()
    result = f"{requirement}[{'/'.join(axes)}]"
    if parse_cell_id(result) != (requirement, *axes):
        raise UsageError(f"{result} is no cell id: a part is empty, or holds a slash, a bracket or a line break")
    return result


def parse_cell_id(text: str) -> tuple[str, ...]:
    """Requirement, topology and, where given, model and case of a cell id; raises `UsageError` for anything
    else."""
    match = _CELL_ID.fullmatch(text)
    if not match:
        raise UsageError(f"{text} is no cell id: expected something like EPD-XFER-003[e-pd/qwen2.5-vl/img2]")
    return (match["requirement"], *match["axes"].split("/"))


def cell_of_test(nodeid: str) -> str:
    """The id of the cell that a test carries out: pytest's id of a test ends in it, in brackets. Empty where there is none."""
    found = _TEST_ID.search(nodeid)
    return found["cell"] if found else ""
