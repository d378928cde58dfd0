"""Looks at this machine: what is there, what is missing for a run, and the command that mends it.

It works without vLLM and without torch, since it is what a person runs when those do not work: versions are
read from files, and whatever has to be imported is imported in a subprocess.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from epd_conformance.errors import UsageError
from epd_conformance.runtime import repairs, vllm_info
from epd_conformance.topology.claims import PORTS, bindable
from epd_conformance.topology.devices import GIB, SERVER_GIB, Inventory
from epd_conformance.topology.zygote import FORK_CONTEXT

SCHEMA = "epd-conformance/doctor/v1"

Status = Literal["ok", "warn", "missing"]

# Servers at a time: the aggregated baseline beside the three of e-p-d.
_LARGEST_STACK = 4

# Each stack server takes an API port, and some a side channel and an EC port: three each.
_PORTS_WANTED = 3 * _LARGEST_STACK

# vLLM passes work to its workers through /dev/shm: a ring of 16 MiB x 10 and one of 24 MiB x 10 a server (0.4
# GiB, vllm/distributed/device_communicators/shm_broadcast.py), taken only as far as written. A container's
# default of 64 MiB ends in a bus error without a message.
_SHM_WANTED_GIB = 0.4 * _LARGEST_STACK


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    status: "ok"; "warn", a run is possible but something is limited; "missing", a run is not possible.
    found: what is there.
    mend: what to do about it, as a command where one exists; None if nothing is to be done.
    """

    name: str
    status: Status
    found: str
    mend: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """All checks in the order in which they are shown, and the repairs in force in servers started here."""

    checks: tuple[Check, ...]
    patches: tuple[dict[str, str], ...]

    @property
    def ready(self) -> bool:
        """Whether a run is possible: nothing is missing."""
        return all(check.status != "missing" for check in self.checks)

    def to_json(self) -> dict[str, object]:
        """The diagnosis as a JSON document (schema `epd-conformance/doctor/v1`)."""
        return {
            "schema": SCHEMA,
            "ready": self.ready,
            "checks": [asdict(check) for check in self.checks],
            "patches": list(self.patches),
        }


def diagnose(model: str | None = None) -> Diagnosis:
    """Look at everything a run needs; with `model` (a zoo name, folder or hub id) also at that model.

    Takes a few seconds where torchvision is installed, which has to be imported to know. Never raises for
    what it finds: that is what the checks say.
    """
    vllm = vllm_info.find()
    inventory = Inventory.read()
    checks = [
        _python(sys.version_info[:3]),
        _vllm(vllm),
        _system_library(vllm, _loads),
        _torch(vllm),
        _torchvision(),
        *_media_libraries(),
        _nixl(),
        _cores(inventory),
        _memory(inventory, psutil.virtual_memory().total / GIB),
        _shared_memory(Path("/dev/shm")),
        _ports(sum(bindable(port) for port in PORTS)),
        _gpus(inventory, vllm),
        _home(),
        _cache(),
    ]
    if model is not None:
        checks.append(_model(model))
    # A probe that did not finish has been reported by the check on torchvision.
    try:
        # On CPU servers are forked from a warmed parent unless somebody asks for --boot plain.
        patches = tuple(repairs.in_force(*([FORK_CONTEXT] if vllm is not None and vllm.platform == "cpu" else [])))
    except UsageError:
        patches = ()
    names = ", ".join(patch["name"] for patch in patches)
    checks.append(Check("patches in force", "ok", names or "none"))
    return Diagnosis(tuple(checks), patches)


def preflight(vllm: vllm_info.VllmInfo) -> None:
    """Raises UsageError for what would otherwise kill servers in obscure words; takes no time."""
    check = _system_library(vllm, _loads)
    if check.status == "missing":
        raise UsageError(f"{check.name} is missing ({check.found}): {check.mend}")


def exit_code(diagnosis: Diagnosis) -> int:
    """0 if a run is possible, else 2, the code for an environment in which no report can be made."""
    return 0 if diagnosis.ready else 2


def render(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print the diagnosis to stdout (or `console`): a table, then one line for each thing to mend."""
    console = console or Console(soft_wrap=True)
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("check", no_wrap=True)
    table.add_column("status", no_wrap=True)
    table.add_column("found", overflow="fold")
    for check in diagnosis.checks:
        colour = colours[check.status]
        table.add_row(escape(check.name), f"[{colour}]{check.status}[/{colour}]", escape(check.found))
    console.print(table)
    for check in diagnosis.checks:
        if check.mend is not None:
            # One unbroken line each, so that a command can be copied.
            console.print(f"{check.name}: {check.mend}", markup=False, highlight=False, soft_wrap=True)
    console.print("ready" if diagnosis.ready else "not ready: mend what is missing", markup=False)


def _python(version: tuple[int, int, int]) -> Check:
    found = f"{'.'.join(map(str, version))} ({sys.executable})"
    if version < (3, 11):
        return Check("Python", "missing", found, "use Python 3.11 or newer")
    return Check("Python", "ok", found)


def _vllm(info: vllm_info.VllmInfo | None) -> Check:
    if info is None:
        return Check("vLLM", "missing", "not installed", vllm_info.missing_message())
    commit = f", commit {info.commit}" if info.commit else ""
    found = f"{info.version}{commit}, {info.platform}, from {info.distribution or info.location}"
    if not info.supported:
        return Check("vLLM", "missing", found, vllm_info.unsupported_message(info))
    return Check("vLLM", "ok", found)


def _system_library(info: vllm_info.VllmInfo | None, loads: Callable[[str], bool]) -> Check:
    """vLLM's CPU library is linked against libnuma, which slim images lack; vLLM then only logs a warning."""
    if info is None or info.platform != "cpu":
        return Check("libnuma", "ok", "not needed")
    if loads("libnuma.so.1"):
        return Check("libnuma", "ok", "loads")
    return Check("libnuma", "missing", "vLLM's CPU library needs it", "apt-get install libnuma1")


def _torch(info: vllm_info.VllmInfo | None) -> Check:
    location = vllm_info.package_directory("torch")
    if location is None:
        return Check("torch", "missing", "not installed", "it comes with vLLM: mend that")
    constants = vllm_info.read_constants(location / "version.py")
    version, cuda = constants.get("__version__", "unknown version"), constants.get("cuda")
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'no CUDA'}"
    if info is not None and info.platform == "cuda" and not cuda:
        mend = f"{sys.executable} -m pip install --force-reinstall 'epd-conformance[cuda]'"
        return Check("torch", "missing", f"{found}, but vLLM is a CUDA build", mend)
    return Check("torch", "ok", found)


def _torchvision() -> Check:
    try:
        seen = repairs.torchvision()
    except UsageError as error:
        return Check("torchvision", "missing", "its import does not end", str(error))
    reinstall = "install the torchvision release that was built for this torch"
    match seen.state:
        case "loads":
            return Check("torchvision", "ok", "loads")
        case "repaired":
            return Check("torchvision", "ok", f"its library does not load; repaired ({seen.detail} defined)")
        case "absent":
            return Check("torchvision", "missing", "not installed", "it comes with vLLM: mend that")
        case "broken":
            return Check("torchvision", "missing", f"does not import: {seen.detail}", reinstall)


def _media_libraries() -> list[Check]:
    """torchaudio and torchcodec are not needed; only a broken one is in the way."""
    try:
        broken = {library.name: library.error for library in repairs.broken_media_libraries()}
    except UsageError as error:
        return [Check(" and ".join(repairs.MEDIA_LIBRARIES), "missing", "their import does not end", str(error))]
    checks = []
    for name in repairs.MEDIA_LIBRARIES:
        if name in broken:
            found = f"does not import, and transformers dies of it: {broken[name]}"
            checks.append(Check(name, "missing", found, shlex.join(repairs.uninstall_command((name,)))))
        elif vllm_info.package_directory(name) is not None:
            checks.append(Check(name, "ok", "imports"))
        else:
            checks.append(Check(name, "ok", "not installed, not needed"))
    return checks


def _nixl() -> Check:
    if vllm_info.package_directory("nixl") is None:
        mend = "pip install 'epd-conformance[nixl]' (only for connectors that transfer over NIXL)"
        return Check("nixl", "warn", "not installed", mend)
    try:
        return Check("nixl", "ok", importlib.metadata.version("nixl"))
    except importlib.metadata.PackageNotFoundError:
        return Check("nixl", "ok", "unknown version")


def _cores(inventory: Inventory) -> Check:
    if inventory.cores < 2:
        mend = "give it two or more: on one core, servers that wait for each other may run into timeouts"
        return Check("cores", "warn", str(inventory.cores), mend)
    return Check("cores", "ok", str(inventory.cores))


def _memory(inventory: Inventory, physical_gib: float) -> Check:
    fit = int(inventory.available_gib // SERVER_GIB)
    limited = ", limited by the container" if inventory.memory_gib < physical_gib else ""
    found = (
        f"{inventory.available_gib:.1f} of {inventory.memory_gib:.1f} GiB available{limited}; "
        f"{fit} servers of {SERVER_GIB:.0f} GiB fit"
    )
    if fit < 1:
        return Check("memory", "missing", found, f"free {SERVER_GIB:.0f} GiB for one server, more for a topology")
    if fit < _LARGEST_STACK:
        need = _LARGEST_STACK * SERVER_GIB
        return Check("memory", "warn", found, f"free {need:.0f} GiB for e-p-d, or run smaller profiles only")
    return Check("memory", "ok", found)


def _shared_memory(directory: Path) -> Check:
    name = str(directory)
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return Check(name, "missing", "not there", "mount it: vLLM's processes talk through it")
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free"
    if usage.free / GIB < _SHM_WANTED_GIB:
        mend = "give the container more (docker run --shm-size=2g), or remove what earlier runs left"
        return Check(name, "warn", found, mend)
    return Check(name, "ok", found)


def _ports(free: int) -> Check:
    found = f"{free} of {len(PORTS)} free between {PORTS.start} and {PORTS.stop - 1}"
    if free < _PORTS_WANTED:
        return Check("ports", "missing", found, f"stop what listens there: e-p-d takes up to {_PORTS_WANTED}")
    return Check("ports", "ok", found)


def _gpus(inventory: Inventory, info: vllm_info.VllmInfo | None) -> Check:
    if inventory.gpus:
        found = "; ".join(f"{gpu.index}: {gpu.name}, {gpu.memory_gib:.0f} GiB" for gpu in inventory.gpus)
        if info is not None and info.platform == "cpu":
            return Check(
                "GPUs",
                "warn",
                f"{found}; unused, the CPU build is installed",
                "pip install 'epd-conformance[cuda]'",
            )
        return Check("GPUs", "ok", found)
    if info is not None and info.platform == "cuda":
        found = "none, but the installed vLLM is a CUDA build"
        return Check("GPUs", "missing", found, "pip install 'epd-conformance[cpu]' in an environment of its own")
    return Check("GPUs", "ok", "none: CPU build is used")


def _home() -> Check:
    """vLLM, transformers and the compilers beneath them write below the home directory."""
    try:
        home = Path.home()
    except RuntimeError:
        return Check("home", "missing", "there is none", "set HOME to a writable directory")
    try:
        with tempfile.TemporaryFile(dir=home):
            return Check("home", "ok", f"{home} is writable")
    except OSError as error:
        # Not fatal: XDG_CACHE_HOME or VLLM_CACHE_ROOT may point elsewhere.
        found = f"{home} cannot be written: {error.strerror}"
        return Check("home", "warn", found, "set HOME to a writable directory")


def _cache() -> Check:
    # Imported here because NumPy and the model builders would cost the other callers of this module their
    # time.
    from epd_conformance.models import zoo

    try:
        cache = zoo.default_cache()
    except UsageError as error:
        return Check("cache", "missing", "no folder can be written", str(error))
    return Check("cache", "ok", f"{cache}, {shutil.disk_usage(cache).free / GIB:.0f} GiB free")


def _model(model: str) -> Check:
    from epd_conformance.models import zoo

    name = f"model {model}"
    try:
        cache = zoo.default_cache()
        if model in zoo.MODELS:
            made = any(cache.glob(f"{model}-*/config.json"))
            return Check(name, "ok", f"in {cache}" if made else f"made on first use in {cache}")
        folder = Path(model).expanduser()
        if (folder / "config.json").is_file():
            return Check(name, "ok", f"folder {folder.absolute()}")
        zoo.resolve(model, cache)
    except UsageError as error:
        return Check(name, "missing", "not found", str(error))
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return Check(name, "warn", "a hub id, and HF_HUB_OFFLINE=1", "make sure that it has been downloaded")
    return Check(name, "ok", "a hub id: loaded on first use")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
