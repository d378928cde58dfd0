"""A run over several processes (`-n`, with pytest-xdist): one controller, and workers that each have a topology at a time.

The controller collects the cells and fixes the expected set before any worker starts, makes the run's folder, hands both to the
workers, shows the progress, and makes one report of what they wrote (report/merge.py). A worker boots servers, carries cells
out, and writes into the same folder: the names of stacks, baselines and cells are those of its topology, so no two workers share
a file. Which worker gets which cells is decided in scheduling.py, how many have servers at once in topology/claims.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from epd_conformance.catalogue.selection import cell_of_test
from epd_conformance.errors import UsageError
from epd_conformance.progress import Progress
from epd_conformance.report.merge import WORKERS, worker_results
from epd_conformance.report.schema import CellRecord, ExpectedSet, RunEnd, RunStart
from epd_conformance.report.writer import RESULTS_NAME, read_results
from epd_conformance.verdict import Verdict

if TYPE_CHECKING:
    from epd_conformance.run import Run

# What the controller tells a worker, and a worker the controller, beside what pytest-xdist itself does.
INPUT = "epd_conformance"
DECLINED = "epd_conformance_declined"
# After a signal a worker stops its servers, for which the guard may take 20 s at worst (guard.py), and writes its last line.
STOP_S = 30.0
# How often the controller looks for new lines of its workers; a person does not notice a fifth of a second.
POLL_S = 0.2


@dataclass(frozen=True)
class Share:
    """What a worker knows of the run that it takes part in. `chosen`: the cells that will run, in their order."""

    worker: str
    folder: Path
    start: RunStart
    expected: ExpectedSet
    chosen: tuple[str, ...]

    def to_input(self) -> dict[str, Any]:
        """As plain values, which is all that can be sent to a worker."""
        return {
            "folder": str(self.folder),
            "start": self.start.to_disk(),
            "expected": self.expected.to_disk(),
            "chosen": list(self.chosen),
        }

    @classmethod
    def from_input(cls, worker: str, data: Mapping[str, Any]) -> Share:
        return cls(
            worker,
            Path(data["folder"]),
            RunStart.model_validate(data["start"]),
            ExpectedSet.model_validate(data["expected"]),
            tuple(data["chosen"]),
        )

    @property
    def progress(self) -> Path:
        """Where the worker's lines of progress go."""
        return self.folder / WORKERS / f"{self.worker}.log"


def share_of(config: pytest.Config) -> Share | None:
    """What this process has to do as a worker; None where it is none."""
    given = getattr(config, "workerinput", None)
    if given is None:
        return None
    return Share.from_input(given["workerid"], given[INPUT])


def controls(config: pytest.Config) -> bool:
    """Whether this process hands its cells to workers. Raises UsageError for workers on other machines."""
    option = config.option
    if hasattr(config, "workerinput") or option.collectonly or getattr(option, "dist", "no") == "no":
        return False
    gateways = [str(spec).partition("*")[2] or str(spec) for spec in option.tx]
    if any(not spec.startswith("popen") for spec in gateways):
        raise UsageError("workers share the folder of the run: leave out --tx, and give their number with -n")
    return bool(gateways)


class Interruptible:
    """Lets SIGINT and SIGTERM end a worker, once.

    Ctrl-C reaches a worker from the terminal and again from its controller; the second must not cut the cleaning up short.
    """

    def __init__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._end)

    def _end(self, number: int, frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt("terminated" if number == signal.SIGTERM else "interrupted by the user")


class Controller:
    """The pytest plug-in object of the process that hands out the cells."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._workers: dict[str, int] = {}
        self._told: set[str] = set()
        self._tail: Tail | None = None
        self._stopping = False
        self.declined = ""
        """Why a worker could not even begin."""

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    @pytest.hookimpl(tryfirst=True, optionalhook=True)
    def pytest_xdist_setupnodes(self) -> None:
        """Collect here too, before pytest-xdist starts the workers.

        What is wrong with the options or the suites is so said once, by this process, and nothing was started for it.
        """
        session = self._session
        broken: list[str] = []

        class Watch:
            def pytest_collectreport(self, report: pytest.CollectReport) -> None:
                if report.failed:
                    broken.append(f"{report.nodeid} was not collected\n{report.longrepr}")

        watch = Watch()
        session.config.pluginmanager.register(watch)
        session.perform_collect()
        session.config.pluginmanager.unregister(watch)
        if broken:
            # Who runs pytest without its terminal has a plug-in that shows such reports.
            shown = session.config.pluginmanager.has_plugin("terminalreporter")
            raise pytest.UsageError("\n".join(broken) if shown else f"{len(broken)} files of the suites do not work")
        self._tail = Tail(self._run.out / WORKERS, self._run.progress)
        self._tail.start()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        run = self._run
        chosen = tuple(cell.id for cell in run.chosen)
        node.workerinput[INPUT] = Share(node.gateway.id, run.out, run.start, run.expected, chosen).to_input()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodeready(self, node: Any) -> None:
        # pytest-xdist has asked for it when it set the worker up, so this is no message to a busy process.
        self._workers[node.gateway.id] = node.gateway._rinfo().pid

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Whatever --dist says: there is one way to hand out cells that share servers."""
        from epd_conformance.scheduling import TopologyScheduling

        return TopologyScheduling(config, log)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self._workers.pop(node.gateway.id, None)
        self.declined = self.declined or getattr(node, "workeroutput", {}).get(DECLINED, "")
        if error:
            what = "was interrupted" if error == "keyboard-interrupt" else f"died ({str(error).splitlines()[-1]})"
            self._run.interrupted = self._run.interrupted or f"worker {node.gateway.id} {what}"

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """The made report of the test that a worker died of says which cell that was."""
        if (planned := self._run.planned.get(cell_of_test(crashitem))) is not None:
            facts = {"verdict": str(Verdict.COULD_NOT_RUN), "reason": "its worker died"}
            report.user_properties = [*self._run.facts(planned).items(), *facts.items()]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        facts = dict(report.user_properties)
        if "verdict" not in facts or facts["cell"] in self._told:
            return
        self._told.add(str(facts["cell"]))
        verdict = Verdict(str(facts["verdict"]))
        self._run.progress.cell_done(
            str(facts["cell"]), str(facts["topology"]), verdict, str(facts["reason"]), report.duration
        )

    def pytest_keyboard_interrupt(self) -> None:
        """Stop the workers now: by itself pytest-xdist would wait five seconds, then interrupt them, then kill them."""
        self._stopping = True
        for pid in self._workers.values():
            # Our own children: a number is not used again before we have asked for the end of its process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Before pytest-xdist takes the workers down: let those that were stopped write their last line."""
        deadline = time.monotonic() + STOP_S
        while self._stopping and time.monotonic() < deadline:
            if all(not _running(pid) or self._ended(worker) for worker, pid in self._workers.items()):
                break
            time.sleep(POLL_S)

    def _ended(self, worker: str) -> bool:
        """Whether a worker has written all that it will write; one that had not begun writes nothing."""
        path = worker_results(self._run.out, worker)
        return not path.is_file() or bool(_results(path, RunEnd))

    def close(self) -> None:
        """Show the last lines of the workers, and no more of them."""
        if self._tail is not None:
            self._tail.close()

    def refusal(self) -> str:
        """Why no report can be made: a worker was refused what was asked for, and no other judged a single cell."""
        if not self.declined:
            return ""
        records = _results(self._run.out / RESULTS_NAME, CellRecord)
        judged = any((record.verdict, record.reason) != (Verdict.ERROR, "usage") for record in records)
        return "" if judged else self.declined


class Tail(threading.Thread):
    """Shows what the workers write of their progress."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        super().__init__(name="workers-progress", daemon=True)
        self._folder = folder
        self._progress = progress
        self._read: dict[Path, int] = {}
        self._closed = threading.Event()

    def run(self) -> None:
        while not self._closed.wait(POLL_S):
            self._look()
        self._look()

    def _look(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                # The last line may not be whole yet.
                whole, end, _ = file.read().rpartition(b"\n")
                self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
                for line in whole.decode("utf-8", "replace").splitlines():
                    self._progress.say(f"{path.stem}: {line}")

    def close(self) -> None:
        self._closed.set()
        self.join()


def _running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _results(path: Path, model: type[Any]) -> Sequence[Any]:
    with contextlib.suppress(UsageError):
        return read_results(path).all(model)
    return ()
