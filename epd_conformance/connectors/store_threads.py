"""Threads that touch the store, so that nobody has to wait longer for it than he wants.

A folder on a network may take seconds for a call, or never return: no time limit can be set on a file system's call, only on
waiting for it. The threads are daemons, since one that never returns must not keep its process from ending.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class Task(Generic[Result]):
    """One call. ``result`` holds once ``wait`` has said True; of a call that raised it is ``otherwise``."""

    def __init__(self, call: Callable[[], Result], otherwise: Result) -> None:
        self._call = call
        # A bare lock, held until it has ended: an Event costs a third more, and a look-up is short.
        self._running = threading.Lock()
        self._running.acquire()
        self._done = False
        self.result = otherwise

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after so many seconds."""
        if not self._done and seconds > 0 and self._running.acquire(timeout=seconds):
            self._running.release()
        return self._done

    def run(self) -> None:
        with contextlib.suppress(Exception):
            self.result = self._call()
        self.give_up()

    def give_up(self) -> None:
        """It has ended, with the result it has now."""
        self._done = True
        self._running.release()


class StoreThreads:
    """A fixed number of daemon threads, started as they are needed. They end with this object.

    Args:
        threads: how many calls may be under way at once. name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._queue: queue.SimpleQueue[Task[Any] | None] = queue.SimpleQueue()
        # Calls that have not ended, and when each was begun.
        self._unfinished: dict[Task[Any], float] = {}
        self._started = 0
        self._stopped = False
        # The threads know the queue, not this object, so that it can be collected and they with it.
        self._end = weakref.finalize(self, _end, self._queue, threads)

    def submit(self, call: Callable[[], Result], otherwise: Result) -> Task[Result]:
        """Start a call. What it raises is not passed on: its result is then ``otherwise``, as after ``stop``."""
        task = Task(call, otherwise)
        if self._stopped:
            task.give_up()
            return task
        self._unfinished[task] = time.monotonic()
        if self._started < min(self._threads, len(self._unfinished)):
            try:
                threading.Thread(
                    target=_work,
                    args=(self._queue, self._unfinished),
                    name=f"{self._name}-{self._started}",
                    daemon=True,
                ).start()
                self._started += 1
            except RuntimeError:  # the system has no more of them
                if not self._started:
                    del self._unfinished[task]
                    task.give_up()
                    return task
        self._queue.put(task)
        return task

    def stuck_s(self) -> float:
        """For how long the oldest call that has not ended has been wanted, in seconds; 0 if there is none."""
        # A copy: the threads change it meanwhile.
        began = min(list(self._unfinished.values()), default=None)
        return 0.0 if began is None else time.monotonic() - began

    def stop(self) -> None:
        """Take no more calls, and let the threads end once what was submitted is done. Does not wait; safe to repeat."""
        self._stopped = True
        self._end()


def _work(calls: queue.SimpleQueue[Task[Any] | None], unfinished: dict[Task[Any], float]) -> None:
    while (task := calls.get()) is not None:
        task.run()
        unfinished.pop(task, None)
        del task  # or its result would live until the next one comes


def _end(calls: queue.SimpleQueue[Task[Any] | None], threads: int) -> None:
    for _ in range(threads):
        calls.put(None)
