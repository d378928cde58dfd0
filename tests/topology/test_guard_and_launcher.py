"""Whatever way a run ends, nothing of it is left. Stand-ins (standin.py) play the servers; the live tests have real ones."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from topology_residue import QuickLauncher, Traces, alive, marked, new_token, start_standin, wait_ready, wait_until

from epd_conformance.errors import StackError, UsageError
from epd_conformance.runtime import repairs
from epd_conformance.runtime.site import _epd_lifeline
from epd_conformance.topology import guard, launcher
from epd_conformance.topology.launcher import Boot, Launcher, Process

# Everything that makes a process hard to get rid of, in one server.
NASTY = ["deaf", "child", "session", "daemon", "memory"]
HERE = str(Path(__file__).parent)


@pytest.fixture
def token() -> Iterator[str]:
    """The mark of everything that a test starts; whatever a failing test leaves is ended here."""
    token = new_token()
    yield token
    for pid in marked(token):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a folder with spaces"
    path.mkdir()
    return path


def start_owner(
    folder: Path, end: str, *servers: list[str], boot: Boot = Boot.PLAIN, **environment: str
) -> tuple[subprocess.Popen[bytes], Any]:
    """An owner in a process and group of its own; returns it and what it tells of itself."""
    process = subprocess.Popen(
        [sys.executable, "-m", "standin_owner", str(folder), boot, end, json.dumps(servers)],
        env={**os.environ, "PYTHONPATH": HERE, **environment},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    wait_until(lambda: (folder / "owner.json").exists() or process.poll() is not None, "the owner")
    assert (folder / "owner.json").exists(), process.stderr and process.stderr.read().decode()
    return process, json.loads((folder / "owner.json").read_text())


def told_traces(token: str, told: Any) -> Traces:
    return Traces.of(token, told["scratch"], told["servers"])


# -- the detector itself -----------------------------------------------------------------------------------------------


def test_the_detector_finds_what_is_left(token: str, folder: Path) -> None:
    """Negative control: a stand-in outside any launcher leaves all of it, and all of it is found."""
    ready = folder / "lost.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "standin", str(ready), *NASTY], env={**os.environ, "PYTHONPATH": HERE}
    )
    made = wait_ready(folder, "lost")
    traces = Traces.of(token, folder, [made])
    process.kill()
    process.wait()
    # Python's tracker of shared memory is the one that goes by itself, soon.
    wait_until(lambda: sorted(marked(token)) == sorted(made["pids"][1:]), "the tracker to go")
    assert len(traces.left()) == 3 + 1 + 2 + 1, "the port too: the children hold the listener"
    with pytest.raises(AssertionError, match="left after"):
        traces.assert_gone(0.1)
    for pid in made["pids"][1:]:
        os.kill(pid, signal.SIGKILL)
    for block in made["blocks"]:
        Path("/dev/shm", block).unlink()
    wait_until(lambda: traces.left() == [f"folder {folder}"], "the rest to be gone")


def test_guard_and_lifeline_remove_the_same_blocks() -> None:
    assert guard.SHM_NAMES == _epd_lifeline.SHM_NAMES


# -- how an owner may end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["return", "raise"])
def test_an_owner_that_leaves_its_launcher_leaves_nothing(end: str, token: str, folder: Path) -> None:
    # Everything may be gone before there was time to look, so what is to be gone is told, not seen.
    process, told = start_owner(folder, end, NASTY, ["child"])
    process.wait(20)
    assert (process.returncode == 0) is (end == "return")
    made = told["servers"]
    ports = tuple(one["port"] for one in made)
    Traces(token, ports, tuple(made[0]["blocks"]), (told["scratch"],)).assert_gone(0.0)


@pytest.mark.parametrize("boot", Boot)
def test_sigkill_of_the_owner(boot: Boot, token: str, folder: Path) -> None:
    process, told = start_owner(folder, "wait", NASTY, NASTY, boot=boot)
    traces = told_traces(token, told)
    # Owner, guard, scratch folder, warmed parent; per server itself, three others, Python's tracker, the port, block, semaphore.
    assert len(traces.left()) == 3 + 2 * (5 + 1 + 2) + (boot is Boot.FORK)
    process.kill()
    process.wait()
    traces.assert_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_that_end_the_owner_without_a_word(number: signal.Signals, token: str, folder: Path) -> None:
    process, told = start_owner(folder, "wait", NASTY)
    traces = told_traces(token, told)
    os.killpg(process.pid, number)
    assert process.wait(20) == -number
    traces.assert_gone()


def test_ctrl_c(token: str, folder: Path) -> None:
    """The terminal sends SIGINT to the whole foreground group; the owner cleans up before it ends."""
    process, told = start_owner(folder, "wait", NASTY)
    traces = told_traces(token, told)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(20)
    assert b"KeyboardInterrupt" in (process.stderr.read() if process.stderr else b"")
    traces.assert_gone(0.0)


def test_an_owner_that_dies_while_its_forked_child_lives_on(token: str, folder: Path) -> None:
    """The child holds a copy of the socket to the guard, so the socket's end alone would tell nothing."""
    process, told = start_owner(folder, "fork", NASTY)
    traces = told_traces(token, told)
    process.kill()
    process.wait()
    wait_until(lambda: marked(token) == [told["child"]], "all but the child to be gone")
    os.kill(told["child"], signal.SIGKILL)
    traces.assert_gone()


def test_an_owner_without_a_home(token: str, folder: Path) -> None:
    process, told = start_owner(folder, "wait", ["child"], HOME="/dev/null/home")
    process.kill()
    process.wait()
    told_or_gone = Traces(token, (told["servers"][0]["port"],), (), (told["scratch"],))
    told_or_gone.assert_gone()


# -- the guard's end ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("boot", Boot)
def test_sigkill_of_the_guard(boot: Boot, token: str, folder: Path) -> None:
    """The lifeline ends the servers, their descendants, their shared memory; the owner learns of it."""
    with QuickLauncher(boot, folder / "logs", os.environ) as mine:
        server = start_standin(mine, folder, "server", ["deaf", "child", "session", "memory"])
        traces = Traces.of(token, mine.scratch, [wait_ready(folder, "server")])
        os.kill(mine.guard_pid, signal.SIGKILL)
        wait_until(lambda: not server.alive, "the owner to learn of it")
        with pytest.raises(StackError, match="guard process is gone"):
            start_standin(mine, folder, "another", [])
    traces.assert_gone(0.0)
    assert server.status == -signal.SIGKILL


@pytest.mark.parametrize("boot", Boot)
def test_sigkill_of_guard_and_owner_together(boot: Boot, token: str, folder: Path) -> None:
    process, told = start_owner(folder, "wait", ["deaf", "child", "session", "memory"], ["child"], boot=boot)
    traces = told_traces(token, told)
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot do anything in between
    os.kill(told["guard"], signal.SIGKILL)
    process.kill()
    process.wait()
    traces.assert_gone()


def test_the_owner_sweeps_where_a_server_has_no_lifeline(
    token: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that runs without our sitecustomize (`-S`, another interpreter) still does not survive the guard."""
    monkeypatch.setattr(launcher, "_with_site", dict)
    monkeypatch.setattr(launcher, "SWEEP_S", 0.4)
    with Launcher(Boot.PLAIN, folder / "logs", os.environ) as mine:
        start_standin(mine, folder, "server", ["deaf", "child"])
        traces = Traces.of(token, mine.scratch, [wait_ready(folder, "server")])
        os.kill(mine.guard_pid, signal.SIGKILL)
    traces.assert_gone(0.0)


# -- single servers ----------------------------------------------------------------------------------------------------


@pytest.fixture
def mine(token: str, folder: Path) -> Iterator[Launcher]:
    """A launcher of plain stand-ins that leaves nothing, whatever the test has done with it."""
    with Launcher(Boot.PLAIN, folder / "logs", os.environ) as launched:
        yield launched
    Traces(token, scratch=(str(launched.scratch),)).assert_gone(0.0)


def test_stop_ends_one_server_and_spares_the_other(mine: Launcher, token: str, folder: Path) -> None:
    first = start_standin(mine, folder, "first", ["deaf", "child", "session", "memory"])
    second = start_standin(mine, folder, "second", ["child", "memory"])
    gone, stays = wait_ready(folder, "first"), wait_ready(folder, "second")
    assert sorted(mine.tree(first)) == sorted(gone["pids"] + gone["trackers"])
    mine.stop(first)
    assert not any(alive(pid) for pid in gone["pids"])
    assert not Path("/dev/shm", gone["blocks"][0]).exists()
    assert first.status == -signal.SIGKILL
    assert all(alive(pid) for pid in stays["pids"])
    assert Path("/dev/shm", stays["blocks"][0]).exists()
    assert second.alive


def test_a_graceful_stop_lets_the_server_end_itself(mine: Launcher, folder: Path) -> None:
    server = start_standin(mine, folder, "server", ["memory"])
    made = wait_ready(folder, "server")
    mine.stop(server, graceful=True)
    assert server.status == -signal.SIGTERM, "it was not given the signal that anybody's server gets"
    assert not any(alive(pid) for pid in made["pids"])
    assert not Path("/dev/shm", made["blocks"][0]).exists()


def test_stop_after_the_server_was_killed_ends_what_it_left(mine: Launcher, folder: Path) -> None:
    server = start_standin(mine, folder, "server", ["deaf", "child", "child"])
    made = wait_ready(folder, "server")
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.alive, "its end to be known")
    assert server.status == -signal.SIGKILL
    assert alive(made["pids"][1]), "nothing to stop, nothing is proved"
    mine.stop(server)
    assert not any(alive(pid) for pid in made["pids"])


@pytest.mark.parametrize("stopped", [True, False])
def test_the_memory_of_a_server_that_died_all_at_once(stopped: bool, token: str, folder: Path) -> None:
    """Then nobody has it mapped, and Python's tracker has died as well; only what was noted before tells of it."""
    with Launcher(Boot.PLAIN, folder / "logs", os.environ) as mine:
        server = start_standin(mine, folder, "server", ["child", "memory"])
        made = wait_ready(folder, "server")
        mine.tree(server)
        os.killpg(server.pid, signal.SIGKILL)
        wait_until(lambda: not server.alive, "its end")
        blocks = [Path("/dev/shm", block) for block in made["blocks"]]
        assert all(block.exists() for block in blocks), "nothing to find, nothing is proved"
        if stopped:
            mine.stop(server)
            assert not any(block.exists() for block in blocks)
    assert not any(block.exists() for block in blocks)


def test_the_end_of_a_server_is_told_with_status_cause_and_log(mine: Launcher, folder: Path) -> None:
    said = "ModuleNotFoundError: No module named 'their_connector'"
    server = start_standin(mine, folder, "server", [f"say={said}", "exit=3"])
    wait_until(lambda: not server.alive, "its end")
    first, *rest = server.obituary().splitlines()
    assert first == (
        "server ended with exit code 3: the module 'their_connector' does not import in the server: install it in this "
        "environment, or mend the connector's module path"
    )
    assert rest == [f"--- from {folder}/logs/server.log", said]
    assert isinstance(server.failure(), UsageError)


def test_a_program_that_cannot_start_is_an_error_of_the_launcher(mine: Launcher, folder: Path) -> None:
    (folder / "logs" / "odd.log").mkdir()
    with pytest.raises(StackError, match="could not spawn: IsADirectoryError"):
        start_standin(mine, folder, "odd", [])
    server = start_standin(mine, folder, "next", [])
    wait_ready(folder, "next")
    assert server.alive, "the guard did not survive it"


def test_the_guard_kills_nobody_elses_processes(mine: Launcher, token: str) -> None:
    """The number of a server that has ended may be another program's by now."""
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        mine.stop(Process("long-gone", foreign.pid, Path("/dev/null")))
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_the_end_of_an_orphan_is_not_taken_for_that_of_a_later_server(mine: Launcher, folder: Path) -> None:
    """Pids come again: ends of programs that are not ours must not be kept for them."""
    for name in ("one", "two"):
        start_standin(mine, folder, name, ["exit=0"])
    wait_until(lambda: all(not process.alive for process in mine._processes.values()), "their ends")
    mine._take({"event": "exit", "pid": 4_000_001, "status": 0})
    assert mine._exits == {}


def test_a_server_inherits_no_descriptor_but_its_own(mine: Launcher, folder: Path) -> None:
    server = start_standin(mine, folder, "server", [])
    wait_ready(folder, "server")
    held = sorted(str(entry.readlink()) for entry in Path(f"/proc/{server.pid}/fd").iterdir())
    sockets = [one for one in held if one.startswith("socket:")]
    pipes = [one for one in held if one.startswith("pipe:")]
    assert len(sockets) == 1, f"its listener and nothing of the guard's: {held}"
    assert len(pipes) == 1, f"the lifeline: {held}"


# -- the warmed parent -------------------------------------------------------------------------------------------------


@pytest.fixture
def forking(token: str, folder: Path) -> Iterator[Launcher]:
    """A launcher that forks stand-ins, and leaves nothing, whatever the test has done with it."""
    with QuickLauncher(Boot.FORK, folder / "logs", os.environ) as launched:
        yield launched
    Traces(token, scratch=(str(launched.scratch),)).assert_gone(0.0)


def test_sigkill_of_the_warmed_parent_takes_no_server_with_it(forking: Launcher, folder: Path) -> None:
    first = start_standin(forking, folder, "first", ["deaf", "child", "session", "daemon"])
    made = wait_ready(folder, "first")
    old = forking.zygote_pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    second = start_standin(forking, folder, "second", [])
    wait_ready(folder, "second")
    assert forking.zygote_pid != old
    assert all(alive(pid) for pid in made["pids"])
    socket.create_connection(("127.0.0.1", made["port"]), timeout=5).close()
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: not first.alive, "the end of a server of the parent that is gone")
    assert first.status == -signal.SIGKILL
    assert second.alive


def test_a_warmed_parent_that_ends_while_it_is_asked(forking: Launcher, folder: Path) -> None:
    """The request is answered and made again to the next one, instead of waiting for an answer that cannot come."""
    forking.wait_warm()
    old = forking.zygote_pid
    assert old is not None
    os.kill(old, signal.SIGSTOP)
    started: list[Process] = []
    thread = threading.Thread(target=lambda: started.append(start_standin(forking, folder, "server", [])))
    thread.start()
    wait_until(lambda: forking._starting == 1, "the request to be on its way")
    os.kill(old, signal.SIGKILL)
    thread.join(20)
    wait_ready(folder, "server")
    assert started[0].alive


def test_a_warmed_parent_that_cannot_start_is_an_error_with_its_log(
    folder: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPD_ZYGOTE_FD", "none")
    (folder / "logs").mkdir()

    class Broken(QuickLauncher):
        def warm(self) -> Process:
            self._zygote = self._launch(
                "spawn", "warmed-parent", self.logs / "z.log", argv=[sys.executable, "-c", "import no_such"], env={}
            )
            return self._zygote

    with Broken(Boot.FORK, folder / "logs", os.environ) as mine, pytest.raises(UsageError) as raised:
        start_standin(mine, folder, "server", [])
    assert str(raised.value).splitlines()[0].startswith("warmed-parent ended with exit code 1: the module 'no_such'")


@pytest.mark.parametrize(("habit", "status"), [("exit=0", 0), ("exit=3", 3)])
def test_a_forked_servers_status_reaches_the_owner(habit: str, status: int, forking: Launcher, folder: Path) -> None:
    server = start_standin(forking, folder, "server", [habit])
    wait_until(lambda: not server.alive, "its end")
    assert server.status == status


def test_a_forked_servers_last_words_reach_its_log(forking: Launcher, folder: Path) -> None:
    """`sys.exit("words")` and an exception print what they would have printed without the fork."""
    server = forking.start("server", "standin", [], {"PYTHONPATH": HERE})
    wait_until(lambda: not server.alive, "its end")
    assert server.status == 1
    assert "IndexError: list index out of range" in server.log.read_text()


def test_a_forked_server_that_has_no_log_fails_alone(forking: Launcher, folder: Path) -> None:
    (folder / "logs" / "odd.log").mkdir()
    odd = start_standin(forking, folder, "odd", [])
    wait_until(lambda: not odd.alive, "its end")
    assert odd.status == 1
    start_standin(forking, folder, "next", [])
    wait_ready(folder, "next")


def test_a_forked_server_looks_like_a_plain_one(token: str, folder: Path) -> None:
    """Same descriptors, same reaction to signals."""
    looks = []
    for boot in Boot:
        with QuickLauncher(boot, folder / "logs", os.environ) as launched:
            server = start_standin(launched, folder, boot, [])
            wait_ready(folder, boot)
            held = [entry.readlink().name.split(":")[0] for entry in Path(f"/proc/{server.pid}/fd").iterdir()]
            status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
            signals = [line for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt"))]
            looks.append((sorted(one.replace(boot, "server") for one in held), signals))
    assert looks[0] == looks[1]


# -- several launchers, and what a launcher takes ----------------------------------------------------------------------


def test_two_launchers_at_once_do_not_touch_each_other(token: str, folder: Path) -> None:
    with Launcher(Boot.PLAIN, folder / "logs 1", os.environ) as one:
        start_standin(one, folder, "of-one", NASTY)
        stays = wait_ready(folder, "of-one")
        with Launcher(Boot.PLAIN, folder / "logs 2", os.environ) as two:
            start_standin(two, folder, "of-two", NASTY)
            gone = wait_ready(folder, "of-two")
            assert one.scratch != two.scratch
        assert not any(alive(pid) for pid in gone["pids"])
        assert all(alive(pid) for pid in stays["pids"])
        assert Path("/dev/shm", stays["blocks"][0]).exists()
        assert one.scratch.is_dir()
        traces = Traces.of(token, one.scratch, [stays])
    traces.assert_gone(0.0)


def test_a_closed_launcher_has_given_back_threads_and_descriptors(token: str, folder: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for round_ in range(3):
        with Launcher(Boot.PLAIN, folder / "logs", os.environ) as mine:
            start_standin(mine, folder, f"server-{round_}", [])
    assert (len(list(Path("/proc/self/fd").iterdir())), threading.active_count()) == before


def test_closing_twice_is_closing_once(folder: Path, token: str) -> None:
    with Launcher(Boot.PLAIN, folder / "logs", os.environ) as mine:
        mine.close()
    mine.close()
    assert marked(token) == []


def test_a_launcher_whose_first_program_cannot_start_leaves_nothing(
    folder: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "logs" / "warmed-parent.log").mkdir(parents=True)
    made = Launcher(Boot.FORK, folder / "logs", os.environ)
    with pytest.raises(StackError, match="could not warm"):
        made.__enter__()
    Traces(token, scratch=(str(made.scratch),)).assert_gone(0.0)


def test_the_scratch_folder_is_short_enough_for_sockets(
    folder: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = folder / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with Launcher(Boot.PLAIN, folder / "logs", os.environ) as mine:
        assert len(f"{mine.scratch}/{'u' * 36}") <= 107
    assert not list(deep.iterdir())


def test_a_subject_that_sets_pythonpath_keeps_lifeline_and_repairs() -> None:
    environment = launcher._with_site({"PYTHONPATH": "/theirs"})
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(repairs.SITE), "/theirs"]
