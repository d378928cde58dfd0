"""A comparison as text for a terminal (80 columns are enough), and as Markdown for a pull request or a nightly's summary."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from epd_conformance.report.compare import CellChange, Change, Comparison, Difference

HEADINGS: dict[Change, str] = {
    Change.NEW_FAIL: "fails now, and did not before",
    Change.DISAPPEARED: "not in the new run",
    Change.NEWLY_SKIPPED: "not shown any more",
    Change.FLAKY: "known to be flaky",
    Change.NOT_ASKED: "the new run was told to leave it out",
    Change.STILL_FAILING: "fails in both",
    Change.STILL_UNVERIFIED: "shown in neither",
    Change.FIXED: "passes now, and did not before",
    Change.NEW: "not in the old run",
    Change.UNCHANGED: "passes in both",
}
STYLES: dict[Change, str] = {
    Change.NEW_FAIL: "bold red",
    Change.DISAPPEARED: "bold red",
    Change.NEWLY_SKIPPED: "bold yellow",
    Change.FLAKY: "yellow",
    Change.NOT_ASKED: "yellow",
    Change.STILL_FAILING: "red",
    Change.STILL_UNVERIFIED: "yellow",
    Change.FIXED: "bold green",
    Change.NEW: "cyan",
    Change.UNCHANGED: "dim",
}
# A name and what became of it.
Pairs = list[tuple[str, str]]

# More cells of one requirement that changed alike are one line: what is new in them is said by the first.
ALIKE = 3
# More lines under one heading nobody reads; `--json` has all of them.
MOST_LINES = 20


def rows(cells: Sequence[CellChange]) -> Pairs:
    """What is changed and how, one pair a line: a cell, or several of one requirement that changed alike."""
    groups: dict[tuple[str, str], list[CellChange]] = {}
    for cell in cells:
        groups.setdefault((cell.requirement, cell.words()), []).append(cell)
    lines = [
        line
        for (requirement, words), group in groups.items()
        for line in (
            [(f"{requirement}, {len(group)} cells", words)]
            if len(group) > ALIKE
            else [(cell.id, words) for cell in group]
        )
    ]
    return _capped(lines)


def render(comparison: Comparison, width: int) -> RenderableType:
    """The sum first, then warnings, outcomes, requirements, and the cells by what became of them; unchanged ones are counted."""
    style = "bold red" if comparison.regressions else "bold green"
    parts: list[RenderableType] = [Text(comparison.first_line(), style=style)]
    parts += [Text(f"warning: {words}", style="yellow") for words in comparison.warnings]
    for title, found in (("outcomes", comparison.outcomes), ("requirements", comparison.requirements)):
        if found:
            parts += [Text(), Text(f"{title} that changed", style="bold"), *_lines(_pairs(found), width)]
    for change in comparison.counts:
        if change is not Change.UNCHANGED:
            cells = comparison.of(change)
            head = Text(f"{change} ({len(cells)}): {HEADINGS[change]}", style=STYLES[change])
            parts += [Text(), head, *_lines(rows(cells), width)]
    return Group(*parts)


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Prints `render(comparison)`, by default to the standard output."""
    console = console or Console(highlight=False)
    console.print(render(comparison, console.width))


def markdown(comparison: Comparison) -> str:
    """The same as Markdown; long lists are folded."""
    lines = [f"**{comparison.first_line()}**", ""]
    lines += [f"* warning: {words}" for words in comparison.warnings]
    for title, found in (("Outcome", comparison.outcomes), ("Requirement", comparison.requirements)):
        lines += ["", *_table((title, "change"), _pairs(found))] if found else []
    for change in comparison.counts:
        if change is not Change.UNCHANGED:
            cells = comparison.of(change)
            # What somebody has to look at stands open.
            opened = " open" if change.regression else ""
            summary = f"<details{opened}><summary>{change} ({len(cells)}): {HEADINGS[change]}</summary>"
            lines += ["", summary, "", *_table(("cell", "change"), rows(cells)), "", "</details>"]
    return "\n".join(lines) + "\n"


def _pairs(found: Sequence[Difference]) -> Pairs:
    return _capped([(item.name, f"{item.old} → {item.new}") for item in found])


def _capped(lines: Pairs) -> Pairs:
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], (f"and {more} more", "--json has all of them")] if more > 0 else lines


def _lines(pairs: Pairs, width: int) -> list[Text]:
    """Two columns; where the second has no room beside the first, it stands below it."""
    room = max(len(name) for name, _ in pairs)
    lines = []
    for name, words in pairs:
        beside = f"  {name:<{room}}  {words}"
        text = beside if len(beside) <= width else f"  {name}\n      {words}"
        lines.append(Text(text, overflow="fold"))
    return lines


def _table(head: tuple[str, str], pairs: Pairs) -> list[str]:
    def cell(text: str) -> str:
        return text.replace("|", "\\|")

    return [
        f"| {head[0]} | {head[1]} |",
        "|---|---|",
        *(f"| {cell(name)} | {cell(words)} |" for name, words in pairs),
    ]
