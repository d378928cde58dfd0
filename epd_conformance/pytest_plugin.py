"""The pytest plug-in: makes cells of the suites' tests, runs them through a `Run`, and turns verdicts into outcomes.

Registered as a pytest11 entry point; it does nothing unless `--subject` is given, so that it never disturbs another project's
tests. `epd-conformance run` is sugar over it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import parallel, reporters
from epd_conformance.catalogue import ConformanceLevel
from epd_conformance.errors import UsageError
from epd_conformance.live.case import MARK, AnyCase
from epd_conformance.oracle.cell import Judgement
from epd_conformance.progress import Progress, Relay
from epd_conformance.proxycheck import under_test
from epd_conformance.report import render_text, schema
from epd_conformance.run import AnyCell, Options, Planted, Run, default_seed, result_code
from epd_conformance.verdict import EXCUSED, Mode, Verdict

RUN = pytest.StashKey[Run]()
PLANTED = pytest.StashKey[Planted]()
# How a person who runs pytest itself sees the report; `epd-conformance run` prints it on its own.
REPORT = pytest.StashKey[schema.Report]()
# What is wrong with a suite, or with how it was called: found while tests are collected, said when that is done.
COMPLAINT = pytest.StashKey[str]()
# Whoever handled SIGTERM before the run.
HANDLER = pytest.StashKey[Any]()
CONTROLLER = pytest.StashKey[parallel.Controller]()
RECORD = pytest.StashKey[schema.CellRecord]()


def _asked(config: pytest.Config) -> bool:
    """Whether somebody asks for a run, or for help: options of these names must not be in the way of other projects' own."""
    words = [*config.invocation_params.args, *shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))]
    # Not known yet where the plug-in is handed to pytest.main itself.
    with contextlib.suppress(ValueError):
        words += config.getini("addopts")
    return any(str(word).partition("=")[0] in ("--subject", "--attach", "-h", "--help") for word in words)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    config = pluginmanager.get_plugin("pytestconfig")
    if config is None or not _asked(config):
        return
    group = parser.getgroup("epd-conformance", "certify a vLLM EC connector")
    group.addoption(
        "--subject", help="what to certify: reference, vllm-example, an entry point, module:Class, or file.toml"
    )
    group.addoption(
        "--profile", default="e-pd", help="contract, scheduler, proxy, aggregated, e-pd, e-p-d, all, or 2e-1pd"
    )
    group.addoption("--level", default="full", choices=[str(level) for level in ConformanceLevel])
    group.addoption("--device", default="cpu", help="cpu or cuda")
    group.addoption(
        "--model", default="tiny-qwen2.5-vl", help="a zoo name, a folder, or org/name[@commit] of the Hugging Face hub"
    )
    group.addoption("--dtype", default="", help="float32 on cpu and the model's own on cuda, unless given")
    group.addoption("--mode", default="develop", choices=[str(mode) for mode in Mode])
    group.addoption("--out", default=None, help="folder for report, evidence and logs (default: a new one in runs/)")
    group.addoption("--seed", default=None, type=int, help="draws every cell's contents (0; with --attach a new one)")
    group.addoption("--attach", default=None, help="TOML file: run against servers that something else started")
    group.addoption(
        "--examples",
        default=None,
        type=int,
        help="plans that the profiles contract and scheduler draw (default: by mode)",
    )
    group.addoption("--proxy-command", default="", help="profile proxy: the command that starts somebody else's proxy")
    group.addoption("--proxy-url", default="", help="profile proxy: where somebody else's proxy runs")
    group.addoption("--proxy-upstreams", default="", help="ports where it looks for its servers: encode=P,P,decode=P")
    group.addoption("--proxy-limit-s", default=None, type=float, help="seconds of silence that it bears (60)")
    group.addoption("--proxy-feature", action="append", default=[], help="a feature that it has, such as metadata_only")
    group.addoption("--boot", default="", help="how servers start: fork (CPU only, fast) or plain")
    group.addoption("--cell", action="append", default=[], help="run only this cell (may be repeated)")
    group.addoption("--known", default=None, help="TOML file: known deviations, waivers, flaky cells (develop mode)")
    group.addoption("--memory-wait", default=600.0, type=float, help="seconds to wait for memory that others hold")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`--clean-alluredir` is for the controller: each worker would empty the folder again, of the others' results too."""
    if parallel.INPUT in getattr(config, "workerinput", {}):
        config.option.clean_alluredir = False


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARK}(id, cases): the requirement that a suite's test is for")
    attach = config.getoption("--attach", None)
    if config.getoption("--subject", None) is None and attach is None:
        return
    option = config.getoption
    attach = Path(attach) if attach else None
    try:
        foreign = under_test.foreign(
            option("--proxy-command"),
            option("--proxy-url"),
            option("--proxy-upstreams"),
            option("--proxy-limit-s"),
            option("--proxy-feature"),
            option("--subject") or "",
        )
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    options = Options(
        foreign=foreign,
        subject=option("--subject") or "",
        profile=option("--profile"),
        level=ConformanceLevel(option("--level")),
        device=option("--device"),
        model=option("--model"),
        dtype=option("--dtype"),
        mode=Mode(option("--mode")),
        out=Path(option("--out")) if option("--out") else None,
        seed=option("--seed") if option("--seed") is not None else default_seed(attach),
        boot=option("--boot"),
        cells=tuple(option("--cell")),
        memory_wait_s=option("--memory-wait"),
        examples=option("--examples"),
        known=Path(option("--known")) if option("--known") else None,
        attach=attach,
        junit=Path(option("xmlpath")) if option("xmlpath", None) else None,
        allure=Path(option("allure_report_dir")) if option("allure_report_dir", None) else None,
    )
    if options.mode is Mode.CERTIFY and (option("keyword") or option("markexpr") or option("maxfail")):
        raise pytest.UsageError("--mode certify runs everything: leave out -k, -m, -x and --maxfail")
    share = parallel.share_of(config)
    if share is not None:
        # The controller's: where none is given it may be a new one in each process.
        options = replace(options, seed=share.start.run.seed)
    try:
        hands_out = parallel.controls(config)
        progress = Progress() if share is None else Relay(share.progress)
        run = Run(options, planted=config.stash.get(PLANTED, Planted()), progress=progress, share=share)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[RUN] = run
    config.pluginmanager.register(_Interrupts(run))
    if options.allure is not None and not hands_out and not config.option.collectonly:
        from epd_conformance.reporters import allure

        config.pluginmanager.register(allure.Tests(run, RECORD, _planned))
    if hands_out:
        config.stash[CONTROLLER] = parallel.Controller(run)
        config.pluginmanager.register(config.stash[CONTROLLER])
    if share is not None:
        parallel.Interruptible()
        return

    # A run that is told to end (a CI's time limit) must leave a report and no process behind, as with Ctrl-C.
    def end(*_: object) -> None:
        raise KeyboardInterrupt("terminated")

    # Python lets only the main thread have handlers.
    if threading.current_thread() is threading.main_thread():
        config.stash[HANDLER] = signal.signal(signal.SIGTERM, end)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker(MARK)
    run = metafunc.config.stash.get(RUN, None)
    if run is None and not _is_ours(marker):
        # Another project's fixture of that name.
        return
    cells: list[AnyCell] = []
    try:
        if marker is None:
            raise UsageError(f"{metafunc.definition.nodeid} asks for `cell` without @requirement: add it")
        if run is None:
            raise UsageError("the suites need a subject: add --subject reference (or your own)")
        requirement_id, cases = marker.args
        cells = run.cells_of(run.catalogue[requirement_id], cases)
    except UsageError as error:
        # Whatever is raised here, pytest shows it with a traceback, once for each file: it is said after the collection.
        metafunc.config.stash.setdefault(COMPLAINT, str(error))
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells], indirect=True)


def _is_ours(marker: pytest.Mark | None) -> bool:
    """Whether a mark is that of `live.case.requirement`; other projects mark their tests with the same word."""
    if marker is None or len(marker.args) != 2 or not isinstance(marker.args[1], tuple):
        return False
    return all(isinstance(case, AnyCase) for case in marker.args[1])


def _planned(item: pytest.Item) -> AnyCell | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("cell") if callspec is not None else None
    return found if isinstance(found, AnyCell) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cells of one topology together (its servers are booted once), then fix the expected set."""
    if (complaint := config.stash.get(COMPLAINT, None)) is not None:
        raise pytest.UsageError(complaint)
    run = config.stash.get(RUN, None)
    if run is None:
        return
    wanted = set(run.options.cells)

    def leave_out(item: pytest.Item) -> bool:
        cell = _planned(item)
        if cell is None:
            # A suite's test whose requirement this run does not select has no cell; pytest would call it skipped.
            return item.get_closest_marker(MARK) is not None
        return bool(wanted) and cell.id not in wanted

    dropped = [item for item in items if leave_out(item)]
    if dropped:
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=dropped)
    order = {name: position for position, name in enumerate(run.topologies)}

    def stage(item: pytest.Item) -> int:
        cell = _planned(item)
        return order[cell.topology] if cell is not None else -1

    items.sort(key=stage)
    # A suite that was not collected ends the session; there is no run whose report could have a hole in its place.
    broken = session.testsfailed and not config.getoption("continue_on_collection_errors")
    if config.getoption("collectonly") or broken:
        return
    try:
        run.begin([cell.id for item in items if (cell := _planned(item)) is not None])
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Begin the progress display; collection may still have failed before."""
    run = session.config.stash.get(RUN, None)
    if run is not None and run.share is None and not session.config.getoption("collectonly"):
        run.progress.__enter__()


class CellUnderTest:
    """What a suite's test gets: `check()` runs the cell and asserts its verdict."""

    def __init__(self, run: Run, planned: AnyCell, item: pytest.Item) -> None:
        self._run = run
        self._item = item
        self.planned = planned
        self.record: schema.CellRecord | None = None

    def check(self) -> None:
        """Run the cell, write down its verdict, and fail the test unless it is `pass`; an excused cell is an expected failure."""
        # pytest names the running test there: the subject's own code could read which cell it is, and servers would inherit it.
        os.environ.pop("PYTEST_CURRENT_TEST", None)
        self.record = self._item.stash[RECORD] = self._run.carry_out(self.planned)
        if self.record.verdict in EXCUSED:
            pytest.xfail(f"{self.record.verdict}: {self.record.reason}\n{self.record.message}")
        if self.record.verdict is not Verdict.PASS:
            pytest.fail(f"{self.record.verdict}: {self.record.reason}\n{self.record.message}", pytrace=False)


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Generator[CellUnderTest, None, None]:
    """One cell of a suite. A test that ends without having judged it, or breaks, makes the cell `error`."""
    run = request.config.stash[RUN]
    under_test = CellUnderTest(run, request.param, request.node)
    try:
        yield under_test
    finally:
        if under_test.record is None and not run.interrupted and not run.refused:
            judgement = Judgement(
                Verdict.ERROR, reason="harness", expected="the test judges its cell", observed="it did not"
            )
            request.node.stash[RECORD] = run.record(request.param, judgement, 0.0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """An error of usage or environment ends the run with exit code 2 while there is nothing to report yet."""
    try:
        return (yield)
    except UsageError as error:
        run = item.config.stash.get(RUN, None)
        if run is None or run.judged:
            raise
        run.refused = str(error)
        pytest.exit(str(error), returncode=2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every report of a test says which cell it is, and its verdict as soon as it has one: for JUnit and the controller."""
    run = item.config.stash.get(RUN, None)
    if run is not None and (planned := _planned(item)) is not None:
        facts = run.facts(planned)
        if (record := item.stash.get(RECORD, None)) is not None:
            facts |= {"verdict": str(record.verdict), "reason": record.reason, "seconds": f"{record.duration_s:.3f}"}
        item.user_properties[:] = [pair for pair in item.user_properties if pair[0] not in facts]
        item.user_properties += facts.items()
    return (yield)


class _Interrupts:
    """Notes at once that a run was stopped, so that the cell that was cut off is not recorded as a failure of the harness."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # `pytest.exit` comes this way too, with its own words.
        self._run.interrupted = self._run.interrupted or str(excinfo.value) or "interrupted by the user"

    def pytest_internalerror(self, excrepr: object) -> None:
        self._run.interrupted = self._run.interrupted or f"internal error: {str(excrepr).splitlines()[-1]}"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    run = session.config.stash.get(RUN, None)
    if run is None:
        return
    controller = session.config.stash.get(CONTROLLER, None)
    if controller is not None:
        controller.close()
    run.progress.__exit__(None, None, None)
    if run.refused or not hasattr(run, "chosen"):
        run.close()
        return
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not run.interrupted:
        run.interrupted = f"pytest ended with status {int(exitstatus)}"
    run.end()
    if run.share is not None:
        session.config.workeroutput[parallel.DECLINED] = run.declined  # type: ignore[attr-defined]  # pytest-xdist's
        return
    if controller is not None and (refusal := controller.refusal()):
        print(f"error: {refusal}", file=sys.stderr)
        session.exitstatus = 2
        return
    report = run.finish()
    reporters.complete(run, report)
    session.config.stash[REPORT] = report
    session.exitstatus = result_code(report)


def pytest_unconfigure(config: pytest.Config) -> None:
    run = config.stash.get(RUN, None)
    if run is not None:
        run.close()
    if (handler := config.stash.get(HANDLER, None)) is not None:
        signal.signal(signal.SIGTERM, handler)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    report = config.stash.get(REPORT, None)
    if report is not None:
        terminalreporter.section("verdicts")
        sys.stdout.flush()
        render_text.print_report(report)
        terminalreporter.line(f"report: {config.stash[RUN].out / 'report.json'}")
        if (page := config.stash[RUN].out / "report.html").is_file():
            terminalreporter.line(f"page: {page}")
