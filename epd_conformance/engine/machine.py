"""The state machine: carries out an engine plan against a subject and says what did not hold.

One interpreter runs every plan, however it came about: drawn by Hypothesis, shrunk, written by hand, or replayed from a failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_conformance.engine import beacon, clock, configs, site
from epd_conformance.engine.core import StepOrder
from epd_conformance.engine.events import EngineDied, Event
from epd_conformance.engine.explain import explained, once
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.judge import Judge, judge_of
from epd_conformance.engine.plan import LIMIT_RUN, Plan, argument
from epd_conformance.engine.server import MakeCore, Server, contract_core
from epd_conformance.engine.site import Site
from epd_conformance.engine.worker import Source
from epd_conformance.features import Feature
from epd_conformance.subject import Subject

#: How long, by the clock that is put forward, a request may be held back: five times the longest limit that vLLM's own
#: connectors have (60 s, ECMooncakeConnector).
PATIENCE_S = 300.0
#: By how much the clock is put forward between the steps of that time.
_PATIENCE_STEP_S = 15.0
#: Steps each time it was put forward: what only waits has nothing to do in more of them, and in all there are enough to end a plan.
_STEPS_WAITED = 4
#: A step at which a connector may have something to do in a thread of its own; real seconds.
_BREATH_S = 0.001


@dataclass
class Outcome:
    """What a plan showed. `steps`: engine steps of all servers; `seconds` as the machine's clock has them.

    `twins`: the events of the plans without one circumstance that were carried out to explain a finding (`explain`).
    """

    findings: list[Finding]
    steps: int = 0
    seconds: float = 0.0
    deaths: int = 0
    events: list[tuple[str, Event]] = field(default_factory=list)
    twins: dict[str, list[tuple[str, Event]]] = field(default_factory=dict)

    def names(self) -> set[tuple[str, str]]:
        return {finding.name for finding in self.findings}


def run(
    plan: Plan,
    subject: Subject,
    root: Path,
    *,
    make_core: MakeCore = contract_core,
    keep_events: bool = False,
    explain: bool = True,
) -> Outcome:
    """Carry out a plan in this process, in an empty folder. A hook that hangs or ends the process does so here: see `hosted`.

    Args:
        make_core: the engine core of the servers: `server.contract_core`, or `real_core.scheduler_core`.
        keep_events: return what was recorded, with the server's name.
        explain: where something was found that may be due to one circumstance of the plan, run the plan once more without it, and
            name the requirement about that circumstance if it then holds (`TWINS`).

    Raises UsageError where vLLM does not take the subject's configuration.
    """
    began = clock.real()
    outcome = _Machine(plan, subject, root / "plan", make_core, keep_events).carry_out()
    if explain and outcome.findings:

        def judge(requirement: str, twin: Plan) -> Judge:
            carried = _Machine(twin, subject, root / f"twin-{requirement}", make_core, keep_events)
            outcome.twins[requirement] = carried.carry_out().events
            return carried.judge

        outcome.findings = explained(outcome.findings, plan, judge)
    outcome.seconds = clock.real() - began
    return outcome


class _Machine:
    def __init__(self, plan: Plan, subject: Subject, root: Path, make_core: MakeCore, keep_events: bool) -> None:
        self.plan = plan
        self.site = Site(subject, plan, root, configs.hidden_size())
        self.make_core = make_core
        self.outcome = Outcome([])
        contents = {
            key: item.content(self.site.hidden, plan.dtype)
            for key, item in zip(self.site.keys, plan.items, strict=True)
        }
        self.source = Source(
            {key: (contents[key], item.strided) for key, item in zip(self.site.keys, plan.items, strict=True)}
        )
        self.judge = judge_of(plan, self.site.keys, self.site.hidden)
        self.names = plan.server_names()
        self.servers: list[Server | None] = [None] * len(self.names)
        self.fault = ""
        self.keep_events = keep_events
        self._requests = 0
        self._persistent = Feature.PERSISTENT_STORE in subject.features
        self._generations = [0] * len(self.names)

    def carry_out(self) -> Outcome:
        try:
            for index in range(len(self.servers)):
                self._boot(index)
            for number, operation in enumerate(self.plan.operations):
                self._note(None, "operation", number)
                self._do(operation)
            self._note(None, "operation", len(self.plan.operations))
            self._finish()
        finally:
            site.mend_process(self.fault)
            for server in self.servers:
                if server is not None:
                    server.end()
        self.outcome.findings = once(self.judge.findings)
        return self.outcome

    # ---- servers ----

    def _boot(self, index: int) -> bool:
        """Start a server; False where that fails, which was recorded."""
        self._generations[index] += 1
        spec, name = self.plan.servers[index], self.names[index]
        server = Server.__new__(Server)
        try:
            server.__init__(name, spec, self.site, self.source, self._recorder(index), self.make_core)  # type: ignore[misc]
        except EngineDied:
            server.end()
            self.outcome.deaths += 1
            self.servers[index] = None
            return False
        self.servers[index] = server
        self._note(index, "booted")
        if self.fault:
            server.fault(self.fault, False)
        return True

    def _note(self, index: int | None, *event: Any) -> None:
        """What the harness itself did, to a server or to all."""
        self._recorder(index)(event)

    def _recorder(self, index: int | None) -> Any:
        name, judge = self.names[index] if index is not None else "", self.judge
        if not self.keep_events:
            return lambda event: judge.take(name, event)
        kept = self.outcome.events

        def record(event: Event) -> None:
            kept.append((name, event))
            judge.take(name, event)

        return record

    def _dead(self, index: int) -> None:
        """A server ended: a new one takes its place, as an operator would have it."""
        server = self.servers[index]
        self.outcome.deaths += 1
        if server is not None:
            server.end()
        self._forget(index)
        self._boot(index)

    def _forget(self, index: int) -> None:
        self.servers[index] = None
        self._note(index, "gone", self._persistent)

    def _step(
        self,
        index: int,
        order: StepOrder,
        during: Mapping[str, Any] | None = None,
        watch: bool = False,
        force: bool = False,
    ) -> bool:
        """One step; False where there was nothing to do, or the server died of it."""
        server = self.servers[index]
        if server is None:
            return False
        self.outcome.steps += 1
        try:
            return server.step(order, during, watch, force)
        except EngineDied:
            self._dead(index)
            return False

    def _idle(self, index: int) -> bool:
        server = self.servers[index]
        return server is None or server.idle()

    def _run(self, index: int, tokens: int, limit: int = LIMIT_RUN) -> None:
        """Steps until nothing is left to do, at most `limit`. Deferred requests may be left."""
        for _ in range(limit):
            if self._idle(index) or not self._step(index, StepOrder(tokens)):
                return

    # ---- operations ----

    def _do(self, operation: Mapping[str, Any]) -> None:
        beacon.light(f"engine, operation {self.judge.operation}")
        getattr(self, f"_do_{operation['op']}")(operation)

    def _index(self, operation: Mapping[str, Any]) -> int:
        return int(argument(operation, "server")) % len(self.servers)

    def _arrive(
        self,
        index: int,
        items: Sequence[int],
        media: str,
        text: int,
        tokens: int,
        parameters: Any,
        priority: int = 0,
    ) -> None:
        server = self.servers[index]
        if server is None:
            return
        self._requests += 1
        request_id = f"r{self._requests}"
        chosen = [item % len(self.plan.items) for item in items]
        has: list[bool | None] = [
            None if media == "stripped" else media == "all" or (media == "odd" and place % 2 == 0)
            for place in range(len(chosen))
        ]
        if self.plan.servers[index].role == "ec_producer":
            # An encode server is never sent references: there is nothing to encode.
            has = [True] * len(chosen)
        specs = [self.plan.items[item] for item in chosen]
        keys = [self.site.keys[item] for item in chosen]
        with_media: dict[str, bool] = {}
        for key, there in zip(keys, has, strict=True):
            with_media[key] = with_media.get(key, True) and bool(there)
        self._note(index, "arrived", request_id, with_media, parameters is not None)
        self._guard(
            index,
            "add",
            request_id,
            {
                "items": [(key, spec.rows, spec.gaps) for key, spec in zip(keys, specs, strict=True)],
                "media": has,
                "text": text,
                "max_tokens": max(tokens, 1),
                "parameters": parameters,
                "priority": priority,
            },
        )

    def _guard(self, index: int, method: str, *arguments: Any) -> None:
        server = self.servers[index]
        if server is None:
            return
        try:
            getattr(server, method)(*arguments)
        except EngineDied:
            self._dead(index)

    def _do_request(self, operation: Mapping[str, Any]) -> None:
        self._arrive(
            self._index(operation),
            argument(operation, "items"),
            argument(operation, "media"),
            argument(operation, "text"),
            argument(operation, "tokens"),
            argument(operation, "params"),
            argument(operation, "priority"),
        )

    def _do_step(self, operation: Mapping[str, Any]) -> None:
        index = self._index(operation)
        during = argument(operation, "during")
        for turn in range(argument(operation, "times")):
            order = StepOrder(argument(operation, "tokens"), argument(operation, "kv") if turn == 0 else "")
            self._step(index, order, during if turn == 0 else None, argument(operation, "watch"))

    def _do_run(self, operation: Mapping[str, Any]) -> None:
        self._run(self._index(operation), argument(operation, "tokens"))

    def _do_transfer(self, operation: Mapping[str, Any]) -> None:
        items = argument(operation, "items")
        producer = self._of_role(("ec_producer", "ec_both"), argument(operation, "producer"))
        # Nobody asks for them where the plan says -1.
        wanted = argument(operation, "consumer")
        consumer = self._of_role(("ec_consumer", "ec_both"), wanted) if wanted >= 0 else None
        if producer is not None:
            self._arrive(producer, items, "all", 1, 1, None)
            self._run(producer, 64)
        if consumer is not None:
            self._arrive(consumer, items, argument(operation, "media"), 1, 1, None)
            self._run(consumer, 64)

    def _of_role(self, roles: tuple[str, ...], number: int) -> int | None:
        found = [index for index, spec in enumerate(self.plan.servers) if spec.role in roles]
        return found[number % len(found)] if found else None

    def _do_abort(self, operation: Mapping[str, Any]) -> None:
        index = self._index(operation)
        server = self.servers[index]
        live = server.engine.live() if server is not None else []
        if live:
            self._guard(index, "abort", live[argument(operation, "request") % len(live)])

    def _do_again(self, operation: Mapping[str, Any]) -> None:
        index = self._index(operation)
        name, server = self.names[index], self.servers[index]
        over = [key for key, request in self.judge.requests.items() if request.server == name and request.over]
        if server is None or not over:
            return
        try:
            server.engine.again(over[argument(operation, "request") % len(over)])
        except EngineDied:
            self._dead(index)
        except KeyError:
            pass  # it ended in an earlier life of the server

    def _do_evict(self, operation: Mapping[str, Any]) -> None:
        index = self._index(operation)
        server = self.servers[index]
        if server is None:
            return
        server.engine.evict()
        if not argument(operation, "same_pass"):
            self._step(index, StepOrder(tokens=0), force=True)

    def _do_reset(self, operation: Mapping[str, Any]) -> None:
        self._guard(self._index(operation), "reset")

    def _do_damage(self, operation: Mapping[str, Any]) -> None:
        event = self.site.damage(argument(operation, "item"), argument(operation, "how"))
        if event is not None:
            self._recorder(0)(event)

    def _do_store(self, operation: Mapping[str, Any]) -> None:
        self._store_fault(argument(operation, "fault"))

    def _store_fault(self, fault: str) -> None:
        if fault == self.fault:
            return
        if self.fault:
            before = self.fault
            self._note(None, "absent", self.site.absent())
            site.mend_process(before)
            for server in self.servers:
                if server is not None:
                    server.fault(before, True)
            self.site.mend_files(before)
        self.fault = fault
        if fault:
            self.site.break_files(fault)
            site.break_process(fault)
            for server in self.servers:
                if server is not None:
                    server.fault(fault, False)
        self._note(None, "fault", fault)

    def _do_restart(self, operation: Mapping[str, Any]) -> None:
        index = self._index(operation)
        server = self.servers[index]
        if server is not None:
            try:
                if argument(operation, "graceful"):
                    server.shutdown(self.plan.shutdown)
            except EngineDied:
                self.outcome.deaths += 1
            server.end()
        self._forget(index)
        self._boot(index)

    def _do_wait(self, operation: Mapping[str, Any]) -> None:
        clock.advance(float(argument(operation, "seconds")))
        time.sleep(_BREATH_S)

    def _do_name(self, operation: Mapping[str, Any]) -> None:
        index, who = self._index(operation), argument(operation, "who")
        server = self.servers[index]
        if server is None:
            return
        live = server.engine.live()
        name, requests = self.names[index], self.judge.requests
        ended = [key for key, request in requests.items() if request.server == name and key not in live]
        chosen = {"unknown": ["nobody"], "ended": ended[-1:], "live": live[-1:]}[who]
        if chosen:
            self._guard(index, "give_up", chosen[0])

    # ---- the end ----

    def _finish(self) -> None:
        """Everything comes to its end: the store is whole again, all requests are served or given up, a fresh item crosses."""
        self._store_fault("")
        for index in range(len(self.servers)):
            self._drain(index)
        for index in range(len(self.servers)):
            self._quiet(index)
        strays = self.site.strays()
        if strays:
            code = any(name.endswith("/executed") for name in strays)
            self._recorder(0)(("store", "EPD-SEC-005" if code else "EPD-SEC-001", f"{strays[0]} is there"))
        self._note(None, "swept")
        for index in range(len(self.servers)):
            for _ in range(2):
                server = self.servers[index]
                if server is not None:
                    try:
                        server.shutdown(self.plan.shutdown)
                    except EngineDied:
                        break

    def _drain(self, index: int) -> None:
        waited = 0.0
        while True:
            self._run(index, 64, _STEPS_WAITED if waited else LIMIT_RUN)
            server = self.servers[index]
            if server is None or server.idle():
                return
            if waited >= PATIENCE_S:
                break
            waited += _PATIENCE_STEP_S
            clock.advance(_PATIENCE_STEP_S)
            time.sleep(_BREATH_S)
        for request_id in server.engine.live():
            self._note(index, "stuck", request_id, PATIENCE_S)
            self._guard(index, "abort", request_id)

    def _quiet(self, index: int) -> None:
        """An idle server has no pending work."""
        # The step that tells the workers which requests have ended.
        self._step(index, StepOrder())
        waited = 0.0
        while self._step(index, StepOrder()):
            if waited >= PATIENCE_S:
                self._note(index, "idle", PATIENCE_S, True)
                return
            waited += _PATIENCE_STEP_S
            clock.advance(_PATIENCE_STEP_S)
            time.sleep(_BREATH_S)
        self._note(index, "idle", waited, False)
