"""A night: the profiles one after the other, each a `run` in a process of its own, stored and held against what was before.

A process of its own, so that a profile that dies, hangs or takes the interpreter with it loses nothing but itself. Whatever it
has written by then is reported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from epd_conformance import hunting
from epd_conformance.catalogue import ConformanceLevel
from epd_conformance.catalogue.model import topology_kind
from epd_conformance.errors import UsageError
from epd_conformance.history import summary
from epd_conformance.history.database import History
from epd_conformance.history.night import Base, Hunted, Night, ProfileNight
from epd_conformance.history.records import Series
from epd_conformance.history.trend import of_series
from epd_conformance.report import merge
from epd_conformance.report.html import write_page
from epd_conformance.report.schema import Report
from epd_conformance.report.writer import REPORT_NAME, RESULTS_NAME, read_report
from epd_conformance.run import Options, fresh_folder
from epd_conformance.verdict import Mode

PROFILES = ("contract", "scheduler", "proxy", "all")
# A run that is told to end stops its servers and writes its report; on a busy machine with four servers that takes a while.
GRACE_S = 180.0
# As much of a log's end as holds the error of a run that could not begin.
TAIL = 40


@dataclass(frozen=True)
class Asked:
    """What was asked for. Times in seconds; `limit_s` is for one profile.

    `releases`: folders of published reports, or folders that hold such. `known`: a file of known deviations a profile, the
    empty name for all. `build`: what the caller calls the subject's state. `hunt`: a budget as `hunt` takes it, or empty.
    """

    subject: str
    history: Path
    out: Path
    profiles: Sequence[str] = PROFILES
    releases: Sequence[Path] = ()
    level: ConformanceLevel = ConformanceLevel.FULL
    mode: Mode = Mode.DEVELOP
    device: str = "cpu"
    model: str = ""
    dtype: str = ""
    boot: str = ""
    known: Mapping[str, Path] = field(default_factory=dict)
    examples: int | None = None
    workers: int = 0
    memory_wait_s: float = 600.0
    limit_s: float = 3 * 3600.0
    build: str = ""
    hunt: str = ""

    def check(self) -> None:
        """Raises UsageError for what can be known to be wrong before anything runs."""
        if not self.profiles:
            raise UsageError("a night needs a profile: add --profile contract")
        if twice := next((name for name in self.profiles if list(self.profiles).count(name) > 1), ""):
            raise UsageError(f"--profile {twice} is given twice: give each profile once")
        for profile in self.profiles:
            Options(self.subject, profile=profile).topologies()
        for profile, path in self.known.items():
            if profile and profile not in self.profiles:
                raise UsageError(f"--known {profile}={path}: the night has no profile {profile}")
            if not path.is_file():
                raise UsageError(f"--known {path}: there is no such file")
        if self.hunt:
            hunting.seconds(self.hunt)
        for path in self.releases:
            if not path.exists():
                raise UsageError(f"--release {path}: there is no such folder")

    def words(self, profile: str) -> list[str]:
        """The arguments of one profile's run, without those that mean nothing for it."""
        found = ["run", "--profile", profile, "--level", str(self.level), "--mode", str(self.mode)]
        kind = topology_kind(profile)
        if kind != "proxy":
            found += ["--subject", self.subject]
        if kind in ("contract", "scheduler"):
            found += ["--examples", str(self.examples)] if self.examples is not None else []
        elif kind != "proxy":
            found += ["--device", self.device, "--memory-wait", str(self.memory_wait_s)]
            for option, value in (("--model", self.model), ("--dtype", self.dtype), ("--boot", self.boot)):
                found += [option, value] if value else []
            found += ["--workers", str(self.workers)] if self.workers else []
        if (known := self.known.get(profile, self.known.get(""))) is not None:
            found += ["--known", str(known)]
        return [*found, "--out", str(self.out / profile)]


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (negative: the signal), and why it was told to, if it was."""

    code: int
    told: str = ""


Start = Callable[[Sequence[str], Path, float], Ended]


def start(words: Sequence[str], log: Path, limit_s: float) -> Ended:
    """`epd-conformance WORDS` in a process of its own, what it prints in a log. Told to end after `limit_s`, then killed.

    A KeyboardInterrupt is handed on to it and raised again when it has ended.
    """
    # Plain lines instead of a table; and a run's `--subject module:Class` finds modules beside the caller.
    environment = {**os.environ, "CI": "true"}
    with log.open("wb") as file:
        # A session of its own: Ctrl-C of a terminal must not reach its servers before it can say why they end.
        process = subprocess.Popen(
            [sys.executable, "-m", "epd_conformance.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            return Ended(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            return Ended(_end(process), f"it did not end within {limit_s:.0f} s")
        except BaseException:
            _end(process)
            raise


def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(GRACE_S)
    except BaseException as error:
        # Also for a second Ctrl-C: nothing may go on behind a night that has ended.
        process.kill()
        code = process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return code
        raise


def nightly(asked: Asked, say: Callable[[str], None], start: Start = start) -> Night:
    """Run the profiles of a night, store them, and write `summary.md` and `summary.json`. Raises UsageError before anything runs.

    `start` carries out one command; tests put something quicker in its place.
    """
    asked.check()
    # Hours later would be too late to find out that nothing can be stored.
    History(asked.history, write=True).__exit__(None, None, None)
    releases = [report for path in asked.releases for report in _reports(path)]
    out = fresh_folder(asked.out, f"nightly-{asked.subject}")
    asked = replace(asked, out=out)
    began = datetime.now(UTC)
    done: list[ProfileNight] = []
    hunted: Hunted | None = None
    interrupted = False
    try:
        for profile in asked.profiles:
            say(f"{profile}: {out / f'{profile}.log'}")
            done.append(_profile(asked, profile, releases, start))
            say(f"{profile}: {done[-1].words}{': ' if done[-1].said else ''}{done[-1].said}")
        if asked.hunt:
            say(f"hunt: {asked.hunt}")
            hunted = _hunt(asked, began, start)
    except KeyboardInterrupt:
        interrupted = True
    while len(done) < len(asked.profiles):
        profile = asked.profiles[len(done)]
        # The one that was running has written its report when it was told to end.
        done.append(_judge(asked, profile, releases, "the night was interrupted", 0.0))
    night = Night(asked.subject, began, tuple(done), out, asked.history, hunted, interrupted, bool(releases))
    (out / "summary.md").write_text(summary.markdown(night), encoding="utf-8")
    (out / "summary.json").write_text(json.dumps(night.to_json(), indent=2) + "\n", encoding="utf-8")
    return night


def _profile(asked: Asked, profile: str, releases: Sequence[Base], start: Start) -> ProfileNight:
    log = asked.out / f"{profile}.log"
    began = time.monotonic()
    ended = _started(start, asked.words(profile), log, asked.limit_s)
    return _judge(asked, profile, releases, _words(ended, log), time.monotonic() - began)


def _started(start: Start, words: Sequence[str], log: Path, limit_s: float) -> Ended:
    """No disk for the log or no memory for a process: what cannot be started has ended."""
    try:
        return start(words, log, limit_s)
    except OSError as error:
        return Ended(127, f"it could not be started ({error})")


def _words(ended: Ended, log: Path) -> str:
    """Why a run has no whole report, if it has none."""
    if ended.told:
        return ended.told
    if ended.code < 0:
        return f"it was ended by {signal.Signals(-ended.code).name}"
    if ended.code not in (0, 1, 3):
        return _error(log) or f"it ended with exit code {ended.code}"
    return ""


def _error(log: Path) -> str:
    """The last `error:` line of a log, without that word; else its last line."""
    try:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][
            -TAIL:
        ]
    except OSError:
        return ""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or [""])[-1].strip()


def _judge(asked: Asked, profile: str, releases: Sequence[Base], said: str, seconds: float) -> ProfileNight:
    """What a run has left, stored and held against what was before; nothing of it may lose the other profiles."""
    folder = asked.out / profile
    night = ProfileNight(profile, folder=folder, seconds=seconds, said=said)
    try:
        if (report := _left(folder)) is None:
            return replace(night, said=said or "it left no report")
    except Exception as error:  # whatever lies there: it is told, and the other profiles go on
        return replace(night, said=said or f"its report cannot be read ({error})")
    night = replace(night, report=report, release=_release(report, releases))
    try:
        with History(asked.history, write=True) as history:
            added = history.add(report, str(folder), asked.build, night.release)
    except UsageError as error:
        return replace(night, notes=(f"not stored: {error}",))
    notes = (added.note,) if added.note else ()
    try:
        # Made anew, since the one that the run wrote knows of no other night.
        write_page(folder, report, of_series(asked.history, report))
    except Exception as error:  # a page decides nothing
        notes = (*notes, f"its page is without the trend ({type(error).__name__}: {error})")
    return replace(night, stored=added.stored, green=added.green, pasts=added.pasts, notes=notes)


def _left(folder: Path) -> Report | None:
    """The report of a run; made of its results where it died before it could."""
    if (folder / REPORT_NAME).is_file():
        return read_report(folder)
    return merge.rebuild(folder) if (folder / RESULTS_NAME).is_file() else None


def _reports(path: Path) -> list[Base]:
    """The published report of a folder, or those of the folders in it. Raises UsageError where there is none."""
    places = [path] if path.is_file() or (path / REPORT_NAME).is_file() else sorted(path.glob(f"*/{REPORT_NAME}"))
    if not places:
        raise UsageError(f"--release {path} holds no {REPORT_NAME}, nor does a folder in it: give what `publish` made")
    return [Base((place.parent if place.is_file() else place).name, read_report(place)) for place in places]


def _release(report: Report, releases: Sequence[Base]) -> Base | None:
    """The newest release of the same series."""
    same = [base for base in releases if Series.of(base.report) == Series.of(report)]
    return max(same, key=lambda base: base.report.run.started, default=None)


def _hunt(asked: Asked, began: datetime, start: Start) -> Hunted:
    """A hunt with the day's own seed, so that each night looks elsewhere and can be repeated."""
    log = asked.out / "hunt.log"
    words = ["hunt", "--subject", asked.subject, "--time-budget", asked.hunt, "--seed", str(began.toordinal())]
    words += ["--device", asked.device, "--memory-wait", str(asked.memory_wait_s), "--out", str(asked.out / "hunt")]
    for option, value in (("--model", asked.model), ("--dtype", asked.dtype), ("--boot", asked.boot)):
        words += [option, value] if value else []
    ended = _started(start, words, log, hunting.seconds(asked.hunt) + asked.limit_s)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return Hunted(ended.code, tuple(lines), log)
