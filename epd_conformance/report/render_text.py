"""A report as text: first line, verdict table, what did not pass; readable at 80 columns, with and without
colour."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from epd_conformance.catalogue.model import TOPOLOGIES, topology_kind
from epd_conformance.report.schema import CellRecord, DeviationKind, Report, RequirementRecord
from epd_conformance.verdict import Mode, Outcome, Owner, Verdict, worst

# What a CI log and a quoted mail hold without folding a line; a wider terminal is used.
WIDTH = 80

STYLES: dict[Verdict, str] = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.COULD_NOT_RUN: "yellow",
    Verdict.KNOWN_FAILING: "cyan",
    Verdict.WAIVED: "cyan",
    Verdict.NOT_SUPPORTED: "dim",
}
OUTCOME_STYLES: dict[Outcome, str] = {
    Outcome.CONFORMANT: "bold green",
    Outcome.PARTIAL: "cyan",
    Outcome.INCOMPLETE: "bold yellow",
    Outcome.NONCONFORMANT: "bold red",
}


def summary_lines(report: Report) -> list[str]:
    """The report in a few lines, the first of them what may be quoted, such as `reference: conformant on
    cpu-v1 (…)`.

    That line names the environment class, the profile and the level, since it holds for nothing else; where
    the run was cut short, or was no certification, it says so.
    """
    run = report.run
    asked = [f"profile {run.profile}", f"level {run.level}", f"{run.mode} mode"]
    if report.interrupted:
        asked.append("cut short")
    outcome = report.certified_outcome
    lines = [f"{report.subject.name}: {outcome} on {report.environment_class} ({', '.join(asked)})"]
    if report.environment.details.get("fakes") is not True:
        # Behind fakes there is neither a connector nor an engine.
        others = [f"{owner} {report.outcome_of(owner)}" for owner in Owner if owner is not run.certifies]
        lines.append(f"beside it: {', '.join(others)}")
    counts = report.summary
    words = [f"{count} {verdict}" for verdict in Verdict if (count := counts.get(verdict))]
    lines.append(f"cells: {counts['expected']} expected, {counts['executed']} ran: {', '.join(words)}")
    if run.mode is Mode.DEVELOP:
        lines.append("a develop run is no certificate; run again with --mode certify for one")
    if report.environment.details.get("attached") is True:
        lines.append("the servers were attached: what flags, patches and weights they run is not known here")
    if report.environment.patches:
        names = ", ".join(patch.name for patch in report.environment.patches)
        lines.append(f"patched in the servers: {names}")
    if report.not_verified:
        kinds: dict[str, set[str]] = {}
        for gap in report.not_verified:
            kinds.setdefault(gap.kind, set()).add(gap.requirement)
        parts = [f"{len(ids)} {kind}" for kind, ids in sorted(kinds.items())]
        lines.append(f"not verified: {', '.join(parts)}")
    lines += _flaky_lines(report)
    lines += [f"warning: {warning}" for warning in report.warnings]
    return lines


def _flaky_lines(report: Report) -> list[str]:
    """The cells that the run's list calls flaky, with the verdicts that they have all the same; one line an entry."""
    verdicts = {cell.id: cell.verdict for item in report.requirements for cell in item.cells}
    lines = []
    for entry in report.known_deviations:
        if entry.kind is DeviationKind.FLAKY:
            counts = Counter(verdicts[cell] for cell in entry.cells)
            found = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "no cell of this run"
            lines.append(f"known flaky: {entry.pattern} ({entry.issue}): {found}")
    return lines


def verdict_table(report: Report, width: int = WIDTH) -> Table:
    """One row a requirement: passed of expected cells for each topology that occurs, and the verdict.

    `width` is in columns; where it is too small the title gives way, and nothing else.
    """
    kinds = {topology_kind(cell.topology) for item in report.requirements for cell in item.cells}
    topologies = [name for name in TOPOLOGIES if name in kinds]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    # The one name that is longer than what stands below it.
    heads = ["aggr." if name == "aggregated" else name for name in topologies]
    rows = [
        [
            Text(item.id),
            Text(item.title),
            Text(item.level),
            Text(item.owner),
            *(_counted(item, name) for name in topologies),
            Text(item.verdict, style=STYLES[item.verdict]),
        ]
        for item in report.requirements
    ]
    names = ["requirement", "", "level", "owner", *heads, "verdict"]
    widths = [max(len(name), *(len(row[i]) for row in rows), 0) for i, name in enumerate(names)]
    widths[1] = max(1, min(widths[1], width - (sum(widths) - widths[1]) - len(widths)))
    for i, name in enumerate(names):
        justify: Literal["left", "right"] = "right" if 4 <= i < len(names) - 1 else "left"
        table.add_column(name, width=widths[i], no_wrap=True, overflow="ellipsis", justify=justify)
    for row in rows:
        table.add_row(*row)
    return table


def not_passed(report: Report) -> list[CellRecord]:
    """Every cell that is neither `pass` nor `not-supported`, in the order of the requirements."""
    fine = {Verdict.PASS, Verdict.NOT_SUPPORTED}
    return [cell for item in report.requirements for cell in item.cells if cell.verdict not in fine]


def cell_text(cell: CellRecord, sentence: str) -> Text:
    """What a cell that did not pass has to say: its verdict, reason and blame, then its message."""
    head = f"{cell.verdict}: {cell.reason}" if cell.reason else str(cell.verdict)
    if cell.excused:
        head += f" (by the evidence: {cell.excused})"
    if cell.blame:
        head += f" (points at: {cell.blame})"
    text = Text.assemble((head, STYLES[cell.verdict]), "  ", cell.id)
    return text.append("\n" + (cell.message or sentence))


def render(report: Report, width: int = WIDTH) -> RenderableType:
    """The whole report for a terminal: the table, what did not pass, and the summary last, where the eye
    ends."""
    sentences = {item.id: item.sentence for item in report.requirements}
    parts: list[RenderableType] = [verdict_table(report, width), Text()]
    silent = [cell for cell in not_passed(report) if cell.verdict is Verdict.COULD_NOT_RUN and not cell.message]
    for cell in not_passed(report):
        if cell not in silent:
            parts += [cell_text(cell, sentences[cell.requirement]), Text()]
    if silent:
        # One line each would bury what failed; the table shows whose they are, the report lists them.
        words = f"{Verdict.COULD_NOT_RUN}: {len(silent)} expected cells did not run, which is never a pass"
        parts += [Text(words, style=STYLES[Verdict.COULD_NOT_RUN]), Text()]
    first, *rest = summary_lines(report)
    parts.append(Text(first, style=OUTCOME_STYLES[report.certified_outcome]))
    parts += [Text(line) for line in rest]
    return Group(*parts)


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints `render(report)`, by default to the standard output.

    No line is broken: commands, paths and plans are there to be copied, and a terminal breaks lines by itself.
    """
    console = console or Console(highlight=False)
    console.print(render(report, console.width), soft_wrap=True)


def _counted(item: RequirementRecord, topology: str) -> Text:
    cells = [cell for cell in item.cells if topology_kind(cell.topology) == topology]
    if not cells:
        return Text("")
    passed = sum(cell.verdict is Verdict.PASS for cell in cells)
    return Text(f"{passed}/{len(cells)}", style=STYLES[worst(cell.verdict for cell in cells)])
