"""The profiles without servers from the options to the report, and `verify` of it: over a made host, so that vLLM is not needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_fakes import Call, Ended

from epd_conformance.engine import session
from epd_conformance.engine.evidence import Death, PlanEvidence
from epd_conformance.engine.explain import TWINS
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.hosted import Carried
from epd_conformance.engine.plan import Plan
from epd_conformance.errors import StackError, UsageError
from epd_conformance.report.verify import Verification, verify

HIDDEN = 8
POOL = "engine/contract.ndjson"
CELL = "EPD-KEY-001[contract/tiny-qwen2.5-vl/plans]"
LOST = "EPD-XFER-011[contract/tiny-qwen2.5-vl/plans]"


def whole(plan: Plan, lost: bool) -> list[list[Any]]:
    """All that a plan leaves in which each server does nothing; `lost`: the last thing in it is a load that is not there."""
    names = plan.server_names()
    events: list[list[Any]] = [[name, ["booted"]] for name in names]
    events += [["", ["operation", number]] for number in range(len(plan.operations) + 1)]
    events += [[names[-1], ["loading", []]], [names[-1], ["built", True]]]
    events += [[name, ["idle", 0.0, False]] for name in names] + [["", ["swept"]]]
    for name, spec in zip(names, plan.servers, strict=True):
        sides = [f"worker {rank}" for rank in range(spec.ranks)] + ["scheduler"]
        events += [[name, ["shutdown", side]] for side in sides * 2]
    return [*events, [names[-1], ["missing", 0, "item-0"]]] if lost else events


class MadeHost:
    """Carries out nothing: the events of every plan are made up, and those of a plan with `broken` in its name show a loss."""

    def __init__(self, broken: str = "", death: Death | None = None, error: Exception | None = None) -> None:
        self.broken, self.death, self.error = broken, death, error
        self.carried: list[str] = []

    def __call__(self, subject: str, **settings: Any) -> MadeHost:
        return self

    def __enter__(self) -> MadeHost:
        return self

    def __exit__(self, *exc: object) -> None: ...

    def carry(self, plan: Plan, *, keep: str = "", limit_s: float = 0.0) -> Carried:
        if self.error is not None:
            raise self.error
        self.carried.append(keep)
        dead = self.death if self.broken and self.broken in keep else None
        lost = bool(self.broken) and (self.broken in keep or keep in ("", "shrunk")) and dead is None
        # What a twin shows is the same, so that nothing is explained by a circumstance.
        twins = {name: twin for name, _, make in TWINS if (twin := make(plan)) is not None}
        events = {name: whole(twin, lost) for name, twin in twins.items()}
        found = PlanEvidence(keep, plan, HIDDEN, [] if dead else whole(plan, lost), events, dead)
        findings = [Finding("EPD-XFER-011", "promised and not there", "", "")] if lost else []
        return Carried(findings, 1, evidence=found, death=dead)

    def call(self, function: str, arguments: Any, *, bare: bool, limit_s: float) -> dict[str, Any]:
        assert bare is function.endswith(":imports")
        if function.endswith(":race"):
            return {"writers": arguments["writers"], "bad": [], "saves": 9, "loads": 9, "misses": 0}
        if function.endswith(":growth"):
            return {"cycles": 80, "objects": [5, 5], "open files": [3, 3]}
        if function.endswith(":identities"):
            return {"configurations": ["a", "b"], "identifiers": [["k", "l"], ["k", "l"]], "hashes": ["h", "h"]}
        if function.endswith(":imports"):
            return {"asked": True, "error": "", "opened": [], "offline": True}
        if function.endswith((":unknown_setting", ":unusable_store")):
            return {"usable": True, "configured": True, "roles": {}}
        if function.endswith(":slow_store"):
            return {"held": 3, "slowest": {"save_caches": 0.01}, "deferred": 0, "served": True, "died": ""}
        return {"saved": True, "answer": False}


Contract = Callable[..., tuple[Ended, Path]]


@pytest.fixture
def contract(fake_run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Contract:
    """`contract(MadeHost(), "--mode", "certify")`: a run of `reference`, and its folder."""

    def call(host: MadeHost, *words: object) -> tuple[Ended, Path]:
        monkeypatch.setattr(session, "Host", host)
        words = ("--examples", 12, *words) if "certify" not in words else words
        return fake_run(None, "--profile", "contract", *words), tmp_path / "out"

    return call


def test_what_was_put_to_the_test_passes_and_nothing_else(contract: Contract) -> None:
    ended, out = contract(MadeHost())
    assert ended.code == 3
    assert ended.report is not None
    assert {cell["topology"] for cell in ended.cells.values()} == {"contract"}
    passed = {name for name, words in ended.verdicts.items() if words == "pass"}
    assert {name.partition("[")[0] for name in passed} == {
        "EPD-XFER-011",
        "EPD-XFER-012",
        "EPD-XFER-013",
        "EPD-XFER-014",
        "EPD-RACE-006",
        "EPD-RACE-008",
        "EPD-RACE-011",
        "EPD-LIFE-001",
        "EPD-LIFE-009",
        "EPD-LIFE-010",
        "EPD-ROLE-008",
        "EPD-INIT-001",
        "EPD-INIT-002",
        "EPD-INIT-004",
        "EPD-INIT-005",
        "EPD-LOAD-008",
    }
    assert {words for name, words in ended.verdicts.items() if name not in passed} == {"inconclusive not-exercised"}
    assert "noiseFloor" in ended.report
    found = verify(out)
    assert found.ok, found.lines()
    assert found.checked["plans"] > 200


def test_vllms_scheduler_is_a_layer_of_its_own(fake_run: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "Host", MadeHost("transfer-v1"))
    ended, out = fake_run(None, "--profile", "scheduler", "--examples", 12), tmp_path / "out"
    cell = ended.cells["EPD-XFER-011[scheduler/tiny-qwen2.5-vl/plans]"]
    assert (cell["verdict"], cell["rung"]) == ("fail", "scheduler")
    assert {cell["topology"] for cell in ended.cells.values()} == {"scheduler"}
    assert ended.verdicts["EPD-KEY-015[scheduler/tiny-qwen2.5-vl/identities]"] == "pass"
    assert verify(out).ok
    path = out / "engine" / "scheduler.ndjson"
    path.write_text(
        path.read_text()
        .replace('"layer": "scheduler"', '"layer": "contract"')
        .replace('"layer":"scheduler"', '"layer":"contract"')
    )
    words = [problem.words for problem in verify(out).problems]
    assert any("is of the layer contract, and must be of scheduler" in text for text in words), words


def test_a_finding_fails_its_requirement_with_a_plan_to_replay(contract: Contract) -> None:
    ended, out = contract(MadeHost("transfer-v1"))
    assert ended.code == 1
    cell = ended.cells[LOST]
    assert (cell["verdict"], cell["reason"]) == ("fail", "promised and not there")
    assert "smallest plan: " in cell["message"]
    path = out / next(name for name in cell["artifacts"] if name.startswith("cells/"))
    assert f"epd-conformance replay {path}" in cell["message"]
    shrunk = Plan.from_json(json.loads(path.read_text())["shrunk"]["plan"])
    assert len(shrunk.operations) <= 1, "the made host shows the loss whatever the plan holds"
    assert verify(out).ok


def test_a_hook_that_hangs_is_a_verdict_and_ends_the_rest(contract: Contract) -> None:
    host = MadeHost("-", Death("scheduler.has_cache_item", hung=True, status=-9, limit_s=15.0))
    ended, out = contract(host)
    assert ended.code == 1
    assert ended.verdicts[CELL] == "fail has_cache_item hangs"
    assert ended.verdicts["EPD-XFER-012[contract/tiny-qwen2.5-vl/plans]"] == "inconclusive not-exercised"
    assert host.carried.count("shrunk") == 1
    assert len(host.carried) < 10
    assert verify(out).ok


@pytest.mark.parametrize(
    ("error", "reason"), [(StackError("the host ended"), "stack"), (RuntimeError("a defect"), "harness")]
)
def test_what_breaks_the_harness_is_no_pass(contract: Contract, error: Exception, reason: str) -> None:
    ended, out = contract(MadeHost(error=error))
    assert ended.code == 3
    assert set(ended.verdicts.values()) == {f"error {reason}"}
    assert verify(out).ok


def test_a_subject_that_cannot_be_used_is_no_report(contract: Contract) -> None:
    ended, _ = contract(MadeHost(error=UsageError("no such key: mend it")))
    assert (ended.code, ended.report) == (2, None)
    assert "no such key: mend it" in ended.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cuda"), "the profile contract has no servers: leave out --device"),
        (("--model", "/elsewhere"), "the profile contract has no servers: leave out --model"),
        (("--boot", "plain"), "the profile contract has no servers: leave out --boot"),
        (("--mode", "certify", "--examples", "5"), "--mode certify draws as many plans for everybody"),
        (("--examples", "-1"), "--examples -1: give a number of plans"),
    ],
)
def test_options_that_mean_nothing_are_refused(contract: Contract, words: tuple[str, ...], message: str) -> None:
    ended, _ = contract(MadeHost(), *words)
    assert ended.code == 2
    assert message in ended.err


def test_profiles_with_servers_draw_no_plans(fake_run: Call) -> None:
    ended = fake_run(None, "--examples", "5")
    assert ended.code == 2
    assert "--examples says how many plans" in ended.err


def edit(out: Path, change: Callable[[list[dict[str, Any]]], None]) -> Verification:
    """What `verify` says after the lines of the pool were changed, with the sum in the report put right."""
    path = out / POOL
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return verify(out)


def drop_the_failing_plan(lines: list[dict[str, Any]]) -> None:
    lines[:] = [line for line in lines if line.get("plan", {}).get("name") != "transfer-v1"]


def drop_the_failing_event(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line.get("plan", {}).get("name") == "transfer-v1":
            line["plan"]["events"].pop()


def draw_others(lines: list[dict[str, Any]]) -> None:
    lines[0]["seed"] = 1


def leave_out(lines: list[dict[str, Any]]) -> None:
    last = max(index for index, line in enumerate(lines) if "plan" in line)
    lines[0]["left"] = [lines.pop(last)["plan"]["name"]]


def make_an_easier_plan(lines: list[dict[str, Any]]) -> None:
    lines[1]["plan"]["plan"]["operations"] = []


def empty_drawn_plans(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line.get("plan", {}).get("name", "").startswith("drawn"):
            line["plan"]["events"] = []


def cut_a_plan(lines: list[dict[str, Any]]) -> None:
    lines[1]["plan"]["events"] = lines[1]["plan"]["events"][: len(lines[1]["plan"]["events"]) // 2]


def cut_the_shutdown(lines: list[dict[str, Any]]) -> None:
    del lines[1]["plan"]["events"][-2]  # the last one is the finding


def empty_a_twin(lines: list[dict[str, Any]]) -> None:
    lines[1]["plan"]["twins"]["EPD-XFER-009"] = []


def rename_events(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        for _, event in line.get("plan", {}).get("events", []):
            event[0] = event[0].replace("built", "x-built")


def hang_the_harness(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        if line.get("plan", {}).get("name", "").startswith("drawn"):
            line["plan"]["death"] = {"at": "engine", "hung": True, "status": -9, "limit_s": 10.0, "output": ""}
            line["plan"]["events"] = []


def drop_a_check(lines: list[dict[str, Any]]) -> None:
    del lines[-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_the_failing_plan, "its plans are not those"),
        (drop_the_failing_event, "verdict is fail in the result, and the evidence gives pass"),
        (draw_others, "was drawn from seed 1"),
        (leave_out, "no hook hung so often"),
        (make_an_easier_plan, "is not the one of the suite"),
        (drop_a_check, "its checks are"),
        (empty_drawn_plans, "it does not go through its"),
        (cut_a_plan, "what lies outside the store was not looked at"),
        (cut_the_shutdown, "was not shut down"),
        (empty_a_twin, "without the circumstance of EPD-XFER-009, it does not go through"),
        (rename_events, "no event is called 'x-built'"),
        (hang_the_harness, "in a way that says nothing about the connector"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_changed_evidence_is_found(contract: Contract, change: Callable[[Any], None], words: str) -> None:
    _, out = contract(MadeHost("transfer-v1"))
    found = edit(out, change)
    assert any(words in problem.words for problem in found.problems), found.lines()


def junk(shrunk: dict[str, Any]) -> dict[str, Any]:
    return {"junk": 1}


def nothing_lost(shrunk: dict[str, Any]) -> dict[str, Any]:
    return {**shrunk, "events": shrunk["events"][:-1]}


@pytest.mark.parametrize(("change", "words"), [(junk, "is damaged"), (nothing_lost, "does not break EPD-XFER-011")])
def test_a_smallest_plan_that_shows_nothing_is_found(
    contract: Contract, change: Callable[[Any], Any], words: str
) -> None:
    ended, out = contract(MadeHost("transfer-v1"))
    path = out / next(name for name in ended.cells[LOST]["artifacts"] if name.startswith("cells/"))
    cell = json.loads(path.read_text())
    path.write_text(json.dumps({**cell, "shrunk": change(cell["shrunk"])}))
    assert any(words in problem.words for problem in verify(out).problems if problem.where == LOST)
