"""`epd-conformance nightly` and `epd-conformance history`: thin, as every verb."""

from __future__ import annotations

import json
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from epd_conformance.catalogue import ConformanceLevel
from epd_conformance.errors import UsageError
from epd_conformance.history.flakes import Kind
from epd_conformance.history.records import StoredRun
from epd_conformance.history.trend import trend as trend_of
from epd_conformance.verdict import Mode, Verdict

app = typer.Typer(help="The nights of a history: store runs, list them, show a cell's past.", no_args_is_help=True)

# Where published reports lie in a checkout.
REPORTS = Path("reports")
FileOption = Annotated[Path, typer.Option("--history", help="the history's SQLite file")]
SubjectOption = Annotated[str, typer.Option("--subject", help="only runs of this subject")]
ProfileOption = Annotated[str, typer.Option("--profile", help="only runs of this profile")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]


def nightly(
    history: Annotated[Path, typer.Option(help="the SQLite file of the nights before; made where there is none")],
    subject: Annotated[str, typer.Option(help="as in run")] = "reference",
    profile: Annotated[
        list[str] | None, typer.Option(help="as in run (may be repeated; default: contract, scheduler, proxy, all)")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="a new folder for the runs and the summary (default: nights/…)")
    ] = None,
    release: Annotated[
        list[Path] | None,
        typer.Option(
            help="a published report, or a folder of such (may be repeated; default: reports/, if it is there)"
        ),
    ] = None,
    build: Annotated[str, typer.Option(help="the state of the subject that is tested, such as a commit")] = "",
    level: Annotated[ConformanceLevel, typer.Option(help="as in run")] = ConformanceLevel.FULL,
    mode: Annotated[Mode, typer.Option(help="as in run")] = Mode.DEVELOP,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    model: Annotated[str, typer.Option(help="as in run; for the profiles with servers, as are dtype and boot")] = "",
    dtype: Annotated[str, typer.Option(help="as in run")] = "",
    boot: Annotated[str, typer.Option(help="as in run")] = "",
    known: Annotated[
        list[str] | None, typer.Option(help="known deviations: FILE, or PROFILE=FILE for one profile (may be repeated)")
    ] = None,
    examples: Annotated[int | None, typer.Option(help="as in run, for contract and scheduler")] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", min=0, help="as in run, for profiles with servers")] = 0,
    memory_wait: Annotated[float, typer.Option(help="as in run")] = 600.0,
    limit: Annotated[str, typer.Option(help="how long one profile may take before it is told to end")] = "3h",
    hunt: Annotated[str, typer.Option(help="hunt for so long after the profiles: 30m, 8h (default: no hunt)")] = "",
    as_json: JsonOption = False,
) -> None:
    """Run profiles, store them, and say what changed since the last green night: 0 nothing new, 1 regression, 3 incomplete."""
    from epd_conformance import hunting
    from epd_conformance.history import nightly as nights
    from epd_conformance.history import summary

    def say(line: str) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {line}", file=sys.stderr, flush=True)

    if release is None:
        release = [REPORTS] if any(REPORTS.glob("*/report.json")) else []
    asked = nights.Asked(
        subject=subject,
        history=history,
        out=out or Path("nights") / f"{datetime.now(UTC):%Y%m%dT%H%M%S}",
        profiles=tuple(profile or nights.PROFILES),
        releases=tuple(release),
        level=level,
        mode=mode,
        device=device,
        model=model,
        dtype=dtype,
        boot=boot,
        known=_known(known or []),
        examples=examples,
        workers=workers,
        memory_wait_s=memory_wait,
        limit_s=hunting.seconds(limit),
        build=build,
        hunt=hunt,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    night = nights.nightly(asked, say)
    print(
        json.dumps(night.to_json(), indent=2) if as_json else summary.markdown(night), end="" if not as_json else "\n"
    )
    raise typer.Exit(night.code)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _known(given: list[str]) -> dict[str, Path]:
    """By profile; the empty name for all."""
    found: dict[str, Path] = {}
    for text in given:
        profile, equals, path = text.partition("=")
        name, file = (profile, path) if equals else ("", text)
        if name in found:
            raise UsageError(f"--known is given twice for {name or 'all profiles'}: give one file")
        found[name] = Path(file)
    return found


@app.command()
def add(
    directories: Annotated[list[Path], typer.Argument(help="folders of finished runs, or their report.json")],
    history: FileOption,
    build: Annotated[str, typer.Option(help="the state of the subject that was tested, such as a commit")] = "",
    as_json: JsonOption = False,
) -> None:
    """Store finished runs, such as those of a CI job; a run that is stored already is left alone."""
    from epd_conformance.history.database import History
    from epd_conformance.report.writer import read_report

    reports = [(path, read_report(path)) for path in directories]
    # Each is held against the green night before it.
    reports.sort(key=lambda pair: pair[1].run.started)
    rows: list[dict[str, Any]] = []
    with History(history, write=True) as database:
        for path, report in reports:
            added = database.add(report, str(path), build)
            rows.append({**added.stored.to_json(), "stored": added.new})
            if not as_json:
                words = "stored" if added.new else "is stored already"
                print(f"{added.stored.run[:8]} {words}: {_title(added.stored)}")
    if as_json:
        print(json.dumps(rows, indent=2))


@app.command()
def accept(
    run: Annotated[str, typer.Argument(help="the beginning of a run's id, as `show` prints it")], history: FileOption
) -> None:
    """Hold later nights against this run, though it is not green: somebody has looked at what is new in it."""
    from epd_conformance.history.database import History

    with History(history, write=True) as database:
        print(f"accepted {_title(database.accept(run))}")


@app.command()
def show(
    history: FileOption,
    subject: SubjectOption = "",
    profile: ProfileOption = "",
    cell: Annotated[str, typer.Option(help="the past of this cell instead")] = "",
    kind: Annotated[
        str, typer.Option(help="cells by their past instead: flaky, broken, mended, new, not-shown …")
    ] = "",
    as_json: JsonOption = False,
) -> None:
    """List the nights, the newest first; or what every night said about a cell; or all cells that are flaky, broken …"""
    from epd_conformance.history.database import History

    if cell and kind:
        raise UsageError("--cell and --kind are two lists: ask for one")
    if kind and kind not in list(Kind):
        raise UsageError(f"no kind {kind!r}: use {', '.join(Kind)}")
    with History(history) as database:
        runs = database.runs(subject, profile)
        if cell:
            sights = [(run, seen) for run, seen in database.sights(cell) if run in runs]
            if not sights:
                raise UsageError(f"no run in {history} has the cell {cell}: `epd-conformance list --cells` shows cells")
            rows = [_seen(run) | {"verdict": str(seen.verdict), "reason": seen.reason} for run, seen in sights]
            past = {
                run.series.words: _past.words()
                for run, _ in sights
                if (_past := database.pasts(run.series).get(cell)) is not None
            }
            lines = [f"{row['night']}  {row['run'][:8]}  {row['verdict']:<13} {row['reason']}".rstrip() for row in rows]
            text = "\n".join([*lines, *(f"{series}: {words}" for series, words in past.items())])
        elif kind:
            found = [
                (series, past)
                for series in dict.fromkeys(run.series for run in runs)
                for past in database.pasts(series).values()
                if past.kind == kind
            ]
            rows = [{"series": series.words, **past.to_json()} for series, past in found]
            text = "\n".join(f"{past.cell}  {past.words()}  ({series.words})" for series, past in found)
        else:
            rows = [run.to_json() for run in reversed(runs)]
            text = ""
    if as_json:
        print(json.dumps(rows, indent=2))
    elif cell or kind:
        print(text or f"no cell is {kind}")
    else:
        _print_runs(list(reversed(runs)))


@app.command()
def trend(
    history: FileOption, subject: SubjectOption = "", profile: ProfileOption = "", as_json: JsonOption = False
) -> None:
    """The runs of each series over time: outcome, and how many cells had which verdict."""
    from epd_conformance.history.database import History

    with History(history) as database:
        runs = database.runs(subject, profile)
    by_series = {
        series: trend_of(run for run in runs if run.series == series)
        for series in dict.fromkeys(run.series for run in runs)
    }
    if as_json:
        rows = [
            {"series": series.words, "points": [point.to_json() for point in points]}
            for series, points in by_series.items()
        ]
        print(json.dumps(rows, indent=2))
        return
    for series, points in by_series.items():
        print(series.words)
        for point in points:
            counts = ", ".join(f"{count} {verdict}" for verdict, count in point.counts.items() if count)
            green = " (green)" if point.green else ""
            print(f"  {point.time:%Y-%m-%d %H:%M}  {point.outcome}{green}: {counts}")


def _title(run: StoredRun) -> str:
    green = ", accepted" if run.accepted else ", green" if run.green else ""
    return f"{run.series.words}, {run.night}: {run.outcome}{green}"


def _seen(run: StoredRun) -> dict[str, Any]:
    return {"run": run.run, "night": run.night, "started": run.started.isoformat(), "series": run.series.words}


def _print_runs(runs: list[StoredRun]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("began", "run", "subject", "profile", "outcome", "pass", "fail", "other", "vLLM"):
        table.add_column(column, justify="right" if column in ("pass", "fail", "other") else "left")
    for run in runs:
        failed = run.counts[Verdict.FAIL] + run.counts[Verdict.KNOWN_FAILING]
        passed = run.counts[Verdict.PASS]
        table.add_row(
            f"{run.started:%Y-%m-%d %H:%M}",
            run.run[:8],
            f"{run.series.subject} {run.build or run.version}".strip(),
            run.series.profile,
            f"{run.outcome}{', accepted' if run.accepted else ', green' if run.green else ''}",
            str(passed),
            str(failed),
            str(sum(run.counts.values()) - passed - failed),
            run.vllm,
        )
    Console(highlight=False).print(table)
