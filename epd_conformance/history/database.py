"""The history database: one SQLite file of runs, their cells and their reports.

Several nights may write to one file at a time, on a local disk: every change is one immediate transaction, and whoever comes
second waits. A run is stored once, whoever brings it. `application_id` and `user_version` say whose file it is and of which
schema, so that nobody else's database is ever written to.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from epd_conformance.errors import UsageError
from epd_conformance.history import night
from epd_conformance.history.flakes import WINDOW, Past, pasts
from epd_conformance.history.records import Series, StoredCell, StoredRun, cells_of
from epd_conformance.report.schema import Report
from epd_conformance.verdict import Mode, Outcome, Owner, Verdict

# "EPDH": what `file` and SQLite's own shell show of a database; no other program uses it.
APPLICATION = 0x45504448
SCHEMA = 1
# Storing a run takes some milliseconds; whoever has to wait longer for others does not wait for a night to store its run.
WAIT_S = 60.0

_TABLES = """
CREATE TABLE runs (
    run TEXT PRIMARY KEY,
    started TEXT NOT NULL,
    seconds REAL,
    subject TEXT NOT NULL, profile TEXT NOT NULL, level TEXT NOT NULL,
    environment_class TEXT NOT NULL, model TEXT NOT NULL,
    version TEXT NOT NULL, build TEXT NOT NULL, vllm TEXT NOT NULL,
    suite_version TEXT NOT NULL, suite TEXT NOT NULL, catalogue TEXT NOT NULL,
    mode TEXT NOT NULL, inputs TEXT NOT NULL,
    outcome TEXT NOT NULL, interrupted INTEGER NOT NULL, counts TEXT NOT NULL,
    folder TEXT NOT NULL,
    green INTEGER NOT NULL, accepted INTEGER NOT NULL,
    report BLOB NOT NULL
);
CREATE INDEX runs_of_series ON runs (subject, profile, level, environment_class, model, started);
CREATE TABLE cells (
    run TEXT NOT NULL REFERENCES runs (run),
    cell TEXT NOT NULL, requirement TEXT NOT NULL, owner TEXT NOT NULL, level TEXT NOT NULL,
    verdict TEXT NOT NULL, excused TEXT, reason TEXT NOT NULL, asked INTEGER NOT NULL, seconds REAL NOT NULL,
    PRIMARY KEY (run, cell)
) WITHOUT ROWID;
CREATE INDEX runs_of_cell ON cells (cell);
"""
_SERIES = tuple(item.name for item in fields(Series))
_RUN = (
    "run, started, seconds, subject, profile, level, environment_class, model, version, build, vllm, suite_version, suite, "
    "catalogue, mode, inputs, outcome, interrupted, counts, folder, green, accepted"
)
_CELL = "cell, requirement, owner, level, verdict, excused, reason, asked, seconds"


@dataclass(frozen=True)
class Added:
    """What became of a run that was brought. `new`: False where it was stored already.

    `green` is the last green night before it, None where there is none; `note` says why one could not be read.
    """

    stored: StoredRun
    new: bool
    green: night.Base | None
    pasts: dict[str, Past]
    note: str = ""


class History:
    """An open history; a context manager.

    Args:
        path: the file; made, with its folder, where there is none and `write` is given.
        write: whether runs will be stored. Without, the file is only read.

    Raises UsageError, here and in every method, where the file is no history, of a newer schema, damaged, or cannot be used.
    """

    def __init__(self, path: Path, write: bool = False) -> None:
        self.path = path
        if not write and not path.is_file():
            raise UsageError(f"there is no history {path}: `epd-conformance nightly` or `history add` makes one")
        with self._said():
            if write:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._db = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None)
            else:
                uri = f"{path.resolve().as_uri()}?mode=ro"
                self._db = sqlite3.connect(uri, timeout=WAIT_S, isolation_level=None, uri=True)
        try:
            with self._said():
                self._check(write)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._db.close()

    def _check(self, write: bool) -> None:
        if write:
            with self._change():
                if not self._one("PRAGMA application_id") and not self._one("SELECT count(*) FROM sqlite_master"):
                    for statement in _TABLES.split(";"):
                        self._db.execute(statement)
                    self._db.execute(f"PRAGMA user_version = {SCHEMA}")
                    self._db.execute(f"PRAGMA application_id = {APPLICATION}")
        if self._one("PRAGMA application_id") != APPLICATION:
            raise UsageError(f"{self.path} is not a history of epd-conformance: give another file")
        if (version := self._one("PRAGMA user_version")) != SCHEMA:
            raise UsageError(
                f"the history {self.path} has schema {version} and this epd-conformance knows {SCHEMA}: "
                "use the version that wrote it, or give another file"
            )
        # Hours of work are to be stored there: better found out now.
        if (found := self._one("PRAGMA quick_check(1)")) != "ok":
            raise sqlite3.DatabaseError(found)

    # -- storing -------------------------------------------------------------------------------------------------------

    def add(self, report: Report, folder: str, build: str = "", release: night.Base | None = None) -> Added:
        """Store a run, unless it is stored, and say what it is to be held against.

        `release` has its say in whether the night is green, see `night.ProfileNight.base`.
        """
        run = StoredRun.of(report, folder, build)
        cells = cells_of(report)
        with self._said(), self._change():
            before = self.run(run.run)
            new = before is None
            run = before or run
            if new:
                self._insert(run, report, cells)
            base, note = self._last_green(run)
            past = self._pasts(run)
            judged = night.ProfileNight(run.series.profile, report, run, green=base, release=release, pasts=past)
            if new and night.green(judged):
                run = replace(run, green=True)
                self._db.execute("UPDATE runs SET green = 1 WHERE run = ?", (run.run,))
        return Added(run, new, base, past, note)

    def accept(self, start: str) -> StoredRun:
        """Make a run green because a person says so. `start`: enough of its id. Raises UsageError where it names no single run."""
        with self._said(), self._change():
            found = [run for run in self.runs() if run.run.startswith(start)] if start else []
            if len(found) != 1:
                many = f"{len(found)} runs" if found else "no run"
                raise UsageError(
                    f"the history {self.path} has {many} whose id begins with {start!r}: see `history show`"
                )
            self._db.execute("UPDATE runs SET green = 1, accepted = 1 WHERE run = ?", (found[0].run,))
        return replace(found[0], green=True, accepted=True)

    def _insert(self, run: StoredRun, report: Report, cells: Sequence[StoredCell]) -> None:
        values = (
            run.run,
            run.started.isoformat(),
            run.seconds,
            *astuple(run.series),
            run.version,
            run.build,
            run.vllm,
            run.suite_version,
            run.suite,
            run.catalogue,
            str(run.mode),
            run.inputs,
            str(run.outcome),
            run.interrupted,
            json.dumps({str(verdict): count for verdict, count in run.counts.items()}),
            run.folder,
            run.green,
            run.accepted,
            zlib.compress(json.dumps(report.to_disk(), separators=(",", ":")).encode(), 9),
        )
        self._db.execute(f"INSERT INTO runs ({_RUN}, report) VALUES ({_marks(len(values))})", values)
        rows = [
            (run.run, *(str(value) if isinstance(value, Owner | Verdict) else value for value in astuple(cell)))
            for cell in cells
        ]
        self._db.executemany(f"INSERT INTO cells (run, {_CELL}) VALUES ({_marks(10)})", rows)

    # -- reading -------------------------------------------------------------------------------------------------------

    def run(self, run: str) -> StoredRun | None:
        """The run of an id, or None."""
        return next(iter(self._runs("WHERE run = ?", (run,))), None)

    def runs(self, subject: str = "", profile: str = "") -> list[StoredRun]:
        """All runs, or those of a subject and a profile, the oldest first."""
        return self._runs("WHERE ? IN ('', subject) AND ? IN ('', profile) ORDER BY started, run", (subject, profile))

    def report(self, run: StoredRun) -> Report:
        """The report of a run as it was stored. Raises UsageError where this version cannot read it any more."""
        with self._said():
            (packed,) = self._db.execute("SELECT report FROM runs WHERE run = ?", (run.run,)).fetchone()
        try:
            return Report.model_validate_json(zlib.decompress(packed))
        except (ValidationError, zlib.error) as error:
            raise UsageError(
                f"the report of {run.night} ({run.run[:8]}) in {self.path} is none of this version ({type(error).__name__}): "
                "it cannot be compared with"
            ) from error

    def cells(self, runs: Sequence[StoredRun]) -> dict[str, list[StoredCell]]:
        """The cells of runs, by the run's id."""
        found: dict[str, list[StoredCell]] = {}
        with self._said():
            for run in runs:
                rows = self._db.execute(f"SELECT {_CELL} FROM cells WHERE run = ? ORDER BY cell", (run.run,))
                found[run.run] = [_cell(row) for row in rows]
        return found

    def sights(self, cell: str) -> list[tuple[StoredRun, StoredCell]]:
        """Every run that has a cell, the oldest first, with what it says about it."""
        with self._said():
            rows = self._db.execute(f"SELECT run, {_CELL} FROM cells WHERE cell = ?", (cell,)).fetchall()
        by_run = {row[0]: _cell(row[1:]) for row in rows}
        return [(run, by_run[run.run]) for run in self.runs() if run.run in by_run]

    def pasts(self, series: Series) -> dict[str, Past]:
        """Every cell of a series, judged by its last nights."""
        runs = [run for run in self.runs(series.subject, series.profile) if run.series == series]
        return self._pasts(runs[-1]) if runs else {}

    def _pasts(self, run: StoredRun) -> dict[str, Past]:
        """As of a run: what came after it does not count."""
        where = " AND ".join(f"{name} = ?" for name in _SERIES)
        runs = self._runs(
            f"WHERE {where} AND started <= ? ORDER BY started DESC, run LIMIT {WINDOW}",
            (*astuple(run.series), run.started.isoformat()),
        )[::-1]
        return pasts(runs, self.cells(runs))

    def _last_green(self, run: StoredRun) -> tuple[night.Base | None, str]:
        where = " AND ".join(f"{name} = ?" for name in _SERIES)
        found = self._runs(
            f"WHERE green AND {where} AND started < ? ORDER BY started DESC LIMIT 1",
            (*astuple(run.series), run.started.isoformat()),
        )
        if not found:
            return None, ""
        (last,) = found
        try:
            return night.Base(
                f"{last.night} ({last.run[:8]}{', accepted' if last.accepted else ''})", self.report(last)
            ), ""
        except UsageError as error:
            return None, str(error)

    def _runs(self, rest: str, values: Sequence[Any]) -> list[StoredRun]:
        with self._said():
            return [_run(row) for row in self._db.execute(f"SELECT {_RUN} FROM runs {rest}", values)]

    def _one(self, statement: str) -> Any:
        return self._db.execute(statement).fetchone()[0]

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction that nobody else's can come into."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            # Some errors have ended it already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _said(self) -> Iterator[None]:
        """Every error of the database in one sentence."""
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            raise UsageError(
                f"the history {self.path} cannot be used ({error}): see that its folder is there and can be written to, and that "
                "no other program holds it"
            ) from error
        except sqlite3.DatabaseError as error:
            raise UsageError(
                f"{self.path} is no SQLite database, or a damaged one ({error}): give another file, or restore a copy"
            ) from error


def _marks(number: int) -> str:
    return ", ".join("?" * number)


def _run(row: Sequence[Any]) -> StoredRun:
    found = dict(zip(_RUN.split(", "), row, strict=True))
    series = Series(**{name: found.pop(name) for name in _SERIES})
    found |= {
        "started": datetime.fromisoformat(found["started"]),
        "mode": Mode(found["mode"]),
        "outcome": Outcome(found["outcome"]),
        "counts": {Verdict(verdict): count for verdict, count in json.loads(found["counts"]).items()},
        **{name: bool(found[name]) for name in ("interrupted", "green", "accepted")},
    }
    return StoredRun(series=series, **found)


def _cell(row: Sequence[Any]) -> StoredCell:
    found = dict(zip(_CELL.split(", "), row, strict=True))
    found |= {
        "owner": Owner(found["owner"]),
        "verdict": Verdict(found["verdict"]),
        "excused": Verdict(found["excused"]) if found["excused"] else None,
        "asked": bool(found["asked"]),
    }
    return StoredCell(**found)
