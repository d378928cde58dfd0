"""The torchvision hook and the sitecustomize that carries it, run in subprocesses with a made-up torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash._xxhash

from epd_conformance.runtime import repairs, vllm_info

FAKE_TORCH = """
class _Namespace: pass

class _Ops:
    torchvision = _Namespace()
    loaded = []
    def load_library(self, path):
        import ctypes
        ctypes.CDLL(path)
        self.loaded.append(path)
        self.torchvision.nms = self.torchvision.qnms = "own"

ops = _Ops()

class library:
    class Library:
        def __init__(self, namespace, kind):
            assert (namespace, kind) == ("torchvision", "FRAGMENT")
        def define(self, schema):
            setattr(ops.torchvision, schema.partition("(")[0], "defined")
"""

# As the real one: it tries its own library and dies where the operators do not exist.
FAKE_TORCHVISION = """
import torch, os
try:
    torch.ops.load_library(os.path.join(os.path.dirname(__file__), "_C.so"))
except OSError:
    pass
operators = [torch.ops.torchvision.nms, torch.ops.torchvision.qnms]
"""

REPORT = (
    "import json, sys, torch, torchvision; hook = sys.modules.get('_epd_torchvision'); "
    "print(json.dumps([torchvision.operators, hook.defined if hook else None]))"
)


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    """A directory with a torch and a torchvision whose library does not load."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(FAKE_TORCHVISION)
    (tmp_path / "torchvision" / "_C.so").write_bytes(b"not a library")
    return tmp_path


def run(
    code: str, *path: Path, hook: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **(environment or {})}
    if hook:
        base |= repairs.server_environment(base)
    return subprocess.run(
        [sys.executable, "-c", code], env=base, capture_output=True, text=True, check=False, timeout=120
    )


def test_without_the_hook_the_mismatched_torchvision_does_not_import(fakes: Path) -> None:
    result = run(REPORT, fakes, hook=False)
    assert result.returncode != 0 and "nms" in result.stderr


def test_operators_are_defined_where_the_library_does_not_load(fakes: Path) -> None:
    result = run(REPORT, fakes)
    assert json.loads(result.stdout) == [["defined", "defined"], ["nms", "qnms"]], result.stderr


def test_operators_are_defined_where_there_is_no_library(fakes: Path) -> None:
    (fakes / "torchvision" / "_C.so").unlink()
    result = run(REPORT, fakes)
    assert json.loads(result.stdout) == [["defined", "defined"], ["nms", "qnms"]], result.stderr


def test_matching_builds_are_not_touched(fakes: Path) -> None:
    shutil.copy(xxhash._xxhash.__file__, fakes / "torchvision" / "_C.so")
    result = run(REPORT, fakes)
    assert json.loads(result.stdout) == [["own", "own"], []], result.stderr


def test_looking_for_torchvision_repairs_and_imports_nothing(fakes: Path) -> None:
    code = (
        "import importlib.util, sys; spec = importlib.util.find_spec('torchvision'); "
        "print(spec.origin, 'torch' in sys.modules, sys.modules['_epd_torchvision'].defined)"
    )
    result = run(code, fakes)
    assert result.stdout.split() == [str(fakes / "torchvision" / "__init__.py"), "False", "[]"], result.stderr


def test_no_trace_stays_on_the_imported_module(fakes: Path) -> None:
    code = (
        "import torchvision; print(type(torchvision.__loader__).__name__, "
        "torchvision.__spec__.loader is torchvision.__loader__)"
    )
    assert run(code, fakes).stdout.split() == ["SourceFileLoader", "True"]


def test_a_missing_torch_is_reported_by_torchvision_itself(fakes: Path) -> None:
    (fakes / "torch.py").write_text("raise ImportError('there is no torch here')")
    result = run("import torchvision", fakes)
    assert result.stderr.strip().endswith("ImportError: there is no torch here")
    assert "torchvision/__init__.py" in result.stderr


def test_an_absent_torchvision_stays_absent(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path = [entry for entry in sys.path if 'site-packages' not in entry]; "
        "sys.meta_path = [finder for finder in sys.meta_path if 'editable' not in repr(finder).lower()]\n"
        "import torchvision"
    )
    assert "ModuleNotFoundError: No module named 'torchvision'" in run(code, tmp_path).stderr


def test_every_process_of_a_server_is_reached(fakes: Path) -> None:
    """A spawned worker, and a subprocess of the worker, as vLLM's model registry starts one."""
    (fakes / "server.py").write_text(
        f"""
import multiprocessing, subprocess, sys
def work():
    import torchvision
    print(torchvision.operators[0], flush=True)
    subprocess.run([sys.executable, "-c", {REPORT!r}], check=True)
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""
    )
    result = run("import runpy; runpy.run_module('server', run_name='__main__', alter_sys=True)", fakes)
    assert result.stdout.splitlines() == ["defined", '[["defined", "defined"], ["nms", "qnms"]]'], result.stderr


def test_the_users_sitecustomize_runs_too(fakes: Path) -> None:
    (fakes / "sitecustomize.py").write_text("import os; os.environ['USER_SAW'] = __file__")
    code = (
        "import os, sys; print(os.environ['USER_SAW'], sys.modules['sitecustomize'].__file__, "
        "'_epd_torchvision' in sys.modules)"
    )
    theirs = str(fakes / "sitecustomize.py")
    result = run(code, fakes)
    assert result.stdout.split() == [theirs, theirs, "True"], result.stderr


def test_a_sitecustomize_that_chains_as_ours_does_is_run_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (first / "sitecustomize.py").write_text(
        "import os, sys; print('first'); here = os.path.dirname(__file__); sys.path.remove(here); "
        "del sys.modules['sitecustomize']\nimport sitecustomize\nsys.path.append(here)"
    )
    (second / "sitecustomize.py").write_text("print('second')")
    result = run("import sys; print(len(sys.path) == len(set(sys.path)))", first, second)
    assert result.stdout.split() == ["first", "second", "True"], result.stderr


def test_a_failing_sitecustomize_is_reported_as_python_reports_it(fakes: Path) -> None:
    (fakes / "sitecustomize.py").write_text("raise ValueError('the user made a mistake')")
    with_hook = run("import sys; print(sys.path[1])", fakes)
    without = run("", fakes, hook=False)
    assert "the user made a mistake" in with_hook.stderr
    assert with_hook.stderr == without.stderr
    assert with_hook.stdout.strip() == str(repairs.SITE)  # back in its place


def test_with_no_other_sitecustomize_nothing_is_said(tmp_path: Path) -> None:
    result = run("import sys; print(sys.modules['sitecustomize'].__file__)", tmp_path)
    assert result.stderr == ""


def test_the_start_of_a_process_imports_nothing_more(tmp_path: Path) -> None:
    code = "import sys; print(*sorted(sys.modules))"
    more = set(run(code, tmp_path).stdout.split()) - set(run(code, tmp_path, hook=False).stdout.split())
    assert more <= {"sitecustomize", "_epd_torchvision", "__future__"}


def test_a_process_with_a_lifeline_watches_it(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        os.set_inheritable(read, True)
        process = subprocess.Popen(
            [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"],
            env={
                **os.environ,
                **repairs.server_environment({}),
                "EPD_LIFELINE": f"{read}:{os.fstat(read).st_ino}",
            },
            pass_fds=(read,),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        assert process.poll() is None
        os.close(write)
        write = -1
        assert process.wait(timeout=20) < 0
    finally:
        os.close(read)
        if write >= 0:
            os.close(write)
            process.kill()
            process.wait()
        process.stdout.close()


@pytest.mark.skipif(vllm_info.package_directory("torchvision") is None, reason="torchvision is not installed")
def test_the_installed_torchvision_imports_with_the_hook() -> None:
    """The real thing; where the builds do not match, the control shows that the hook is what helps."""
    state = repairs.torchvision()
    assert state.state in {"loads", "repaired"}, state
    assert (run("import torchvision", hook=False).returncode == 0) == (state.state == "loads")
    assert [patch["name"] for patch in repairs.in_force()] == (["torchvision-ops"] if state.state == "repaired" else [])
