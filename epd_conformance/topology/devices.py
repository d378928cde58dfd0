"""What the machine has, and who gets what: CPU cores and memory, or GPUs.

Deciding is pure (`assign`, `shortfall`, `never_fits`), so that it is tested with a stated inventory on a machine without a
GPU; reading the machine is a function beside it.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from epd_conformance.errors import UsageError
from epd_conformance.topology.spec import Role

GIB = 1 << 30
# Resident memory of one tiny-model server on CPU (API server, engine core, worker), measured at vLLM 0.32 with a plain
# start; a server forked from the warmed parent shares pages with it and needs less.
SERVER_GIB = 3.0
# vLLM's own default for one server on a whole GPU; when several share it, this is what they share.
GPU_FRACTION = 0.9
# Below this a server does not start even with a tiny model: a CUDA context alone takes about half a gibibyte, and vLLM's
# profiling run and a first cache block come on top.
GPU_SERVER_GIB = 2.0


@dataclass(frozen=True)
class Gpu:
    """One GPU: index as nvidia-smi counts, name, memory in GiB (0 where unknown), and UUID.

    A MIG slice, which nvidia-smi lists under no index of its own, is known by its UUID only (`MIG-…`).
    """

    index: int
    name: str
    memory_gib: float
    uuid: str = ""

    @property
    def selector(self) -> str:
        """What CUDA_VISIBLE_DEVICES is set to for it."""
        return self.uuid if self.uuid.startswith("MIG-") else str(self.index)


@dataclass(frozen=True)
class Inventory:
    """What one host offers. Memory is in GiB; `available_gib` is what can be taken now without swapping."""

    cores: int
    memory_gib: float
    available_gib: float
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def read(cls, gpus: bool = True) -> Inventory:
        """Read this machine; a cgroup limit (containers) counts as the machine's memory. `gpus`: ask for GPUs too."""
        memory = psutil.virtual_memory()
        total, available = cgroup_memory(float(memory.total), float(memory.available))
        return cls(
            cores=len(os.sched_getaffinity(0)),
            memory_gib=total / GIB,
            available_gib=max(available, 0.0) / GIB,
            gpus=read_gpus() if gpus else (),
        )


def cgroup_memory(
    total: float, available: float, membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float]:
    """The machine's total and available bytes, cut to what this process's cgroups (version 2 or 1) leave of them.

    Every cgroup above counts too: the tightest limit may be a slice's or a pod's. Seen from inside a container the path in
    `membership` may be the host's and not exist under `root`, whose own files are then the container's. Page cache counts
    as use but is given back under pressure, so it is taken off.
    """
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return total, available
    entries = [parts for line in lines if len(parts := line.split(":", 2)) == 3]
    legacy = next((path for _, controllers, path in entries if "memory" in controllers.split(",")), None)
    unified = next((path for number, _, path in entries if number == "0"), None)
    if legacy is not None:
        base, path = root / "memory", legacy
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")
    elif unified is not None:
        base, path = root, unified
        names = ("memory.max", "memory.current", "inactive_file ")
    else:
        return total, available
    folder = base / path.lstrip("/")
    while True:
        limit, used = _cgroup(folder, *names)
        if limit is not None:
            total, available = min(total, limit), min(available, limit - used)
        if folder == base or ".." in folder.parts:
            return total, available
        folder = folder.parent


def _cgroup(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> tuple[float | None, float]:
    """Limit and use of one cgroup in bytes; limit None where there is none."""
    try:
        limit = (folder / limit_name).read_text(encoding="utf-8").strip()
        # Version 1 says "no limit" by a number of about 2**63.
        if limit == "max" or int(limit) >= 1 << 60:
            return None, 0.0
        statistics = (folder / "memory.stat").read_text(encoding="utf-8").splitlines()
        cache = next((int(line.split()[1]) for line in statistics if line.startswith(cache_name)), 0)
        return float(limit), float(int((folder / usage_name).read_text(encoding="utf-8")) - cache)
    except (OSError, ValueError):
        return None, 0.0


def read_gpus() -> tuple[Gpu, ...]:
    """GPUs that nvidia-smi lists, or none. CUDA_VISIBLE_DEVICES of the caller is respected."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=index,name,memory.total,uuid", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(text, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(text: str, visible: str | None = None) -> tuple[Gpu, ...]:
    """Read nvidia-smi's CSV (index, name, MiB, and UUID if it is there).

    `visible` is a CUDA_VISIBLE_DEVICES value: indices, UUIDs or the beginnings of UUIDs, in the order in which they are to be
    used. As in CUDA an entry that names nothing (`-1` is usual) hides itself and all that follow. A MIG slice counts as a
    GPU of unknown size.
    """
    gpus = []
    for row in csv.reader(io.StringIO(text), skipinitialspace=True):
        if len(row) in (3, 4) and row[0].strip().isdecimal():
            # A GPU in an error state, and one that shares its memory with the host, report no number.
            size = float(row[2]) / 1024 if row[2].strip().replace(".", "", 1).isdecimal() else 0.0
            gpus.append(Gpu(int(row[0]), row[1].strip(), size, row[3].strip() if len(row) == 4 else ""))
    if visible is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in visible.split(","):
        name = entry.strip()
        if name.startswith("MIG-"):
            found = [Gpu(len(chosen), "MIG slice", 0.0, name)]
        elif name.startswith("GPU-"):
            found = [gpu for gpu in gpus if gpu.uuid.startswith(name)]
        else:
            found = [gpu for gpu in gpus if str(gpu.index) == name]
        if len(found) != 1:
            break
        if found[0].selector not in [gpu.selector for gpu in chosen]:
            chosen.append(found[0])
    return tuple(chosen)


@dataclass(frozen=True)
class Placement:
    """Where one server runs: environment and flags that put it there, and the words for the report."""

    environment: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    words: str = ""


def assign(servers: Sequence[tuple[str, Role]], inventory: Inventory, device: str) -> dict[str, Placement]:
    """Give each server its device.

    On CPU every server may use every core (servers wait most of the time; pinning them to one would make them wait for each
    other). On CUDA servers are dealt round-robin over the GPUs in the order given; several on one GPU share it by memory
    fraction. Raises UsageError when `device` is `cuda` and there is no GPU.
    """
    if device == "cpu":
        return {name: Placement(words=f"cpu ({inventory.cores} cores)") for name, _ in servers}
    if not inventory.gpus:
        raise UsageError(
            "--device cuda needs a GPU and none was found (nvidia-smi lists none that CUDA_VISIBLE_DEVICES leaves visible): "
            "use --device cpu"
        )
    placements: dict[str, Placement] = {}
    for position, gpu in enumerate(inventory.gpus):
        names = [name for name, _ in servers[position :: len(inventory.gpus)]]
        if not names:
            continue
        # Rounded down: the shares must never exceed the whole.
        percent = int(round(GPU_FRACTION * 100) / len(names))
        share = percent / 100 * gpu.memory_gib
        if percent < 1 or (gpu.memory_gib and share < GPU_SERVER_GIB):
            raise UsageError(
                f"too little GPU memory: {len(names)} servers on {gpu.name} would have {share:.1f} GiB each of "
                f"{gpu.memory_gib:.0f} GiB and need {GPU_SERVER_GIB:.0f} GiB at least: use a smaller topology or more GPUs"
            )
        size = f"{gpu.memory_gib:.0f} GiB" if gpu.memory_gib else "its memory"
        for name in names:
            placements[name] = Placement(
                # Indices are nvidia-smi's, which counts by bus; by itself CUDA may put the fastest first.
                environment={"CUDA_VISIBLE_DEVICES": gpu.selector, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
                flags=("--gpu-memory-utilization", f"{percent / 100:.2f}"),
                words=f"cuda:{gpu.selector} ({gpu.name}, {percent} % of {size})",
            )
    return {name: placements[name] for name, _ in servers}


def shortfall(servers: int, inventory: Inventory, reserved_gib: float = 0.0) -> str | None:
    """Why `servers` more CPU servers do not fit now, with the numbers; None when they fit.

    `reserved_gib` is what other runs on this host have announced but not taken yet.
    """
    need = servers * SERVER_GIB
    free = inventory.available_gib - reserved_gib
    if need <= free:
        return None
    other = f", of which {reserved_gib:.1f} GiB are reserved by other runs" if reserved_gib else ""
    return (
        f"{servers} servers need {need:.0f} GiB ({SERVER_GIB:.0f} GiB each) and {inventory.available_gib:.1f} GiB of "
        f"{inventory.memory_gib:.1f} GiB are free{other}"
    )


def never_fits(servers: int, inventory: Inventory) -> str | None:
    """Why waiting would not help: the machine as a whole is too small. None when it could fit."""
    need = servers * SERVER_GIB
    if need <= inventory.memory_gib:
        return None
    return (
        f"{servers} servers need {need:.0f} GiB ({SERVER_GIB:.0f} GiB each) and this machine has {inventory.memory_gib:.1f} GiB: "
        "use a smaller topology or a larger machine"
    )
