"""What runs in a child of the host: the connector's own tests with a mutant in the place of a module.

The child never imports the connector. It has imported what else the tests need, and forks a process for each mutant, which has
pytest import the tests and the connector anew.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from epd_conformance.engine.exits import exit_text
from epd_conformance.engine.server import die_with_parent
from epd_conformance.power.inside import MARK, Lines, activate
from epd_conformance.subject import Subject

_Tell = Callable[[dict[str, Any]], None]


def carry(
    subject: Subject,
    root: Path,
    *,
    modules: Sequence[str],
    files: Sequence[str],
    checkout: str,
    test_limit_s: float,
    limit_s: float,
    warm: Sequence[str] = (),
    wanted: Sequence[str] | None = None,
    mutant: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Run the tests of some files until one fails. For `Host.call`.

    Args:
        modules: the connector's, by dotted name, those that others import first.
        checkout: the folder of which the tests' ids are relative.
        test_limit_s, limit_s: for a test, and for all; beyond it the process is killed.
        warm: modules that this process imports before it forks.
        wanted: ids of the tests to run, in this order. None: all, and the lines that each runs are taken.
        mutant: as for `inside.step`. None: nothing is changed.

    Returns:
        `at`: the test begun last; `begun`: how many were; `failed` and `text`: the test that failed, or what could not be
        collected; `hung`; `died`: how the process ended before its time; `broken`: why the mutant cannot be imported; `active`:
        whether the mutant is what the tests have imported; `ran`: id -> lines by module and seconds; `loaded`: modules outside the
        checkout that the tests import.
    """
    for name in warm:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    here, there = Pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            die_with_parent()
            os.setpgid(0, 0)
            here.close()
            _run(there, root, modules, files, Path(checkout), wanted, mutant)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    there.close()
    told: dict[str, Any] = {"at": "", "begun": 0, "ran": {}, "ended": False, "hung": False}
    try:
        _follow(here, told, test_limit_s, time.monotonic() + limit_s)
    finally:
        # The process if it hangs, and what the tests have forked in any case.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if not told["ended"] and not told["hung"]:
        told["died"] = exit_text(os.waitstatus_to_exitcode(status))
    return told


def _follow(pipe: Connection, told: dict[str, Any], test_limit_s: float, end: float) -> None:
    """Take in what the process says until it ends or hangs."""
    while not told["ended"]:
        if not pipe.poll(min(test_limit_s, max(0.0, end - time.monotonic()))):
            told["hung"] = True
            return
        try:
            message = pipe.recv()
        except EOFError:
            return
        if "at" in message:
            told["begun"] += 1
        told["ran"].update(message.pop("ran", {}))
        told.update(message)


def _run(
    pipe: Connection,
    root: Path,
    modules: Sequence[str],
    files: Sequence[str],
    checkout: Path,
    wanted: Sequence[str] | None,
    mutant: Mapping[str, str] | None,
) -> None:
    # Nothing that the harness has imported of the connector's package may be what the tests compare with.
    package = modules[0].rpartition(".")[0]
    for name in [name for name in sys.modules if package and name.startswith(f"{package}.")]:
        del sys.modules[name]
    if mutant is not None and (problem := activate(modules, mutant)):
        pipe.send({"broken": problem, "ended": True})
        return
    before = set(sys.modules)
    lines = Lines({name: importlib.import_module(name).__file__ or "" for name in modules}) if wanted is None else None
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    # They would be imported for each mutant, and the tests need none.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    # The same examples each time, and none smaller once one fails.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("power", derandomize=True, database=None, deadline=None, phases=phases)
    hypothesis.settings.load_profile("power")
    folder = root / "own"
    folder.mkdir()
    options = [
        "-q",
        *([] if wanted is None else ["-x"]),
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(checkout),
        "-c",
        str(checkout / "pyproject.toml"),
    ]
    with contextlib.chdir(folder):
        pytest.main([*options, "--basetemp", str(root / "tmp"), *files], [_Watch(pipe.send, wanted, lines)])
    active = mutant is None or getattr(sys.modules[mutant["module"]], MARK, "") == mutant["name"]
    loaded = [name for name in set(sys.modules) - before if _is_foreign(name, checkout)]
    pipe.send({"active": active, "loaded": sorted(loaded), "ended": True})


def _is_foreign(name: str, checkout: Path) -> bool:
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and not (Path(file).is_relative_to(checkout) and "site-packages" not in Path(file).parts)


class _Watch:
    """A plug-in of pytest that picks tests, says which one runs, and what failed."""

    def __init__(self, tell: _Tell, wanted: Sequence[str] | None, lines: Lines | None) -> None:
        self._tell = tell
        self._wanted = wanted
        self._lines = lines

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._wanted is not None:
            found = {item.nodeid: item for item in items}
            items[:] = [found[id_] for id_ in self._wanted if id_ in found]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._tell({"at": item.nodeid})
        began = time.monotonic()
        if self._lines is None:
            return (yield)
        with self._lines:
            result = yield
        seconds = time.monotonic() - began
        self._tell({"ran": {item.nodeid: {"lines": self._lines.taken(), "seconds": seconds}}})
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report)

    def _failed(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = (str(getattr(crash, "message", "") or report.longrepr).strip().splitlines() or [""])[0][:300]
        line = getattr(crash, "lineno", None)
        self._tell({"failed": report.nodeid, "text": f"{text} (line {line})" if line else text})
