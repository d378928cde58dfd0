"""Replay over fake servers: exactly the recorded plan is carried out, as often as asked, and the exit code says what came."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "live"))
sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
import session_fakes
from made_evidence import passing
from run_fakes import Call, found
from session_fakes import FakeLauncher, FakeServer

from epd_conformance import replay as replays
from epd_conformance.errors import UsageError
from epd_conformance.live.session import write_evidence
from epd_conformance.oracle.answers import Answer
from epd_conformance.plans.plan import Draw, Plan, replace_images
from epd_conformance.replay import Recorded
from epd_conformance.report import schema, writer
from epd_conformance.run import Options
from epd_conformance.runtime import doctor, vllm_info
from epd_conformance.topology import stack as stacks
from epd_conformance.topology.devices import Inventory
from epd_conformance.topology.stack import ModelUse
from epd_conformance.verdict import Mode, Owner, Verdict

TEXT = "EPD-TOK-001[e-pd/fake/text]"


def plan_of_text() -> Plan:
    draw = Draw(99, "somewhere else")
    return Plan((draw.request("edited by hand"),), (draw.request("other content"),))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run's folder with one passing cell of text, whose plan no case would draw; returns the cell's file."""
    folder = tmp_path / "run"
    plan = plan_of_text()
    base = {request.digest(): {"aggregated": Answer("a", "b", 200)} for request in plan.requests}
    evidence = replace(
        passing("text-only", "e-pd"), cell=TEXT, owner=Owner.CONNECTOR, plan=plan, baseline=base, topology="e-pd"
    )
    with writer.ResultsLog(folder / writer.RESULTS_NAME) as log:
        log.append(
            schema.RunStart(
                suite=schema.SuiteInfo(version="1", catalogue="sha256:0"),
                run=schema.RunInfo(
                    id="1",
                    mode=Mode.DEVELOP,
                    profile="e-pd",
                    level="full",
                    seed=7,
                    command=(),
                    started=datetime.now(UTC),
                ),
                subject=schema.SubjectInfo(name="vllm-example"),
                environment_class="cpu-v1",
            )
        )
        log.append(
            schema.EnvironmentInfo(
                models=(schema.ModelInfo(id="tiny-qwen2.5-vl", digest="1" * 64),),
                dtype="float32",
                details={"boot": "fork"},
            )
        )
        log.append(
            schema.CellRecord(
                id=TEXT, requirement="EPD-TOK-001", topology="e-pd", verdict=Verdict.FAIL, reason="tokens-differ"
            )
        )
    return write_evidence(folder, evidence)


class Scene:
    """What the fakes saw: launchers, newest last, and what shall become of the stack under test's answers."""

    def __init__(self) -> None:
        self.launchers: list[FakeLauncher] = []
        self.change: Callable[[int, dict[str, Any]], None] = lambda number, answer: None
        self.calls = 0
        self.asked: list[dict[str, Any]] = []
        self.resets: list[str] = []


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Scene]:
    here = Scene()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")

    class Proxy(FakeServer):
        """Through the proxy of the stack under test, answers may be changed."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if self.process.name.endswith("proxy"):
                handler: Any = self.server.RequestHandlerClass
                plain = handler.answer

                def answer(self_: Any, status: int, data: Any) -> None:
                    if "choices" in data:
                        here.calls += 1
                        here.asked.append(self.requests[-1][1])
                        here.change(here.calls, data)
                    plain(self_, status, data)

                handler.answer = answer
            self.requests = Watched(self)  # type: ignore[assignment]

    class Watched(list[Any]):
        def __init__(self, fake: FakeServer) -> None:
            super().__init__()
            self.fake = fake

        def append(self, request: Any) -> None:
            super().append(request)
            if request[0] == "/reset_encoder_cache":
                here.resets.append(self.fake.process.name)

    def launcher(*args: Any) -> FakeLauncher:
        here.launchers.append(FakeLauncher(*args))
        return here.launchers[-1]

    monkeypatch.setattr(stacks, "Launcher", launcher)
    monkeypatch.setattr(session_fakes, "FakeServer", Proxy)
    monkeypatch.setattr(Inventory, "read", classmethod(lambda cls, **_: cls(2, 1e6, 1e6)))
    monkeypatch.setattr(vllm_info, "find", found)
    monkeypatch.setattr(doctor, "preflight", lambda _: None)
    use = ModelUse("fake", str(tmp_path / "model"), "float32", {"image": 4}, digest="0" * 64)
    monkeypatch.setattr(replays, "model_use", lambda options: use)
    yield here
    for one in here.launchers:
        one.close()


def wrong(answer: dict[str, Any]) -> None:
    answer["choices"][0]["token_ids"][3] += 1


def test_a_run_says_how_it_was_asked_for(recorded: Path) -> None:
    found = replays.read(recorded)
    assert found.options == Options(
        subject="vllm-example", seed=7, device="cpu", model="tiny-qwen2.5-vl", dtype="float32", boot="fork"
    )
    assert (found.verdict, found.reason) == (Verdict.FAIL, "tokens-differ"), (
        "what the run said, not what the file gives"
    )
    assert found.cell().case.build(Draw(1, "x")) == plan_of_text()
    assert found.exact


def test_without_a_run_the_file_is_judged(recorded: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone" / "cell.json"
    alone.parent.mkdir()
    alone.write_bytes(recorded.read_bytes())
    found = replays.read(alone)
    assert found.options == Options(subject="")
    assert found.verdict is not Verdict.PASS, "its answers are those of another plan"
    with pytest.raises(UsageError, match="add --subject"):
        replays.replay(found, found.options)


def test_exactly_the_plan_is_carried_out(recorded: Path, scene: Scene, command: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = command("replay", recorded, "--out", out)
    assert ended.code == 0, ended.err
    assert f"{TEXT}: was fail tokens-differ, now pass" in ended.out
    assert "warning: the model fake is not the one of the run" in ended.err
    (asked,) = scene.asked
    assert asked["messages"] == plan_of_text().requests[0].body("epd-model")["messages"]
    data = json.loads(next((out / "cells").glob("*.json")).read_text())
    assert data["plan"] == plan_of_text().to_json()
    assert scene.launchers[0].servers == {}, "nothing is left"


def test_a_failure_is_told_and_is_1(recorded: Path, scene: Scene, command: Call, tmp_path: Path) -> None:
    scene.change = lambda number, answer: wrong(answer)
    ended = command("replay", recorded, "--out", tmp_path / "out")
    assert ended.code == 1
    assert "first divergence: output token 3" in ended.out
    assert "now fail tokens-differ" in ended.out


def test_repetitions_tell_flaky_from_broken(recorded: Path, scene: Scene, command: Call, tmp_path: Path) -> None:
    scene.change = lambda number, answer: wrong(answer) if number == 2 else None
    out = tmp_path / "out"
    ended = command("replay", recorded, "--repeat", 3, "--out", out, "--json")
    assert ended.code == 1, "one failure is a failure"
    data = json.loads(ended.out)
    assert data["counts"] == {"pass": 2, "fail": 1}
    assert [one["verdict"] for one in data["now"]] == ["pass", "fail", "pass"]
    assert data["before"] == {"verdict": "fail", "reason": "tokens-differ"}
    assert all(Path(one["evidence"]).is_file() for one in data["now"])
    assert len({body["cache_salt"] for body in scene.asked}) == 3
    assert len([name for name in scene.launchers[0].started if name.endswith("encode-0")]) == 1, "one boot"
    assert scene.resets == ["e-pd.encode-0", "e-pd.prefill_decode-0"] * 2


def test_restart_boots_the_stack_again_and_asks_the_baseline_once(
    recorded: Path, scene: Scene, command: Call, tmp_path: Path
) -> None:
    ended = command("replay", recorded, "--repeat", 2, "--restart", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    assert "now 2 × pass" in ended.out
    started = scene.launchers[0].started
    assert [name for name in started if name.endswith("encode-0")] == ["e-pd.encode-0", "e-pd-2.encode-0"]
    assert started.count("baseline-e-pd.aggregated-0") == 1
    assert scene.resets == []


def test_servers_that_do_not_come_up_decide_nothing(
    recorded: Path, scene: Scene, command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FakeLauncher.__init__

    def refusing(self: FakeLauncher, *args: Any) -> None:
        plain(self, *args)
        self.refuse["e-pd.encode"] = "stack"

    monkeypatch.setattr(FakeLauncher, "__init__", refusing)
    ended = command("replay", recorded, "--out", tmp_path / "out", "--json")
    assert ended.code == 3
    assert json.loads(ended.out)["now"][0] == {"verdict": "error", "reason": "stack", "rung": None, "evidence": None}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[]", "no cell's evidence"),
        ('{"schema": "epd-conformance/report/v1"}', "no cell's evidence"),
        ({"judge": "of tomorrow"}, "does not know"),
        ({"topology": "x-y"}, "no cell's evidence"),
        ({"plan": {}}, "no cell's evidence"),
    ],
)
def test_what_is_no_evidence_is_one_sentence(
    content: str | dict[str, Any] | None, words: str, recorded: Path, command: Call, tmp_path: Path
) -> None:
    path = tmp_path / "cell.json"
    if isinstance(content, dict):
        content = json.dumps({**json.loads(recorded.read_text()), **content})
    if content is not None:
        path.write_text(content)
    ended = command("replay", path)
    assert ended.code == 2
    assert len(ended.errors) == 1
    assert words in ended.errors[0]


def test_options_win_over_the_run(
    recorded: Path, command: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Options] = []

    def replay(recorded: Recorded, options: Options, **_: Any) -> Any:
        seen.append(options)
        raise UsageError("far enough")

    monkeypatch.setattr(replays, "replay", replay)
    command("replay", recorded, "--subject", "reference", "--model", "m", "--seed", 0, "--device", "cuda")
    (options,) = seen
    assert (options.subject, options.model, options.seed) == ("reference", "m", 0)
    assert (options.device, options.dtype, options.boot) == ("cuda", "", ""), "what fitted another device is not kept"


def test_an_attached_run_does_not_say_what_to_boot(recorded: Path) -> None:
    with writer.ResultsLog(recorded.parent.parent / writer.RESULTS_NAME) as log:
        log.append(schema.EnvironmentInfo(models=(schema.ModelInfo(id="org/x"),), details={"attached": True}))
    assert replays.read(recorded).options == Options(subject="", seed=7)


def test_an_image_of_an_edited_plan_is_sent(recorded: Path, scene: Scene, command: Call, tmp_path: Path) -> None:
    """Only what stands in the file counts: another image there is another image at the proxy."""
    draw = Draw(5, "img")
    request = draw.request("image", draw.image())
    edited = Plan((request,), (replace_images(request, [draw.image()], "other"),))
    data = json.loads(recorded.read_text())
    data |= {"judge": "equality", "plan": edited.to_json(), "cell": "EPD-TOK-002[e-pd/fake/img1]"}
    recorded.write_text(json.dumps(data))
    ended = command("replay", recorded, "--out", tmp_path / "out")
    assert ended.code == 3, "the fakes write no journal, so nothing is proven"
    assert "inconclusive not-journalled" in ended.out
    assert scene.asked[-1]["messages"] == request.body("epd-model")["messages"]
