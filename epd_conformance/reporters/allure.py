"""Allure: allure-pytest writes the results (`--alluredir`), this says what stands in them. Needs the package allure-pytest.

Ids follow from the cell, so that a cell has one history whatever folder, worker or parameter object it ran with. Every expected
cell has a result. `failed` means shown not to conform, `broken` that nothing was shown either way, `skipped` declared beforehand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import allure_commons
import pytest
from allure_commons.logger import AllureFileLogger
from allure_commons.model2 import Attachment, Label, Link, Parameter, Status, StatusDetails, TestResult
from allure_commons.types import AttachmentType, LabelType, LinkType, Severity
from allure_commons.utils import md5, now, uuid4

from epd_conformance.catalogue.page import AREAS
from epd_conformance.report.redact import redact
from epd_conformance.report.schema import CellRecord, Report
from epd_conformance.verdict import Level, Verdict

if TYPE_CHECKING:
    from epd_conformance.run import AnyCell, Run

STATUSES: dict[Verdict, str] = {
    Verdict.PASS: Status.PASSED,
    Verdict.FAIL: Status.FAILED,
    Verdict.ERROR: Status.BROKEN,
    Verdict.INCONCLUSIVE: Status.BROKEN,
    Verdict.COULD_NOT_RUN: Status.BROKEN,
    Verdict.KNOWN_FAILING: Status.SKIPPED,
    Verdict.WAIVED: Status.SKIPPED,
    Verdict.NOT_SUPPORTED: Status.SKIPPED,
}
SEVERITIES = {Level.MUST: Severity.CRITICAL, Level.SHOULD: Severity.NORMAL, Level.MAY: Severity.MINOR}
# Labels of allure-pytest that say where a test ran; the others are made of Python names and give way to ours.
KEPT = {LabelType.HOST, LabelType.THREAD, LabelType.FRAMEWORK, LabelType.LANGUAGE}
# The end of a log or journal is what explains a failure; a report of a hundred failures must still open in a browser.
TAIL_BYTES = 64 * 1024
# More files than a stack of seven processes has are the logs of other stacks.
MOST_FILES = 24
# Where a source names an issue or a pull request the way GitHub shortens it.
_ISSUE = re.compile(r"\b([\w.-]+/[\w.-]+)#(\d+)")
_URL = re.compile(r"https?://[^\s;,)]+")


class Tests:
    """A pytest plug-in object, in each process that runs tests: rewrites the result of every cell before it is written."""

    def __init__(
        self,
        run: Run,
        record: pytest.StashKey[CellRecord],
        planned: Callable[[pytest.Item], AnyCell | None],
    ) -> None:
        """`record`: where an item has its cell's record; `planned`: the cell of an item."""
        assert run.options.allure is not None, "asked for"
        self._run = run
        self._record = record
        self._planned = planned
        self._item: pytest.Item | None = None
        self._folder = run.options.allure
        allure_commons.plugin_manager.register(self)

    def pytest_unconfigure(self) -> None:
        allure_commons.plugin_manager.unregister(self)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._item = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._item = item

    @allure_commons.hookimpl(tryfirst=True)  # type: ignore[untyped-decorator]
    def report_result(self, result: TestResult) -> None:
        """Called by allure-pytest when a test is over, or was cut off."""
        item = self._item
        planned = self._planned(item) if item is not None else None
        if item is None or planned is None:
            return
        record = item.stash.get(self._record, None) or could_not_run(self._run, planned.id, "cut off")
        dress(self._run, self._folder, result, record)


def complete(run: Run, report: Report) -> None:
    """Add the cells that have no result, and what the report says of the run, to the folder of Allure results."""
    folder = run.options.allure
    assert folder is not None, "asked for"
    there = _cells_of_run(folder, run.start.run.id)
    logger = AllureFileLogger(folder)
    for item in report.requirements:
        for cell in item.cells:
            if cell.id not in there:
                result = TestResult(uuid=str(uuid4()), start=now(), stop=now())
                logger.report_result(dress(run, folder, result, cell))
    facts = {
        "subject": report.subject.name,
        "environment.class": report.environment_class,
        "outcome": report.outcome,
        "engine.outcome": report.engine_outcome,
        "proxy.outcome": report.proxy_outcome,
        "vllm": report.environment.vllm_version,
        "suite": report.suite.version,
        "suite.digest": report.suite.digest,
        "run": report.run.id,
        "mode": report.run.mode,
        "profile": report.run.profile,
        "seed": report.run.seed,
    }
    text = "".join(f"{name}={value}\n" for name, value in facts.items())
    (folder / "environment.properties").write_text(text, encoding="utf-8")


def could_not_run(run: Run, cell: str, reason: str) -> CellRecord:
    """The record of a cell that has none."""
    expected = next(one for one in run.expected.cells if one.id == cell)
    return CellRecord(**expected.model_dump(), verdict=Verdict.COULD_NOT_RUN, reason=reason)


def dress(run: Run, folder: Path, result: TestResult, record: CellRecord) -> TestResult:
    """Make an Allure result that of a cell: ids, words, labels, verdict and attachments. Returns the same object."""
    requirement = run.catalogue[record.requirement]
    subject = run.subject.implementation.project or run.options.subject
    result.fullName = record.id
    result.testCaseId = md5(record.id)
    # Results of one history id in one report are taken for repetitions: two subjects are none of each other.
    result.historyId = md5(record.id, subject, str(run.environment_class))
    result.name = f"{requirement.title}: {record.case}" if record.case else requirement.title
    result.description = (
        f"{requirement.sentence}\n\n**Why:** {requirement.rationale}\n\n**Source:** {requirement.source}\n\n"
        f"**Cell:** `{record.id}`"
    )
    result.descriptionHtml = None
    if hasattr(result, "titlePath"):
        result.titlePath = [requirement.area, requirement.id, record.topology]
    result.parameters = [
        *(Parameter(name=name, value=getattr(record, name)) for name in ("topology", "model", "case")),
        # Another seed asks the same of other contents: no other test.
        Parameter(name="seed", value=str(run.options.seed), excluded=True),
    ]
    tags = (str(requirement.level), str(requirement.layer), str(run.environment_class), str(record.verdict))
    labels = [
        (LabelType.EPIC, f"{requirement.area}: {AREAS.get(requirement.area, '')}"),
        (LabelType.FEATURE, requirement.id),
        (LabelType.STORY, record.topology),
        (LabelType.PARENT_SUITE, subject),
        (LabelType.SUITE, record.topology),
        (LabelType.SUB_SUITE, requirement.area),
        (LabelType.SEVERITY, SEVERITIES[requirement.level].value),
        ("owner", str(requirement.owner)),
        ("cell", record.id),
        ("run", run.start.run.id),
        *((LabelType.TAG, tag) for tag in tags),
    ]
    result.labels = [label for label in result.labels if label.name in KEPT]
    result.labels += [Label(name=name, value=value) for name, value in labels]
    result.links = [Link(type=LinkType.LINK, url=url, name=name) for name, url in links(requirement.source)]
    # A test that passed its cell and then broke (in the clean-up of another plug-in) stays broken.
    if record.verdict is not Verdict.PASS or result.status is None:
        result.status = STATUSES[record.verdict]
    if record.verdict is not Verdict.PASS:
        said = f"{record.verdict}: {record.reason}" if record.reason else str(record.verdict)
        known = record.verdict in (Verdict.KNOWN_FAILING, Verdict.WAIVED)
        result.statusDetails = StatusDetails(message=said, trace=redact(record.message) or None, known=known or None)
    logger = AllureFileLogger(folder)
    for name, kind, body in _attachments(run.out, record):
        file_name = f"{uuid4()}-attachment.{kind.extension}"
        logger.report_attached_data(body, file_name)
        result.attachments.append(Attachment(name=name, source=file_name, type=kind.mime_type))
    return result


def links(source: str) -> list[tuple[str, str]]:
    """Name and address of what a requirement's source names: addresses, and issues as `owner/repository#number`."""
    found = [(address, address) for address in _URL.findall(source)]
    return found + [
        (f"{repo}#{number}", f"https://github.com/{repo}/issues/{number}") for repo, number in _ISSUE.findall(source)
    ]


def _attachments(out: Path, record: CellRecord) -> Iterator[tuple[str, AttachmentType, str]]:
    """What a cell rests on. Journals and logs only where it did not pass: its evidence holds its own journal lines."""
    if record.message:
        yield "failure", AttachmentType.TEXT, redact(record.message)
    files = 0
    for artifact in record.artifacts:
        path = out / artifact
        if artifact.startswith("cells/") and path.is_file():
            evidence = path.read_text(encoding="utf-8")
            yield "plan", AttachmentType.JSON, json.dumps(json.loads(evidence).get("plan"), indent=2)
            yield "evidence", AttachmentType.JSON, evidence
        elif record.verdict is not Verdict.PASS and not artifact.startswith("baseline/"):
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if file.is_file() and files < MOST_FILES:
                    files += 1
                    yield file.relative_to(out).as_posix(), AttachmentType.TEXT, _tail(file)


def _tail(path: Path) -> str:
    """The last lines of a file, secrets taken out."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        data = file.read()
    if size > TAIL_BYTES:
        data = data.partition(b"\n")[2]
        head = f"[the last {len(data)} of {size} bytes]\n"
    else:
        head = ""
    return head + "\n".join(redact(line) for line in data.decode("utf-8", "replace").splitlines())


def _cells_of_run(folder: Path, run: str) -> set[str]:
    """The cells that have a result of this run; the folder may hold those of others."""
    found: set[str] = set()
    for path in folder.glob("*-result.json"):
        try:
            labels: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")).get("labels", [])
        except ValueError:
            continue  # of a worker that died while it wrote
        named = {label["name"]: label["value"] for label in labels}
        if named.get("run") == run and "cell" in named:
            found.add(named["cell"])
    return found
