"""The hunt over a made session: which scripts fail is decided here, so that what is left of them can be compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))
from made_evidence import Story, with_answer

from epd_conformance import hunting
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live.case import plan_of
from epd_conformance.oracle import judges
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.plans.plan import Plan
from epd_conformance.run import Options
from epd_conformance.verdict import Verdict

Fails = Callable[[list[str]], bool]


def told(plan: Plan) -> list[str]:
    return [" ".join(step.values()) for step in plan.steps]


class Session:
    """In the place of `LiveSession`: scripts go well, but for those that `fails` names; each attempt is noted."""

    def __init__(self, world: World, cells: list[Any], folder: Path) -> None:
        self.world, self.folder, self.seed, self.subject = world, folder, 0, world.subject
        self.plans = {cell.id: plan_of(cell.case, 0, cell.id) for cell in cells}
        world.sessions.append(self)

    def stage(self, topology: str) -> Any:
        return SimpleNamespace(plans=self.plans, stack=SimpleNamespace(info="info", servers=[]))

    def run(self, cell: Any) -> CellEvidence:
        plan = self.plans[cell.id]
        self.world.carried.append((cell.id, plan))
        if self.world.breaks(told(plan)):
            raise StackError("the stack did not come up")
        story = Story("scripted", cell.topology, plan)
        story.scripted()
        evidence = replace(story.evidence(), cell=cell.id)
        return with_answer(evidence, 0, status=500) if self.world.fails(told(plan)) else evidence

    def end_stage(self) -> None:
        self.world.ended += 1


class World:
    def __init__(self) -> None:
        self.carried: list[tuple[str, Plan]] = []
        self.sessions: list[Session] = []
        self.ended = 0
        self.emptied = 0
        self.fails: Fails = lambda steps: False
        self.breaks: Fails = lambda steps: False
        probe = SimpleNamespace(keys=lambda: ["k"], delete=self._delete)
        self.subject = SimpleNamespace(probe=lambda info: probe, features=frozenset({"store_probe"}))

    def _delete(self, key: str) -> None:
        self.emptied += 1


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    class Site:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Site:
            return self

        def __exit__(self, *_: object) -> None: ...

    def session(site: Any, subject: Any, folder: Path, *, seed: int, cells: list[Any], say: Any) -> Session:
        return Session(made, cells, folder)

    monkeypatch.setattr(hunting, "Site", Site)
    monkeypatch.setattr(hunting, "LiveSession", session)
    monkeypatch.setattr(hunting.subjects, "load", lambda name: made.subject)
    monkeypatch.setattr(hunting.vllm_info, "require", lambda: None)
    monkeypatch.setattr(hunting.doctor, "preflight", lambda found: None)
    monkeypatch.setattr(hunting, "model_use", lambda options: SimpleNamespace(name="tiny"))
    return made


def hunt(world: World, tmp_path: Path, budget_s: float = 0.0, **options: Any) -> hunting.Hunt:
    return hunting.hunt(Options("reference", out=tmp_path / "out"), "e-pd", budget_s, say=lambda _: None, **options)


def test_nothing_found(world: World, tmp_path: Path) -> None:
    done = hunt(world, tmp_path)
    assert (done.verdicts, done.exit_code) == ({"pass": 1}, 0), "with no time at all, one script is carried out"
    assert world.ended == len(world.sessions) == 1


def test_a_failure_is_made_as_small_as_it_goes(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes damage with a reset of the processor cache somewhere behind it; whatever else a script has is not needed."""

    def fails(steps: list[str]) -> bool:
        damage = next((place for place, step in enumerate(steps) if step.startswith("damage")), None)
        return damage is not None and "reset mm" in steps[damage:]

    world.fails = fails
    clock = iter(range(10_000))
    monkeypatch.setattr(hunting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    done = hunt(world, tmp_path, budget_s=4.0 * hunting.BATCH)
    (catch,) = done.catches.values()
    assert 0 < catch.scripts < done.scripts
    assert [operation[0] for operation in catch.operations] == ["spoil", "reset"]
    assert done.exit_code == 1
    assert world.emptied >= catch.attempts > 0
    # What is kept is the evidence of the smallest script: it fails, and it can be carried out again.
    evidence = CellEvidence.from_json(json.loads(catch.evidence.read_text()))
    assert (judges.judge(evidence).verdict, judges.judge(evidence).reason) == (Verdict.FAIL, "request-failed")
    assert fails(told(evidence.plan))
    assert len(evidence.plan.steps) == 6  # first, prime, damage, send, reset, last
    text = "\n".join(hunting.lines(done, Options("reference")))
    assert f"replay --subject reference {catch.evidence}" in text
    assert hunting.to_json(done)["found"][0]["operations"] == [list(operation) for operation in catch.operations]


def test_a_stack_that_breaks_is_counted_and_no_pass(world: World, tmp_path: Path) -> None:
    world.breaks = lambda steps: True
    done = hunt(world, tmp_path)
    assert (done.verdicts, done.exit_code) == ({"error stack": 1}, 3)


def test_as_many_scripts_as_there_is_time_for(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of the same kind is made smaller once; a second batch has a session, and scripts, of its own."""
    clock = iter(range(10_000))
    monkeypatch.setattr(hunting, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    world.fails = lambda steps: True
    done = hunt(world, tmp_path, budget_s=2.0 * hunting.BATCH)
    assert len(world.sessions) == 2
    assert done.scripts > hunting.BATCH
    (catch,) = done.catches.values()
    assert (catch.scripts, catch.operations) == (done.scripts, [])
    assert len({cell for cell, _ in world.carried}) == done.scripts


def test_what_cannot_be_hunted(world: World, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--topology aggregated: hunts are for e-pd and e-p-d"):
        hunting.hunt(Options("reference"), "aggregated", 1, say=lambda _: None)
    world.subject.features = frozenset()
    with pytest.raises(UsageError, match="declares no feature `store_probe`"):
        hunt(world, tmp_path)


def test_times() -> None:
    assert [hunting.seconds(text) for text in ("90", "90s", "1.5m", "8h")] == [90, 90, 90, 28800]
    for wrong in ("", "soon", "-1s", "nan", "inf", "5d"):
        with pytest.raises(UsageError, match="write it as 90s, 30m or 8h"):
            hunting.seconds(wrong)
