"""Who gets what, from stated inventories: no GPU is needed, and none is asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.errors import UsageError
from epd_conformance.topology import devices
from epd_conformance.topology.devices import (
    GIB,
    SERVER_GIB,
    Gpu,
    Inventory,
    assign,
    cgroup_memory,
    never_fits,
    parse_gpus,
    shortfall,
)
from epd_conformance.topology.spec import Role, Topology

CSV = """\
0, NVIDIA H200, 143771, GPU-8932f937-d72c-4106-c12f-20bd9faed9f6
1, NVIDIA H200, 143771, GPU-89ab0000-d72c-4106-c12f-20bd9faed9f6
2, NVIDIA H200, 143771, GPU-00000000-d72c-4106-c12f-20bd9faed9f6
"""


def machine(gpus: int = 0, gib: float = 80.0, memory: float = 24.0, available: float = 20.0) -> Inventory:
    return Inventory(2, memory, available, tuple(Gpu(i, "GPU of the test", gib) for i in range(gpus)))


def servers(text: str) -> list[tuple[str, Role]]:
    return Topology.parse(text).servers()


# -- assigning ---------------------------------------------------------------------------------------------------------


def test_on_cpu_every_server_may_use_every_core() -> None:
    placed = assign(servers("e-p-d"), machine(), "cpu")
    assert list(placed) == ["encode-0", "prefill-0", "decode-0"]
    for placement in placed.values():
        assert placement.environment == {}
        assert placement.flags == ()
        assert placement.words == "cpu (2 cores)"


def test_three_servers_share_one_gpu_by_fraction() -> None:
    placed = assign(servers("e-p-d"), machine(gpus=1), "cuda")
    assert {one.environment["CUDA_VISIBLE_DEVICES"] for one in placed.values()} == {"0"}
    assert {one.flags for one in placed.values()} == {("--gpu-memory-utilization", "0.30")}
    assert placed["encode-0"].words == "cuda:0 (GPU of the test, 30 % of 80 GiB)"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (2, [("0", "0.45"), ("1", "0.90"), ("0", "0.45")]),
        (4, [("0", "0.90"), ("1", "0.90"), ("2", "0.90")]),
        (8, [("0", "0.90"), ("1", "0.90"), ("2", "0.90")]),
    ],
)
def test_servers_are_dealt_over_the_gpus(gpus: int, expected: list[tuple[str, str]]) -> None:
    placed = assign(servers("e-p-d"), machine(gpus), "cuda")
    assert [(one.environment["CUDA_VISIBLE_DEVICES"], one.flags[1]) for one in placed.values()] == expected


def test_indices_are_those_of_nvidia_smi() -> None:
    """CUDA alone would count the fastest first, and two unlike GPUs would change places."""
    (placed,) = assign(servers("aggregated"), machine(1), "cuda").values()
    assert placed.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 16))
def test_no_gpu_is_ever_promised_twice(encoders: int, decoders: int, gpus: int) -> None:
    wanted = servers(f"{encoders}e-{decoders}pd")
    if encoders + decoders > 90 * gpus:  # less than a hundredth each
        with pytest.raises(UsageError, match="too little GPU memory"):
            assign(wanted, machine(gpus, gib=1000.0), "cuda")
        return
    placed = assign(wanted, machine(gpus, gib=1000.0), "cuda")
    assert list(placed) == list(dict(wanted))
    for gpu in range(gpus):
        shares = [float(one.flags[1]) for one in placed.values() if one.environment["CUDA_VISIBLE_DEVICES"] == str(gpu)]
        assert sum(shares) <= 0.9 + 1e-9
        assert all(share > 0 for share in shares)


def test_no_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match=r"needs a GPU and none was found .*: use --device cpu"):
        assign(servers("e-pd"), machine(), "cuda")


def test_a_gpu_that_is_too_small_for_so_many_is_refused_with_the_numbers() -> None:
    with pytest.raises(UsageError) as raised:
        assign(servers("e-p-d"), machine(1, gib=6.0), "cuda")
    assert str(raised.value) == (
        "too little GPU memory: 3 servers on GPU of the test would have 1.8 GiB each of 6 GiB and need 2 GiB at least: "
        "use a smaller topology or more GPUs"
    )
    assert len(assign(servers("e-pd"), machine(1, gib=6.0), "cuda")) == 2


# -- what nvidia-smi and CUDA_VISIBLE_DEVICES say ----------------------------------------------------------------------


def test_every_gpu_is_read() -> None:
    gpus = parse_gpus(CSV)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert gpus[0] == Gpu(0, "NVIDIA H200", 143771 / 1024, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6")
    assert parse_gpus("0, NVIDIA L4, 23034\n") == (Gpu(0, "NVIDIA L4", 23034 / 1024),)
    assert parse_gpus("No devices were found\n") == ()


def test_a_gpu_without_a_number_is_there_with_unknown_memory() -> None:
    """GPUs that share the host's memory say `[N/A]`, ones in an error state `[Unknown Error]`."""
    (gpu,) = parse_gpus("0, NVIDIA GB10, [N/A], GPU-1\n")
    assert gpu.memory_gib == 0.0
    (placed,) = assign(servers("aggregated"), Inventory(2, 8.0, 8.0, (gpu,)), "cuda").values()
    assert placed.words == "cuda:0 (NVIDIA GB10, 90 % of its memory)"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("0,1", [0, 1]),
        ("2, 0", [2, 0]),
        ("1,1", [1]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),  # as in CUDA: what names nothing hides all that follow
        ("7", []),
        ("none", []),
        ("GPU-00000000-d72c-4106-c12f-20bd9faed9f6", [2]),
        ("GPU-8932,GPU-0", [0, 2]),  # the beginning of a UUID is enough
        ("GPU-8", []),  # of two GPUs it names neither
        ("GPU-ffff", []),
    ],
)
def test_cuda_visible_devices_narrows_and_orders(visible: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in parse_gpus(CSV, visible)] == indices


def test_a_mig_slice_is_used_by_its_name() -> None:
    gpus = parse_gpus(CSV, "MIG-1,MIG-2,MIG-1")
    assert [gpu.selector for gpu in gpus] == ["MIG-1", "MIG-2"]
    placed = assign(servers("e-p-d"), Inventory(2, 8.0, 8.0, gpus), "cuda")
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in placed.values()] == ["MIG-1", "MIG-2", "MIG-1"]


def test_reading_gpus_asks_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$1" = --query-gpu=index,name,memory.total,uuid ] && printf "{CSV}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in devices.read_gpus()] == [1]
    assert [gpu.index for gpu in Inventory.read().gpus] == [1]
    assert Inventory.read(gpus=False).gpus == ()
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert devices.read_gpus() == (), "a driver that does not run is no GPU, and no error on CPU"
    monkeypatch.setenv("PATH", "/nonexistent")
    assert devices.read_gpus() == ()


# -- memory ------------------------------------------------------------------------------------------------------------


def test_what_fits_and_what_does_not() -> None:
    assert shortfall(6, machine(available=18.0)) is None
    assert shortfall(6, machine(available=17.9)) == (
        "6 servers need 18 GiB (3 GiB each) and 17.9 GiB of 24.0 GiB are free"
    )
    assert shortfall(5, machine(available=20.0), reserved_gib=5.1) == (
        "5 servers need 15 GiB (3 GiB each) and 20.0 GiB of 24.0 GiB are free, of which 5.1 GiB are reserved by other runs"
    )
    assert never_fits(8, machine(available=0.0)) is None, "it does not fit now, which is another question"
    assert never_fits(9, machine()) == (
        "9 servers need 27 GiB (3 GiB each) and this machine has 24.0 GiB: use a smaller topology or a larger machine"
    )


@given(st.integers(1, 64), st.floats(0, 512), st.floats(0, 512))
def test_a_promise_never_makes_more_fit(count: int, available: float, reserved: float) -> None:
    state = machine(memory=512.0, available=available)
    if shortfall(count, state, reserved) is None:
        assert count * SERVER_GIB <= available - reserved
        assert shortfall(count, state) is None


def cgroup(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
    limit_name, usage_name, prefix = names[version]
    (folder / limit_name).write_text(f"{limit}\n")
    (folder / usage_name).write_text(f"{used}\n")
    local = "inactive_file 7\n" if version == 1 else ""  # version 1 counts the children's apart
    (folder / "memory.stat").write_text(f"anon 1\n{local}{prefix}inactive_file {cache}\n")


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def left(membership: Path, root: Path, total: float = 24.0, available: float = 20.0) -> tuple[float, float]:
    memory = cgroup_memory(total * GIB, available * GIB, membership, root)
    return memory[0] / GIB, memory[1] / GIB


def test_a_cgroups_limit_is_the_machines_memory(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/user.slice/run.scope\n")
    cgroup(tmp_path / "root/user.slice/run.scope", str(8 * GIB), 5 * GIB, 2 * GIB)
    assert left(membership, tmp_path / "root") == (8.0, 5.0), "what the page cache holds can be had"
    assert left(membership, tmp_path / "root", total=4.0, available=3.0) == (4.0, 3.0), (
        "a limit above it changes nothing"
    )


def test_the_tightest_cgroup_above_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/pod/container/run\n")
    (tmp_path / "root").mkdir()
    cgroup(tmp_path / "root/pod", str(6 * GIB), 4 * GIB, 0)
    cgroup(tmp_path / "root/pod/container", str(9 * GIB), 8 * GIB, 0)
    cgroup(tmp_path / "root/pod/container/run", "max", GIB, 0)
    assert left(membership, tmp_path / "root") == (6.0, 1.0)


def test_inside_a_container_the_path_may_be_the_hosts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("11:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n0::/\n")
    cgroup(tmp_path / "root/memory", str(8 * GIB), 5 * GIB, GIB, version=1)
    assert left(membership, tmp_path / "root") == (8.0, 4.0)


def test_version_1_says_no_limit_by_a_huge_number(tmp_path: Path, membership: Path) -> None:
    membership.write_text("4:memory:/\n")
    cgroup(tmp_path / "root/memory", str((1 << 63) - 4096), 5 * GIB, 0, version=1)
    assert left(membership, tmp_path / "root") == (24.0, 20.0)


@pytest.mark.parametrize("text", [None, "", "garbage without colons\n", "0::/../outside\n"])
def test_without_cgroups_the_machine_itself_counts(text: str | None, tmp_path: Path, membership: Path) -> None:
    if text is not None:
        membership.write_text(text)
    assert left(membership, tmp_path / "root") == (24.0, 20.0)


def test_this_machine_can_be_read() -> None:
    inventory = Inventory.read(gpus=False)
    assert inventory.cores >= 1
    assert 0 <= inventory.available_gib <= inventory.memory_gib
