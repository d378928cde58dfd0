"""Claims on ports and memory, between processes that know nothing of each other but the claims."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_conformance.errors import UsageError
from epd_conformance.topology import claims
from epd_conformance.topology.claims import PORTS, Memory, Ports, bindable
from epd_conformance.topology.devices import SERVER_GIB, Inventory, shortfall

GIB_24 = Inventory(cores=2, memory_gib=24.0, available_gib=10.0)


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promises of the tests are no promises to the machine's real runs."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def other() -> Iterator[list[subprocess.Popen[str]]]:
    """Other runs; they say one line when they have what they wanted, and end with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def another_run(started: list[subprocess.Popen[str]], code: str) -> tuple[subprocess.Popen[str], str]:
    """Run `code` in another process; returns it and the first line that it prints. It then waits for a line."""
    head = "import sys\nfrom epd_conformance.topology.claims import *\nfrom epd_conformance.topology.devices import *\n"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{head}{code}\nsys.stdin.readline()\n"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    started.append(process)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


# -- ports -------------------------------------------------------------------------------------------------------------


def test_a_port_is_free_in_range_and_given_once() -> None:
    ports = Ports()
    taken = [ports.take() for _ in range(50)]
    assert len(set(taken)) == 50
    assert all(port in PORTS and bindable(port) for port in taken)
    ports.close()


def test_no_port_is_given_twice_over_two_processes(
    other: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = range(PORTS.start, PORTS.start + 40)
    monkeypatch.setattr(claims, "PORTS", few)
    ports = Ports()
    mine = [ports.take() for _ in range(15)]
    code = (
        f"from epd_conformance.topology import claims\nclaims.PORTS = {few!r}\nports = Ports()\n"
        "print([ports.take() for _ in range(15)], flush=True)"
    )
    process, line = another_run(other, code)
    theirs = json.loads(line)
    assert not set(mine) & set(theirs)
    for port in theirs:
        assert bindable(port), "nobody listens: the claim alone keeps it"
        with pytest.raises(
            UsageError, match=f"port {port} is taken by another program: stop it or choose another port"
        ):
            ports.take_exactly(port)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [ports.take_exactly(port) for port in theirs] == theirs, "a killed run holds nothing"
    ports.close()


def test_a_port_in_use_is_refused_by_name() -> None:
    ports = Ports()
    for host in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((host, 0)) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(UsageError, match=f"port {port} is taken"):
                ports.take_exactly(port)
        assert ports.take_exactly(port) == port, "the refusal holds no claim"
    ports.close()


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match=f"{port} is no port"):
        Ports().take_exactly(port)


def test_released_ports_can_be_had_again_and_cost_nothing() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    first, second = Ports(), Ports()
    port = first.take()
    with pytest.raises(UsageError):
        second.take_exactly(port)
    with pytest.raises(UsageError):
        first.take_exactly(port)
    first.release([port, port])
    assert second.take_exactly(port) == port
    second.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_no_free_port_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "PORTS", range(PORTS.start, PORTS.start + 1))
    ports = Ports()
    ports.take()
    with pytest.raises(UsageError, match=f"no free port between {PORTS.start} and {PORTS.start}: stop what listens"):
        ports.take()
    ports.close()


def test_a_seeded_run_does_not_try_the_same_ports_as_another() -> None:
    drawn = []
    for _ in range(2):
        random.seed(0)
        ports = Ports()
        drawn.append([ports.take() for _ in range(8)])
        ports.close()
    assert drawn[0] != drawn[1]


# -- memory ------------------------------------------------------------------------------------------------------------

# Two servers fit into 10 GiB, four do not. `read` states the machine, which does not change while the servers boot.
HOLDER = """
memory = Memory()
memory.admit(2, 0.0, print, lambda: Inventory(2, 24.0, 10.0))
print("admitted", flush=True)
"""


def stated() -> Inventory:
    return GIB_24


def test_of_two_runs_for_memory_of_one_the_second_waits_and_gets_it(
    other: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "POLL_S", 0.02)
    process, line = another_run(other, HOLDER + "sys.stdin.readline()\nmemory.promise(0.0)\nprint('done', flush=True)")
    assert line == "admitted"
    said: list[str] = []
    waits = Memory()
    got = threading.Event()

    def wait() -> None:
        waits.admit(2, 30.0, said.append, stated)
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.3), "both were admitted to the same memory"
    assert said == [
        "waiting for memory: 2 servers need 6 GiB (3 GiB each) and 10.0 GiB of 24.0 GiB are free, of which 6.0 GiB are "
        "reserved by other runs"
    ]
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert got.wait(10)
    thread.join()
    waits.close()


def test_of_many_that_race_only_as_many_get_in_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the memory and promising it is one step: without that two would see the same free gigabytes."""
    holders = [Memory() for _ in range(8)]
    inside: list[int] = []
    barrier = threading.Barrier(len(holders))

    room = Inventory(cores=2, memory_gib=24.0, available_gib=3 * SERVER_GIB)

    def slow(*arguments: Any) -> str | None:
        decided = shortfall(*arguments)
        time.sleep(0.02)  # between reading what the others have promised and promising
        return decided

    monkeypatch.setattr(claims, "shortfall", slow)

    def enter(number: int) -> None:
        barrier.wait()
        try:
            holders[number].admit(1, 0.0, lambda _: None, lambda: room)
        except UsageError:
            return
        inside.append(number)

    threads = [threading.Thread(target=enter, args=(number,)) for number in range(len(holders))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(inside) == 3
    for memory in holders:
        memory.close()


def test_after_the_wait_it_is_refused_with_the_numbers(
    other: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "POLL_S", 0.02)
    assert another_run(other, HOLDER)[1] == "admitted"
    memory = Memory()
    with pytest.raises(UsageError) as raised:
        memory.admit(2, 0.1, lambda _: None, stated)
    assert str(raised.value) == (
        "too little memory: 2 servers need 6 GiB (3 GiB each) and 10.0 GiB of 24.0 GiB are free, of which 6.0 GiB are reserved "
        "by other runs; waited 0 s: stop something or use a smaller topology"
    )
    memory.close()


def test_what_can_never_fit_is_refused_at_once() -> None:
    memory = Memory()
    began = time.monotonic()
    with pytest.raises(
        UsageError, match=r"9 servers need 27 GiB .* and this machine has 24.0 GiB: use a smaller topology"
    ):
        memory.admit(9, 600.0, lambda _: None, stated)
    assert time.monotonic() - began < 1
    memory.close()


def test_the_promise_of_a_killed_run_vanishes(other: list[subprocess.Popen[str]]) -> None:
    process, line = another_run(other, HOLDER)
    assert line == "admitted"
    memory = Memory()
    assert memory.others() == 6.0
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert memory.others() == 0.0
    assert list((claims.folder() / "memory").iterdir()) == [memory._path], "and its file with it"
    memory.close()
    assert list((claims.folder() / "memory").iterdir()) == []


def test_half_a_promise_is_none(other: list[subprocess.Popen[str]]) -> None:
    assert another_run(other, HOLDER)[1] == "admitted"
    memory = Memory()
    (theirs,) = (path for path in (claims.folder() / "memory").iterdir() if path != memory._path)
    theirs.write_text('{"outst')
    assert memory.others() == 0.0
    memory.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / f"epd-conformance-{os.getuid()}"
    theirs.mkdir()
    os.chown(theirs, 12345, 12345)
    with pytest.raises(
        UsageError, match=f"{theirs} cannot be used .belongs to another user.: remove it, or set TMPDIR"
    ):
        Memory()


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / f"epd-conformance-{os.getuid()}").write_text("a file")
    with pytest.raises(UsageError, match="cannot be used"):
        Memory()
