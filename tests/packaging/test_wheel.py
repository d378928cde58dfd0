"""What a vendor gets: wheels that hold everything, and that certify the example vendor from an empty directory.

The certification runs in an environment of its own, where the wheels are installed and the checkout cannot be imported.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_conformance.release import DIGEST_NAME
from epd_conformance.run import suite_digest

CHECKOUT = Path(__file__).parents[2]
VENDOR = CHECKOUT / "examples" / "vendor-minimal"
MODEL = "tiny-qwen2.5-vl"


def call(*command: object, cwd: Path, seconds: float = 120) -> tuple[int, str]:
    """Run a command as somebody who knows nothing of the checkout; returns exit code and output."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # Neither of them may decide what is imported, or hide that something would be written.
        if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def build(source: Path, out: Path, *kinds: str) -> None:
    code, output = call(sys.executable, "-m", "build", "--no-isolation", *kinds, "--outdir", out, source, cwd=out)
    assert code == 0, output


def files_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def own_files(folder: str) -> set[str]:
    """Every file of a folder of the checkout, relative to it, but for what Python and tools leave there."""
    files = [path.relative_to(CHECKOUT) for path in (CHECKOUT / folder).rglob("*") if path.is_file()]
    left = re.compile(r"\.|__pycache__$|build$|dist$|.*\.egg-info$")
    return {path.as_posix() for path in files if not any(left.match(part) for part in path.parts)}


@dataclass(frozen=True)
class Built:
    """The wheels and the source archive of the checkout as it was, and the suite digest that it had then."""

    wheel: Path
    sdist: Path
    vendor: Path
    digest: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    build(CHECKOUT, out, "--wheel", "--sdist")
    digest = suite_digest()
    build(VENDOR, out, "--wheel")
    (wheel,), (sdist,), (vendor,) = (
        out.glob(pattern) for pattern in ("epd_conformance-*.whl", "epd_conformance-*.tar.gz", "vendor_minimal-*.whl")
    )
    return Built(wheel, sdist, vendor, digest)


def test_the_wheel_holds_everything_that_a_run_needs(built: Built) -> None:
    found = files_of(built.wheel)
    # Whatever lies there, templates of pages too: a kind of file that is new must not be left out.
    wanted = own_files("epd_conformance")
    wanted |= {f"epd_conformance/{name}" for folder in ("suites", "fixtures") for name in own_files(folder)}
    assert wanted - found == set()
    assert "epd_conformance/py.typed" in found and "epd_conformance/report/report-v1.schema.json" in found
    # A top-level `suites` or `tests` would clash with other projects' in site-packages.
    assert {name.split("/")[0] for name in found} == {"epd_conformance"}
    assert not [name for name in found if name.endswith(".pyc")]


def test_both_archives_hold_licence_and_words_for_readers(built: Built) -> None:
    licence = (CHECKOUT / "LICENSE").read_bytes()
    with zipfile.ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == licence
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    assert "License-Expression: Apache-2.0\n" in metadata and "Classifier: Typing :: Typed\n" in metadata
    assert (CHECKOUT / "README.md").read_text(encoding="utf-8") in metadata
    with tarfile.open(built.sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml", "hatch_build.py"}
    wanted |= {name for folder in ("docs", "examples", "scripts", "suites", "tests") for name in own_files(folder)}
    assert wanted - found == set()


def test_the_wheel_says_which_suite_it_was_built_with(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.read(f"epd_conformance/{DIGEST_NAME}").decode() == built.digest + "\n"


def test_the_source_archive_gives_the_same_wheel_and_no_more(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    # What a checkout holds beside its own files: environments, runs, caches.
    strangers = {".venv", ".git", "runs", "dist", "build", ".pytest_cache", ".mypy_cache", ".ruff_cache", "__pycache__"}
    assert not [path for path in source.rglob("*") if path.name in strangers]
    build(source, tmp_path, "--wheel")
    (wheel,) = tmp_path.glob("*.whl")
    assert files_of(wheel) == files_of(built.wheel)


@dataclass(frozen=True)
class Installed:
    """An environment that holds the two wheels, and what else this one holds, but not the checkout."""

    folder: Path

    @property
    def packages(self) -> Path:
        (found,) = self.folder.glob("lib/python*/site-packages")
        return found

    def run(self, *words: object, cwd: Path, seconds: float = 120) -> tuple[int, str]:
        """Call the installed console script."""
        return call(self.folder / "bin" / "epd-conformance", *words, cwd=cwd, seconds=seconds)

    def listing(self) -> dict[str, tuple[int, int]]:
        """Every file with its size and time."""
        return {
            str(path.relative_to(self.folder)): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def set_writable(self, writable: bool) -> None:
        for path in [self.packages, *self.packages.rglob("*")]:
            path.chmod(path.stat().st_mode | 0o200 if writable else path.stat().st_mode & ~0o222)


def install(built: Built, folder: Path) -> Installed:
    code, output = call(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    assert code == 0, output
    wheels = (built.wheel, built.vendor)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "--disable-pip-version-check")
    code, output = call(*pip, "install", "--quiet", "--no-deps", "--no-index", *wheels, cwd=folder.parent)
    assert code == 0, output
    installed = Installed(folder)
    # vLLM and the dependencies come from this environment. A folder that a .pth file names is searched last, and the .pth
    # files in it are not read, so that an editable installation there brings no checkout.
    outer = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (installed.packages / "outer.pth").write_text("\n".join(outer) + "\n")
    # Without the compiled suites, so that whoever imports them would have something to write.
    for path in installed.packages.glob("epd_conformance/suites/**/*.pyc"):
        path.unlink()
    return installed


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheels in read-only site-packages."""
    found = install(built, tmp_path_factory.mktemp("environment") / "venv")
    found.set_writable(False)
    yield found
    found.set_writable(True)


def test_it_is_the_wheel_that_is_imported(installed: Installed, tmp_path: Path) -> None:
    words = "import epd_conformance, vendor_minimal; print(epd_conformance.__file__, vendor_minimal.__file__)"
    code, output = call(installed.folder / "bin" / "python", "-c", words, cwd=tmp_path)
    expected = [str(installed.packages / name / "__init__.py") for name in ("epd_conformance", "vendor_minimal")]
    assert (code, output.split()) == (0, expected)


def report_of(out: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((out / "report.json").read_text())
    return data


@pytest.mark.live
@pytest.mark.needs_vllm
def test_the_example_vendor_is_certified_from_an_empty_directory(
    built: Built, installed: Installed, tmp_path: Path
) -> None:
    before = installed.listing()
    wanted = ("--subject", "vendor-minimal", "--profile", "e-pd", "--mode", "certify", "--out", "E")
    code, output = installed.run("run", *wanted, cwd=tmp_path, seconds=900)
    assert code == 0, output
    assert "vendor-minimal: conformant on cpu-v1" in output
    report = report_of(tmp_path / "E")
    assert [report[name] for name in ("outcome", "proxyOutcome")] == ["conformant"] * 2
    cells = [cell for item in report["requirements"] for cell in item["cells"] if cell["verdict"] != "pass"]
    # Of vLLM itself; the second since this connector says nothing of its items that a client could send in their place.
    assert {cell["id"].partition("[")[0]: cell["reason"] for cell in cells} == {
        "EPD-ERR-009": "not-refused",
        "EPD-SEC-003": "media-sent",
    }
    assert report["suite"]["digest"] == built.digest, "a certificate names the suite of the checkout it was built from"
    code, output = installed.run("verify", "E", cwd=tmp_path)
    assert code == 0, output
    assert "vendor-minimal: conformant on cpu-v1" in output
    assert installed.listing() == before, "nothing is written to site-packages"
    assert [path.name for path in tmp_path.iterdir()] == ["E"], "nothing is written beside --out"


@pytest.mark.live
@pytest.mark.needs_vllm
def test_the_same_vendor_with_one_check_left_out_is_not_conformant(built: Built, tmp_path: Path) -> None:
    """One line of the installed connector is changed: it no longer asks whose rows a file holds, and how many."""
    installed = install(built, tmp_path / "venv")
    store = installed.packages / "vendor_minimal" / "store.py"
    line = "if (about.key, about.model, about.dtype, about.rows) != (key, model, dtype, rows):"
    text = store.read_text()
    assert text.count(line) == 1
    store.write_text(text.replace(line, "if about.model != model:"))
    empty = tmp_path / "empty"
    empty.mkdir()
    cells = [f"EPD-INTEG-002[e-pd/{MODEL}/replaced]", f"EPD-INTEG-003[e-pd/{MODEL}/one-row]"]
    chosen = [word for cell in (*cells, f"EPD-TOK-002[e-pd/{MODEL}/img1]") for word in ("--cell", cell)]
    code, output = installed.run(
        "run", "--subject", "vendor-minimal", "--profile", "e-pd", *chosen, "--out", "E", cwd=empty, seconds=400
    )
    assert code == 1, output
    report = report_of(empty / "E")
    assert report["outcome"] == "nonconformant"
    verdicts = {cell["id"]: cell["verdict"] for item in report["requirements"] for cell in item["cells"]}
    assert {verdicts[cell] for cell in cells} == {"fail"}
    assert verdicts[f"EPD-TOK-002[e-pd/{MODEL}/img1]"] == "pass", "where nothing is damaged nothing is wrong"
