"""What became of a subject night after night: a database of runs, who is flaky and who is broken, and what a night says.

`records` (what is kept of a run), `flakes` (the statistics), `trend` and `night` (what a night says, and its exit code) are pure;
`database` is the SQLite file, `nightly` runs the profiles.
"""

from __future__ import annotations

from epd_conformance.history.records import Series, StoredCell, StoredRun
from epd_conformance.history.trend import TrendPoint, trend

__all__ = ["Series", "StoredCell", "StoredRun", "TrendPoint", "trend"]
