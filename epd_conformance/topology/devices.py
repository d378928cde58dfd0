"""What the machine has, and who gets what: CPU cores and memory, or GPUs.

Deciding is pure (`assign`, `admit`), so that it is tested with a stated inventory on a machine without a GPU; reading the
machine is a function beside it.
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


@dataclass(frozen=True)
class Gpu:
    """One GPU: index as in CUDA_VISIBLE_DEVICES, name, memory in GiB."""

    index: int
    name: str
    memory_gib: float


@dataclass(frozen=True)
class Inventory:
    """What one host offers. Memory is in GiB; `available_gib` is what can be taken now without swapping."""

    cores: int
    memory_gib: float
    available_gib: float
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def read(cls) -> Inventory:
        """Read this machine; a cgroup limit (containers) counts as the machine's memory."""
        memory = psutil.virtual_memory()
        total, available = float(memory.total), float(memory.available)
        limit, used = _cgroup_memory()
        if limit is not None and limit < total:
            total = limit
            available = min(available, limit - used)
        return cls(
            cores=len(os.sched_getaffinity(0)),
            memory_gib=total / GIB,
            available_gib=max(available, 0.0) / GIB,
            gpus=read_gpus(),
        )


def _cgroup_memory() -> tuple[float | None, float]:
    """Limit and use of this process's cgroup in bytes, version 2 or 1; limit None where there is none.

    Page cache counts as use but is given back under pressure, so it is taken off.
    """
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        unified = next((line[3:] for line in lines if line.startswith("0::")), None)
        legacy = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
        if legacy is not None:
            folder, names = (
                root / "memory" / legacy.lstrip("/"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
            )
        elif unified is not None:
            folder, names = root / unified.lstrip("/"), ("memory.max", "memory.current", "inactive_file ")
        else:
            return None, 0.0
        limit = (folder / names[0]).read_text().strip()
        # Version 1 says "no limit" by a number of about 2**63.
        if limit == "max" or int(limit) >= 1 << 60:
            return None, 0.0
        statistics = (folder / "memory.stat").read_text().splitlines()
        cache = next((int(line.split()[1]) for line in statistics if line.startswith(names[2])), 0)
        return float(limit), float(int((folder / names[1]).read_text()) - cache)
    except (OSError, ValueError):
        return None, 0.0


def read_gpus() -> tuple[Gpu, ...]:
    """GPUs that nvidia-smi lists, or none. CUDA_VISIBLE_DEVICES of the caller is respected."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return parse_gpus(text, visible)


def parse_gpus(text: str, visible: str | None = None) -> tuple[Gpu, ...]:
    """Read nvidia-smi's CSV (index, name, MiB); `visible` is a CUDA_VISIBLE_DEVICES value that narrows it."""
    gpus = [
        Gpu(int(row[0]), row[1].strip(), float(row[2]) / 1024) for row in csv.reader(io.StringIO(text)) if len(row) == 3
    ]
    if visible is not None:
        wanted = {int(part) for part in visible.split(",") if part.strip().isdigit()}
        gpus = [gpu for gpu in gpus if gpu.index in wanted]
    return tuple(gpus)


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
        raise UsageError("--device cuda needs a GPU and none was found (nvidia-smi lists none): use --device cpu")
    owners: dict[int, list[str]] = {gpu.index: [] for gpu in inventory.gpus}
    for position, (name, _) in enumerate(servers):
        owners[inventory.gpus[position % len(inventory.gpus)].index].append(name)
    placements: dict[str, Placement] = {}
    for gpu in inventory.gpus:
        names = owners[gpu.index]
        for name in names:
            fraction = (
                int(GPU_FRACTION / len(names) * 100) / 100
            )  # rounded down: the shares must never exceed the whole
            placements[name] = Placement(
                environment={"CUDA_VISIBLE_DEVICES": str(gpu.index)},
                flags=("--gpu-memory-utilization", f"{fraction:.2f}"),
                words=f"cuda:{gpu.index} ({gpu.name}, {fraction:.0%} of {gpu.memory_gib:.0f} GiB)",
            )
    return placements


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
