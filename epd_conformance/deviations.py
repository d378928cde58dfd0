"""Known deviations, waivers and known-flaky cells: what a develop run was told beforehand, and whether it came true. Pure.

One TOML file, three lists of tables. `[[known]]` makes `known-failing` of a `fail` whose words are the expected ones;
`[[waiver]]` makes `waived` of a `fail` or an `inconclusive`; `[[flaky]]` changes no verdict and is only named. An `error` and a
`could-not-run` are never excused: they say nothing about the subject, and there is no evidence to hold an excuse against.

A list must stay true. An entry of the first two that is expired, covers no cell of the run, or covers one that it does not
excuse (because it passes, did not run, or fails otherwise) makes the run incomplete, whatever else came out.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from epd_conformance.errors import UsageError
from epd_conformance.report.failure import Divergence
from epd_conformance.report.schema import CellRecord, DeviationKind, KnownDeviation, KnownDeviationRecord
from epd_conformance.verdict import EXCUSED, Verdict, worst

# More names would bury the sentence; the report's `cells` holds all of them.
NAMED_CELLS = 3

Text = Annotated[str, Field(min_length=1)]


class _Table(BaseModel):
    """What every table of the file has. `cells` is a pattern over cell ids, see `covers`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cells: Text
    issue: Text
    note: str = ""


class _Known(_Table):
    message: Text
    expires: date

    @field_validator("message")
    @classmethod
    def _expression(cls, text: str) -> str:
        try:
            found = re.compile(text).search("")
        except re.error as error:
            raise ValueError(f"{text!r} is no regular expression: {error}") from None
        if found:
            raise ValueError(f"{text!r} fits every failure: give words that only this failure has")
        return text


class _Waiver(_Table):
    reason: Text
    expires: date


class _Flaky(_Table):
    pass


_TABLES: dict[DeviationKind, type[_Table]] = {
    DeviationKind.KNOWN: _Known,
    DeviationKind.WAIVER: _Waiver,
    DeviationKind.FLAKY: _Flaky,
}


def read(path: Path) -> tuple[KnownDeviation, ...]:
    """The entries of a file, in its order within each kind. Raises UsageError, naming file and entry, for anything wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {path} ({error.strerror}): --known takes a TOML file of known deviations"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not valid TOML: {error}") from error
    return parse(text, path.name)


def parse(text: str, name: str) -> tuple[KnownDeviation, ...]:
    """As `read`, for a text; `name` is what errors call it."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{name} is not valid TOML: {error}") from error
    tables = {kind: document.pop(str(kind), []) for kind in DeviationKind}
    if document:
        raise UsageError(
            f"{name}: unknown key `{next(iter(document))}`; only [[known]], [[waiver]] and [[flaky]] tables may stand in it"
        )
    return tuple(
        _entry(name, kind, number, table)
        for kind, found in tables.items()
        for number, table in enumerate(found if isinstance(found, list) else [found], start=1)
    )


def _entry(name: str, kind: DeviationKind, number: int, table: Any) -> KnownDeviation:
    if not isinstance(table, dict):
        raise UsageError(f"{name}: `{kind}` is no table: write [[{kind}]] above its entries")
    try:
        values = _TABLES[kind].model_validate(table).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise UsageError(f"{name}: [[{kind}]] number {number}: {f'`{where}`: ' if where else ''}{message}") from error
    return KnownDeviation(kind=kind, pattern=values.pop("cells"), **values)


def covers(pattern: str, cell: str) -> bool:
    """Whether a pattern names a cell: `*` is anything, `?` one character; everything else, brackets too, is literal."""
    return fnmatchcase(cell, pattern.replace("[", "[[]"))


def words(reason: str, observed: str, divergence: Divergence | None = None) -> str:
    """What `message` is searched in: the reason, what was observed and the first divergence.

    Not the whole failure text: the requirement's sentence, likely causes and paths would fit any failure of the cell.
    """
    return "\n".join([reason, observed, *(divergence.lines() if divergence else ())])


@dataclass(frozen=True)
class Decision:
    """The verdict that a cell counts with. `excused` is the one that the evidence gave, None where nothing was changed;
    `by` are the places of the entries that changed it."""

    verdict: Verdict
    excused: Verdict | None = None
    by: tuple[int, ...] = ()


def decide(entries: Sequence[KnownDeviation], cell: str, verdict: Verdict, text: str, day: date) -> Decision:
    """What the lists make of a verdict. `text` is what `words` gives, `day` that on which the run was started (UTC).

    Where several entries excuse a cell it takes the worse word, and all of them are named.
    """
    excuses = {
        place: excuse
        for place, entry in enumerate(entries)
        if covers(entry.pattern, cell)
        and not expired(entry, day)
        and (excuse := _excuse(entry, verdict, text)) is not None
    }
    return Decision(worst(excuses.values()), verdict, tuple(excuses)) if excuses else Decision(verdict)


def remarks(entries: Sequence[KnownDeviation], cell: str, decision: Decision) -> list[str]:
    """What the lists say about a cell that did not pass, one line an entry, for its failure text."""
    found = []
    for place, entry in enumerate(entries):
        note = f" ({entry.note})" if entry.note else ""
        if place in decision.by and entry.kind is DeviationKind.KNOWN:
            found.append(f"known deviation: {entry.issue}, until {entry.expires}{note}")
        elif place in decision.by:
            found.append(f"waived until {entry.expires}: {entry.reason}, {entry.issue}{note}; it is {decision.excused}")
        elif entry.kind is DeviationKind.FLAKY and covers(entry.pattern, cell):
            found.append(f"known flaky, which changes no verdict: {entry.issue}{note}")
    return found


def _excuse(entry: KnownDeviation, verdict: Verdict, text: str) -> Verdict | None:
    if entry.kind is DeviationKind.KNOWN and verdict is Verdict.FAIL and re.search(entry.message, text):
        return Verdict.KNOWN_FAILING
    if entry.kind is DeviationKind.WAIVER and verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE):
        return Verdict.WAIVED
    return None


def expired(entry: KnownDeviation, day: date) -> bool:
    """Whether an entry counts no more; on the day that it names it still does."""
    return entry.expires is not None and day > entry.expires


def title(entry: KnownDeviation) -> str:
    """How an entry is called in sentences."""
    return f"[[{entry.kind}]] {entry.pattern}"


def covered(entry: KnownDeviation, cells: Iterable[str]) -> tuple[str, ...]:
    """Those of the cells that an entry names."""
    return tuple(cell for cell in cells if covers(entry.pattern, cell))


def early_problem(entry: KnownDeviation, cells: Iterable[str], day: date) -> str:
    """What is wrong with an entry whatever comes out, so that it can be said before the run; empty if nothing.

    A flaky entry excuses nothing, and so nothing is ever wrong with it.
    """
    if entry.kind is DeviationKind.FLAKY:
        return ""
    if expired(entry, day):
        return f"expired on {entry.expires}, so it excuses nothing: mend the cell, or give a new date if {entry.issue} is open"
    if not covered(entry, cells):
        return "matches no cell of this run: take it out, or mend its pattern (only * and ? are wildcards)"
    return ""


def review(
    entries: Sequence[KnownDeviation], cells: Sequence[CellRecord], day: date
) -> tuple[KnownDeviationRecord, ...]:
    """Each entry with the cells that it covers and what is wrong with it. `cells`: one record for each cell of the run."""
    return tuple(
        KnownDeviationRecord(
            **entry.model_dump(),
            cells=covered(entry, [cell.id for cell in cells]),
            problems=tuple(_problems(place, entry, cells, day)),
        )
        for place, entry in enumerate(entries)
    )


def _problems(place: int, entry: KnownDeviation, cells: Sequence[CellRecord], day: date) -> Iterator[str]:
    if early := early_problem(entry, [cell.id for cell in cells], day):
        yield early
        return
    found: dict[str, list[str]] = {}
    for cell in cells:
        excused = cell.verdict in EXCUSED and place in cell.excused_by
        if entry.kind is not DeviationKind.FLAKY and covers(entry.pattern, cell.id) and not excused:
            found.setdefault(_untrue(entry, cell), []).append(cell.id)
    for sentence, names in found.items():
        more = len(names) - NAMED_CELLS
        yield ", ".join(names[:NAMED_CELLS]) + (f" and {more} more" if more > 0 else "") + f": {sentence}"


def _untrue(entry: KnownDeviation, cell: CellRecord) -> str:
    """Why an entry does not excuse a cell that it covers, and what to do."""
    verdict = cell.excused or cell.verdict
    because = f" ({cell.reason})" if cell.reason else ""
    if verdict is Verdict.PASS:
        return "passes: take it out, or narrow the pattern"
    if verdict is Verdict.FAIL:
        return f"fails otherwise{because}: a new failure, or a `message` that does not fit it"
    if verdict is Verdict.INCONCLUSIVE:
        return f"is inconclusive{because}, not the failure that was declared"
    return f"is {verdict}{because}, which no list excuses"
