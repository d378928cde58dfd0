"""What a night says: each profile against the last green night and the last release, and the exit code. Pure.

The comparing rules are those of `report.compare`; the past of each cell tells a flaky one apart. The rules of the exit code,
`ProfileNight.code` and `Night.code`, mirror those of a run (`verdict`): a proven failure first, then whatever was not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from epd_conformance.errors import UsageError
from epd_conformance.history.flakes import Kind, Past
from epd_conformance.history.records import StoredCell, StoredRun, cells_of
from epd_conformance.report.compare import CellChange, Change, Comparison, State, compare
from epd_conformance.report.schema import DID_NOT_RUN, CellRecord, Report
from epd_conformance.verdict import Outcome, Verdict, exit_code

NOTHING_NEW, REGRESSION, NO_REPORT, INCOMPLETE = 0, 1, 2, 3

# What a night's exit code of 1 is for. A cell that is only not shown any more is no proof of anything: the night is incomplete.
BROKE = (Change.NEW_FAIL, Change.DISAPPEARED)


@dataclass(frozen=True)
class Base:
    """What a profile is held against: an earlier run, or a published report. `name` is for readers."""

    name: str
    report: Report


@dataclass(frozen=True)
class Finding:
    """One cell that a reader has to look at, or may be glad of."""

    cell: str
    owner: str
    change: str
    observed: str
    past: Past | None

    def to_json(self) -> dict[str, Any]:
        return {
            "cell": self.cell,
            "owner": self.owner,
            "change": self.change,
            "observed": self.observed,
            "past": self.past.to_json() if self.past is not None else None,
        }


@dataclass(frozen=True)
class ProfileNight:
    """One profile on one night. `report` None: it left none, and `said` has the words for why.

    `green` is the last green night and `release` the last release, where there is one; `pasts` the past of every cell, tonight
    included. `folder` is where the run lies, `seconds` how long it took by the clock.
    """

    profile: str
    report: Report | None = None
    stored: StoredRun | None = None
    green: Base | None = None
    release: Base | None = None
    pasts: Mapping[str, Past] = field(default_factory=dict)
    said: str = ""
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    seconds: float = 0.0

    @cached_property
    def since_green(self) -> Comparison | None:
        """What changed since the last green night; None where there is none, or none that can be compared."""
        return self._compared(self.green)[0]

    @cached_property
    def since_release(self) -> Comparison | None:
        """What changed since the last release, in the same way."""
        return self._compared(self.release)[0]

    @property
    def remarks(self) -> tuple[str, ...]:
        """The notes, and why a comparison could not be made."""
        return (*self.notes, *(words for base in (self.green, self.release) if (words := self._compared(base)[1])))

    def _compared(self, base: Base | None) -> tuple[Comparison | None, str]:
        if base is None or self.report is None:
            return None, ""
        try:
            return compare(base.report, self.report, self.flaky), ""
        except UsageError as error:
            return None, f"not compared with {base.name}: {error}"

    @property
    def flaky(self) -> frozenset[str]:
        """The cells that the past shows to be flaky."""
        return frozenset(name for name, past in self.pasts.items() if past.kind is Kind.FLAKY)

    @property
    def base(self) -> Comparison | None:
        """What decides the exit code: what changed since the last green night; where none is known, since the release."""
        return self.since_green or self.since_release

    @property
    def regressions(self) -> tuple[Finding, ...]:
        """What fails now and did not in the base, or is expected no more; without a base all that fails.

        A failure that a list declared beforehand is none: a person has looked at it already.
        """
        if self.report is None:
            return ()
        if self.base is None:
            failing = (name for name, (_, cell) in self._records.items() if cell.verdict is Verdict.FAIL)
            return tuple(self._finding(name, "fail") for name in failing if name not in self.flaky)
        return self._found(BROKE, lambda change: not self._declared(change.id))

    @property
    def lost(self) -> tuple[Finding, ...]:
        """What was shown in the base and ran, but is not shown now; without a base all that ran and is not shown.

        What a run that was cut short did not come to is only counted (`unreached`): it says nothing about single cells.
        """
        if self.report is None:
            return ()
        if self.base is None:
            open_ = (cell for cell in cells_of(self.report) if cell.state is State.NOT_SHOWN and cell.excused is None)
            found = [self._finding(cell.cell, str(cell.verdict)) for cell in open_]
        else:
            found = list(self._found((Change.NEWLY_SKIPPED,), lambda change: not self._declared(change.id)))
        return tuple(item for item in found if item.cell not in self.unreached)

    @property
    def unreached(self) -> frozenset[str]:
        """The cells that a run did not come to, since it was cut short."""
        if self.report is None or not self.report.interrupted:
            return frozenset()
        return frozenset(name for name, (_, cell) in self._records.items() if cell.reason == DID_NOT_RUN)

    @property
    def mended(self) -> tuple[Finding, ...]:
        """What passes now, and did not in the base or when it was shown before; flaky cells are not mended by a pass."""
        found = {item.cell: item for item in self._found((Change.FIXED,), lambda change: True)}
        for name, past in self.pasts.items():
            if past.kind is Kind.MENDED and name in self._records:
                found.setdefault(name, self._finding(name, "fail → pass"))
        return tuple(item for name, item in sorted(found.items()) if name not in self.flaky)

    @property
    def flaking(self) -> tuple[Finding, ...]:
        """Every flaky cell, with what it did tonight."""
        return tuple(
            self._finding(name, str(self._records[name][1].verdict))
            for name in sorted(self.flaky)
            if name in self._records
        )

    @property
    def failing_flakes(self) -> frozenset[str]:
        """The flaky cells that fail tonight, and that no list declared."""
        return frozenset(
            name
            for name, cell in self._states.items()
            if name in self.flaky and cell.state is State.FAILS and not self._declared(name)
        )

    @property
    def standing(self) -> tuple[Finding, ...]:
        """What fails, and did in the base as well, or was declared beforehand: nothing new, and nothing good."""
        new = {item.cell for item in self.regressions} | self.flaky
        failing = (name for name, cell in self._states.items() if cell.state is State.FAILS and name not in new)
        return tuple(self._finding(name, str(self._records[name][1].verdict)) for name in failing)

    @property
    def code(self) -> int:
        """1 a regression; else 3 where the run did not come to its end, lost something, or is incomplete; else 0.

        Where there is nothing to hold the night against, its own exit code: a failure must not pass as old. A night that could
        not be stored was not held against the last green one, so it is never 0.
        """
        if self.report is None:
            return INCOMPLETE
        if self.base is None:
            return exit_code(self.report.certified_outcome) or (INCOMPLETE if self.stored is None else NOTHING_NEW)
        if self.regressions:
            return REGRESSION
        open_ = (
            self.stored is None
            or self.report.interrupted
            or self.lost
            or self.report.certified_outcome is Outcome.INCOMPLETE
        )
        return INCOMPLETE if open_ else NOTHING_NEW

    @property
    def words(self) -> str:
        """Such as `2 regressions`, `nothing new` or `did not run`."""
        if self.report is None:
            return "did not run"
        if self.code == REGRESSION and self.base is None:
            return f"{len(self.regressions)} failing"
        if number := len(self.regressions) if self.base is not None else 0:
            return f"{number} regression{'s' if number > 1 else ''}"
        if self.code == INCOMPLETE:
            return "incomplete"
        return "nothing new" if self.base is not None else "nothing to compare with"

    # -- parts ---------------------------------------------------------------------------------------------------------

    @property
    def _records(self) -> dict[str, tuple[str, CellRecord]]:
        """Every cell of the night, with who a failure points at."""
        items = self.report.requirements if self.report is not None else ()
        return {cell.id: (str(cell.blame or item.owner), cell) for item in items for cell in item.cells}

    @property
    def _states(self) -> dict[str, StoredCell]:
        return {cell.cell: cell for cell in cells_of(self.report)} if self.report is not None else {}

    def _declared(self, cell: str) -> bool:
        return cell in self._records and self._records[cell][1].excused is not None

    def _found(self, wanted: Iterable[Change], keep: Callable[[CellChange], bool]) -> tuple[Finding, ...]:
        base = self.base
        cells = [cell for change in wanted for cell in base.of(change)] if base is not None else []
        return tuple(self._finding(cell.id, cell.words(), cell) for cell in cells if keep(cell))

    def _finding(self, name: str, change: str, cell: CellChange | None = None) -> Finding:
        owner, record = self._records.get(name, ("", None))
        if record is None and cell is not None:
            # It is not there any more: the base knows whose it was.
            owner = self._owner_before(cell)
        observed = " ".join((record.observed if record is not None else "").split())
        reason = record.reason if record is not None else ""
        words = ": ".join(word for word in (reason, observed) if word)
        return Finding(name, owner, change, words or (cell.why if cell is not None else ""), self.pasts.get(name))

    def _owner_before(self, cell: CellChange) -> str:
        for base in (self.green, self.release):
            for item in base.report.requirements if base is not None else ():
                if item.id == cell.requirement:
                    return str(item.owner)
        return ""

    def to_json(self) -> dict[str, Any]:
        return {
            "profile": self.profile,
            "code": self.code,
            "words": self.words,
            "said": self.said,
            "notes": list(self.remarks),
            "unreached": sorted(self.unreached),
            "folder": str(self.folder) if self.folder is not None else None,
            "seconds": round(self.seconds, 1),
            "run": self.stored.to_json() if self.stored is not None else None,
            "lastGreen": self.green.name if self.green is not None else None,
            "lastRelease": self.release.name if self.release is not None else None,
            "sinceGreen": self.since_green.to_json() if self.since_green is not None else None,
            "sinceRelease": self.since_release.to_json() if self.since_release is not None else None,
            **{
                name: [item.to_json() for item in found]
                for name, found in (
                    ("regressions", self.regressions),
                    ("lost", self.lost),
                    ("mended", self.mended),
                    ("flaky", self.flaking),
                    ("standing", self.standing),
                )
            },
        }


@dataclass(frozen=True)
class Hunted:
    """What a hunt of the night found. `code` is the verb's own; `lines` what it printed for a person."""

    code: int
    lines: tuple[str, ...]
    log: Path


@dataclass(frozen=True)
class Night:
    """A whole night. `history` and `out` are where it was stored and what it has written."""

    subject: str
    started: datetime
    profiles: tuple[ProfileNight, ...]
    out: Path
    history: Path
    hunted: Hunted | None = None
    interrupted: bool = False
    releases: bool = False
    """Whether there was any release to look among."""

    @property
    def code(self) -> int:
        """1 a regression, or something that a hunt found; 2 no profile left a report; 3 something was not shown; else 0."""
        codes = [profile.code for profile in self.profiles]
        hunted = self.hunted.code if self.hunted is not None else NOTHING_NEW
        if REGRESSION in (*codes, hunted):
            return REGRESSION
        if not self.interrupted and all(profile.report is None for profile in self.profiles):
            return NO_REPORT
        return INCOMPLETE if self.interrupted or hunted or any(codes) else NOTHING_NEW

    @property
    def words(self) -> str:
        """The night in a few words."""
        first = all(profile.base is None for profile in self.profiles)
        return {
            NOTHING_NEW: "nothing to compare with yet" if first else "nothing new",
            REGRESSION: "failing, and nothing to compare with yet" if first else "regression",
            NO_REPORT: "nothing ran",
            INCOMPLETE: "incomplete",
        }[self.code]

    def to_json(self) -> dict[str, Any]:
        hunted = self.hunted
        return {
            "subject": self.subject,
            "started": self.started.isoformat(),
            "code": self.code,
            "words": self.words,
            "interrupted": self.interrupted,
            "out": str(self.out),
            "history": str(self.history),
            "hunt": {"code": hunted.code, "lines": list(hunted.lines), "log": str(hunted.log)} if hunted else None,
            "profiles": [profile.to_json() for profile in self.profiles],
        }


def green(night: ProfileNight) -> bool:
    """Whether later nights are held against this one: nothing new in it, and its own outcome conformant or partial.

    Of every owner: a connector's certificate stands beside a new failure of the engine, but the night is not green. Nor is
    one on which a flaky cell fails: held against it, a cell that has become broken would fail as before.
    """
    report = night.report
    good = report is not None and report.certified_outcome in (Outcome.CONFORMANT, Outcome.PARTIAL)
    return good and night.code == NOTHING_NEW and not night.failing_flakes
