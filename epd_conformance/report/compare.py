"""`compare`: what changed between two runs, cell by cell. Pure: two reports in, one `Comparison` out.

Every verdict is one of three things: shown to hold (`pass`), shown not to hold (`fail`, and `known-failing`: declared
beforehand it is a failure all the same), or not shown. With the cell that a report does not have, four states make the table
in `TABLE`. A regression is whatever a run says less good, or less, about a cell than the one before, where it was asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from epd_conformance.catalogue.model import ConformanceLevel, topology_kind
from epd_conformance.errors import UsageError
from epd_conformance.report.schema import DID_NOT_RUN, CellRecord, DeviationKind, Report
from epd_conformance.verdict import Owner, Verdict


class Change(StrEnum):
    """What became of a cell, worst first: the order in which they are printed."""

    NEW_FAIL = "new-fail"
    DISAPPEARED = "disappeared"
    NEWLY_SKIPPED = "newly-skipped"  # was shown to hold or not to hold, and is not shown now
    FLAKY = "flaky"  # passes in one run and fails in the other, and is known to do so
    NOT_ASKED = "not-asked"  # was shown to hold or not to hold, and the new run was told to leave it out
    STILL_FAILING = "still-failing"
    STILL_UNVERIFIED = "still-unverified"  # shown in neither
    FIXED = "fixed"  # did not pass, and passes now
    NEW = "new"  # a cell that the old run does not have; one that fails is a new failure
    UNCHANGED = "unchanged"  # passes in both

    @property
    def regression(self) -> bool:
        """Whether this makes `compare` end with 1."""
        return self in (Change.NEW_FAIL, Change.DISAPPEARED, Change.NEWLY_SKIPPED)


class State(StrEnum):
    """What a report says about a cell."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_SHOWN = "not-shown"
    ABSENT = "absent"


STATES: dict[Verdict | None, State] = {
    Verdict.PASS: State.HOLDS,
    Verdict.FAIL: State.FAILS,
    Verdict.KNOWN_FAILING: State.FAILS,
    Verdict.ERROR: State.NOT_SHOWN,
    Verdict.INCONCLUSIVE: State.NOT_SHOWN,
    Verdict.COULD_NOT_RUN: State.NOT_SHOWN,
    Verdict.WAIVED: State.NOT_SHOWN,
    Verdict.NOT_SUPPORTED: State.NOT_SHOWN,
    None: State.ABSENT,
}

TABLE: dict[tuple[State, State], Change] = {
    (State.HOLDS, State.HOLDS): Change.UNCHANGED,
    (State.HOLDS, State.FAILS): Change.NEW_FAIL,
    (State.HOLDS, State.NOT_SHOWN): Change.NEWLY_SKIPPED,
    (State.HOLDS, State.ABSENT): Change.DISAPPEARED,
    (State.FAILS, State.HOLDS): Change.FIXED,
    (State.FAILS, State.FAILS): Change.STILL_FAILING,
    # A failure that is shown no more is not mended.
    (State.FAILS, State.NOT_SHOWN): Change.NEWLY_SKIPPED,
    (State.FAILS, State.ABSENT): Change.DISAPPEARED,
    (State.NOT_SHOWN, State.HOLDS): Change.FIXED,
    (State.NOT_SHOWN, State.FAILS): Change.NEW_FAIL,
    (State.NOT_SHOWN, State.NOT_SHOWN): Change.STILL_UNVERIFIED,
    (State.NOT_SHOWN, State.ABSENT): Change.DISAPPEARED,
    (State.ABSENT, State.HOLDS): Change.NEW,
    # Nothing was known of it before; a failure must not pass as news.
    (State.ABSENT, State.FAILS): Change.NEW_FAIL,
    (State.ABSENT, State.NOT_SHOWN): Change.NEW,
}
"""What became of a cell, by what the old report says about it and what the new one does. In neither it is no cell."""


def classify(old: Verdict | None, new: Verdict | None, flaky: bool = False, asked: bool = True) -> Change:
    """What became of a cell; None is a report that does not have it. Raises ValueError for None twice.

    `flaky`: the cell is known to be. It excuses nothing but a change between pass and fail. `asked`: whether the new run was
    asked for the cell; what nobody asked for is not shown less.
    """
    pair = (STATES[old], STATES[new])
    if pair not in TABLE:
        raise ValueError("a cell that neither report has")
    if flaky and set(pair) == {State.HOLDS, State.FAILS}:
        return Change.FLAKY
    change = TABLE[pair]
    return Change.NOT_ASKED if not asked and change in (Change.NEWLY_SKIPPED, Change.DISAPPEARED) else change


@dataclass(frozen=True)
class CellChange:
    """One cell in both reports. `old` and `new` are None where a report does not have it; `why` are a few words, or none."""

    id: str
    requirement: str
    change: Change
    old: Verdict | None
    new: Verdict | None
    why: str = ""

    def words(self) -> str:
        """Such as `pass → fail (digest-differs)`."""
        arrow = f"{self.old or 'absent'} → {self.new or 'absent'}"
        return f"{arrow} ({self.why})" if self.why else arrow

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "requirement": self.requirement,
            "change": str(self.change),
            "old": None if self.old is None else str(self.old),
            "new": None if self.new is None else str(self.new),
            "why": self.why,
        }


@dataclass(frozen=True)
class Difference:
    """Something that has one value in the old report and another in the new one."""

    name: str
    old: str
    new: str

    def to_json(self) -> dict[str, str]:
        return {"name": self.name, "old": self.old, "new": self.new}


@dataclass(frozen=True)
class Comparison:
    """What changed. `cells` holds every cell of both reports, sorted by id; `requirements` and `outcomes` only what changed."""

    title: str
    environment_class: str
    cells: tuple[CellChange, ...]
    requirements: tuple[Difference, ...]
    outcomes: tuple[Difference, ...]
    warnings: tuple[str, ...]

    @property
    def counts(self) -> dict[Change, int]:
        """How many cells of each kind, in the order of `Change`; kinds without a cell are left out."""
        found = Counter(cell.change for cell in self.cells)
        return {change: found[change] for change in Change if found[change]}

    @property
    def regressions(self) -> int:
        """How many cells are less good, or less shown, than before."""
        return sum(count for change, count in self.counts.items() if change.regression)

    def of(self, change: Change) -> tuple[CellChange, ...]:
        """The cells of one kind."""
        return tuple(cell for cell in self.cells if cell.change is change)

    def first_line(self) -> str:
        """Such as `3 regressions, 1 fixed, 54 unchanged: e-pd reference 0.1.0 → vllm-example 0.32.0`."""
        number = self.regressions
        words = ["no regression" if not number else f"{number} regression{'s' if number > 1 else ''}"]
        words += [f"{count} {change}" for change, count in self.counts.items() if not change.regression]
        return f"{', '.join(words)}: {self.title}"

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "environmentClass": self.environment_class,
            "regressions": self.regressions,
            "counts": {str(change): count for change, count in self.counts.items()},
            "warnings": list(self.warnings),
            "outcomes": [item.to_json() for item in self.outcomes],
            "requirements": [item.to_json() for item in self.requirements],
            "cells": [cell.to_json() for cell in self.cells],
        }


def compare(old: Report, new: Report, flaky: Collection[str] = ()) -> Comparison:
    """What changed from `old` to `new`. Raises UsageError for two environment classes, and for runs without a common cell.

    `flaky`: cells that a history of runs shows to be flaky, beside those that the new run's list names.
    """
    if old.environment_class is not new.environment_class:
        raise UsageError(
            f"a run on {old.environment_class} and one on {new.environment_class} are not compared: what holds on one says "
            "nothing about the other; give two runs of one environment class"
        )
    before, after = _cells(old), _cells(new)
    if not before.keys() & after.keys():
        raise UsageError(
            f"the runs have no cell in common ({_label(old)} with {_models(old)}, {_label(new)} with {_models(new)}): "
            "give runs of one profile and model"
        )
    named = {cell for entry in new.known_deviations if entry.kind is DeviationKind.FLAKY for cell in entry.cells}
    return Comparison(
        title=_title(old, new),
        environment_class=str(new.environment_class),
        cells=tuple(
            _change(before.get(name), after.get(name), name in named or name in flaky, old, new)
            for name in sorted(before.keys() | after.keys())
        ),
        requirements=_differences(_requirements(old), _requirements(new)),
        outcomes=_differences(_outcomes(old), _outcomes(new)),
        warnings=tuple(_warnings(old, new)),
    )


def _change(old: CellRecord | None, new: CellRecord | None, flaky: bool, before: Report, report: Report) -> CellChange:
    cell = new or old
    assert cell is not None  # its id stands in one of the reports
    change = classify(_shown(old), _shown(new), flaky, _asked(old, new, before, report))
    return CellChange(
        id=cell.id,
        requirement=cell.requirement,
        change=change,
        old=old.verdict if old else None,
        new=new.verdict if new else None,
        why=_why(old, new, report),
    )


def _asked(old: CellRecord | None, new: CellRecord | None, before: Report, report: Report) -> bool:
    """Whether a run was asked for a cell that it may have nothing about.

    An expected cell that did not run in a run that came to its end was left out by a selection (`-k`, `--cell`). One that is
    not expected at all was not asked for where the new run has another profile without its topology, or only the level core.
    """
    if new is not None:
        return report.interrupted or (new.verdict, new.reason) != (Verdict.COULD_NOT_RUN, DID_NOT_RUN)
    assert old is not None
    topologies = {cell.topology for item in report.requirements for cell in item.cells}
    if before.run.profile != report.run.profile and old.topology not in topologies:
        return False
    explained = any(gap.requirement == old.requirement for gap in report.not_verified)
    lower = before.run.level is ConformanceLevel.FULL and report.run.level is ConformanceLevel.CORE
    return explained or not lower


def _shown(cell: CellRecord | None) -> Verdict | None:
    """What the evidence gave: that a list excuses it is no change of the subject."""
    return None if cell is None else cell.excused or cell.verdict


def _why(old: CellRecord | None, new: CellRecord | None, report: Report) -> str:
    """A few words: the new reason, the old one beside it where it is another; why a cell is not there any more."""
    if new is None:
        assert old is not None
        gaps = [gap.detail for gap in report.not_verified if gap.requirement == old.requirement]
        kind = topology_kind(old.topology)
        return next((gap for gap in sorted(gaps, key=lambda gap: not gap.startswith(f"{kind}:"))), "")
    before = old.reason if old else ""
    if before and before != new.reason:
        return f"{new.reason}, was {before}" if new.reason else f"was {before}"
    return new.reason


def _cells(report: Report) -> dict[str, CellRecord]:
    return {cell.id: cell for item in report.requirements for cell in item.cells}


def _requirements(report: Report) -> dict[str, str]:
    return {item.id: str(item.verdict) for item in report.requirements}


def _outcomes(report: Report) -> dict[str, str]:
    return {str(owner): str(report.outcome_of(owner)) for owner in Owner}


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name, old.get(name, "absent"), new.get(name, "absent"))
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    )


def _label(report: Report) -> str:
    return f"{report.subject.name} {report.subject.implementation.version}".strip()


def _title(old: Report, new: Report) -> str:
    """Profile, subject and version of both, what is equal said once; the times where all of it is."""
    profile, before, after = old.run.profile, _label(old), _label(new)
    if profile != new.run.profile:
        return f"{profile} {before} → {new.run.profile} {after}"
    if before == after:
        return f"{profile} {before}, {old.run.started:%Y-%m-%d %H:%M} → {new.run.started:%Y-%m-%d %H:%M}"
    return f"{profile} {before} → {after}"


def _models(report: Report) -> str:
    names = (f"{model.id} {_short(model.digest)}".strip() for model in report.environment.models)
    return ", ".join(names) or "an unknown model"


def _short(digest: str) -> str:
    """As much of a digest as tells two of them apart."""
    return digest.removeprefix("sha256:")[:12]


def _conditions(report: Report) -> dict[str, tuple[str, str]]:
    """What has to be the same for two cells to be comparable, and what it means if it is not."""
    only_one = "cells that only one of them asks for are new or not-asked"
    return {
        "profile": (report.run.profile, only_one),
        "level": (str(report.run.level), only_one),
        "suite": (_short(report.suite.digest), "the cells were not judged by the same code"),
        "catalogue": (_short(report.suite.catalogue), "a requirement may be another one, or have other cells"),
        "model": (_models(report), "the cells were answered by other weights"),
        "dtype": (report.environment.dtype, "the noise is another"),
        "vLLM": (report.environment.vllm_version, "a change may be the engine's, not the subject's"),
        "seed": (str(report.run.seed), "the cells have other contents"),
    }


def _warnings(old: Report, new: Report) -> Iterator[str]:
    """Why a cell of the one and the same cell of the other may not be comparable."""
    before, after = _conditions(old), _conditions(new)
    for name, (value, meaning) in before.items():
        if (other := after[name][0]) != value:
            yield f"{name} differs ({value or 'unknown'} → {other or 'unknown'}): {meaning}"
    for name, report in (("old", old), ("new", new)):
        if report.interrupted:
            yield f"the {name} run did not come to its end"
