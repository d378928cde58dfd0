"""A trend over the runs of a series: what a chart needs, and no more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_conformance.history.records import Series, StoredRun
from epd_conformance.report.html import page
from epd_conformance.report.schema import Report


@dataclass(frozen=True, kw_only=True)
class TrendPoint(page.TrendPoint):
    """A point of a page's trend, which also knows the whole id of its run and whether it was green. Its time is UTC."""

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
    points = (
        TrendPoint(
            time=run.started, outcome=run.outcome, counts=run.counts, name=run.run[:8], run=run.run, green=run.green
        )
        for run in runs
    )
    return tuple(sorted(points, key=lambda point: point.time))


def of_series(path: Path, report: Report) -> tuple[TrendPoint, ...]:
    """The runs that a history file has of a report's series, for its page.

    Raises UsageError for what is no history file.
    """
    from epd_conformance.history.database import History

    with History(path) as history:
        return trend(run for run in history.runs() if run.series == Series.of(report))
