"""What the page shows, as data: made of a report, the evidence of its cells and the ends of their logs. Pure.

Nothing is judged here. Verdicts and outcomes are the report's; what the evidence adds is what a person looks at to understand them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from epd_conformance.catalogue.model import TOPOLOGIES, topology_kind
from epd_conformance.catalogue.page import AREAS
from epd_conformance.report import render_text
from epd_conformance.report.html import evidence, faults
from epd_conformance.report.html.evidence import Shown
from epd_conformance.report.html.faults import Fate
from epd_conformance.report.redact import redact
from epd_conformance.report.schema import CellRecord, Report, RequirementRecord
from epd_conformance.verdict import PRECEDENCE, Outcome, Owner, Verdict, worst

# Characters of a cell's message and of an observation: some quote whole tracebacks, and the report has them in full.
LONGEST = 6000
# Lines of a log's end, and characters of a line.
LOG_LINES, LOG_WIDTH = 40, 300

# Of the owner that the run certifies, and of MUST requirements: others may fail beside it.
MEANING: dict[Outcome, str] = {
    Outcome.CONFORMANT: "Every MUST requirement that was asked of the {owner} ran, and holds.",
    Outcome.PARTIAL: "No MUST failure points at the {owner} but what was declared beforehand as known or waived. "
    "This is no certificate.",
    Outcome.INCOMPLETE: "No MUST failure points at the {owner}, but some MUST cell is open: it did not run, was not exercised, or "
    "broke in the harness or because of somebody else.",
    Outcome.NONCONFORMANT: "At least one MUST failure points at the {owner}.",
}
GAPS: dict[str, str] = {
    "planned": "no test yet",
    "feature": "needs a feature that the subject does not declare",
    "environment": "asked only in another environment class",
    "optional-method": "needs an optional method that the subject does not have",
}


@dataclass(frozen=True)
class TrendPoint:
    """One run of a history. `counts`: cells by verdict. `name`: what tells it from others, such as its folder; may be empty."""

    time: datetime
    outcome: Outcome
    counts: Mapping[Verdict, int]
    name: str = ""

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def trend_point(report: Report, name: str = "") -> TrendPoint:
    """A report as a point of a trend."""
    counts = {verdict: report.summary.get(verdict, 0) for verdict in Verdict}
    return TrendPoint(report.run.started, report.certified_outcome, counts, name)


@dataclass(frozen=True)
class LogTail:
    """The end of a log. `path` is relative to the run's folder."""

    anchor: str
    path: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class CellView:
    """One cell with its drill-down. `counts`: what the recorders counted, in words. `logs`: those that the page has the end of."""

    anchor: str
    record: CellRecord
    item: RequirementRecord
    expected: str
    observed: str
    causes: tuple[str, ...]
    message: str
    counts: tuple[str, ...]
    shown: Shown
    logs: tuple[LogTail, ...]

    @property
    def passed(self) -> bool:
        return self.record.verdict is Verdict.PASS

    @property
    def words(self) -> str:
        """What a search looks through, in lower case."""
        record = self.record
        return " ".join(
            (
                record.id,
                self.item.title,
                record.verdict,
                record.reason,
                str(record.blame or ""),
                self.item.owner,
                self.item.level,
            )
        ).lower()


@dataclass(frozen=True)
class Row:
    """A requirement of the matrix: its cells by topology."""

    item: RequirementRecord
    cells: Mapping[str, tuple[CellView, ...]]


@dataclass(frozen=True)
class Area:
    """The rows of one area of the catalogue."""

    name: str
    about: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class FaultRow:
    """A kind of fault: its cells by what became of the victim. A scripted cell may stand there more than once."""

    kind: str
    cells: Mapping[Fate, tuple[CellView, ...]]


@dataclass(frozen=True)
class Gap:
    """Why something was not verified, in words, and the requirements that it is about."""

    why: str
    requirements: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Page:
    """Everything that the template shows."""

    report: Report
    headline: str
    meaning: str
    beside: tuple[tuple[Owner, Outcome], ...]
    counts: tuple[tuple[Verdict, int], ...]
    topologies: tuple[str, ...]
    areas: tuple[Area, ...]
    cells: tuple[CellView, ...]
    """Those that did not pass come first, in the order of `verdict.PRECEDENCE`."""
    fates: tuple[Fate, ...]
    fault_rows: tuple[FaultRow, ...]
    gaps: tuple[Gap, ...]
    logs: tuple[LogTail, ...]
    trend: tuple[TrendPoint, ...]
    """Newest first; the run itself is among them. Empty without a history."""

    @property
    def fakes(self) -> bool:
        """Whether the subject is a proxy before fake servers: then there is neither a connector nor an engine."""
        return self.report.environment.details.get("fakes") is True


def build(
    report: Report,
    evidences: Mapping[str, Mapping[str, Any]],
    logs: Mapping[str, Sequence[str]],
    history: Iterable[TrendPoint] = (),
) -> Page:
    """The page of a run. `evidences`: by cell id, as JSON. `logs`: all lines, by path relative to the run's folder."""
    tails = {path: _tail(path, lines) for path, lines in logs.items()}
    views = {
        record.id: _view(item, record, evidences.get(record.id), tails)
        for item in report.requirements
        for record in item.cells
    }
    topologies = sorted({view.record.topology for view in views.values()}, key=_topology_order)
    rows = [
        Row(
            item,
            {name: tuple(views[record.id] for record in item.cells if record.topology == name) for name in topologies},
        )
        for item in report.requirements
    ]
    areas = [
        Area(name, about, found)
        for name, about in AREAS.items()
        if (found := tuple(row for row in rows if row.item.id.split("-")[1] == name))
    ]
    # What did not pass comes first, here too; otherwise the order of the catalogue.
    areas.sort(key=lambda area: PRECEDENCE.index(worst(row.item.verdict for row in area.rows)))
    used = {log.path for view in views.values() for log in view.logs}
    counts = report.summary
    others = [owner for owner in Owner if owner is not report.run.certifies]
    fates, fault_rows = _fault_rows(views.values())
    return Page(
        report=report,
        headline=render_text.summary_lines(report)[0],
        meaning=MEANING[report.certified_outcome].format(owner=report.run.certifies),
        beside=tuple((owner, report.outcome_of(owner)) for owner in others),
        counts=tuple((verdict, count) for verdict in PRECEDENCE if (count := counts.get(verdict, 0))),
        topologies=tuple(topologies),
        areas=tuple(areas),
        cells=tuple(sorted(views.values(), key=_place)),
        fates=fates,
        fault_rows=fault_rows,
        gaps=_gaps(report),
        logs=tuple(tail for path, tail in tails.items() if path in used),
        trend=_trend(report, history),
    )


def _view(
    item: RequirementRecord, record: CellRecord, data: Mapping[str, Any] | None, tails: Mapping[str, LogTail]
) -> CellView:
    found = evidence.shown(data) if data is not None else Shown()
    logs = tuple(tails[path] for path in record.artifacts if path in tails)
    passed = record.verdict is Verdict.PASS
    return CellView(
        anchor=anchor("c", record.id),
        record=record,
        item=item,
        expected=_expected(record.message)[:LONGEST],
        observed=record.observed[:LONGEST],
        causes=_causes(record.message),
        message=record.message[:LONGEST],
        counts=_counted(record),
        shown=found,
        logs=() if passed else logs,
    )


def anchor(kind: str, name: str) -> str:
    """A place of the page that is the same in every run, and has no character of a subject's in it."""
    return f"{kind}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:10]}"


def _expected(message: str) -> str:
    """What `failure_text` says was expected; empty for a message of another form."""
    return message.partition("\nexpected: ")[2].partition("\nobserved: ")[0]


def _causes(message: str) -> tuple[str, ...]:
    """The likely causes that `failure_text` lists."""
    one = message.partition("\nlikely cause: ")[2].partition("\n")[0]
    if one:
        return (one,)
    found = []
    for line in message.partition("\nlikely causes:\n")[2].split("\n"):
        if not line.startswith("  - "):
            break
        found.append(line.removeprefix("  - "))
    return tuple(found)


def _counted(record: CellRecord) -> tuple[str, ...]:
    seen = record.evidence
    words = [
        f"{count} {one if count == 1 else many}"
        for count, one, many in (
            (seen.saves, "save", "saves"),
            (seen.loads, "load", "loads"),
            (seen.local_encodes, "local encode", "local encodes"),
            (seen.decode_encodes, "encode on decode", "encodes on decode"),
        )
        if count is not None
    ]
    if seen.digests_equal is not None:
        words.append("digests equal" if seen.digests_equal else "digests differ")
    if seen.kv_tokens is not None:
        words.append(f"{seen.kv_tokens} of {seen.kv_tokens_expected} tokens of KV taken")
    return tuple(words)


def _topology_order(name: str) -> tuple[int, str]:
    return TOPOLOGIES.index(topology_kind(name)), name


def _place(view: CellView) -> tuple[int, str, tuple[int, str], str]:
    """Where a cell stands among all: what did not pass first, then by requirement, topology and case."""
    record = view.record
    return PRECEDENCE.index(record.verdict), record.requirement, _topology_order(record.topology), record.id


def _tail(path: str, lines: Sequence[str]) -> LogTail:
    end = tuple(redact(line)[:LOG_WIDTH] for line in lines[-LOG_LINES:])
    return LogTail(anchor("l", path), path, end)


def _fault_rows(views: Iterable[CellView]) -> tuple[tuple[Fate, ...], tuple[FaultRow, ...]]:
    found: dict[str, dict[Fate, list[CellView]]] = {}
    for view in views:
        if view.shown.cell is None:
            continue
        try:
            ends = list(faults.fates(view.shown.cell))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            # Evidence that nobody can read to its end; the cell's verdict says so.
            continue
        for kind, fate in ends:
            found.setdefault(kind, {}).setdefault(fate, []).append(view)
    occurring = tuple(fate for fate in Fate if any(fate in row for row in found.values()))
    rows = tuple(
        FaultRow(kind, {fate: tuple(sorted(cells, key=_place)) for fate, cells in found[kind].items()})
        for kind in sorted(found)
    )
    return occurring, rows


def _gaps(report: Report) -> tuple[Gap, ...]:
    titles = {item.id: item.title for item in report.requirements}
    kinds: dict[str, dict[str, str]] = {}
    for gap in report.not_verified:
        kinds.setdefault(gap.kind, {}).setdefault(gap.requirement, "" if gap.kind == "planned" else gap.detail)
    return tuple(
        Gap(GAPS[kind], tuple((name, detail or titles.get(name, "")) for name, detail in sorted(found.items())))
        for kind, found in sorted(kinds.items())
    )


def _trend(report: Report, history: Iterable[TrendPoint]) -> tuple[TrendPoint, ...]:
    older = [point for point in history if point.time != report.run.started]
    if not older:
        return ()
    return tuple(sorted([*older, trend_point(report, "this run")], key=lambda point: point.time, reverse=True))


def when(moment: datetime) -> str:
    """A moment as the page writes it."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
