"""Deciding about and mending the environment: broken media libraries, PYTHONPATH, repairs in force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epd_conformance.errors import UsageError
from epd_conformance.runtime import repairs
from epd_conformance.runtime.site import _epd_torchvision


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torch that imports at once, first on the path of this process and of those it starts."""
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def library(folder: Path, name: str, code: str) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(code)


def test_only_the_library_that_does_not_import_is_broken(libraries: Path) -> None:
    library(libraries, "torchaudio", "")
    library(libraries, "torchcodec", "raise OSError('libcudart.so.13: cannot open shared object file')")
    assert repairs.broken_media_libraries() == (
        repairs.BrokenLibrary("torchcodec", "OSError: libcudart.so.13: cannot open shared object file"),
    )


def test_a_library_that_kills_the_interpreter_is_broken(libraries: Path) -> None:
    library(libraries, "torchaudio", "import os; os.abort()")
    assert [broken.name for broken in repairs.broken_media_libraries()] == ["torchaudio"]


def test_libraries_are_not_blamed_for_a_missing_torch(libraries: Path) -> None:
    (libraries / "torch.py").write_text("raise ImportError")
    library(libraries, "torchaudio", "import torch")
    assert repairs.broken_media_libraries() == ()


def test_mending_uninstalls_exactly_the_broken_ones(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(libraries, "torchaudio", "")
    library(libraries, "torchcodec", "raise OSError('no')")
    commands: list[list[str]] = []
    real = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "pip" not in command:
            return real(command, **options)  # type: ignore[call-overload, no-any-return]
        commands.append(command)
        (libraries / "torchcodec" / "__init__.py").unlink()
        (libraries / "torchcodec").rename(libraries / "gone")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    assert [broken.name for broken in repairs.mend_broken_media_libraries()] == ["torchcodec"]
    assert commands == [[sys.executable, "-m", "pip", "uninstall", "-y", "torchcodec"]]
    assert repairs.mend_broken_media_libraries() == ()
    assert len(commands) == 1


def test_a_library_that_pip_cannot_remove_is_named(libraries: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies on PYTHONPATH and belongs to no distribution, so that pip ends with 0 and removes nothing."""
    library(libraries, "torchcodec", "raise OSError('no')")
    real = subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "pip" not in command:
            return real(command, **options)  # type: ignore[call-overload, no-any-return]
        return subprocess.CompletedProcess(command, 0, "", "WARNING: Skipping torchcodec")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError, match=r"torchcodec does not import and could not be uninstalled by .*-m pip"):
        repairs.mend_broken_media_libraries()


def test_the_servers_environment_keeps_what_was_there() -> None:
    site = str(repairs.SITE)
    assert repairs.server_environment({}) == {"PYTHONPATH": site}
    kept = repairs.server_environment({"PYTHONPATH": f"/a{os.pathsep}/b", "HOME": "/h"})
    assert kept == {"PYTHONPATH": os.pathsep.join([site, "/a", "/b"])}
    assert repairs.server_environment(kept) == kept


def test_installing_twice_hooks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = len(sys.meta_path)
    repairs.install()
    repairs.install()
    hooks = [finder for finder in sys.meta_path if isinstance(finder, _epd_torchvision._Finder)]
    assert len(hooks) == 1 and len(sys.meta_path) <= before + 1


def test_repairs_of_other_parts_are_named_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "torchvision", lambda: repairs.Torchvision("loads"))
    fork = repairs.Repair("fork-context", "forks", "is quick", needed=lambda: True)
    unused = repairs.Repair("unused", "nothing", "no reason", needed=lambda: False)
    assert repairs.in_force(fork, unused) == [{"name": "fork-context", "what": "forks", "why": "is quick"}]
    monkeypatch.setattr(repairs, "torchvision", lambda: repairs.Torchvision("repaired"))
    assert [patch["name"] for patch in repairs.in_force(fork)] == ["torchvision-ops", "fork-context"]
