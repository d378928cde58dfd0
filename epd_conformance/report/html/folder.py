"""Reads the folder of a run for its page: the report, the evidence of its cells and their logs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from epd_conformance.report.html.page import Page, TrendPoint, build, trend_point
from epd_conformance.report.schema import Report
from epd_conformance.report.writer import read_report
from epd_conformance.verdict import Verdict

# Bytes that are read of a file of evidence (the largest of a real run has 100 kB), and of a log's end.
LARGEST, LOG_END = 20_000_000, 200_000

# What colours a terminal.
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def read_page(
    run: Path, history: Sequence[Path] = (), stored: Callable[[Report], Iterable[TrendPoint]] = lambda report: ()
) -> Page:
    """The page of a run's folder. `history`: folders or `report.json` of other runs, for the trend; their order does not matter.
    `stored` gives what a history has of the runs of such a report.

    A report without its evidence has a page as well, which shows less. Raises UsageError for a folder that holds no report.
    """
    report = read_report(run)
    points = [trend_point(read_report(older), older.name) for older in history]
    return page_of(run if run.is_dir() else run.parent, report, [*points, *stored(report)])


def page_of(folder: Path, report: Report, history: Iterable[TrendPoint] = ()) -> Page:
    """The page of a report whose evidence lies in `folder`."""
    evidences: dict[str, dict[str, Any]] = {}
    logs: dict[str, list[str]] = {}
    for record in (record for item in report.requirements for record in item.cells):
        name = next((one for one in record.artifacts if one.startswith("cells/")), "")
        path = _inside(folder, name) if name else None
        if path is not None and (data := _json(path)) is not None and data.get("cell") == record.id:
            evidences[record.id] = data
        if record.verdict is Verdict.PASS:
            continue
        for name in record.artifacts:
            if name not in logs and name.endswith(".log") and (log := _inside(folder, name)) is not None:
                logs[name] = _lines(log)
    return build(report, evidences, logs, history)


def _inside(folder: Path, name: str) -> Path | None:
    """A file of the run; None where it is none, or where a link leads out of the folder: a page must show nothing else."""
    path = (folder / name).resolve()
    return path if path.is_relative_to(folder.resolve()) and path.is_file() else None


def _json(path: Path) -> dict[str, Any] | None:
    if path.stat().st_size > LARGEST:
        return None
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError):
        return None
    return data if isinstance(data, dict) else None


def _lines(path: Path) -> list[str]:
    """The lines of a log's end, without a terminal's colours and other control characters."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_END))
        text = file.read().decode("utf-8", "replace")
    return [
        "".join(letter for letter in _COLOUR.sub("", line) if letter.isprintable() or letter == "\t")
        for line in text.splitlines()
    ]
