"""A trend over the runs of a series: what a chart needs, and no more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from epd_conformance.history.records import Series, StoredRun
from epd_conformance.report.html import page
from epd_conformance.report.schema import Report
from epd_conformance.verdict import Outcome, Verdict


@dataclass(frozen=True)
class TrendPoint:
    """One run: when it began (UTC), the certified owner's outcome, and how many expected cells had which verdict (all of them)."""

    time: datetime
    outcome: Outcome
    counts: Mapping[Verdict, int]
    run: str
    green: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "time": self.time.isoformat(),
            "outcome": str(self.outcome),
            "counts": {str(verdict): count for verdict, count in self.counts.items()},
            "run": self.run,
            "green": self.green,
        }


def trend(runs: Iterable[StoredRun]) -> tuple[TrendPoint, ...]:
    """The runs of one series as points, the oldest first."""
    points = (TrendPoint(run.started, run.outcome, run.counts, run.run, run.green) for run in runs)
    return tuple(sorted(points, key=lambda point: point.time))


def of_series(path: Path, report: Report) -> list[page.TrendPoint]:
    """The runs that a history file has of a report's series, for its page.

    Raises UsageError for what is no history file.
    """
    from epd_conformance.history.database import History

    with History(path) as history:
        runs = [run for run in history.runs() if run.series == Series.of(report)]
    return [page.TrendPoint(one.time, one.outcome, one.counts, one.run[:8]) for one in trend(runs)]
