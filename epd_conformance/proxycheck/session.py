"""The layer `proxy` of a run: fake servers and a proxy in front, plans carried out one after the other, evidence written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from epd_conformance.errors import UsageError
from epd_conformance.live.layout import cell_path
from epd_conformance.oracle.cell import Judgement
from epd_conformance.proxy.app import create_app
from epd_conformance.proxycheck import clients, fakes, judges, under_test
from epd_conformance.proxycheck.case import OWN_LIMIT_S, ProxyCase, ProxyCell
from epd_conformance.proxycheck.evidence import Got, ProxyEvidence
from epd_conformance.proxycheck.plan import ROLES, Plan, Role, Step
from epd_conformance.proxycheck.under_test import App, Foreign

T = TypeVar("T")

# What a request may take beyond the silence that the proxy bears: a retry or two, and a busy machine.
SLACK_S = 4.0

# The work of a cell that has not ended by itself is looked at once more after so long; a client that left is due in five seconds.
SETTLE_S = 5.0

LOG = "logs/proxy.log"


@dataclass
class _Front:
    """The fakes of one arrangement, and what stands before them."""

    arrangement: str
    ground: fakes.Ground
    servers: dict[str, fakes.Fake]
    stack: contextlib.ExitStack
    own: dict[str, under_test.OwnProxy] = field(default_factory=dict)
    """Our own proxies, by their options."""
    foreign: str = ""
    """The address of somebody else's."""
    alive: Callable[[], bool] = lambda: True

    @property
    def urls(self) -> dict[Role, list[str]]:
        return {role: [fake.url for fake in self.servers.values() if fake.role == role] for role in ROLES}


class ProxySession:
    """A context manager; nothing starts before the first cell.

    Args:
        out: the folder of the run.
        given: somebody else's proxy; None for our own.
        app: makes our own proxy from its configuration; tests plant defects here.
    """

    def __init__(
        self,
        out: Path,
        given: Foreign | None = None,
        *,
        app: App = create_app,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.out = out
        self.given = given
        self.app = app
        self.say = say
        self._front: _Front | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake servers", daemon=True)
        self._thread.start()

    def __enter__(self) -> ProxySession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_front()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def judge(self, cell: ProxyCell) -> tuple[Judgement, Path]:
        """The verdict of a cell, and its evidence file. Raises UsageError for a proxy that cannot be had."""
        evidence = self.carry_out(cell.id, cell.topology, cell.case)
        path = self.out / cell_path(cell.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(evidence.to_json(), separators=(",", ":")), encoding="utf-8")
        return judges.judge(evidence), path

    def carry_out(self, cell: str, arrangement: str, case: ProxyCase) -> ProxyEvidence:
        """Carry out one plan."""
        front = self._front_of(arrangement)
        if not front.alive():
            # The cell in which it ended has failed by that; the others are asked all the same.
            self._end_front()
            front = self._front_of(arrangement)
        url = self._proxy(front, case)
        limit_s = self.given.limit_s if self.given is not None else case.options.get("timeout_s", OWN_LIMIT_S)
        got = self._await(self._steps(front, url, case.plan, limit_s + SLACK_S))
        proxy = self.given.to_json() if self.given is not None else {"own": True, "options": dict(case.options)}
        return ProxyEvidence(
            cell=cell,
            judge=case.judge,
            arrangement=arrangement,
            plan=case.plan,
            seen=tuple(front.ground.seen),
            got=tuple(got),
            servers={name: fake.url for name, fake in front.servers.items()},
            media=front.ground.host,
            limit_s=limit_s,
            proxy=proxy,
        )

    # -- plans -------------------------------------------------------------------------------------------------------------------

    async def _steps(self, front: _Front, url: str, plan: Plan, longest_s: float) -> list[Got]:
        front.ground.begin(plan)
        got: list[Got] = []
        async with clients.session() as client:
            for step in plan.steps:
                await asyncio.sleep(step.pause_s)
                got += await self._step(front, url, step, client, longest_s)
        await self._settled(front)
        return got

    async def _step(self, front: _Front, url: str, step: Step, client: Any, longest_s: float) -> list[Got]:
        front.ground.step(step)
        for name in step.down:
            await front.servers[name].hide()
        try:
            sends = [clients.carry_out(send, url, front.ground, client, longest_s) for send in step.sends]
            return list(await asyncio.gather(*sends))
        finally:
            for name in step.down:
                await front.servers[name].listen()

    @staticmethod
    async def _settled(front: _Front) -> None:
        """Wait until no server works any more, so that the next cell begins on quiet ground."""
        ground = front.ground
        end = ground.now() + SETTLE_S
        while any(seen.ended is None for seen in ground.seen) and ground.now() < end:
            await asyncio.sleep(0.005)

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # -- fakes and proxies -------------------------------------------------------------------------------------------------------

    def _front_of(self, arrangement: str) -> _Front:
        if self._front is not None and self._front.arrangement == arrangement:
            return self._front
        self._end_front()
        stack = contextlib.ExitStack()
        try:
            serving = fakes.serving(under_test.fake_ports(self.given, arrangement))
            ground, servers = self._await(serving.__aenter__())
            stack.callback(lambda: self._await(serving.__aexit__(None, None, None)))
            front = _Front(arrangement, ground, servers, stack)
            if self.given is not None:
                self._foreign(front, self.given)
        except BaseException:
            stack.close()
            raise
        self._front = front
        return front

    def _foreign(self, front: _Front, given: Foreign) -> None:
        url, seconds = given.url, under_test.BY_HAND_S
        if given.command:
            seconds = under_test.COMMAND_S
            log = self.out / LOG
            url, front.alive = front.stack.enter_context(under_test.started(given, front.urls, log))
        else:
            places = ", ".join(f"{name} {fake.url}" for name, fake in front.servers.items())
            self.say(f"fake servers: {places}")
            self.say(f"waiting for the proxy at {url}: start it now, with these as its servers")
        if not self._await(self._answers(url, seconds, front.alive)):
            how = f"see {self.out / LOG}" if given.command else "start it, or correct --proxy-url"
            raise UsageError(f"the proxy does not answer at {url}: {how}")
        front.foreign = url

    @staticmethod
    async def _answers(url: str, seconds: float, alive: Callable[[], bool]) -> bool:
        waiting = asyncio.create_task(clients.answers(url, seconds))
        while not waiting.done() and alive():
            await asyncio.wait({waiting}, timeout=0.1)
        waiting.cancel()
        return waiting.done() and not waiting.cancelled() and waiting.result()

    def _proxy(self, front: _Front, case: ProxyCase) -> str:
        """The address of the proxy that a case is sent to."""
        if self.given is not None:
            return front.foreign
        key = json.dumps(dict(case.options), sort_keys=True)
        if key not in front.own:
            front.own[key] = under_test.OwnProxy(front.urls, case.options, self.app)
        return front.own[key].url

    def _end_front(self) -> None:
        front, self._front = self._front, None
        if front is None:
            return
        for proxy in front.own.values():
            proxy.tell()
        for proxy in front.own.values():
            proxy.wait()
        front.stack.close()
