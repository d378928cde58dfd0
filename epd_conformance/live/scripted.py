"""Carries out the steps of a scripted cell (plans/steps.py) on a running stack, and says of each whether it happened.

Decides nothing: what happened goes into the cell's facts, for `oracle.script_judges`. Whatever was done to the store is undone at
the end, also of a cell that breaks off.
"""

from __future__ import annotations

import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epd_conformance.connectors.barriers import Barrier, arm
from epd_conformance.errors import StackError
from epd_conformance.faults.fault import Receipt, Target
from epd_conformance.live import faulting
from epd_conformance.oracle.answers import Answer
from epd_conformance.plans.plan import Request
from epd_conformance.probe import StoreProbe
from epd_conformance.topology.spec import Role
from epd_conformance.topology.stack import Server

if TYPE_CHECKING:
    from epd_conformance.live.session import Runner

# Removing one object takes a tenth of a millisecond; a request stays in its windows for some milliseconds.
PURGE_PAUSE_S = 0.002


def scripted(runner: Runner) -> None:
    """Carry out the plan's steps; `facts["steps"]` has one record for each."""
    script = _Script(runner)
    try:
        for step in runner.plan.steps:
            script.carry(step)
        runner.facts |= {"health": faulting.health(runner.stack), "busy": faulting.busy(runner.stack)}
    finally:
        script.mend()


class _Script:
    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.stack = runner.stack
        self.records: list[dict[str, Any]] = []
        runner.facts["steps"] = self.records
        self.rest: Iterator[Any] = iter(runner.plan.requests)
        self.primed: tuple[Any, str] | None = None
        self.key: str | None = None
        self.injected: tuple[Target, Receipt] | None = None
        self.undo: list[Callable[[], None]] = []
        self.held: tuple[Barrier, threading.Thread] | None = None
        self.purging: Purge | None = None

    def carry(self, step: Mapping[str, Any]) -> None:
        record: dict[str, Any] = {"do": step["do"], "at": time.time(), "done": False, "problem": ""}
        self.records.append(record)
        fields = {name: value for name, value in step.items() if name != "do"}
        try:
            record |= getattr(self, f"_{step['do'].replace('-', '_')}")(**fields) or {}
            record["done"] = True
        except Exception as error:
            # A subject's probe, and a stack that has just been damaged, may raise anything; the judge says what it means.
            record["problem"] = f"{type(error).__name__}: {error}"[:2000]
        record["ended"] = time.time()

    def mend(self) -> None:
        """Undo what was done to servers and store, last things first. Raises what cannot be undone: later cells would meet it."""
        if self.held is not None:
            self._release()
        if self.purging is not None:
            self.purging.stop()
            self.purging = None
        while self.undo:
            self.undo.pop()()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _send(self, way: str, how: str) -> None:
        del how  # the judge's
        request, rid = self.primed or (next(self.rest), uuid.uuid4().hex)
        self.primed = None
        overrides = {}
        if way == "reference":
            overrides = faulting.referred(self.runner, request)
        elif way == "uuid-alone":
            overrides = {"messages": without_media(request.body(self.stack.served_name))}
        address = self.stack.base_url if way == "proxy" else self.runner.stage.bypass
        self.runner.send(address, request, rid=rid, overrides=overrides)
        self.key = self.key or faulting.key_of(self.runner, self.runner.answers[0].request_id)

    def _prime(self) -> None:
        request, rid = next(self.rest), uuid.uuid4().hex
        self.primed = (request, rid)
        problem: dict[str, Any] = {"problem": ""}
        self.key, _ = faulting.primed(self.runner, request, rid, problem)
        if problem["problem"]:
            raise StackError(problem["problem"])

    def _together(self, count: str, how: str) -> None:
        del how
        asked = [(next(self.rest), uuid.uuid4().hex) for _ in range(int(count))]
        answers: dict[str, Answer] = {}

        def ask(request: Request, rid: str, begun: Callable[[], None]) -> None:
            answers[rid] = self.runner.ask(self.stack.base_url, request, rid, begun=begun)

        self._at_once([partial(ask, request, rid) for request, rid in asked], asked[0][1])
        self.runner.answers += [answers[rid] for _, rid in asked]

    def _prime_together(self, count: str) -> dict[str, Any]:
        request, rid = next(self.rest), uuid.uuid4().hex
        self.primed = (request, rid)
        primers: list[dict[str, Any]] = []

        def prime(name: str, begun: Callable[[], None]) -> None:
            began = time.time()
            begun()
            status, _ = faulting.prime(self.stack, request, name, self.runner.salt(request, name))
            primers.append({"started": began, "ended": time.time(), "status": status})

        # The first has the id of the request that will be sent, so that its key is found by it.
        names = [rid, *(uuid.uuid4().hex for _ in range(int(count) - 1))]
        opened = self._at_once([partial(prime, name) for name in names], rid)
        self.key = faulting.key_of(self.runner, f"{rid}-e0")
        if bad := [one["status"] for one in primers if one["status"] != 200]:
            raise StackError(f"primers were answered with {bad}")
        return {"opened_at": opened, "primers": primers}

    def _at_once(self, jobs: list[Callable[[Callable[[], None]], None]], rid: str) -> float | None:
        """Do jobs that each need an encode server, while that of `rid` is held until all have begun; when it was let go."""
        barrier = self._arm("scheduled", req=rid)
        begun = [threading.Event() for _ in jobs]
        threads = [
            threading.Thread(target=job, args=(told.set,), name="at-once")
            for job, told in zip(jobs, begun, strict=True)
        ]
        opened = None
        try:
            # The first must be there before the others: else another request would be in the step that is held.
            threads[0].start()
            if barrier.wait(lambda: not threads[0].is_alive()):
                for thread in threads[1:]:
                    thread.start()
                for told in begun:
                    told.wait()
                opened = time.time()
        finally:
            barrier.open()
            for thread in threads:
                if opened is None and not thread.ident:
                    thread.start()
                thread.join()
        return opened

    def _arm(self, point: str, *, id: str = "", req: str = "") -> Barrier:
        if self.stack.barriers is None:
            raise StackError("nothing can be held: the servers have no points")
        encode = {server.name for server in self.stack.of(Role.ENCODE)}
        return arm(self.stack.barriers, encode, point, id=id, req=req)

    def _prime_held(self, point: str) -> None:
        request, rid = next(self.rest), uuid.uuid4().hex
        # The worker knows no request, only the item, by the client's own name for it.
        barrier = self._arm(point, id=str(request.uuids[0]))
        salt = self.runner.salt(request, rid)
        thread = threading.Thread(target=lambda: faulting.prime(self.stack, request, rid, salt), name="held-primer")
        thread.start()
        self.held = (barrier, thread)
        self.primed = (request, rid)
        if not barrier.wait(lambda: not thread.is_alive()):
            raise StackError(f"no encode server came to the point {point!r} with the item")

    def _release(self) -> None:
        if self.held is None:
            raise StackError("nobody is held")
        barrier, thread = self.held
        self.held = None
        barrier.open()
        thread.join()

    def _purge(self, how: str) -> dict[str, Any]:
        if how == "begin":
            probe = self._probe()
            if probe is None:
                raise StackError("the subject gives no probe, so nobody can remove anything from its store")
            self.purging = Purge(probe)
            return {}
        if self.purging is None:
            raise StackError("no purge has begun")
        purge, self.purging = self.purging, None
        return {"removed": purge.end()}

    def _damage(self, kind: str) -> dict[str, Any]:
        if self.key is None:
            raise StackError("nobody has saved an item yet")
        means = faulting.means(self.runner, kind)
        # Any other object may take its place.
        donor = next(iter({*means.probe.keys()} - {self.key}), self.key)
        target = Target(means.probe, self.key, donor)
        faulting.await_object(means.probe, self.key)
        receipt = means.fault.inject(target)
        self.injected = (target, receipt)
        self.undo.append(lambda: means.fault.heal(target, receipt))
        if not faulting.soon(lambda: means.fault.verify(target, receipt)):
            raise StackError("it was injected, and the store does not show it")
        return {"receipt": receipt.to_json()}

    def _heal(self) -> None:
        if self.injected is None:
            raise StackError("nothing was damaged")
        target, receipt = self.injected
        self.undo.pop()()
        if not faulting.soon(lambda: target.probe.read(receipt.key) == receipt.before):
            raise StackError("the object could not be put back")

    def _reset(self, cache: str) -> dict[str, Any]:
        return {"statuses": {server.name: faulting.reset(server.url, cache) for server in self.stack.servers}}

    def _restart(self, servers: str) -> dict[str, Any]:
        chosen = self._chosen(servers)
        self.runner.session.site.restart(self.stack, chosen)
        return {"servers": [server.name for server in chosen]}

    def _chosen(self, servers: str) -> list[Server]:
        if servers == "encode":
            return self.stack.of(Role.ENCODE)
        if servers == "consumer":
            return self.stack.of(Role.PREFILL, Role.PREFILL_DECODE)
        return list(self.stack.servers)

    def _store(self, how: str) -> dict[str, Any]:
        return {"emptied": self._emptied, "removed": self._removed, "mended": self._mended}[how]()

    def _mended(self) -> dict[str, Any]:
        self.mend()
        return {}

    def _look(self) -> dict[str, Any]:
        if len([record for record in self.records if record["do"] == "look"]) > 1:
            time.sleep(faulting.WRITTEN_S)
        return {"outside": faulting.outside(self.stack)}

    def _probe(self) -> StoreProbe | None:
        info, subject = self.stack.info, self.runner.session.subject
        return subject.probe(info) if info is not None and subject is not None else None

    def _emptied(self) -> dict[str, Any]:
        probe = self._probe()
        if probe is None:
            raise StackError("the subject gives no probe, so nobody can empty its store")
        keys = probe.keys()
        if not keys:
            raise StackError("the probe lists no object, though an item was saved")
        for key in keys:
            probe.delete(key)
        if not faulting.soon(lambda: not probe.keys()):
            raise StackError(f"{len(probe.keys())} objects are left of {len(keys)}")
        return {"removed": len(keys)}

    def _removed(self) -> dict[str, Any]:
        store = self.stack.store
        away = store.with_name(f"{store.name}-away")
        store.rename(away)
        self.undo.append(lambda: _put_back(away, store))
        probe = self._probe()
        if probe is not None and self.key is not None and probe.read(self.key) is not None:
            raise StackError("the object can be read although the store's folder is away: the store lies elsewhere")
        return {}


class Purge:
    """Removes every object that a probe lists, in random order, again and again, in a thread of its own."""

    def __init__(self, probe: StoreProbe) -> None:
        self._probe = probe
        self._over = threading.Event()
        self._removed: list[tuple[str, float]] = []
        self._problem = ""
        # The order only has to be another one each time; what is found is judged by what happened.
        self._random = random.Random(0)
        # What other cells have left goes first: a round over hundreds of objects would not come back to those of this cell.
        keys = probe.keys()
        for key in keys:
            probe.delete(key)
        self._thread = threading.Thread(target=self._run, name="purge", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A breath between two rounds: listing a store without pause would starve two cores of the servers' work.
        while not self._over.wait(PURGE_PAUSE_S):
            try:
                keys = self._probe.keys()
                self._random.shuffle(keys)
                for key in keys:
                    self._probe.delete(key)
                    self._removed.append((key, time.time()))
            except Exception as error:
                # A producer may be writing, or the store have no such object any more: the next round sees.
                self._problem = f"{type(error).__name__}: {error}"[:2000]

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def end(self) -> list[tuple[str, float]]:
        """Stop; what was removed, and when. Raises StackError where nothing was."""
        self.stop()
        if not self._removed:
            raise StackError(f"nothing was removed: {self._problem or 'the probe lists no object'}")
        return self._removed


def without_media(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request with nothing left of its items but the client's names for them, as vLLM takes them for
    something that it has in its processor cache (`_parse_chat_message_content_mm_part` in renderers/chat_utils.py)."""
    return [
        {
            **message,
            "content": [
                {**part, "image_url": None} if isinstance(part, dict) and "image_url" in part else part
                for part in message["content"]
            ],
        }
        for message in body["messages"]
    ]


def _put_back(away: Path, store: Path) -> None:
    """The folder comes back; what was put into its place meanwhile goes."""
    if store.exists():
        shutil.rmtree(store)
    away.rename(store)
