"""What a history keeps of a run, made of its report. Pure.

The whole report is kept beside it, so that a later night can be compared with it when its folder is gone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime

from epd_conformance.report.compare import STATES, State
from epd_conformance.report.schema import DID_NOT_RUN, CellRecord, Report, RequirementRecord
from epd_conformance.verdict import Mode, Outcome, Owner, Verdict


@dataclass(frozen=True)
class Series:
    """What runs must have in common to be nights of one thing. `model` are the models' ids; versions may change in between."""

    subject: str
    profile: str
    level: str
    environment_class: str
    model: str

    @classmethod
    def of(cls, report: Report) -> Series:
        """The series that a report belongs to."""
        return cls(
            subject=report.subject.name,
            profile=report.run.profile,
            level=str(report.run.level),
            environment_class=str(report.environment_class),
            model=", ".join(model.id for model in report.environment.models),
        )

    @property
    def words(self) -> str:
        """Such as `reference contract full cpu-v1 tiny-qwen2.5-vl`."""
        return " ".join(word for word in astuple(self) if word)


@dataclass(frozen=True)
class StoredCell:
    """One cell of one run. `owner` is who a failure points at; `excused` what the evidence gave where a list excused it.

    `asked`: False where the run was told to leave the cell out. `seconds` is the cell's own time.
    """

    cell: str
    requirement: str
    owner: Owner
    level: str
    verdict: Verdict
    excused: Verdict | None
    reason: str
    asked: bool
    seconds: float

    @classmethod
    def of(cls, report: Report, item: RequirementRecord, cell: CellRecord) -> StoredCell:
        """What is kept of a cell of a report."""
        left_out = (cell.verdict, cell.reason) == (Verdict.COULD_NOT_RUN, DID_NOT_RUN)
        return cls(
            cell=cell.id,
            requirement=cell.requirement,
            owner=cell.blame or item.owner,
            level=str(item.level),
            verdict=cell.verdict,
            excused=cell.excused,
            reason=cell.reason,
            asked=report.interrupted or not left_out,
            seconds=cell.duration_s,
        )

    @property
    def state(self) -> State:
        """What the run shows of the cell, as in `compare`; `ABSENT` where it was left out."""
        return STATES[self.excused or self.verdict] if self.asked else State.ABSENT


@dataclass(frozen=True)
class StoredRun:
    """One run. `outcome` is that of the owner whom it certifies. `counts` holds a number of expected cells a verdict.

    `inputs` is a digest of everything that a report names and that decides what comes out: two runs with the same one should
    say the same. `build` is what the caller called the subject's state, such as a commit. `green`: see `night.green`;
    `accepted`: a person has said that this night is what later ones are held against. `seconds`: None for a run without an end.
    """

    run: str
    started: datetime
    seconds: float | None
    series: Series
    version: str
    build: str
    vllm: str
    suite_version: str
    suite: str
    catalogue: str
    mode: Mode
    inputs: str
    outcome: Outcome
    interrupted: bool
    counts: Mapping[Verdict, int]
    folder: str
    green: bool = False
    accepted: bool = False

    @classmethod
    def of(cls, report: Report, folder: str, build: str = "") -> StoredRun:
        """What is kept of a run, whose folder is only told to readers."""
        run = report.run
        return cls(
            run=run.id,
            started=run.started.astimezone(UTC),
            seconds=(run.finished - run.started).total_seconds() if run.finished is not None else None,
            series=Series.of(report),
            version=report.subject.implementation.version,
            build=build,
            vllm=report.environment.vllm_version,
            suite_version=report.suite.version,
            suite=report.suite.digest,
            catalogue=report.suite.catalogue,
            mode=run.mode,
            inputs=inputs(report, build),
            outcome=report.certified_outcome,
            interrupted=report.interrupted,
            counts={verdict: report.summary.get(verdict, 0) for verdict in Verdict},
            folder=folder,
        )

    @property
    def night(self) -> str:
        """The day (UTC) on which it began, such as `2026-12-01`."""
        return f"{self.started:%Y-%m-%d}"

    def to_json(self) -> dict[str, object]:
        """For programs; times in ISO 8601, UTC."""
        plain = asdict(self) | asdict(self.series)
        del plain["series"]
        return plain | {
            "started": self.started.isoformat(),
            "counts": {str(verdict): count for verdict, count in self.counts.items()},
        }


def cells_of(report: Report) -> tuple[StoredCell, ...]:
    """Every cell of a report."""
    return tuple(StoredCell.of(report, item, cell) for item in report.requirements for cell in item.cells)


def inputs(report: Report, build: str = "") -> str:
    """`sha256:<hex>` over what decides the verdicts, as far as a report names it: subject, suite, engine, model, seed, repairs.

    Not over machine, time or path. A connector that changes while its version stays is not seen here; `build` is for that.
    """
    environment = report.environment
    parts = [
        report.subject.name,
        report.subject.implementation.model_dump(),
        list(report.subject.features),
        report.subject.config_digest,
        build,
        report.suite.digest,
        report.suite.catalogue,
        [str(report.run.mode), report.run.profile, str(report.run.level), report.run.seed],
        [environment.vllm_version, environment.vllm_commit, environment.torch, environment.python, environment.dtype],
        [model.model_dump() for model in environment.models],
        sorted(patch.name for patch in environment.patches),
    ]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
