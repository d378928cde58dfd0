"""`publish`: a run's folder as something to give away: report, readable summary, and evidence that still verifies.

A run's files name folders of the machine it ran on: in logs, flags, tracebacks. Published, each becomes a word in angle brackets,
everywhere alike, so that evidence and journals still agree; then the list of artifacts is made anew and everything is verified.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import epd_conformance
from epd_conformance import catalogue as catalogues
from epd_conformance.catalogue.model import topology_kind
from epd_conformance.errors import UsageError
from epd_conformance.report import render_text
from epd_conformance.report.schema import CellRecord, Report
from epd_conformance.report.verify import verify
from epd_conformance.report.writer import (
    REPORT_NAME,
    RESULTS_NAME,
    build_report,
    read_report,
    read_results,
    write_report,
)
from epd_conformance.verdict import Verdict

EVIDENCE_NAME = "evidence.tar.xz"
README_NAME = "README.md"
# What one line of a failure may take in a table.
_OBSERVED = 300


def publish(run: Path, destination: Path, readme_file: Path | None = None) -> Report:
    """Write report, readable summary and evidence of `run` into a new folder `destination`; returns the published report.

    `readme_file`: a README whose table of reports is made anew from the destination's parent.
    Raises UsageError where the destination is taken or cannot be made, where the README has no place for the table, or where
    the run does not verify: what nobody can check is not published.
    """
    if readme_file is not None:
        # Before anything is written: else the report would lie there, and a second try be refused.
        with_table(_read(readme_file), "")
    if destination.is_dir() and any(destination.iterdir()):
        raise UsageError(f"{destination} is not empty: publish into a new folder")
    _demand(run, "the run")
    try:
        destination.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{destination} cannot be made ({error.strerror}): publish into a new folder") from error
    report = read_report(run)
    with tempfile.TemporaryDirectory(prefix="epd-publish-") as scratch:
        copy = Path(scratch) / "evidence"
        names = [RESULTS_NAME, *(artifact.path for artifact in report.artifacts)]
        hide = _Places(run.resolve())
        for name in dict.fromkeys(names):
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(hide((run / name).read_text("utf-8", "surrogateescape")), "utf-8", "surrogateescape")
        write_report(copy, build_report(read_results(copy / RESULTS_NAME), catalogues.load()))
        _demand(copy, "the copy without the machine's folders")
        shutil.copyfile(copy / REPORT_NAME, destination / REPORT_NAME)
        with tarfile.open(destination / EVIDENCE_NAME, "w:xz") as archive:
            archive.add(copy, "evidence", filter=_anonymous)
        published = read_report(copy)
    (destination / README_NAME).write_text(readme(published), encoding="utf-8")
    if readme_file is not None:
        refresh(readme_file, destination.parent)
    return published


def _demand(folder: Path, what: str) -> None:
    found = verify(folder)
    if not found.ok:
        raise UsageError(f"{what} does not verify, so it is not published: {found.lines()[0]}")


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


class _Places:
    """Replaces the names of this machine's folders, and its own, by words."""

    def __init__(self, run: Path) -> None:
        package = Path(epd_conformance.__file__).resolve().parent
        found = {
            str(run): "<run>",
            sys.prefix: "<venv>",
            str(package.parent): "<checkout>",
            sys.base_prefix: "<python>",
            # Not the folder for temporary files: it is the same everywhere, and plans name it.
            str(Path.home()): "<home>",
        }
        host = socket.gethostname()
        # Longest first: a folder inside another one is named for itself. The root of a file system would match everywhere.
        self._words = {
            path: word for path, word in sorted(found.items(), key=lambda pair: -len(pair[0])) if len(path) > 1
        }
        paths = "|".join(re.escape(path) for path in self._words)
        # Whole names only: `/home/me` is no part of `/home/melissa`, and `/root` none of `e-pd/model/root`.
        self._paths = re.compile(rf"(?<![\w.-])(?:{paths})(?![\w.-])")
        # A short name would hit words of any text.
        self._host = re.compile(rf"\b{re.escape(host)}\b") if len(host) > 5 else None

    def __call__(self, text: str) -> str:
        text = self._paths.sub(lambda found: self._words[found[0]], text)
        return self._host.sub("<host>", text) if self._host is not None else text


def readme(report: Report) -> str:
    """The summary that stands beside a published report: what came out, what fails and what that means, how to make it again."""
    implementation = report.subject.implementation
    name = f"{implementation.project or report.subject.name} {implementation.version}".strip()
    environment = report.environment
    fakes = environment.details.get("fakes") is True
    ran_on = (
        f"Fake servers ({environment.platform}), Python {environment.python}; "
        if fakes
        else f"vLLM {environment.vllm_version} ({environment.platform}), Python {environment.python}, torch {environment.torch}, "
        f"model {', '.join(model.id for model in environment.models)}, {environment.dtype}; "
    )
    beside = "" if fakes else f"Engine {report.engine_outcome}, proxy {report.proxy_outcome}. "
    lines = [
        f"# {name}",
        "",
        f"**{render_text.summary_lines(report)[0]}**",
        "",
        f"{beside}{report.summary['executed']} of {report.summary['expected']} expected cells ran, "
        f"{report.summary['pass']} passed.",
        "",
        f"{ran_on}{report.run.started:%Y-%m-%d}; suite {report.suite.version}.",
        "",
        "| requirement | verdict | cells |",
        "|---|---|---|",
    ]
    for item in report.requirements:
        passed = sum(cell.verdict is Verdict.PASS for cell in item.cells)
        lines.append(f"| {item.id} {item.title} | {item.verdict} | {passed} of {len(item.cells)} passed |")
    failing = [item for item in report.requirements if item.verdict is not Verdict.PASS]
    lines += ["", "## What fails, and what that means for who runs it", ""]
    if not failing:
        lines.append("Nothing that was tested. What was not tested is listed in `report.json` under `notVerified`.")
    catalogue = catalogues.load()
    for item in failing:
        lines += [f"### {item.id}: {item.title} ({item.verdict})", "", item.sentence, ""]
        lines += [" ".join(catalogue[item.id].rationale.split()), "", "| cell | verdict | observed |", "|---|---|---|"]
        lines += [_row(cell) for cell in item.cells if cell.verdict is not Verdict.PASS]
        lines.append("")
    lines += [
        "",
        "## Check it, make it again",
        "",
        "```",
        f"tar xf {EVIDENCE_NAME} && epd-conformance verify evidence",
        _again(report),
        "```",
        "",
        f"`verify` needs the suite that made it: version {report.suite.version}{_commit()}, digest `{report.suite.digest}`. "
        "Folders of the machine are replaced by words such as `<run>`.",
        "",
    ]
    return "\n".join(lines)


def _commit() -> str:
    """The commit of the checkout that this is, in words; nothing where it is none."""
    package = Path(epd_conformance.__file__).resolve().parent
    command = ["git", "-C", str(package), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        return f", commit `{head}`"
    return ""


def _again(report: Report) -> str:
    """The command that makes such a run."""
    run = report.run
    if topology_kind(run.profile) == "proxy":
        # Only the command says which proxy it was.
        return shlex.join(["epd-conformance", *run.command[1:]])
    words = [
        "epd-conformance",
        "run",
        "--subject",
        report.subject.name,
        "--profile",
        run.profile,
        "--mode",
        str(run.mode),
    ]
    words += ["--model", *(model.id for model in report.environment.models), "--seed", str(run.seed)]
    return shlex.join(words)


def _row(cell: CellRecord) -> str:
    # A death's words end with lines of the log.
    words = " ".join((cell.observed or cell.reason).split("--- from")[0].split())
    short = words if len(words) <= _OBSERVED else words[:_OBSERVED] + " …"
    return f"| `{cell.id}` | {cell.verdict}: {cell.reason} | {short.replace('|', '&#124;')} |"


# -- the table of a project's README -----------------------------------------------------------------------------------

BEGIN, END = "<!-- published reports: made by epd-conformance publish -->", "<!-- end of published reports -->"
CLASSES = ("cpu-v1", "cpu-v2-emulated", "cuda")
TOPOLOGIES = ("contract", "scheduler", "proxy", "aggregated", "e-pd", "e-p-d")


def table(reports: Path, link: str) -> str:
    """Environment class × profile × topology → the last report of each subject, or "never run", as Markdown.

    `link` leads to `reports`. Of a class that has no report the profile `all` stands there.
    """
    found: list[tuple[str, Report]] = sorted(
        ((path.parent.name, read_report(path.parent)) for path in reports.glob(f"*/{REPORT_NAME}")),
        key=lambda pair: pair[1].run.started,
    )
    lines = ["| environment | profile | " + " | ".join(TOPOLOGIES) + " |", "|---|---|" + "---|" * len(TOPOLOGIES)]
    for environment in CLASSES:
        mine = [(folder, report) for folder, report in found if report.environment_class == environment]
        for profile in dict.fromkeys(report.run.profile for _, report in mine) or ["all"]:
            of_profile = [(folder, report) for folder, report in mine if report.run.profile == profile]
            cells = [_entries(of_profile, topology, link) for topology in TOPOLOGIES]
            lines.append(f"| {environment} | {profile} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _entries(reports: Sequence[tuple[str, Report]], topology: str, link: str) -> str:
    entries: dict[str, str] = {}
    for folder, report in reports:
        cells = [cell for item in report.requirements for cell in item.cells if _column(cell.topology) == topology]
        if cells:
            passed = sum(cell.verdict is Verdict.PASS for cell in cells)
            entries[report.subject.name] = f"[{report.subject.name}]({link}/{folder}): {passed} of {len(cells)} pass"
    return "<br>".join(entries.values()) or "never run"


def _column(topology: str) -> str:
    # Fakes behind a proxy have one column, however they stand; servers in sizes of their own have none.
    return "proxy" if topology_kind(topology) == "proxy" else topology


def with_table(readme_text: str, made: str) -> str:
    """A README's text with the table between its two marks replaced. Raises UsageError where the marks are not there."""
    before, begin, rest = readme_text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"the README has no place for the table: put {BEGIN!r} and {END!r} into it")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def _read(readme_file: Path) -> str:
    try:
        return readme_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the README {readme_file} cannot be read ({error}): correct its name") from error


def refresh(readme_file: Path, reports: Path) -> None:
    """Make the table of a README anew from the reports below a folder."""
    link = os.path.relpath(reports, readme_file.parent)
    text = _read(readme_file)
    readme_file.write_text(with_table(text, table(reports, Path(link).as_posix())), encoding="utf-8")
