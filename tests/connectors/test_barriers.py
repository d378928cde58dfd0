"""Barriers: a point holds what was ordered, once; it opens by order, by the harness' death, or by itself; else nothing is there."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from barrier_server import HOOKS, STEP, Inner, go, held

from epd_conformance.connectors import barriers
from epd_conformance.connectors.barriers import POINTS, arm
from epd_conformance.connectors.journal import DIRECTORY, SERVER, Journal
from epd_conformance.errors import StackError

HERE = Path(__file__).parent
# For a busy machine: what is waited for comes in milliseconds.
PATIENCE_S = 60.0


# A harness that costs no start.
FORK = multiprocessing.get_context("fork")


def over() -> bool:
    return False


def hold(gates: Path, point: str, order: dict[str, str], told: Any) -> None:
    """A harness that never lets go."""
    told.send(arm(gates, {"pd-0"}, point, **order).wait(over))
    time.sleep(600)


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the gates; the journal lies in `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="epd-") as folder:
        for name, value in ((barriers.FOLDER, folder), (DIRECTORY, str(tmp_path)), (SERVER, "pd-0")):
            monkeypatch.setenv(name, value)
        yield Path(folder)


@pytest.fixture
def journal(gates: Path, tmp_path: Path) -> Journal:
    return Journal(tmp_path)


def lines(journal: Journal, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in journal.read() if event["ev"] in kinds]


def until(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)
    return found


class Going:
    """A side of a server that goes through its hooks once, in a thread."""

    def __init__(self, side: str, connector: Any) -> None:
        self.connector = connector
        self.thread = threading.Thread(target=go, args=(connector, side))

    def __enter__(self) -> Going:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


AT = [
    ("looked-up", "scheduler", ["has_cache_item"]),
    ("allocated", "scheduler", ["has_cache_item", "update_state_after_alloc"]),
    ("scheduled", "scheduler", ["has_cache_item", "update_state_after_alloc", "build_connector_meta"]),
    ("loading", "worker", []),
    ("loaded", "worker", ["start_load_caches"]),
    ("saving", "worker", ["start_load_caches"]),
    ("saved", "worker", ["start_load_caches", "save_caches"]),
]


class TestPoints:
    @pytest.mark.parametrize(("point", "side", "done"), AT)
    def test_it_holds_where_it_says_until_it_is_opened(
        self, gates: Path, journal: Journal, point: str, side: str, done: list[str]
    ) -> None:
        connector = held(side)
        barrier = arm(gates, {"pd-0"}, point, id="item")
        with Going(side, connector) as going:
            assert barrier.wait(over)
            assert connector.calls == done
            assert [event["ev"] for event in journal.read()] == ["held"]
            barrier.open()
            going.thread.join(PATIENCE_S)
        assert len(connector.calls) == {"scheduler": 3, "worker": 2}[side]
        at, opened = journal.read()
        assert (at["ev"], at["point"], at["id"], at["side"]) == ("held", point, "item", side)
        assert (opened["ev"], opened["why"]) == ("opened", "released")
        assert at["t"] <= opened["t"]

    def test_every_point_is_tried_here(self) -> None:
        assert {point for point, _, _ in AT} | {"prefilled"} == set(POINTS)

    def test_one_order_is_one_hit(self, gates: Path, journal: Journal) -> None:
        connector = held("scheduler")
        barrier = arm(gates, {"pd-0"}, "looked-up", id="item")
        with Going("scheduler", connector):
            assert barrier.wait(over)
            barrier.open()
        go(connector, "scheduler")
        assert len(lines(journal, "held")) == 1

    @pytest.mark.parametrize("order", [{"id": "other"}, {"req": "somebody"}, {"id": "item", "nth": 3}])
    def test_others_go_on(self, gates: Path, journal: Journal, order: dict[str, Any]) -> None:
        connector = held("scheduler")
        barrier = arm(gates, {"pd-0"}, "allocated", **order)
        go(connector, "scheduler")
        go(connector, "scheduler")
        assert not barrier.wait(lambda: True)
        assert journal.read() == []
        barrier.open()

    def test_the_nth_time_with_what_was_computed(self, gates: Path, journal: Journal) -> None:
        connector = held("scheduler")
        barrier = arm(gates, {"pd-0"}, "scheduled", req="rid", nth=2)
        go(connector, "scheduler")
        with Going("scheduler", connector):
            assert barrier.wait(over)
            barrier.open()
        (at,) = lines(journal, "held")
        assert (at["computed"], at["tokens"]) == (512, 40)

    def test_a_look_up_that_finds_nothing_is_no_window(self, gates: Path, journal: Journal) -> None:
        connector = held("scheduler")
        connector.found = False
        barrier = arm(gates, {"pd-0"}, "looked-up", id="item")
        go(connector, "scheduler")
        assert not barrier.wait(lambda: True)
        barrier.open()

    def test_results_and_exceptions_pass(self, gates: Path, journal: Journal) -> None:
        connector = held("scheduler")
        assert connector.has_cache_item("x") is True
        assert connector.build_connector_meta(STEP) == "meta"
        barrier = arm(gates, {"pd-0"}, "scheduled", req="nobody")
        assert connector.build_connector_meta(STEP) == "meta"
        # What the recorder does not understand is said, and harms nobody.
        assert connector.build_connector_meta(object()) == "meta"
        assert [event["ev"] for event in journal.read()] == ["lost"]
        barrier.open()


class TestOpening:
    def test_by_itself(self, gates: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(barriers, "OPENS_S", 0.05)
        connector = held("worker")
        barrier = arm(gates, {"pd-0"}, "saving", id="item")
        with Going("worker", connector):
            assert barrier.wait(over)
        barrier.open()
        (opened,) = lines(journal, "opened")
        assert opened["why"] == "timeout"
        assert opened["seconds"] >= 0.05

    def test_by_the_end_of_the_connection(self, gates: Path, journal: Journal) -> None:
        connector = held("worker")
        barrier = arm(gates, {"pd-0"}, "saving", id="item")
        with Going("worker", connector):
            assert barrier.wait(over)
            barrier.close()
        assert [event["why"] for event in lines(journal, "opened")] == ["closed"]

    def test_what_nobody_came_to_is_disarmed_with_the_connection(self, gates: Path, journal: Journal) -> None:
        connector = held("worker")
        arm(gates, {"pd-0"}, "saving", id="item").close()
        until(lambda: not connector._epd_gate.armed)
        go(connector, "worker")
        assert journal.read() == []
        # And the next harness finds the gate.
        barrier = arm(gates, {"pd-0"}, "saved", id="item")
        with Going("worker", connector):
            assert barrier.wait(over)
            barrier.open()

    def test_a_killed_harness_opens_every_point(self, gates: Path, journal: Journal) -> None:
        """Server and harness are processes of their own; each point is held once by a harness that is killed."""

        def rounds() -> int:
            return len(lines(journal, "round"))

        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        with subprocess.Popen([sys.executable, HERE / "barrier_server.py"], env=environment) as server:
            try:
                until(rounds)
                for point in POINTS:
                    order = {"req": "rid"} if point == "prefilled" else {"id": "item"}
                    ours, theirs = FORK.Pipe()
                    holder = FORK.Process(target=hold, args=(gates, point, order, theirs), daemon=True)
                    holder.start()
                    assert ours.poll(PATIENCE_S)
                    assert ours.recv() is True, point
                    before = rounds()
                    holder.kill()
                    holder.join()
                    until(lambda before=before: rounds() > before + 1)
                    opened = lines(journal, "opened")[-1]
                    assert (opened["point"], opened["why"]) == (point, "closed")
                assert server.poll() is None
            finally:
                server.kill()
        assert lines(journal, "lost") == []


class TestArming:
    def test_a_server_without_a_gate_is_named(self, gates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(barriers, "GATE_S", 0.05)
        with pytest.raises(StackError, match="pd-0: no scheduler there listens for a barrier"):
            arm(gates, {"pd-0"}, "looked-up", id="item")

    def test_a_dead_gate_is_passed_over(self, gates: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
        connector = held("worker")
        dead = barriers.socket.socket(barriers.socket.AF_UNIX)
        dead.bind(str(gates / "pd-0.w1"))
        dead.close()
        barrier = arm(gates, {"pd-0"}, "saving", id="item")
        assert connector._epd_gate.armed
        barrier.open()

    def test_of_two_ranks_one_waits(self, gates: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
        one = held("worker")
        # Another process.
        monkeypatch.setattr(barriers.os, "getpid", lambda: 1)
        two = held("worker")
        barrier = arm(gates, {"pd-0"}, "saving", id="item")
        assert sorted([one._epd_gate.armed, two._epd_gate.armed]) == [False, True]
        barrier.open()

    def test_without_a_folder_the_hooks_are_what_they_were(
        self, gates: Path, journal: Journal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(barriers.FOLDER)
        assert barriers.with_points(HOOKS) == HOOKS
        assert Inner("scheduler")._epd_gate is None
        assert barriers.own_gate("proxy") is None
        assert list(gates.iterdir()) == []
