"""Allure: one result for each expected cell, ids that follow from the cell, and only a pass is passed."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from parallel_runs import Fakes
from run_fakes import Call, Ended

from epd_conformance.oracle import judges

allure = pytest.importorskip("epd_conformance.reporters.allure")

CELL = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"
BROKEN = "EPD-TOK-003[e-pd/tiny-qwen2.5-vl/img2]"
SCRIPT = {"EPD-TOK-002": "fail", "EPD-TOK-003": "harness", "EPD-TOK-004": "inconclusive"}


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """By cell; no cell may have two."""
    found = [json.loads(path.read_text()) for path in folder.glob("*-result.json")]
    by_cell = {labels(one)["cell"][0]: one for one in found}
    assert len(by_cell) == len(found)
    return by_cell


def labels(result: dict[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for label in result["labels"]:
        found[label["name"]].append(label["value"])
    return found


def attached(folder: Path, result: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: (folder / one["source"]).read_text() for one in result.get("attachments", ())}


@pytest.fixture
def ended(fake_run: Call, tmp_path: Path) -> Ended:
    return fake_run(SCRIPT, "--alluredir", tmp_path / "allure")


def test_every_verdict_has_a_status_and_only_a_pass_is_passed() -> None:
    assert set(allure.STATUSES) == set(allure.Verdict)
    assert [str(verdict) for verdict, status in allure.STATUSES.items() if status == "passed"] == ["pass"]
    assert [str(verdict) for verdict, status in allure.STATUSES.items() if status == "failed"] == ["fail"]


def test_each_cell_has_its_result(ended: Ended, tmp_path: Path) -> None:
    found = results(tmp_path / "allure")
    assert set(found) == set(ended.cells)
    for name, cell in ended.cells.items():
        assert found[name]["status"] == allure.STATUSES[allure.Verdict(cell["verdict"])], name
    assert found[CELL]["status"] == "failed"
    assert found[BROKEN]["status"] == "broken"
    assert ended.report is not None
    assert ended.report["results"]["allure"] == str(tmp_path / "allure")


def test_the_words_of_a_result(ended: Ended, tmp_path: Path) -> None:
    result = results(tmp_path / "allure")[CELL]
    assert result["name"] == "one image: img1"
    assert result["fullName"] == CELL
    requirement = next(item for item in ended.report["requirements"] if item["id"] == "EPD-TOK-002")  # type: ignore[index]
    assert requirement["sentence"] in result["description"]
    assert "**Why:**" in result["description"]
    assert "**Source:**" in result["description"]
    said = labels(result)
    assert said["epic"] == ["TOK: the same answers, token for token"]
    assert (said["feature"], said["story"]) == (["EPD-TOK-002"], ["e-pd"])
    assert (said["owner"], said["severity"]) == (["connector"], ["critical"])
    assert {"MUST", "live", "cpu-v1", "fail"} <= set(said["tag"])
    assert said["framework"] == ["pytest"]
    parameters = {one["name"]: one["value"] for one in result["parameters"]}
    assert parameters == {"topology": "e-pd", "model": "tiny-qwen2.5-vl", "case": "img1", "seed": "0"}
    assert result["statusDetails"]["message"] == f"fail: {ended.cells[CELL]['reason']}"
    assert result["statusDetails"]["trace"] == ended.cells[CELL]["message"]


def test_ids_follow_from_the_cell(fake_run: Call, tmp_path: Path) -> None:
    """Neither folder nor seed nor the memory address in a parameter's repr may cut a cell off from its history."""
    fake_run(None, "--alluredir", tmp_path / "one")
    fake_run(SCRIPT, "--alluredir", tmp_path / "two", "--seed", 7)
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert set(one) == set(two)
    for name in one:
        assert (one[name]["testCaseId"], one[name]["historyId"]) == (two[name]["testCaseId"], two[name]["historyId"])
    assert len({result["historyId"] for result in one.values()}) == len(one)
    assert not set(uuids(one)) & set(uuids(two))


def uuids(found: dict[str, dict[str, Any]]) -> list[str]:
    return [result["uuid"] for result in found.values()]


def test_two_subjects_have_histories_of_their_own(fake_run: Call, tmp_path: Path) -> None:
    """In one folder, too: Allure takes results of one history id for repetitions of one test."""
    for subject in ("reference", "vllm-example"):
        fake_run(None, "--alluredir", tmp_path / "both", subject=subject)
    found = [json.loads(path.read_text()) for path in (tmp_path / "both").glob("*-result.json")]
    mine = [result for result in found if labels(result)["cell"] == [CELL]]
    assert len(mine) == 2
    assert len({result["testCaseId"] for result in mine}) == 1
    assert len({result["historyId"] for result in mine}) == 2


def test_what_is_attached(ended: Ended, tmp_path: Path) -> None:
    folder = tmp_path / "allure"
    found = results(folder)
    passed = next(name for name, cell in ended.cells.items() if cell["verdict"] == "pass")
    there = attached(folder, found[passed])
    assert set(there) == {"plan", "evidence"}
    evidence = json.loads(there["evidence"])
    assert evidence["cell"] == passed
    assert json.loads(there["plan"]) == evidence["plan"]
    failed = attached(folder, found[CELL])
    assert failed["failure"] == ended.cells[CELL]["message"]
    assert any(name.startswith("state/") for name in failed)


def test_logs_are_cut_and_secrets_are_taken_out(
    fake_run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = judges.judge

    def with_logs(evidence: Any) -> Any:
        logs = tmp_path / "out" / "stacks" / "e-pd" / "journal"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "server.log").write_text("HF_TOKEN=hf_abc\n" + "a line\n" * 100_000 + "the last --api-key k123\n")
        return judge(evidence)

    monkeypatch.setattr(judges, "judge", with_logs)
    fake_run({"EPD-TOK-002": "fail"}, "--alluredir", tmp_path / "allure")
    folder = tmp_path / "allure"
    log = attached(folder, results(folder)[CELL])["stacks/e-pd/journal/server.log"]
    assert len(log) < 70_000
    assert log.startswith("[the last ")
    assert log.endswith("the last --api-key [redacted]")


@pytest.mark.parametrize("words", [("--cell", CELL), ("-k", "one_image")])
def test_what_was_left_out_is_broken(fake_run: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    ended = fake_run(None, "--alluredir", tmp_path / "allure", *words)
    found = results(tmp_path / "allure")
    assert set(found) == set(ended.cells)
    assert [name for name, result in found.items() if result["status"] == "passed"] == [CELL]
    other = next(name for name in found if name != CELL)
    assert found[other]["statusDetails"]["message"] == "could-not-run: did not run"


@pytest.mark.parametrize("action", ["interrupt", "terminate"])
def test_what_was_cut_off_is_broken(fake_run: Call, tmp_path: Path, action: str) -> None:
    """allure-pytest itself writes it as passed: its set-up was."""
    ended = fake_run({"EPD-TOK-002": action}, "--alluredir", tmp_path / "allure")
    found = results(tmp_path / "allure")
    assert set(found) == set(ended.cells)
    for name, cell in ended.cells.items():
        assert (found[name]["status"] == "passed") == (cell["verdict"] == "pass"), name
    assert found[CELL]["statusDetails"]["message"] == "could-not-run: cut off"


def test_the_results_of_workers(by_workers: tuple[Fakes, Ended], fake_run: Call, tmp_path: Path) -> None:
    fakes, ended = by_workers
    found = results(fakes.out / "allure")
    assert set(found) == set(ended.cells)
    for name, cell in ended.cells.items():
        assert found[name]["status"] == allure.STATUSES[allure.Verdict(cell["verdict"])], name
    assert found["EPD-TOK-002[e-p-d/tiny-qwen2.5-vl/img1]"]["status"] == "broken"
    fake_run(None, "--alluredir", tmp_path / "here", "--profile", "all")
    here = results(tmp_path / "here")
    assert {name: one["historyId"] for name, one in found.items()} == {
        name: one["historyId"] for name, one in here.items()
    }
    assert "outcome=nonconformant\n" in (fakes.out / "allure" / "environment.properties").read_text()


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("vLLM 0.32.0: v1/core/sched/scheduler.py (_free)", []),
        (
            "vllm-project/vllm#55290; llm-d/llm-d-router#1615",
            ["vllm-project/vllm/issues/55290", "llm-d/llm-d-router/issues/1615"],
        ),
        ("see https://example.org/a_(b; and more", ["https://example.org/a_(b"]),
    ],
)
def test_links(source: str, wanted: list[str]) -> None:
    addresses = [address for _, address in allure.links(source)]
    assert [address.removeprefix("https://github.com/") for address in addresses] == wanted
