"""Fixtures: the command line with a fake live session, in this process."""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_fakes
from parallel_runs import WORKERS, Fakes
from run_fakes import Call, Ended, read

from epd_conformance import cli


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """`command("list", ...)` calls the command line as its console script does."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)

    def call(*words: object, out: Path | None = None) -> Ended:
        monkeypatch.setattr(sys, "argv", ["epd-conformance", *map(str, words)])
        capfd.readouterr()
        # A pytest that ends collects garbage. The one around it may hold millions of objects (vLLM, torch, a thousand tests),
        # which are not its own to look through.
        gc.freeze()
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            gc.unfreeze()
        streams = capfd.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return Ended(code, streams.out, streams.err, read(out) if out else None)

    return call


@pytest.fixture
def fake_run(command: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Call]:
    """`fake_run({"TOK-002": "fail"}, "--level", "core")`: a run of `reference` in e-pd over the fake session (run_fakes.py)."""
    run_fakes.install(monkeypatch.setattr)
    monkeypatch.setattr(cli._Keep, "pytest_runtest_logfinish", staticmethod(run_fakes.after), raising=False)

    # A run takes a folder of its own.
    folders = (tmp_path / f"out{number or ''}" for number in itertools.count())

    def call(script: dict[str, str] | None = None, *words: object, subject: str = "reference") -> Ended:
        monkeypatch.setenv(run_fakes.SCRIPT, json.dumps(script or {}))
        out = next(folders)
        given = () if "--out" in words else ("--out", out)
        return command("run", "--subject", subject, *given, *words, out=out)

    yield call


@pytest.fixture(scope="session")
def by_workers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fakes, Ended]:
    """A run with `-n 2`, JUnit and Allure, in which a cell of e-pd fails, one breaks, and the worker of e-p-d dies at a third."""
    pytest.importorskip("xdist")
    pytest.importorskip("allure_commons")
    script = {"EPD-TOK-002[e-pd/": "fail", "EPD-TOK-003[e-pd/": "harness", "EPD-TOK-002[e-p-d/": "die once"}
    fakes = Fakes(tmp_path_factory.mktemp("by_workers") / "out", script)
    reports = (f"--junitxml={fakes.out / 'junit.xml'}", f"--alluredir={fakes.out / 'allure'}", "--clean-alluredir")
    return fakes, fakes.run(*WORKERS, *reports)
