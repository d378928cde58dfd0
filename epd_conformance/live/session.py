"""A live session: boots what the cells of one topology need, asks the baselines first, then runs the cells one by one.

One stage at a time: the stacks of a topology are stopped before those of the next are booted, so that the memory of three or
four servers is enough.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import requests

from epd_conformance.connectors.journal import Follower
from epd_conformance.errors import StackError
from epd_conformance.live import baseline, client, faulting, http, proxied, scripted
from epd_conformance.live.baseline import Baselines
from epd_conformance.live.case import Case, plan_of
from epd_conformance.live.layout import Layout, cell_path
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.oracle.baselines import write as write_baseline
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.noise import NoiseFloor
from epd_conformance.oracle.transport import Roles
from epd_conformance.plans.plan import Plan, Request
from epd_conformance.plans.steps import HOLDING
from epd_conformance.subject import Subject
from epd_conformance.topology.spec import Role, Shape, Topology
from epd_conformance.topology.stack import AnySite, Server, Stack, StackSpec
from epd_conformance.verdict import Owner

# Tokens of a step where prompts may be cut: above the prompts of all cells but those about chunks (suites/live/test_windows.py).
# `--long-prefill-token-threshold` would not do: since vLLM 0.32 a request that is alone takes all it can.
STEP_TOKENS = 512


@dataclass(frozen=True)
class PlannedCell:
    """A cell that will run: its id, topology (as the profile names it), requirement's owner, and case."""

    id: str
    topology: str
    owner: Owner
    case: Case


@dataclass
class Stage:
    """One topology while its cells run."""

    topology: Topology
    spec: StackSpec
    stack: Stack
    baselines: Baselines
    plans: dict[str, Plan]
    floor: NoiseFloor
    bypass: str
    """Where a request goes that shall not be primed: the consumer itself, or a proxy without encode servers."""
    direct: str
    """The aggregated server of the baseline, which stays while the cells run."""
    reported: set[int] = field(default_factory=set)
    """Pids of dead servers that a cell's evidence names."""
    _followed: tuple[Stack, Follower] | None = None

    def journal(self) -> list[dict[str, Any]]:
        """All journal lines of the stack under test so far."""
        if self._followed is None or self._followed[0] is not self.stack:
            self._followed = self.stack, Follower()
        return self._followed[1].read(self.stack.journal)


class LiveSession:
    """Everything that the live cells of a run share. Close it, or let its process die: nothing is left either way."""

    def __init__(
        self,
        site: AnySite,
        subject: Subject,
        folder: Path,
        *,
        seed: int,
        cells: Sequence[PlannedCell],
        say: Callable[[str], None] = lambda _: None,
        on_floor: Callable[[BaselineAnswers], None] = lambda _: None,
        on_boot: Callable[[], None] = lambda: None,
        recorder: bool = True,
        stages: str | None = None,
        salted: bool = True,
    ) -> None:
        """`cells`: all cells of the run, so that each topology's admitted set is fixed before its first cell.

        `on_floor` is called when the baselines of a topology were asked, `on_boot()`
        after every boot. `stages`
        names another proxy stage class: the negative controls plant proxy defects with it. `salted` False leaves out the
        `cache_salt` that keeps a prefix cache from answering: the control for that very detector.
        """
        self.site = site
        self.subject = subject
        self.folder = folder
        self.seed = seed
        self.cells = list(cells)
        self.say = say
        self.on_floor = on_floor
        self.on_boot = on_boot
        self.recorder = recorder
        self.proxy_stages = stages
        self.salted = salted
        self._stage: Stage | None = None
        self._failed: dict[str, Exception] = {}

    # -- stages --------------------------------------------------------------------------------------------------------

    def stage(self, topology: str) -> Stage:
        """The running stage of a topology; the first call boots it and ends the one before.

        Raises StackError, or UsageError where the cause is what was asked for; again, at once, for every cell of a topology
        whose stage did not come up.
        """
        if self._stage is not None and self._stage.topology.name == topology:
            self._replace_dead(self._stage)
            return self._stage
        if topology in self._failed:
            raise self._failed[topology]
        self.end_stage()
        try:
            self._stage = self._boot(Topology.parse(topology))
        except Exception as error:
            self._failed[topology] = error
            self.end_stage()
            raise
        return self._stage

    def _replace_dead(self, stage: Stage) -> None:
        """Start servers again that a cell has killed: the next cell must not pay for it.

        The stack under test is booted again as a whole where a proxy has ended, where the servers are somebody else's, and
        where those that ended do not come up beside the others. Raises StackError, once, for a death that no cell has
        reported: it happened between two cells, and must show.
        """
        dead = stage.stack.dead()
        if not dead:
            return
        unreported = [process for process in dead if process.pid not in stage.reported]
        servers = [server for server in stage.stack.servers if server.process in dead]
        self.say(f"starting {stage.topology.name} again: {', '.join(process.name for process in dead)} ended")
        if len(servers) < len(dead) or not self._restarted(stage, servers):
            self._boot_again(stage)
        if unreported:
            raise StackError("between two cells " + unreported[0].obituary())

    def _restarted(self, stage: Stage, servers: Sequence[Server]) -> bool:
        try:
            self.site.restart(stage.stack, servers)
        except StackError as error:
            self.say(f"{stage.topology.name} as a whole: {error}")
            return False
        return True

    def _boot_again(self, stage: Stage) -> None:
        try:
            self.site.stop(stage.stack)
            (stage.stack,) = self.site.boot(stage.spec)
            self.on_boot()
            stage.bypass = self._bypass(stage.stack)
        except Exception as error:
            self._failed[stage.topology.name] = error
            self.end_stage()
            raise

    def restart(self) -> None:
        """Boot the stack under test of the running stage again: empty caches, an empty store. The baselines stay."""
        if self._stage is not None:
            self._boot_again(self._stage)

    def end_stage(self) -> None:
        """Stop every stack, also those of a stage that did not come up."""
        for stack in list(self.site.stacks):
            self.site.stop(stack)
        self._stage = None

    def _boot(self, topology: Topology) -> Stage:
        layout = Layout(topology)
        # The file KV connector stores in a request's first step only, so there a prompt must not be cut.
        shape = Shape(prefix_caching=False) if topology.has_kv else Shape(max_num_batched_tokens=STEP_TOKENS)
        mine = [cell for cell in self.cells if cell.topology == topology.name]
        plans = {cell.id: plan_of(cell.case, self.seed, cell.id) for cell in mine}
        subject_spec = StackSpec(
            layout.stack,
            topology,
            shape,
            subject=self.subject,
            recorder=self.recorder,
            stages=self.proxy_stages,
            # Only where a cell holds somebody there: all other runs have servers without points.
            barriers=any(holds(plan) for plan in plans.values()),
        )
        agg_spec = StackSpec(layout.baseline, Topology.parse("aggregated"), shape)
        baselines = Baselines()
        exact = {cell.id for cell in mine if cell.case.exact}
        if topology.has_kv:
            pd_spec = StackSpec(layout.pd_baseline, Topology.parse("p-d"), shape)
            aggregated, pd = self.site.boot(agg_spec, pd_spec)
            self.on_boot()
            plans = self._settle(plans, aggregated, self.site.block_size(shape))
            offered = self._ask(baselines, aggregated, plans, exact, topology)
            self.say(f"asking the p-d baseline {len(offered)} prompts")
            # The noise of the pair is that of its two servers, which the aggregated arm measures; once more shows a
            # difference between its own runs.
            sequences = _sequences(plans, exact)
            baseline.ask_pd(baselines, pd, _apart(offered, sequences), 2, sequences=sequences)
            self.site.stop(pd)
            (stack,) = self.site.boot(subject_spec)
            self.on_boot()
        else:
            aggregated, stack = self.site.boot(agg_spec, subject_spec)
            self.on_boot()
            offered = self._ask(baselines, aggregated, plans, exact, topology)
        asked = BaselineAnswers(topology.name, tuple(offered), baselines.arms, baselines.unproven)
        write_baseline(self.folder, asked)
        floor = asked.floor()
        self.say(f"{topology.name}: {floor.words()}")
        self.on_floor(asked)
        return Stage(topology, subject_spec, stack, baselines, plans, floor, self._bypass(stack), aggregated.base_url)

    def _settle(self, plans: dict[str, Plan], aggregated: Stack, block: int) -> dict[str, Plan]:
        """Move every prompt off the lengths that the KV connector cannot serve; those have cells of their own."""

        def ask(request: Request) -> Answer:
            return client.send(
                aggregated.base_url,
                request,
                uuid.uuid4().hex,
                # Of one choice: the prompt is the same, whatever limits and choices a request has.
                overrides={"max_tokens": 1, "stream": False, "n": 1, "min_tokens": None, "max_completion_tokens": None},
                model=aggregated.served_name,
            )

        return {cell: baseline.settle_plan(plan, ask, block) for cell, plan in plans.items()}

    def _ask(
        self, baselines: Baselines, aggregated: Stack, plans: dict[str, Plan], exact: set[str], topology: Topology
    ) -> list[Request]:
        """Ask the aggregated server everything that will be compared. Returns the offered requests, without repetition."""
        offered: dict[str, Request] = {}
        for request in baseline.floor_requests(self.seed, topology.name):
            offered.setdefault(request.digest(), request)
        contrasts: dict[str, Request] = {}
        for cell, plan in plans.items():
            if cell not in exact:
                continue
            for request in plan.compared:
                offered.setdefault(request.digest(), replace(request, label=f"{cell} {request.label}"))
            for request in plan.contrasts:
                contrasts.setdefault(request.digest(), request)
        self.say(f"asking the aggregated baseline {len(offered)} prompts {baseline.REPETITIONS} times")
        sequences = _sequences(plans, exact)
        alone = _apart(offered.values(), sequences)
        baseline.ask_aggregated(baselines, aggregated, alone, sequences=sequences)
        # A contrast only has to differ: once is enough.
        answers = baselines.arms["aggregated"]
        for digest, request in contrasts.items():
            if digest not in answers:
                rid = uuid.uuid4().hex
                answers[digest] = [
                    client.send(
                        aggregated.base_url,
                        request,
                        rid,
                        salt=f"c-{rid}",
                        overrides=baseline.NOT_STREAMED,
                        model=aggregated.served_name,
                    )
                ]
        return list(offered.values())

    def _bypass(self, stack: Stack) -> str:
        if stack.spec.topology.kind == "e-pd":
            return stack.of(Role.PREFILL_DECODE)[0].url
        if stack.spec.topology.kind == "e-p-d":
            return self.site.start_bypass(stack)
        return stack.base_url

    # -- cells ---------------------------------------------------------------------------------------------------------

    def run(self, cell: PlannedCell) -> CellEvidence:
        """Carry out a cell and return its evidence; judging is somebody else's."""
        stage = self.stage(cell.topology)
        return Runner(self, stage, cell).evidence()


def _sequences(plans: Mapping[str, Plan], exact: set[str]) -> list[Plan]:
    """The plans whose whole script a baseline is asked."""
    return [plan for cell, plan in plans.items() if cell in exact and plan.sequence]


def _apart(requests: Iterable[Request], sequences: Sequence[Plan]) -> list[Request]:
    """The requests that a baseline is asked by themselves."""
    within = {request.digest() for plan in sequences for request in plan.requests}
    return [request for request in requests if request.digest() not in within]


class Runner:
    """One cell while it runs: sends, marks the journals, gathers."""

    def __init__(self, session: LiveSession, stage: Stage, cell: PlannedCell) -> None:
        self.session = session
        self.stage = stage
        self.cell = cell
        self.plan = stage.plans[cell.id]
        self.stack = stage.stack
        self.roles = roles_of(self.stack)
        self.answers: list[Answer] = []
        self.facts: dict[str, Any] = {}
        self._outlived = False

    def evidence(self) -> CellEvidence:
        before = self.stage.journal()
        self.mark = self.stack.journal.mark()
        getattr(self, "_" + self.cell.case.judge.replace("-", "_"), self._through_proxy)()
        self._settled()
        during = self.journal()
        keys = {item["id"] for event in during if event["ev"] == "request" for item in event["items"]}
        digests = {request.digest() for request in (*self.plan.requests, *self.plan.contrasts)}
        floor = self.stage.floor
        dead = self.stack.dead()
        self.stage.reported.update(process.pid for process in dead)
        return CellEvidence(
            cell=self.cell.id,
            judge=self.cell.case.judge,
            topology=self.cell.topology,
            owner=self.cell.owner,
            plan=self.plan,
            answers=tuple(self.answers),
            baseline={digest: self.stage.baselines.first(digest) for digest in sorted(digests)},
            admitted=floor.admitted & digests,
            floor=floor.floor,
            floor_enough=floor.enough,
            roles=self.roles,
            before=tuple(relevant(before, keys)),
            during=tuple(during),
            deaths=tuple(
                {"name": process.name, "status": process.status, "text": process.obituary()} for process in dead
            ),
            facts=self.facts,
        )

    def salt(self, request: Request, rid: str) -> str | None:
        """The `cache_salt` that a request is sent with."""
        return request.salt or f"cell-{rid}" if self.session.salted else None

    def journal(self) -> list[dict[str, Any]]:
        """The journal lines of the cell so far."""
        return self.stack.journal.read(self.mark)

    def send(self, base_url: str, request: Request, *, rid: str = "", **options: Any) -> Answer:
        """Send one of the plan's requests and keep its answer."""
        answer = self.ask(base_url, request, rid or uuid.uuid4().hex, **options)
        self.answers.append(answer)
        self._outlived = self._over_all(base_url, request) and answer.status == 200 and answer.error is None
        return answer

    def _over_all(self, base_url: str, request: Request) -> bool:
        """Whether a request needs every server of the stack: of several with one role it needs only one."""
        roles = {server.role for server in self.stack.servers}
        return base_url == self.stack.base_url and bool(request.images) and len(roles) == len(self.stack.servers)

    def ask(self, base_url: str, request: Request, rid: str, **options: Any) -> Answer:
        """Send one of the plan's requests; the answer is the caller's to keep."""
        self._outlived = False
        return client.send(
            base_url, request, rid, salt=self.salt(request, rid), model=self.stack.served_name, **options
        )

    def _settled(self) -> None:
        """Wait a moment for the death of a server that has just failed a request: it takes about a second to go.

        Not where the last request, sent after the others were answered, was answered by every server: one whose engine is
        about to end answers nobody any more.
        """
        if self._outlived:
            return
        statuses = [answer.status for answer in self.answers] + [
            self.facts.get("status"),
            self.facts.get("reset_status"),
        ]
        if any(status in (0, 500, 502, 503, 504) for status in statuses):
            deadline = time.monotonic() + 3.0
            while time.monotonic() < deadline and not self.stack.dead():
                time.sleep(0.1)

    def _through_proxy(self) -> None:
        if self.plan.at_once:
            proxied.at_once(self)
            return
        for request in self.plan.requests:
            self.send(self.stack.base_url, request)

    def _miss(self) -> None:
        """Past the encode servers, so that nobody has saved the item."""
        self.send(self.stage.bypass, self.plan.requests[0])

    def _both(self) -> None:
        """Once cold, then again after the server's own encoder cache was reset, so that only the store can give the item."""
        server = self.stack.servers[0]
        first, second = self.plan.requests
        self.send(server.url, first)
        self.facts["reset_status"] = _post(f"{server.url}/reset_encoder_cache")[0]
        self.send(server.url, second)

    def _recomputed(self) -> None:
        faulting.damaged(self)

    def _contained(self) -> None:
        faulting.damaged(self)

    def _fails_alone(self) -> None:
        faulting.damaged(self)

    def _in_window(self) -> None:
        faulting.damaged(self)

    def _confined(self) -> None:
        faulting.confined(self)

    def _scripted(self) -> None:
        scripted.scripted(self)

    def _as_direct(self) -> None:
        # Twice, so that what is not the same twice is held against nobody.
        proxied.asked(self, directly=2)

    def _refused(self) -> None:
        proxied.asked(self, directly=1)

    def _not_begun(self) -> None:
        proxied.asked(self, directly=1)

    def _passed_on(self) -> None:
        proxied.passed_on(self)

    def _one_token(self) -> None:
        proxied.one_token(self)

    def _one_id(self) -> None:
        proxied.identified(self)

    def _work_ends(self) -> None:
        proxied.work_ends(self)

    def _stage_error(self) -> None:
        """Ask for a model that no server has: the first stage that a request meets answers 404."""
        first = self.plan.requests[0]
        self.facts["stage"] = "encode" if first.images else ("prefill" if self.stack.of(Role.PREFILL) else "decode")
        self.facts["status"] = 404
        for request in self.plan.requests:
            self.send(self.stack.base_url, request, overrides={"model": "no-such-model"})

    def _constructed(self) -> None:
        self.facts["servers"] = [server.name for server in self.stack.servers if "scheduler" in server.expects]

    def _encode_only(self) -> None:
        """A primer that asks for five tokens, sent to an encode server directly."""
        encode = self.stack.of(Role.ENCODE)
        inits = [event for event in self.stack.journal.read() if event["ev"] == "init" and event["side"] == "scheduler"]
        self.facts["blocks"] = {
            server.name: [event["blocks"] for event in inits if event["server"] == server.name][-1] for server in encode
        }
        rid = uuid.uuid4().hex
        body = self.plan.requests[0].body(self.stack.served_name, f"cell-{rid}") | {"max_tokens": 5}
        body.pop("logprobs")
        body.pop("top_logprobs")
        status, answer = _post(f"{encode[0].url}/v1/chat/completions", json=body, headers={"X-Request-Id": rid})
        self.facts["status"] = status
        self.facts["completion_tokens"] = (answer.get("usage") or {}).get("completion_tokens")

    def _ended(self) -> None:
        """Every request to an encode server directly."""
        said: list[dict[str, Any]] = []
        self.facts["said"] = said
        for request in self.plan.requests:
            rid = uuid.uuid4().hex
            body = request.body(self.stack.served_name, self.salt(request, rid))
            url = f"{self.stack.of(Role.ENCODE)[0].url}/v1/chat/completions"
            status, answer = _post(url, json=body, headers={"X-Request-Id": rid})
            choice = (answer.get("choices") or [{}])[0]
            said.append(
                {
                    "request_id": rid,
                    "status": status,
                    "completion_tokens": (answer.get("usage") or {}).get("completion_tokens"),
                    "content": (choice.get("message") or {}).get("content"),
                    "params": answer.get("ec_transfer_params"),
                }
            )

    _text_ended = _named = _ended


def _post(url: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON object of an answer; status 0 where none came, an empty object where it holds none."""
    try:
        response = http.post(url, timeout=client.DEADLINE_S, **options)
    except requests.RequestException:
        return 0, {}
    try:
        data = response.json()
    except ValueError:
        data = {}
    return response.status_code, data if isinstance(data, dict) else {}


def holds(plan: Plan) -> bool:
    """Whether a cell holds a request in a server or proxy."""
    return plan.window is not None or any(step["do"] in HOLDING for step in plan.steps)


def roles_of(stack: Stack) -> Roles:
    """The journal names of a stack's servers by the part they play; a single server without a connector plays none."""
    if stack.spec.topology.kind == "aggregated" and stack.spec.subject is None:
        return Roles()
    return Layout(stack.spec.topology).roles


def relevant(events: Sequence[Mapping[str, Any]], keys: set[str]) -> list[Mapping[str, Any]]:
    """The earlier lines that a judge needs for a cell's keys: starts, saves, loads, and what was freed or encoded."""
    kept: list[Mapping[str, Any]] = []
    for event in events:
        kind = event["ev"]
        if kind in ("init", "raise") or (kind in ("save", "load", "encoded") and event["id"] in keys):
            kept.append(event)
        elif kind == "step" and keys.intersection(event["free"]):
            kept.append({**event, "free": [key for key in event["free"] if key in keys], "new": [], "encode": {}})
    return kept


def write_evidence(folder: Path, evidence: CellEvidence) -> Path:
    """Write a cell's raw evidence to `cells/<name>.json` under the run's folder; returns the path."""
    path = folder / cell_path(evidence.cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(evidence.to_json(), separators=(",", ":")), encoding="utf-8")
    return path
