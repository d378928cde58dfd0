"""Flaky or broken? What the past of a cell makes of it. Pure; the rule is `judge`, and stands in docs/nightly.md.

Only runs that show something count: a night on which a cell erred or was left out neither breaks a row of failures nor ends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from typing import Any

from epd_conformance.history.records import StoredCell, StoredRun
from epd_conformance.report.compare import State

# Nights that are looked at: about a month. What a cell did before that says little about what it is now.
WINDOW = 30
# There and back again. One turn alone is what a regression looks like, or its repair.
FLAKY_TURNS = 2
# A row of failures that a flaky cell would show less often than this is no flake any more. A cell that fails half of the time
# has ten nights for it, one that fails once in twenty nights three.
CHANCE = 0.001


class Kind(StrEnum):
    """What a cell is by its past, and what its last run adds to that."""

    FLAKY = "flaky"  # turned between pass and fail and back, on unchanged inputs
    BROKEN = "broken"  # fails each time since a night
    NOT_SHOWN = "not-shown"  # asked in the last run, and not shown either way
    NOT_ASKED = "not-asked"  # the last run has no such cell, or was told to leave it out
    MENDED = "mended"  # passes in the last run, and failed when it was shown before
    NEW = "new"  # passes, and was never shown before
    HOLDS = "holds"  # passes, and did before


@dataclass(frozen=True)
class Sight:
    """What one run shows of a cell: `ABSENT` where it was not asked. `inputs`: `StoredRun.inputs`."""

    run: str
    at: datetime
    state: State
    inputs: str

    @property
    def shown(self) -> bool:
        return self.state in (State.HOLDS, State.FAILS)


@dataclass(frozen=True)
class Past:
    """A cell over the nights of the window. `since`: the first of the last row of equal nights; None if it was never shown.

    `shown` and `failed` count nights, `row` the last ones in a row that were alike, `turns` changes between pass and fail from
    one shown night to the next on the same inputs.
    """

    cell: str
    kind: Kind
    since: Sight | None = None
    shown: int = 0
    failed: int = 0
    row: int = 0
    turns: int = 0

    def words(self) -> str:
        """A few words for a reader, such as `fails each time since 2026-12-01 (3 nights)`."""
        night = f"{self.since.at:%Y-%m-%d}" if self.since is not None else ""
        nights = f"{self.row} night{'s' if self.row > 1 else ''}"
        match self.kind:
            case Kind.FLAKY:
                return f"failed on {self.failed} of {self.shown} nights, {self.turns} turns on unchanged inputs"
            case Kind.BROKEN if self.row == self.shown:
                return f"fails on every night known, since {night} ({nights})"
            case Kind.BROKEN:
                return f"fails each time since {night} ({nights})"
            case Kind.MENDED:
                return f"passes since {night}"
            case Kind.HOLDS:
                return f"passes each time since {night} ({nights})"
            case _:
                return str(self.kind)

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "kind": str(self.kind),
            "since": self.since.at.isoformat() if self.since is not None else None,
            "sinceRun": self.since.run if self.since is not None else None,
            "shown": self.shown,
            "failed": self.failed,
            "row": self.row,
            "turns": self.turns,
        }


def judge(cell: str, sights: Sequence[Sight]) -> Past:
    """What a cell is by all runs of its series, the oldest first. Raises ValueError for no run at all.

    Flaky: at least two turns within the window, each between two shown nights, one after the other, with the same inputs. It
    stays flaky however often it passes then; it is broken as soon as it fails so often in a row that its own rate before
    (counted with one night more of each kind, so that it is never 0 or 1) would give that less than once in a thousand times.
    """
    if not sights:
        raise ValueError("a cell without a run")
    window = sights[-WINDOW:]
    shown = [one for one in window if one.shown]
    last = window[-1]
    if not last.shown:
        return Past(cell, Kind.NOT_SHOWN if last.state is State.NOT_SHOWN else Kind.NOT_ASKED)
    row = next((n for n, one in enumerate(reversed(shown)) if one.state is not last.state), len(shown))
    turns = sum(
        one.state is not following.state and one.inputs == following.inputs for one, following in pairwise(shown)
    )
    failed = sum(one.state is State.FAILS for one in shown)
    fails = last.state is State.FAILS
    if turns >= FLAKY_TURNS and not (fails and _no_chance(failed - row, len(shown) - row, row)):
        kind = Kind.FLAKY
    elif fails:
        kind = Kind.BROKEN
    elif row < len(shown):
        kind = Kind.MENDED if row == 1 else Kind.HOLDS
    else:
        kind = Kind.NEW if len(shown) == 1 and not any(one.shown for one in sights[:-1]) else Kind.HOLDS
    return Past(cell, kind, shown[-row], len(shown), failed, row, turns)


def _no_chance(failed: int, shown: int, row: int) -> bool:
    """Whether a cell that failed so often of so many nights would hardly fail on `row` nights one after the other."""
    rate = (failed + 1) / (shown + 2)
    return bool(rate**row < CHANCE)


def pasts(runs: Sequence[StoredRun], cells: Mapping[str, Iterable[StoredCell]]) -> dict[str, Past]:
    """Every cell of the runs of a series (the oldest first), judged; `cells`: those of each run, by its id."""
    by_run = {run.run: {cell.cell: cell.state for cell in cells.get(run.run, ())} for run in runs}
    names = sorted({name for found in by_run.values() for name in found})
    return {
        name: judge(
            name, [Sight(run.run, run.started, by_run[run.run].get(name, State.ABSENT), run.inputs) for run in runs]
        )
        for name in names
    }
