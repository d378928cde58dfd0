"""Waiting for a store no longer than one wants."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from epd_conformance.connectors.store_threads import StoreThreads


def fail() -> int:
    raise OSError("no")


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
    deadline = time.monotonic() + 10
    while count("ending"):
        assert time.monotonic() < deadline
        time.sleep(0.005)


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
    deadline = time.monotonic() + 10
    while threads.stuck_s():
        assert time.monotonic() < deadline
