"""Waiting for a store no longer than one wants."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from epd_conformance.connectors import store_threads
from epd_conformance.connectors.store_threads import StoreThreads


def fail() -> int:
    raise OSError("no")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_results_and_failures() -> None:
    threads = StoreThreads(2, "t")
    assert threads.stuck_s() == 0
    tasks = [threads.submit(lambda number=number: number, -1) for number in range(5)]
    tasks.append(threads.submit(fail, -1))
    assert all(task.wait(10) for task in tasks)
    assert [task.result for task in tasks] == [0, 1, 2, 3, 4, -1]
    threads.stop()
    threads.stop()
    late = threads.submit(lambda: 1, -1)
    assert late.wait(0)
    assert late.result == -1


def count(name: str) -> int:
    return sum(thread.name.startswith(name) for thread in threading.enumerate())


def test_threads_are_started_as_needed_and_end_with_their_owner() -> None:
    threads = StoreThreads(3, "ending")
    gate = threading.Event()
    tasks = [threads.submit(lambda: gate.wait(20), False)]
    assert count("ending") == 1
    tasks += [threads.submit(lambda: gate.wait(20), False) for _ in range(5)]
    assert count("ending") == 3
    gate.set()
    assert all(task.wait(10) for task in tasks)
    del threads, tasks
    gc.collect()
    until(lambda: not count("ending"))


def test_without_threads_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    threads = StoreThreads(2, "t")
    task = threads.submit(lambda: 1, -1)
    assert task.wait(5)
    assert task.result == -1
    assert threads.stuck_s() == 0


def test_waiting_has_an_end() -> None:
    threads = StoreThreads(1, "t")
    gate = threading.Event()
    task = threads.submit(lambda: gate.wait(20), False)
    began = time.monotonic()
    assert not task.wait(0.01)
    assert not task.wait(0)
    assert time.monotonic() - began < 1
    time.sleep(0.02)
    assert threads.stuck_s() > 0.01
    gate.set()
    assert task.wait(10)
    assert task.result
    until(lambda: threads.stuck_s() == 0)


def test_a_thread_is_started_only_for_a_call_that_none_is_free_for() -> None:
    threads = StoreThreads(3, "few")
    for number in range(5):
        assert threads.submit(lambda number=number: number, -1).wait(10)
        until(lambda: threads.stuck_s() == 0)  # its thread has come back
    assert count("few") == 1


def test_the_oldest_call_says_how_long_the_store_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(store_threads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    threads = StoreThreads(2, "stuck")
    gate = threading.Event()
    tasks = []
    for _ in range(2):
        tasks.append(threads.submit(lambda: gate.wait(20), False))
        now[0] += 5
    assert threads.stuck_s() == 10
    # None may keep the process from ending.
    assert [thread.daemon for thread in threading.enumerate() if thread.name.startswith("stuck")] == [True, True]
    gate.set()
    assert all(task.wait(10) for task in tasks)


def test_a_result_does_not_outlive_its_call() -> None:
    class Result:
        pass

    threads = StoreThreads(1, "t")
    task = threads.submit(Result, None)
    assert task.wait(10)
    known = weakref.ref(task.result)
    del task
    until(lambda: threads.stuck_s() == 0 and known() is None)


def test_calls_under_way_end_after_stop() -> None:
    """What was submitted before is done, by as many threads as there were."""
    threads = StoreThreads(2, "stopping")
    gate = threading.Event()
    tasks = [threads.submit(lambda number=number: gate.wait(20) and number, -1) for number in range(4)]
    threads.stop()
    gate.set()
    assert all(task.wait(10) for task in tasks)
    assert [task.result for task in tasks] == [0, 1, 2, 3]
    until(lambda: not count("stopping"))
