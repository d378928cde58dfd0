"""pytest itself with the plug-in: the same results as the command line, and silence in other projects' tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fakes import Call, read, start

from epd_conformance.run import suites_folder

FAST = ["-p", "no:cacheprovider", "-p", "no:xdist"]


def run_pytest(*words: object, script: dict[str, str] | None = None) -> tuple[int, str]:
    """pytest in a process of its own, with our entry point but no conftest of ours."""
    process = start(["-m", "pytest", *words], script)
    out, err = process.communicate(timeout=60)
    return process.returncode, out + err


SUITES = (suites_folder(), "-p", "run_fakes", *FAST)


def test_the_same_results_as_the_command_line(fake_run: Call, tmp_path: Path) -> None:
    script = {"TOK-002": "fail", "TOK-003": "inconclusive", "XFER-002": "harness"}
    wanted = fake_run(script)
    out = tmp_path / "by pytest"
    code, text = run_pytest(*SUITES, "--subject", "reference", "--profile", "e-pd", "--out", out, script=script)
    report = read(out)
    assert report is not None, text
    assert wanted.report is not None
    assert code == wanted.code == 1
    got = {cell["id"]: cell["verdict"] for item in report["requirements"] for cell in item["cells"]}
    assert got == {name: cell["verdict"] for name, cell in wanted.cells.items()}
    for name in ("outcome", "engineOutcome", "proxyOutcome", "summary", "notVerified"):
        assert report[name] == wanted.report[name], name
    assert report["suite"] == wanted.report["suite"]
    # What pytest prints has the failure's words and the verdicts.
    assert "fail: " in text
    assert "reference: nonconformant" in text
    assert f"report: {out / 'report.json'}" in text
    assert f"page: {out / 'report.html'}" in text
    assert "EPD-TOK-002" in (out / "report.html").read_text()


def test_without_a_subject(tmp_path: Path) -> None:
    code, text = run_pytest(*SUITES, script={})
    assert code == 4
    assert "the suites need a subject: add --subject reference" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--dist", "load", "--tx", "ssh=somewhere"), "workers share the folder of the run: leave out --tx"),
        (("--mode", "certify", "-x"), "leave out -k, -m, -x and --maxfail"),
        (("--mode", "certify", "-k", "one"), "leave out -k, -m, -x and --maxfail"),
        (("--device", "tpu"), "no device 'tpu'"),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    options = list(SUITES)
    if "--tx" in words:
        pytest.importorskip("xdist")
        options = [suites_folder(), "-p", "run_fakes"]
    out = tmp_path / "out"
    code, text = run_pytest(*options, "--subject", "reference", "--out", out, *words)
    assert code == 4, text
    assert says in text
    assert "Traceback" not in text
    assert not out.exists()


def test_collecting_runs_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = run_pytest(*SUITES, "--subject", "reference", "--out", out, "--collect-only", "-q")
    assert code == 0, text
    assert "test_one_image[EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]]" in text
    assert not out.exists()


OTHERS = """
import signal
import pytest

def pytest_addoption(parser):
    for name in ("--profile", "--level", "--device", "--model", "--out", "--seed", "--mode", "--cell"):
        parser.addoption(name, default="theirs")

@pytest.fixture(params=[1, 2])
def cell(request):
    return request.param
"""
OTHER_TESTS = """
import signal
import pytest

@pytest.mark.requirement("REQ-1", "text")
def test_marked(cell, request):
    assert cell in (1, 2)
    assert request.config.getoption("--seed") == "theirs"

def test_plain(cell):
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


def test_nothing_happens_in_other_projects(tmp_path: Path) -> None:
    """A project may have a fixture, a mark and options of our names."""
    (tmp_path / "conftest.py").write_text(OTHERS)
    (tmp_path / "test_theirs.py").write_text(OTHER_TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    code, text = run_pytest(tmp_path, *FAST, "-q")
    assert code == 0, text
    assert "4 passed" in text
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "conftest.py",
        "pytest.ini",
        "test_theirs.py",
    ]


def test_a_subject_may_stand_in_the_configuration(tmp_path: Path) -> None:
    """As a nightly's pytest.ini has it."""
    out = tmp_path / "out"
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --subject=reference --profile=e-pd -p no:cacheprovider\n")
    code, text = run_pytest("-c", tmp_path / "pytest.ini", "-p", "run_fakes", suites_folder(), "--out", out)
    assert code == 0, text
    report = read(out)
    assert report is not None
    assert report["summary"]["expected"] == report["summary"]["pass"] > 20


def test_an_attachment_is_enough_to_ask_for_a_run(tmp_path: Path) -> None:
    code, text = run_pytest(*SUITES, "--attach", tmp_path / "no.toml")
    assert code == 4
    assert "of --attach cannot be read" in text
    assert "Traceback" not in text
