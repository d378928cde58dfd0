"""One results file out of those that the workers of a parallel run wrote.

With `-n` the controller writes the first lines of `results.ndjson` (run, environment, expected set), and each worker a results
file of its own, `workers/<worker>.ndjson`: whichever process dies, the others' lines are whole. `merge` makes one file of them;
`python -m epd_conformance.report.merge DIR` does so, and writes the report, for a run whose controller died.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from epd_conformance import catalogue as catalogues
from epd_conformance.errors import UsageError
from epd_conformance.report.schema import EnvironmentInfo, ExpectedSet, Model, Report, RunEnd, RunStart
from epd_conformance.report.writer import (
    KINDS,
    REOPENED,
    RESULTS_NAME,
    ResultLine,
    ResultLines,
    build_report,
    read_results,
    write_report,
)

WORKERS = "workers"


def worker_results(folder: Path, worker: str) -> Path:
    """Where a worker of a run writes its results."""
    return folder / WORKERS / f"{worker}.ndjson"


def merge(folder: Path, end: RunEnd | None = None) -> None:
    """Replace `results.ndjson` by the whole run: one run line, one environment with what every worker's servers had, one
    expected set, all other lines in the order of their times, and the end line.

    `end` None leaves the run without one, as after a crash, unless it has one already. A worker that did not come to its end
    makes the run an interrupted one. The workers' files stay, so that a second call gives the same. Does nothing where no
    worker wrote anything.
    Raises UsageError where the files are not of one run, or its workers did not all have the same expected set.
    """
    parts = {path.stem: read_results(path) for path in sorted((folder / WORKERS).glob("*.ndjson"))}
    if not parts:
        return
    path = folder / RESULTS_NAME
    own = read_results(path) if path.is_file() else ResultLines(())
    every = {"the controller": own, **{f"worker {name}": part for name, part in parts.items()}}
    head = [_only(every, RunStart), _environment(every), _only(every, ExpectedSet)]
    # Head and end are made anew: a worker's end is only its own.
    apart = {*(KINDS[model] for model in (RunStart, EnvironmentInfo, ExpectedSet, RunEnd)), REOPENED}
    bodies = [[line for line in part if line.kind not in apart] for part in parts.values()]
    merged = {_key(line) for body in bodies for line in body}
    rest = [line for line in own if line.kind not in apart and _key(line) not in merged]
    lines = _by_time([rest, *bodies])
    whole = [_text(line) for line in (*head, *lines)]
    last = _end(end or next(iter(own.all(RunEnd)), None), parts)
    if last is not None:
        whole.append(json.dumps({"kind": KINDS[RunEnd], "time": last.finished.isoformat(), "data": last.to_disk()}))
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=".results-", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write("".join(f"{line}\n" for line in whole))
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def rebuild(folder: Path) -> Report:
    """Merge what a run has left and write its report, also where the run crashed. Raises UsageError where nothing is left."""
    merge(folder)
    return write_report(folder, build_report(read_results(folder / RESULTS_NAME), catalogues.load()))


def _by_time(bodies: Iterable[Iterable[ResultLine]]) -> list[ResultLine]:
    """The lines of several files by their times; those of one file keep their order, also where its clock was set back."""
    timed = []
    for body in bodies:
        latest = datetime.min.replace(tzinfo=UTC)
        for line in body:
            latest = max(latest, line.time)
            timed.append((latest, line))
    return [line for _, line in sorted(timed, key=lambda pair: pair[0])]


def _only(every: Mapping[str, ResultLines], model: type[Model]) -> ResultLine:
    """The line of a kind that all files have alike. Raises UsageError where they differ."""
    found: tuple[str, ResultLine] | None = None
    for name, part in every.items():
        for line in part:
            if line.kind != KINDS[model]:
                continue
            if found is not None and line.data != found[1].data:
                raise UsageError(
                    f"{name} has another {line.kind} line than {found[0]}: these are not results of one run"
                )
            found = found or (name, line)
    if found is None:
        raise UsageError(f"no worker wrote a {KINDS[model]} line: there is nothing to make a report from")
    return found[1]


def _environment(every: Mapping[str, ResultLines]) -> ResultLine:
    """The environment of all servers of the run: each worker knows only what its own had."""
    lines = [line for part in every.values() for line in part if line.kind == KINDS[EnvironmentInfo]]
    if not lines:
        raise UsageError("no worker wrote an environment line: there is nothing to make a report from")
    found = [part.all(EnvironmentInfo)[-1] for part in every.values() if part.all(EnvironmentInfo)]
    flags: dict[str, tuple[str, ...]] = {}
    details: dict[str, Any] = {}
    for environment in found:
        flags |= environment.flags
        for name, value in environment.details.items():
            # A worker that started nothing has an empty server environment, which says nothing about the others'.
            known = details.get(name)
            details[name] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
    backends = {name for environment in found for name in environment.attention_backend.split(", ") if name}
    united = found[-1].model_copy(
        update={
            "flags": flags,
            "devices": tuple(sorted({device for environment in found for device in environment.devices})),
            "attention_backend": ", ".join(sorted(backends)),
            "patches": tuple(dict.fromkeys(patch for environment in found for patch in environment.patches)),
            "details": details,
        }
    )
    last = max(lines, key=lambda line: line.time)
    return ResultLine(last.number, last.kind, last.time, united.to_disk())


def _end(end: RunEnd | None, parts: Mapping[str, ResultLines]) -> RunEnd | None:
    """The end of the run: interrupted where that of a worker is, or is missing."""
    if end is None or end.interrupted:
        return end
    for reason in _ends(parts):
        return end.model_copy(update={"interrupted": True, "reason": reason})
    return end


def _ends(parts: Mapping[str, ResultLines]) -> Iterator[str]:
    for name, part in parts.items():
        ends = part.all(RunEnd)
        if not ends:
            yield f"worker {name} died"
        elif ends[-1].interrupted:
            yield f"worker {name}: {ends[-1].reason}"


def _key(line: ResultLine) -> str:
    return json.dumps([line.kind, line.time.isoformat(), line.data], sort_keys=True)


def _text(line: ResultLine) -> str:
    whole = {"kind": line.kind, "time": line.time.isoformat(timespec="milliseconds"), "data": line.data}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


if __name__ == "__main__":
    try:
        made = rebuild(Path(sys.argv[1]))
    except (UsageError, IndexError) as error:
        sys.exit(f"error: {error}" if isinstance(error, UsageError) else "error: give the folder of a run")
    print(f"{made.subject.name}: {made.certified_outcome} on {made.environment_class}")
