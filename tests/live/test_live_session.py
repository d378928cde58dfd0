"""The live session over fake servers: what it boots, asks, keeps and says, and what becomes of servers that die."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from session_fakes import PROMPT, FakeLauncher, FakeServer

from epd_conformance.errors import StackError, UsageError
from epd_conformance.live import http, session
from epd_conformance.live.baseline import FLOOR_PROMPTS, REPETITIONS
from epd_conformance.live.case import Case
from epd_conformance.live.session import LiveSession, PlannedCell, relevant, roles_of
from epd_conformance.oracle.answers import TOLD, Answer
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.plans.plan import Draw, Plan, replace_images
from epd_conformance.run import Options, Run
from epd_conformance.subject import ReferenceSubject
from epd_conformance.topology import stack as stacks
from epd_conformance.topology.devices import Inventory
from epd_conformance.topology.spec import Role, Shape, Topology
from epd_conformance.topology.stack import ModelUse, Server, Site, Stack, StackSpec
from epd_conformance.verdict import Owner, Verdict


def one(draw: Draw) -> Plan:
    request = draw.request("one image", draw.image())
    return Plan((request,), (replace_images(request, [draw.image()], "other"),))


def cell(number: int, topology: str = "e-pd", judge: str = "equality", **options: Any) -> PlannedCell:
    case = Case(f"c{number}", judge, options.pop("build", one), **options)
    return PlannedCell(f"EPD-TOK-002[{topology}/fake/c{number}]", topology, Owner.CONNECTOR, case)


class Scene:
    """A session over a site whose launcher is a fake."""

    def __init__(self, folder: Path, cells: list[PlannedCell], **options: Any) -> None:
        (folder / "model").mkdir(parents=True)
        (folder / "model" / "config.json").write_text("{}")
        self.folder = folder
        self.said: list[str] = []
        self.floors: list[str] = []
        self.boots = 0
        model = ModelUse("fake", str(folder / "model"), "float32", {"image": 4})
        inventory = Inventory(cores=2, memory_gib=1e6, available_gib=1e6)
        self.site = Site(folder, model, inventory=inventory, cache=folder / "cache").__enter__()
        self.launcher: FakeLauncher = self.site.launcher  # type: ignore[assignment]
        self.session = LiveSession(
            self.site,
            ReferenceSubject(),
            folder,
            seed=3,
            cells=cells,
            say=self.said.append,
            on_floor=lambda asked: self.floors.append(asked.topology),
            on_boot=self._booted,
            **options,
        )

    def _booted(self) -> None:
        self.boots += 1

    def running(self) -> set[str]:
        return set(self.launcher.servers)

    def fake(self, name: str) -> FakeServer:
        return self.launcher.servers[name]


Make = Callable[..., Scene]


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setattr(stacks, "Launcher", FakeLauncher)
    made: list[Scene] = []

    def make(*cells: PlannedCell, **options: Any) -> Scene:
        made.append(Scene(tmp_path / f"scene-{len(made)}", list(cells), **options))
        return made[-1]

    yield make
    for one_scene in made:
        one_scene.site.close()


# -- stages ------------------------------------------------------------------------------------------------------------


def test_a_stage_is_booted_once_and_asks_its_baseline(scene: Make) -> None:
    here = scene(cell(1), cell(2), cell(3, exact=False))
    stage = here.session.stage("e-pd")
    assert here.session.stage("e-pd") is stage
    assert here.running() == {
        "baseline-e-pd.aggregated-0",
        "e-pd.encode-0",
        "e-pd.prefill_decode-0",
        "e-pd.proxy",
    }
    assert (here.boots, here.floors) == (1, ["e-pd"])
    asked = here.fake("baseline-e-pd.aggregated-0").requests
    # The fixed prompts and the exact cells' own, each several times; contrasts once.
    assert len(asked) == REPETITIONS * (FLOOR_PROMPTS + 2) + 2
    assert len({body["cache_salt"] for _, body in asked}) == len(asked), "a salt was used twice"
    assert all(body["stream"] is False for _, body in asked)
    assert here.fake("e-pd.proxy").requests == [], "the baseline is asked before the subject's arm runs"
    offered = {request.digest() for name in (1, 2) for request in stage.plans[cell(name).id].requests}
    assert offered <= stage.floor.admitted
    assert stage.floor.enough
    assert stage.floor.floor == 0
    assert stage.bypass == stage.stack.of(Role.PREFILL_DECODE)[0].url


def test_the_next_stage_stops_the_one_before(scene: Make) -> None:
    here = scene(cell(1), cell(2, "aggregated"), cell(3, "e-p-d"))
    here.session.stage("aggregated")
    assert here.running() == {"baseline-aggregated.aggregated-0", "ec-both.aggregated-0"}
    here.session.stage("e-pd")
    assert not [name for name in here.running() if "aggregated." in name and "baseline-e-pd" not in name]
    here.session.stage("e-p-d")
    assert here.running() == {
        "baseline-e-p-d.aggregated-0",
        "e-p-d.encode-0",
        "e-p-d.prefill-0",
        "e-p-d.decode-0",
        "e-p-d.proxy",
        "e-p-d.bypass",
    }
    # The p-d baseline was asked and stopped before the subject's servers came.
    order = here.launcher.started
    assert order.index("baseline-p-d-e-p-d.decode-0") < order.index("e-p-d.encode-0")
    assert "baseline-p-d-e-p-d.decode-0" in here.launcher.stopped
    here.session.end_stage()
    assert here.running() == set()
    assert here.site.stacks == []


def test_a_bypass_knows_no_encode_server(scene: Make) -> None:
    here = scene(cell(1, "e-p-d", "miss"))
    evidence = here.session.run(cell(1, "e-p-d", "miss"))
    assert here.fake("e-p-d.proxy").requests == []
    ((path, body),) = here.fake("e-p-d.bypass").requests
    assert path == "/v1/chat/completions"
    assert body["cache_salt"].startswith("cell-")
    assert evidence.answers[0].status == 200


@pytest.mark.parametrize(("kind", "error"), [("usage", UsageError), ("stack", StackError)])
@pytest.mark.parametrize("part", ["baseline-e-pd", "e-pd.encode", "e-pd.proxy"])
def test_a_stage_that_fails_stops_everything_and_is_tried_once(
    scene: Make, kind: str, error: type[Exception], part: str
) -> None:
    here = scene(cell(1), cell(2), cell(3, "aggregated"))
    here.launcher.refuse = {part: kind}
    with pytest.raises(error) as first:
        here.session.stage("e-pd")
    assert here.running() == set()
    started = list(here.launcher.started)
    with pytest.raises(error) as second:
        here.session.run(cell(2))
    assert second.value is first.value
    assert here.launcher.started == started, "it was not booted again"
    here.session.stage("aggregated")
    assert here.running() == {"baseline-aggregated.aggregated-0", "ec-both.aggregated-0"}
    with pytest.raises(error):
        here.session.stage("e-pd")
    assert "ec-both.aggregated-0" in here.running(), "the stage that works is not given up for one that does not"


def test_a_stage_that_fails_after_its_boot_stops_everything(scene: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    here = scene(cell(1))

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("while asking")

    monkeypatch.setattr(session.baseline, "ask_aggregated", broken)
    with pytest.raises(RuntimeError, match="while asking"):
        here.session.stage("e-pd")
    assert here.running() == set()


# -- cells -------------------------------------------------------------------------------------------------------------


def test_answers_and_journal_land_in_the_evidence(scene: Make) -> None:
    here = scene(cell(1), cell(2))
    stage = here.session.stage("e-pd")
    key, other = "k" * 64, "o" * 64
    encode, consumer = here.fake("e-pd.encode-0"), here.fake("e-pd.prefill_decode-0")
    encode.write("worker", "save", id=key)
    encode.write("worker", "save", id=other)

    def answering(request: Any) -> None:
        consumer.write("scheduler", "request", req="r", items=[{"id": key}], prompt=len(PROMPT))
        consumer.write("worker", "load", id=key)

    proxy = here.fake("e-pd.proxy")
    proxy.requests = Watched(answering)  # type: ignore[assignment]
    evidence = here.session.run(cell(1))
    (request,) = stage.plans[cell(1).id].requests
    (answer,) = evidence.answers
    assert (answer.status, answer.label, answer.prompt_ids) == (200, "one image", PROMPT)
    assert answer.ids == evidence.baseline[request.digest()]["aggregated"].ids
    assert set(evidence.baseline) == {r.digest() for r in (*evidence.plan.requests, *evidence.plan.contrasts)}
    assert evidence.admitted == {request.digest()}
    assert [event["ev"] for event in evidence.during] == ["request", "load"]
    # Of what was before: the starts, and what concerns the cell's key.
    assert [event["id"] for event in evidence.before if event["ev"] == "save"] == [key]
    assert len([event for event in evidence.before if event["ev"] == "init"]) == 4
    assert evidence.deaths == ()
    assert evidence.roles == roles_of(stage.stack)
    ((_, body),) = list(proxy.requests)
    assert body["cache_salt"] == f"cell-{answer.request_id}"
    # It is written down as it is.
    path = session.write_evidence(here.folder, evidence)
    assert CellEvidence.from_json(json.loads(path.read_text())) == evidence


class Watched(list[Any]):
    """A list that says what is put into it."""

    def __init__(self, told: Callable[[Any], None]) -> None:
        super().__init__()
        self.told = told

    def append(self, item: Any) -> None:
        super().append(item)
        self.told(item)


def test_without_salt(scene: Make) -> None:
    here = scene(cell(1), salted=False)
    here.session.run(cell(1))
    ((_, body),) = here.fake("e-pd.proxy").requests
    assert "cache_salt" not in body


def test_an_ec_both_server_is_asked_around_a_reset(scene: Make) -> None:
    def twice(draw: Draw) -> Plan:
        plan = one(draw)
        return Plan((*plan.requests, *plan.requests), plan.contrasts)

    both = cell(1, "aggregated", "both", build=twice)
    here = scene(both)
    evidence = here.session.run(both)
    paths = [path for path, _ in here.fake("ec-both.aggregated-0").requests]
    assert paths == ["/v1/chat/completions", "/reset_encoder_cache", "/v1/chat/completions"]
    assert evidence.facts["reset_status"] == 200


def test_special_judges_state_their_facts(scene: Make) -> None:
    cells = [
        cell(1, judge="constructed", build=lambda draw: Plan(()), exact=False),
        cell(2, judge="encode-only", exact=False),
        cell(3, judge="stage-error", exact=False),
    ]
    here = scene(*cells)
    built, encoded, failed = (here.session.run(one_cell) for one_cell in cells)
    assert built.facts == {"servers": ["encode-0", "prefill_decode-0"]}
    assert encoded.facts == {"blocks": {"encode-0": 1}, "status": 200, "completion_tokens": 5}
    assert failed.facts == {"stage": "encode", "status": 404}
    assert [answer.status for answer in failed.answers] == [404]


def test_proxies_of_the_environment_are_ignored(scene: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    here = scene(cell(1))
    assert here.session.run(cell(1)).answers[0].status == 200
    url = here.session.stage("e-pd").stack.servers[0].url
    assert http.get(f"{url}/metrics", timeout=2).status_code == 200
    assert http.post(f"{url}/reset_encoder_cache", timeout=2).status_code == 200
    # The control: by itself `requests` goes where the environment sends it.
    with pytest.raises(requests.RequestException):
        requests.get(f"{url}/metrics", timeout=2)


def test_connections_are_not_reused(scene: Make) -> None:
    here = scene(cell(1))
    url = here.session.stage("e-pd").stack.servers[0].url
    assert http.get(url, timeout=2).request.headers["Connection"] == "close"


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_a_death_is_reported_by_its_cell_only(scene: Make) -> None:
    here = scene(cell(1), cell(2), cell(3))
    stage = here.session.stage("e-pd")
    first, floor, plans = stage.stack, stage.floor, stage.plans
    proxy = here.fake("e-pd.proxy")
    proxy.status = 500
    proxy.requests = Watched(lambda _: here.fake("e-pd.prefill_decode-0").die(-11))  # type: ignore[assignment]
    cut = here.session.run(cell(1))
    ((death),) = cut.deaths
    assert (death["name"], death["status"]) == ("e-pd.prefill_decode-0", -11)
    assert "by signal 11" in death["text"]
    assert "the log of e-pd.prefill_decode-0" in death["text"]
    assert cut.answers[0].status == 500
    # The next cell finds it running again, and only that one was started.
    proxy.status, proxy.requests = 200, []
    after = here.session.run(cell(2))
    assert after.deaths == ()
    assert after.answers[0].status == 200
    assert stage.stack is first
    assert here.launcher.started.count("e-pd.prefill_decode-0") == 2
    assert here.launcher.started.count("e-pd.encode-0") == 1
    assert (stage.floor, stage.plans) == (floor, plans), "the admitted set stays that of the first boot"
    assert stage.bypass == stage.stack.of(Role.PREFILL_DECODE)[0].url
    assert any("starting e-pd again: e-pd.prefill_decode-0 ended" in line for line in here.said)
    assert here.session.run(cell(3)).deaths == ()
    assert here.boots == 1


def test_where_a_server_does_not_come_up_beside_the_others_all_are_booted_again(scene: Make) -> None:
    here = scene(cell(1), cell(2))
    stage = here.session.stage("e-pd")
    first = stage.stack
    here.fake("e-pd.proxy").requests = Watched(lambda _: here.fake("e-pd.prefill_decode-0").die(-11))  # type: ignore[assignment]
    here.session.run(cell(1))
    here.launcher.refuse = {"e-pd.prefill_decode-0": "stack"}
    after = here.session.run(cell(2))
    assert (after.deaths, after.answers[0].status) == ((), 200)
    assert stage.stack is not first
    assert {name for name in here.running() if name.startswith("e-pd")} == {
        "e-pd-2.encode-0",
        "e-pd-2.prefill_decode-0",
        "e-pd-2.proxy",
    }
    assert stage.bypass == stage.stack.of(Role.PREFILL_DECODE)[0].url
    assert here.boots == 2


def test_a_server_that_dies_under_the_request(scene: Make) -> None:
    here = scene(cell(1), cell(2))
    here.session.stage("e-pd")
    here.fake("e-pd.proxy").killed_by_request = True
    evidence = here.session.run(cell(1))
    assert evidence.answers[0].status == 0
    assert [death["name"] for death in evidence.deaths] == ["e-pd.proxy"]
    assert here.session.run(cell(2)).answers[0].status == 200


def test_a_death_between_two_cells_shows_exactly_once(scene: Make) -> None:
    here = scene(cell(1), cell(2), cell(3))
    here.session.run(cell(1))
    here.fake("e-pd.encode-0").die(-9)
    with pytest.raises(StackError, match=r"between two cells e-pd\.encode-0 ended by signal 9"):
        here.session.stage("e-pd")
    assert here.session.run(cell(2)).answers[0].status == 200
    assert here.session.run(cell(3)).deaths == ()
    assert here.launcher.started.count("e-pd.encode-0") == 2


def test_a_stack_that_does_not_come_back_fails_its_topology_only(scene: Make) -> None:
    here = scene(cell(1), cell(2), cell(3, "aggregated"))
    here.session.run(cell(1))
    here.fake("e-pd.encode-0").die(-9)
    here.launcher.refuse = {"e-pd.encode-0": "stack", "e-pd-2": "stack"}
    for _ in range(2):
        with pytest.raises(StackError, match="did not come up"):
            here.session.stage("e-pd")
    assert here.running() == set()
    assert here.session.run(cell(3, "aggregated")).answers[0].status == 200


def test_a_death_between_cells_makes_one_error_in_a_run(
    scene: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same through `Run`: one cell is an error of the stack, and no other."""
    cells = [cell(number) for number in range(3)]
    here = scene(*cells)
    run = Run(Options("reference"))
    monkeypatch.setattr(run, "session", lambda: here.session)
    recorded: list[tuple[Verdict, str]] = []
    monkeypatch.setattr(
        run, "record", lambda planned, judgement, *_: recorded.append((judgement.verdict, judgement.reason))
    )
    run.out = here.folder
    for planned in cells:
        if planned is cells[1]:
            here.fake("e-pd.encode-0").die(-9)
        run.carry_out(planned)
    assert [entry == (Verdict.ERROR, "stack") for entry in recorded] == [False, True, False]


def test_what_a_failed_cell_leaves_is_captured(scene: Make, tmp_path: Path) -> None:
    here = scene(cell(1))
    stack = here.session.stage("e-pd").stack
    (stack.store / "object").write_bytes(b"12345")
    run = Run(Options("reference"))
    run.out = here.folder
    paths = run._capture(cell(1), stack)
    state = json.loads((here.folder / paths[0]).read_text())
    assert state["cell"] == cell(1).id
    assert set(state["metrics"]) == {"encode-0", "prefill_decode-0"}
    assert [(entry["path"], entry["bytes"]) for entry in state["store"]] == [("object", 5)]
    assert set(paths[1:]) == {f"logs/{name}.log" for name in ("e-pd.encode-0", "e-pd.prefill_decode-0", "e-pd.proxy")}
    # A server that has gone costs its metrics, nothing else.
    here.fake("e-pd.encode-0").die()
    assert set(json.loads((here.folder / run._capture(cell(1), stack)[0]).read_text())["metrics"]) <= set(
        state["metrics"]
    )


def test_a_site_that_cannot_be_entered_does_not_break_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Broken(FakeLauncher):
        def __enter__(self) -> FakeLauncher:
            raise OSError(12, "Cannot allocate memory")

        def close(self) -> None:
            raise AssertionError("it was never entered")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(stacks, "Launcher", Broken)
    run = Run(Options("reference"))
    run.out, run.chosen = tmp_path, []
    run.model = ModelUse("fake", str(tmp_path), "float32", {})
    with pytest.raises(OSError, match="Cannot allocate"):
        run.session()
    run.close()


# -- pure parts --------------------------------------------------------------------------------------------------------


def stack_of(topology: str, subject: bool = True) -> Stack:
    parsed = Topology.parse(topology)
    spec = StackSpec("s", parsed, Shape(), subject=ReferenceSubject() if subject else None)
    stack = Stack(spec, Path("/nowhere"))
    for name, role in parsed.servers():
        stack.servers.append(Server(name, role, 1, None, (), None))  # type: ignore[arg-type]
    return stack


@pytest.mark.parametrize(
    ("topology", "encode", "consumers", "decode", "both"),
    [
        ("aggregated", "", "aggregated-0", "", "aggregated-0"),
        ("e-pd", "encode-0", "prefill_decode-0", "", ""),
        ("p-d", "", "prefill-0", "decode-0", ""),
        ("e-p-d", "encode-0", "prefill-0", "decode-0", ""),
        ("2e-3pd", "encode-0 encode-1", "prefill_decode-0 prefill_decode-1 prefill_decode-2", "", ""),
        ("1e-2p-2d", "encode-0", "prefill-0 prefill-1", "decode-0 decode-1", ""),
    ],
)
def test_roles(topology: str, encode: str, consumers: str, decode: str, both: str) -> None:
    roles = roles_of(stack_of(topology))
    assert roles.encode == set(encode.split())
    assert roles.consumers == set(consumers.split())
    assert roles.decode == set(decode.split())
    assert roles.both == set(both.split())


def test_a_baseline_has_no_consumer() -> None:
    roles = roles_of(stack_of("aggregated", subject=False))
    assert roles.consumers == roles.both == frozenset()


def test_relevant_lines_are_kept_and_no_others() -> None:
    mine, other = "mine", "other"
    kept: list[Mapping[str, Any]] = [
        {"ev": "init", "side": "scheduler"},
        {"ev": "raise", "hook": "x"},
        {"ev": "save", "id": mine},
        {"ev": "load", "id": mine},
        {"ev": "encoded", "id": mine},
    ]
    dropped: list[Mapping[str, Any]] = [
        {"ev": "save", "id": other},
        {"ev": "load", "id": other},
        {"ev": "encoded", "id": other},
        {"ev": "step", "free": [other], "new": [{"req": "r"}], "encode": {"r": [mine]}},
        {"ev": "step", "free": [], "new": [], "encode": {}},
        {"ev": "lookup", "id": mine},
        {"ev": "request", "items": [{"id": mine}]},
        {"ev": "finished", "req": "r"},
    ]
    step = {"ev": "step", "t": 1.0, "free": [other, mine], "new": [{"req": "r"}], "encode": {"r": [other]}}
    assert relevant([*dropped, *kept, step], {mine}) == [
        *kept,
        {"ev": "step", "t": 1.0, "free": [mine], "new": [], "encode": {}},
    ]
    assert step["free"] == [other, mine], "the journal's own lines are not changed"
    assert relevant([*dropped, *kept, step], set()) == kept[:2]


def test_only_an_answer_of_every_server_disproves_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer("l", "r", 200, (1,))
    request = one(Draw(0, "outlived")).requests[0]
    runner = object.__new__(session.Runner)
    runner.answers, runner.salt = [], lambda *_: None  # type: ignore[method-assign]
    monkeypatch.setattr(session.client, "send", lambda *_, **__: answer)

    def outlived(*roles: Role, url: str = "proxy") -> bool:
        servers = [SimpleNamespace(role=role) for role in roles]
        runner.stack = SimpleNamespace(base_url="proxy", servers=servers, served_name="m")  # type: ignore[assignment]
        runner.send(url, request)
        return runner._outlived

    assert outlived(Role.ENCODE, Role.PREFILL_DECODE)
    runner.ask("proxy", request, "one of several at once")
    assert not runner._outlived, "whose answer is not known yet"
    assert not outlived(Role.ENCODE, Role.ENCODE, Role.PREFILL_DECODE), "the other encode server was not asked"
    assert not outlived(Role.ENCODE, Role.PREFILL_DECODE, url="past the encode server")
    answer = Answer("l", "r", 200, (), error=f"{TOLD}the engine is gone")
    assert not outlived(Role.ENCODE, Role.PREFILL_DECODE), "a stream that ends with an error"
