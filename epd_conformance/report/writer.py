"""Writes results line by line while a run goes on, and makes the report from those lines alone.

`results.ndjson` holds one object a line: `{"kind", "time", "data"}`. Kinds: `run` (`RunStart`), `environment`
(`EnvironmentInfo`), `expected` (`ExpectedSet`), `noise` (`NoiseFloor`), `cell` (`CellRecord`), `fault`
(`FaultRecord`), `configuration` (`ConfigurationRecord`), `warning` (`WarningRecord`), `end` (`RunEnd`), and
`reopened` where a writer found a torn line and went on after it. Since nothing else goes into the report, a run
that crashed can be reported as well: what never ran stands in it as `could-not-run`.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from epd_conformance import deviations
from epd_conformance.catalogue import Catalogue
from epd_conformance.errors import UsageError
from epd_conformance.report.redact import redact
from epd_conformance.report.schema import (
    DID_NOT_RUN,
    Artifact,
    CellRecord,
    ConfigurationRecord,
    EnvironmentInfo,
    ExpectedRecord,
    ExpectedSet,
    FaultRecord,
    KnownDeviationRecord,
    Model,
    NoiseFloor,
    Report,
    RequirementRecord,
    RunEnd,
    RunStart,
    WarningRecord,
    config_digest,
)
from epd_conformance.verdict import (
    PRECEDENCE,
    Cell,
    Mode,
    Outcome,
    Owner,
    Verdict,
    complete,
    outcome,
    requirement_verdict,
    summary,
)

RESULTS_NAME = "results.ndjson"
REPORT_NAME = "report.json"
PAGE_NAME = "report.html"

KINDS: dict[type[Model], str] = {
    RunStart: "run",
    EnvironmentInfo: "environment",
    ExpectedSet: "expected",
    NoiseFloor: "noise",
    CellRecord: "cell",
    FaultRecord: "fault",
    ConfigurationRecord: "configuration",
    WarningRecord: "warning",
    RunEnd: "end",
}
REOPENED = "reopened"

M = TypeVar("M", bound=Model)


class ResultsLog:
    """Appends to a `results.ndjson`; every line is on its way to the disk when `append` returns.

    Threads may share one log. Opening a file whose last line is torn (its writer died in the middle of it)
    ends that line and says so in the next, so that a reader can tell a crash from a damaged file.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._lock = threading.Lock()
        torn = _torn_bytes(path)
        # O_APPEND: a second writer's lines may come between ours, never into them.
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if torn:
            self._write(b"\n" + _encode(REOPENED, {"tornBytes": torn}))

    def append(self, record: Model) -> None:
        """Writes one record (`RunStart`, `EnvironmentInfo`, … see `KINDS`), secrets taken out."""
        self._write(_encode(KINDS[type(record)], redact(record.to_disk())))

    def close(self) -> None:
        """Closes the file; a second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> ResultsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._fd < 0:
                raise ValueError(f"{self.path} is closed")
            while line:
                line = line[os.write(self._fd, line) :]


@dataclass(frozen=True)
class ResultLine:
    """One line of a results file, its data as it stands on disk."""

    number: int
    kind: str
    time: datetime
    data: dict[str, Any]


@dataclass(frozen=True)
class ResultLines:
    """A results file, in order. `torn` lists the numbers of lines that a crash cut off; they are not among
    `lines`."""

    lines: tuple[ResultLine, ...]
    torn: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[ResultLine]:
        return iter(self.lines)

    def all(self, model: type[M]) -> tuple[M, ...]:
        """Every record of one type, in order; raises `UsageError` for data that does not fit it."""
        kind = KINDS[model]
        found: list[M] = []
        for line in self.lines:
            if line.kind == kind:
                try:
                    found.append(model.model_validate(line.data))
                except ValidationError as exc:
                    first = exc.errors(include_url=False)[0]
                    where = ".".join(str(part) for part in first["loc"])
                    raise UsageError(f"results line {line.number} ({kind}): `{where}`: {first['msg']}") from exc
        return tuple(found)


def read_results(path: Path) -> ResultLines:
    """Reads a results file. A line that a crash cut off is left out and named; any other bad line is a
    `UsageError`."""
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}; give the directory of a run") from exc
    lines: list[ResultLine] = []
    torn: list[int] = []
    pieces = raw.split(b"\n")
    tail = pieces.pop()  # what follows the last line end: nothing, or a torn line
    for number, piece in enumerate(pieces, start=1):
        line = _decode(number, piece)
        if line is None:
            after = _decode(number + 1, pieces[number]) if number < len(pieces) else None
            if after is None or after.kind != REOPENED:
                raise UsageError(f"{path} is damaged: line {number} is not a result")
            torn.append(number)
        else:
            lines.append(line)
    if tail:
        torn.append(len(pieces) + 1)
    return ResultLines(tuple(lines), tuple(torn))


def build_report(results: ResultLines, catalogue: Catalogue) -> Report:
    """The report of a run, from its results alone; pure. Artifacts are added by `write_report`.

    Raises `UsageError` where the lines are no run (no `run` line, two runs in one file), or belong to another
    catalogue than this one.
    """
    start = _only_run(results.all(RunStart))
    if start.suite.catalogue != catalogue.digest():
        raise UsageError(
            f"these results were made with another catalogue than this one; "
            f"use epd-conformance {start.suite.version}, which made them"
        )
    environments = results.all(EnvironmentInfo)
    expected_records = {cell.id: cell for part in results.all(ExpectedSet) for cell in part.cells}
    gaps = {gap: None for part in results.all(ExpectedSet) for gap in part.not_verified}
    records = _worst_records(results.all(CellRecord))
    ends = results.all(RunEnd)
    interrupted = not ends or ends[-1].interrupted

    expected = [_cell(catalogue, record) for record in expected_records.values()]
    cells = complete(expected, [_cell(catalogue, record) for record in records.values()])
    counts = summary(cells)
    noise = results.all(NoiseFloor)
    warnings = [f"line {number} of the results was cut off by a crash" for number in results.torn]
    if interrupted:
        reason = ends[-1].reason if ends and ends[-1].reason else "the results have no end line"
        warnings.append(f"the run did not come to its end: {reason}")
    warnings += [f"{cell.id} ran, but is not in the expected set" for cell in cells if not cell.expected]
    thin = [floor for floor in noise if not floor.sufficient]
    for floor in thin:
        tried = len(floor.admitted) + len(floor.rejected)
        warnings.append(
            f"the baseline {floor.baseline} of {floor.model} agrees with itself on {len(floor.admitted)} of "
            f"{tried} prompts only: too few to decide anything"
        )

    requirements = _requirements(catalogue, cells, expected_records, records)
    every = [cell for item in requirements for cell in item.cells]
    lists = deviations.review(start.known_deviations, every, start.day)
    untrue = _untrue(lists)
    warnings += untrue
    warnings += dict.fromkeys(warning.text for warning in results.all(WarningRecord))
    configurations = _distinct(results.all(ConfigurationRecord))
    twice = _answered_twice(configurations)
    warnings += twice

    def decide(owner: Owner) -> Outcome:
        result = outcome(cells, owner, start.run.mode)
        unsettled = thin or interrupted or untrue or (twice and start.run.mode is Mode.CERTIFY)
        if result in (Outcome.CONFORMANT, Outcome.PARTIAL) and unsettled:
            return Outcome.INCOMPLETE
        return result

    return Report(
        suite=start.suite,
        run=start.run.model_copy(update={"finished": ends[-1].finished if ends else None}),
        subject=start.subject.model_copy(
            update={"configurations": configurations, "config_digest": config_digest(configurations)}
        ),
        # The last one: it is written again when more of the environment is known (first the run's, then the
        # servers').
        environment=environments[-1] if environments else EnvironmentInfo(),
        environment_class=start.environment_class,
        complete=not interrupted and counts["executed"] == counts["expected"],
        interrupted=interrupted,
        warnings=tuple(warnings),
        noise_floor=noise,
        outcome=decide(Owner.CONNECTOR),
        engine_outcome=decide(Owner.ENGINE),
        proxy_outcome=decide(Owner.PROXY),
        summary=counts,
        not_verified=tuple(gaps),
        requirements=requirements,
        faults=_faults(results.all(FaultRecord)),
        known_deviations=lists,
        results=start.results,
    )


def write_report(directory: Path, report: Report) -> Report:
    """Writes `report.json` into `directory`, atomically, with the manifest of all evidence that its cells
    name.

    The manifest holds the results file and every file that a cell names, or that lies below a folder that a
    cell names. Returns the report as written. What is named and not there becomes a warning, since a report
    that says so is worth more than none.
    """
    artifacts, warnings = _manifest(directory, report)
    whole = report.model_copy(update={"artifacts": artifacts, "warnings": report.warnings + warnings})
    text = json.dumps(redact(whole.to_disk()), indent=2, ensure_ascii=False) + "\n"
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=directory, prefix=".report-", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(directory / REPORT_NAME)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return whole


def read_report(directory: Path) -> Report:
    """Reads `report.json` of a directory, or a report by its own path; raises `UsageError` where it is missing or
    does not fit the schema."""
    path = directory if directory.is_file() else directory / REPORT_NAME
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as exc:
        raise UsageError(f"cannot read {path}: {exc.strerror}; give the directory of a run") from exc
    except ValidationError as exc:
        first = exc.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path} is no report of this version: `{where}`: {first['msg']}") from exc


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(kind: str, data: Any) -> bytes:
    line = {"kind": kind, "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "data": data}
    return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _decode(number: int, piece: bytes) -> ResultLine | None:
    """The line, or None for what is not one."""
    try:
        line = json.loads(piece)
        return ResultLine(number, str(line["kind"]), datetime.fromisoformat(line["time"]), dict(line["data"]))
    except (ValueError, KeyError, TypeError):
        return None


def _torn_bytes(path: Path) -> int:
    """The length of what follows the last line end of a file; 0 for a file that is empty or absent."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return 0
    return len(raw) - (raw.rfind(b"\n") + 1)


def _only_run(starts: tuple[RunStart, ...]) -> RunStart:
    if not starts:
        raise UsageError("the results hold no `run` line: nothing says what was run, so no report can be made")
    if len({start.run.id for start in starts}) > 1:
        raise UsageError("the results hold two runs; give each run a directory of its own")
    return starts[0]


def _cell(catalogue: Catalogue, record: CellRecord | ExpectedRecord) -> Cell:
    """What the verdict rules see of a record; level and owner are always the catalogue's."""
    item = catalogue[record.requirement]
    if isinstance(record, CellRecord):
        return Cell(record.id, item.id, item.level, item.owner, record.verdict, record.blame)
    return Cell(record.id, item.id, item.level, item.owner)


def _worst_records(records: Iterable[CellRecord]) -> dict[str, CellRecord]:
    """One record a cell: the worst, as in `verdict.complete`."""
    worst: dict[str, CellRecord] = {}
    for record in records:
        before = worst.get(record.id)
        if before is None or PRECEDENCE.index(record.verdict) < PRECEDENCE.index(before.verdict):
            worst[record.id] = record
    return worst


def _requirements(
    catalogue: Catalogue,
    cells: list[Cell],
    expected: dict[str, ExpectedRecord],
    records: dict[str, CellRecord],
) -> tuple[RequirementRecord, ...]:
    grouped: dict[str, list[Cell]] = {}
    for cell in cells:
        grouped.setdefault(cell.requirement, []).append(cell)
    result = []
    for requirement_id, group in sorted(grouped.items()):
        item = catalogue[requirement_id]
        result.append(
            RequirementRecord(
                id=item.id,
                title=item.title,
                sentence=item.sentence,
                owner=item.owner,
                level=item.level,
                verdict=requirement_verdict(group),
                cells=tuple(_record(cell, records.get(cell.id), expected.get(cell.id)) for cell in group),
            )
        )
    return tuple(result)


def _record(cell: Cell, record: CellRecord | None, expected: ExpectedRecord | None) -> CellRecord:
    """The record of a cell with the verdict that it counts with; a made one for a cell that never ran."""
    if record is not None:
        return record if record.verdict is cell.verdict else record.model_copy(update={"verdict": cell.verdict})
    assert expected is not None  # a cell comes from a record or from the expected set
    reason = DID_NOT_RUN if expected.case else "no test was collected"
    return CellRecord(
        id=expected.id,
        requirement=expected.requirement,
        topology=expected.topology,
        model=expected.model,
        case=expected.case,
        verdict=Verdict.COULD_NOT_RUN,
        reason=reason,
    )


def _distinct(configurations: Iterable[ConfigurationRecord]) -> tuple[ConfigurationRecord, ...]:
    """By topology and role, without repetitions: each worker of a parallel run writes down what it asked."""
    found = {config_digest([one]): one for one in configurations}.values()
    return tuple(sorted(found, key=lambda one: (one.topology, one.role)))


def _answered_twice(configurations: Iterable[ConfigurationRecord]) -> list[str]:
    """The axes for which the subject gave more than one configuration."""
    counts = Counter((one.topology, one.role) for one in configurations)
    return [
        f"the subject gave {count} configurations for {role} in {topology}: what ran is not one connector"
        for (topology, role), count in counts.items()
        if count > 1
    ]


def _untrue(lists: Iterable[KnownDeviationRecord]) -> list[str]:
    """What is wrong with the lists: a run that does not show what they say is not as it was declared."""
    return [f"{deviations.title(entry)}: {problem}" for entry in lists for problem in entry.problems]


def _faults(records: tuple[FaultRecord, ...]) -> tuple[FaultRecord, ...]:
    """One record a kind, counts added up."""
    totals: dict[str, FaultRecord] = {}
    for record in records:
        before = totals.get(record.kind)
        totals[record.kind] = (
            FaultRecord(
                kind=record.kind,
                injected=before.injected + record.injected,
                verified=before.verified + record.verified,
                met_by_victim=before.met_by_victim + record.met_by_victim,
            )
            if before
            else record
        )
    return tuple(totals[kind] for kind in sorted(totals))


def _manifest(directory: Path, report: Report) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
    named = {report.results.ndjson}
    named.update(path for item in report.requirements for cell in item.cells for path in cell.artifacts)
    files: set[Path] = set()
    warnings: list[str] = []
    root = directory.resolve()
    for name in sorted(named):
        path = root / name
        if not path.resolve().is_relative_to(root):
            warnings.append(f"{name} leads out of the report's directory and is left out of the evidence")
        elif path.is_dir():
            # Links are left out: what they point at can change, or lie elsewhere.
            files.update(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        elif path.is_file():
            files.add(path)
        else:
            warnings.append(f"{name} is named as evidence but is not there")
    artifacts = tuple(
        Artifact(path=file.relative_to(root).as_posix(), sha256=sha256_file(file), bytes=file.stat().st_size)
        for file in sorted(files)
    )
    return artifacts, tuple(warnings)
