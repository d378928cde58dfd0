"""`verify` finds whatever was changed after the run, however many sums were made anew, and says what it cannot find.

Each forger here ends with `rewrite`, which makes report and all SHA-256 sums anew; only the content betrays them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_run import (
    MODEL,
    MadeRun,
    cell_file,
    change_json,
    change_lines,
    change_results,
    digest_of,
    journals,
    rewrite,
)
from spoilt_faults import DAMAGE, VICTIM, fault, loads, outside, says

from epd_conformance import run as runs
from epd_conformance.errors import UsageError
from epd_conformance.live import suites
from epd_conformance.live.case import Case, plan_of
from epd_conformance.live.suites import Suite
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.plan import Plan, lengthen
from epd_conformance.report.verify import Kind, Verification, verify
from epd_conformance.report.writer import REPORT_NAME, RESULTS_NAME, ResultsLog, read_report
from epd_conformance.verdict import Outcome

SUITE = suites.installed()
IMAGE = f"EPD-TOK-002[e-pd/{MODEL}/img1]"
IMAGES = f"EPD-TOK-003[e-pd/{MODEL}/img2]"
MOVED = f"EPD-XFER-001[e-pd/{MODEL}/img1]"

Forge = Callable[[Path], Any]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An honest run of each profile that differs in kind."""
    folders = {}
    for profile in ("aggregated", "e-pd", "e-p-d"):
        folders[profile] = tmp_path_factory.mktemp(profile)
        MadeRun(folders[profile], SUITE, profile).write()
    return folders


@pytest.fixture
def folder(honest: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest["e-pd"], tmp_path / "run"))


@pytest.fixture
def kv_folder(honest: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(honest["e-p-d"], tmp_path / "kv"))


def check(folder: Path, suite: Suite = SUITE) -> Verification:
    return verify(folder, suite)


def kinds(folder: Path) -> set[Kind]:
    found = check(folder)
    assert found.ok is not bool(found.problems)
    return {problem.kind for problem in found.problems}


def in_cell(folder: Path, change: Callable[[dict[str, Any]], Any], cell: str = IMAGE) -> None:
    change_json(cell_file(folder, cell), change)


def in_journal(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None], stack: str = "e-pd") -> None:
    assert sum(change_lines(path, change) for path in journals(folder, stack)), "nothing was changed"


def result(cell: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: {**data, **changes} if data["id"] == cell else data


def without_result(cell: str) -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    return lambda data: None if data["id"] == cell else data


def without_expected(cell: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda data: {**data, "cells": [entry for entry in data["cells"] if entry["id"] != cell]}


def wrong_token(evidence: CellEvidence) -> CellEvidence:
    first, *rest = evidence.answers
    return replace(evidence, answers=(replace(first, ids=(first.ids[0] + 1, *first.ids[1:])), *rest))


def local_encode(evidence: CellEvidence) -> CellEvidence:
    """The consumer encodes the item itself, and loads nothing."""
    events = []
    for event in evidence.during:
        if event["ev"] == "load":
            continue
        if event["ev"] == "step" and event["server"] in evidence.roles.consumers:
            (new,) = event["new"]
            key = next(item["id"] for line in evidence.during if line["ev"] == "request" for item in line["items"])
            event = {**event, "encode": {new["req"]: [key]}}
        events.append(event)
    return replace(evidence, during=tuple(events))


class TestHonest:
    @pytest.mark.parametrize("profile", ["aggregated", "e-pd", "e-p-d"])
    def test_an_honest_run_verifies(self, honest: dict[str, Path], profile: str) -> None:
        found = check(honest[profile])
        assert found.problems == ()
        assert found.outcome is Outcome.CONFORMANT
        assert found.lines()[-1] == "verified: the evidence gives reference: conformant on cpu-v1"
        assert all(found.checked.values())

    def test_it_changes_nothing(self, folder: Path) -> None:
        def content() -> dict[Path, bytes]:
            return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

        before = content()
        check(folder)
        assert content() == before

    def test_a_failure_that_is_told_verifies(self, tmp_path: Path) -> None:
        report = MadeRun(tmp_path, SUITE, changes={IMAGE: wrong_token}).write()
        found = check(tmp_path)
        # The bytes were right, so the answer counts against the engine, and leaves the connector's cell open.
        assert (found.problems, found.outcome) == ((), Outcome.INCOMPLETE)
        assert report.engine_outcome is Outcome.NONCONFORMANT

    def test_a_develop_run_of_some_cells_verifies(self, tmp_path: Path) -> None:
        report = MadeRun(tmp_path, SUITE, mode="develop", only=frozenset({IMAGE, MOVED})).write()
        found = check(tmp_path)
        assert (found.problems, found.outcome) == ((), Outcome.INCOMPLETE)
        assert report.summary["pass"] == 2

    def test_a_certification_of_some_cells_does_not(self, tmp_path: Path) -> None:
        MadeRun(tmp_path, SUITE, only=frozenset({IMAGE, MOVED})).write()
        assert kinds(tmp_path) == {Kind.EXPECTED}

    def test_a_run_whose_stack_was_booted_again_verifies(self, tmp_path: Path) -> None:
        MadeRun(tmp_path, SUITE, boots=frozenset({IMAGE, MOVED})).write()
        assert sorted(path.name for path in (tmp_path / "stacks").iterdir()) == ["e-pd", "e-pd-2", "e-pd-3"]
        assert check(tmp_path).problems == ()
        in_journal(tmp_path, spoil_loads, "e-pd-2")
        rewrite(tmp_path, SUITE)
        assert kinds(tmp_path) == {Kind.JOURNAL}

    def test_an_error_without_evidence_is_taken_and_told(self, folder: Path) -> None:
        cell_file(folder, IMAGE).unlink()
        change_results(folder, "cell", result(IMAGE, verdict="error", reason="stack", artifacts=[], evidence={}))
        rewrite(folder, SUITE)
        found = check(folder)
        assert (found.problems, found.outcome) == ((), Outcome.INCOMPLETE)
        assert "1 errors without evidence" in found.lines()[-2]

    def test_an_interrupted_run_verifies_as_far_as_it_came(self, folder: Path) -> None:
        cells = read_report(folder).requirements[-1].cells
        last = cells[-1].id
        cell_file(folder, last).unlink()
        change_results(folder, "cell", without_result(last))
        change_results(folder, "end", lambda data: {**data, "interrupted": True, "reason": "Ctrl-C"})
        rewrite(folder, SUITE)
        found = check(folder)
        assert (found.problems, found.outcome) == ((), Outcome.INCOMPLETE)

    def test_what_is_no_run_is_said_in_a_sentence(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"holds no report\.json: give the folder of a run"):
            check(tmp_path)
        (folder / RESULTS_NAME).unlink()
        with pytest.raises(UsageError, match=r"holds no results\.ndjson"):
            check(folder)


# -- a forger who makes all sums anew ------------------------------------------------------------------------------------


def one_token(folder: Path) -> None:
    in_cell(folder, lambda data: data["answers"][0]["ids"].__setitem__(3, data["answers"][0]["ids"][3] + 1))


def one_token_of_the_baseline(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        for arms in data["baseline"].values():
            arms["aggregated"]["ids"][0] += 1

    in_cell(folder, change)


def digest_in_the_cell(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        for line in data["during"]:
            if line["ev"] in ("save", "load"):
                line["digest"] = digest_of("other bytes")

    in_cell(folder, change)


def spoil_loads(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "digest": digest_of("other bytes")} if line["ev"] == "load" else line


def digest_in_the_journal(folder: Path) -> None:
    in_journal(folder, spoil_loads)


def digest_in_both(folder: Path) -> None:
    in_journal(folder, spoil_loads)
    for path in (folder / "cells").glob("*.json"):
        change_json(path, lambda data: data.update(during=[spoil_loads(line) for line in data["during"]]))


def result_line_deleted(folder: Path) -> None:
    change_results(folder, "cell", without_result(IMAGE))


def cell_deleted(folder: Path) -> None:
    result_line_deleted(folder)
    cell_file(folder, IMAGE).unlink()


def cell_never_expected(folder: Path) -> None:
    cell_deleted(folder)
    change_results(folder, "expected", without_expected(IMAGE))


def gap_hidden(folder: Path) -> None:
    change_results(folder, "expected", lambda data: {**data, "notVerified": data["notVerified"][1:]})


def axes_changed(folder: Path) -> None:
    one = {"requirement": "EPD-TOK-001", "case": "text"}
    change_results(
        folder,
        "expected",
        lambda data: {**data, "cells": [{**cell, **one} if cell["id"] == IMAGE else cell for cell in data["cells"]]},
    )


def two_models(folder: Path) -> None:
    change_results(folder, "expected", lambda d: {**d, "cells": [*d["cells"], {**d["cells"][0], "model": "other"}]})


def unknown_feature(folder: Path) -> None:
    def change(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "subject": {**data["subject"], "features": ["telepathy"]}}

    change_results(folder, "run", change)


def expected_shortened_only(folder: Path) -> None:
    change_results(folder, "expected", without_expected(IMAGE))


def gap_made_up(folder: Path) -> None:
    gap = {"kind": "feature", "requirement": "EPD-TOK-002", "detail": "e-pd: the subject does not declare x"}
    change_results(folder, "expected", lambda data: {**data, "notVerified": [*data["notVerified"], gap]})


def evidence_swapped(folder: Path) -> None:
    shutil.copy(cell_file(folder, IMAGES), cell_file(folder, IMAGE))


def evidence_swapped_and_renamed(folder: Path) -> None:
    target = cell_file(folder, IMAGE)
    shutil.copy(cell_file(folder, IMAGES), target)
    change_json(target, lambda data: data.update(cell=IMAGE))


def evidence_deleted(folder: Path) -> None:
    cell_file(folder, IMAGE).unlink()
    change_results(folder, "cell", result(IMAGE, artifacts=[]))


def judge_swapped(folder: Path) -> None:
    in_cell(folder, lambda data: data.update(judge="transported"))


def owner_swapped(folder: Path) -> None:
    in_cell(folder, lambda data: data.update(owner="engine"))


def roles_swapped(folder: Path) -> None:
    in_cell(folder, lambda data: data["roles"]["encode"].append("prefill_decode-0"))


def plan_without_power(folder: Path) -> None:
    in_cell(folder, lambda data: data["plan"].update(contrasts=data["plan"]["contrasts"] * 2))


def plan_of_another_seed(folder: Path) -> None:
    change_results(folder, "run", lambda data: {**data, "run": {**data["run"], "seed": 1}})


def local_encode_left_out(folder: Path) -> None:
    """The journal shows a local encode, and the evidence does not."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        consumer = line["server"] == "prefill_decode-0" and line["ev"] == "step"
        return {**line, "encode": {"r": [digest_of("a key")]}} if consumer else line

    in_journal(folder, change)


def last_line_left_out(folder: Path) -> None:
    in_cell(folder, lambda data: data["during"].pop())


def line_doubled(folder: Path) -> None:
    in_cell(folder, lambda data: data["during"].append(data["during"][-1]))


def before_shortened(folder: Path) -> None:
    in_cell(folder, lambda data: data["before"].pop())


def lines_deleted_everywhere(folder: Path) -> None:
    """Every `finished` line, from evidence and journals, without numbering the others anew."""
    for path in (folder / "cells").glob("*.json"):
        change_json(path, lambda data: data.update(during=[e for e in data["during"] if e["ev"] != "finished"]))
    in_journal(folder, lambda line: None if line["ev"] == "finished" else line)


def lines_moved_to_another_server(folder: Path) -> None:
    in_journal(folder, lambda line: {**line, "server": "encode-0"} if line["server"] == "prefill_decode-0" else line)


def lines_moved_everywhere(folder: Path) -> None:
    """A line of the consumer, in evidence and journal alike, becomes one of the server that may encode."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        return (
            {**line, "server": "encode-0"} if (line["server"], line["ev"]) == ("prefill_decode-0", "lookup") else line
        )

    in_journal(folder, change)
    for path in (folder / "cells").glob("*.json"):
        change_json(path, lambda data: data.update(during=[change(line) for line in data["during"]]))


def journal_deleted(folder: Path) -> None:
    shutil.rmtree(folder / "stacks")


def floor_raised_in_the_cell(folder: Path) -> None:
    in_cell(folder, lambda data: data.update(floor=0.5))


def floor_raised_in_the_results(folder: Path) -> None:
    change_results(folder, "noise", lambda data: {**data, "maxLogprobDelta": 0.5})


def rejected_prompt_admitted(folder: Path) -> None:
    """One repetition of a prompt has other ids, so it had been rejected."""

    def change(data: dict[str, Any]) -> None:
        digest = next(iter(data["arms"]["aggregated"]))
        data["arms"]["aggregated"][digest][1]["ids"][0] += 1

    change_json(folder / "baseline" / "e-pd.json", change)


def baseline_asked_once(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["arms"]["aggregated"] = {digest: runs[:1] * 3 for digest, runs in data["arms"]["aggregated"].items()}

    change_json(folder / "baseline" / "e-pd.json", change)


def baseline_asked_twice_only(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["arms"]["aggregated"] = {digest: runs[:2] for digest, runs in data["arms"]["aggregated"].items()}

    change_json(folder / "baseline" / "e-pd.json", change)
    change_results(folder, "noise", lambda data: {**data, "runs": 2})


def prompts_never_offered(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["offered"] = [entry for entry in data["offered"] if not entry["label"].startswith(IMAGE)]

    change_json(folder / "baseline" / "e-pd.json", change)


def easy_prompts_offered(folder: Path) -> None:
    """More prompts that agree, to outweigh those that do not."""

    def change(data: dict[str, Any]) -> None:
        more = json.loads(json.dumps(data["offered"][0]))
        more["label"], more["messages"][0]["parts"] = "easy", [{"text": "easy"}]
        data["offered"].append(more)

    change_json(folder / "baseline" / "e-pd.json", change)


def baseline_after_the_cells(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        for answers in data["arms"]["aggregated"].values():
            answers[-1]["started"] = 10_000_000.0

    change_json(folder / "baseline" / "e-pd.json", change)


def baseline_deleted(folder: Path) -> None:
    shutil.rmtree(folder / "baseline")


def answer_of_another_cell(folder: Path) -> None:
    answer = json.loads(cell_file(folder, MOVED).read_text())["answers"][0]
    in_cell(folder, lambda data: data["answers"].__setitem__(0, {**answer, "label": data["answers"][0]["label"]}))


def answer_of_the_baseline(folder: Path) -> None:
    """The whole answer, not only its ids."""

    def change(data: dict[str, Any]) -> None:
        digest = next(iter(data["admitted"]))
        copied = data["baseline"][digest]["aggregated"]
        data["answers"][0] = {**copied, "label": data["answers"][0]["label"]}

    in_cell(folder, change)


def answers_of_another_day(folder: Path) -> None:
    change_results(folder, "end", lambda data: {**data, "finished": "1970-01-01T00:10:00Z"})


def counts_embellished(folder: Path) -> None:
    evidence = {"saves": 9, "loads": 9, "localEncodes": 0, "digestsEqual": True}
    change_results(folder, "cell", result(IMAGE, evidence=evidence))


def blame_shifted(folder: Path) -> None:
    change_results(folder, "cell", result(IMAGE, blame="engine", rung="tokens"))


def recorded_twice(folder: Path) -> None:
    with ResultsLog(folder / RESULTS_NAME) as log:
        log.append(next(cell for item in read_report(folder).requirements for cell in item.cells if cell.id == IMAGE))


def results_reordered(folder: Path) -> None:
    path = folder / RESULTS_NAME
    *begin, first, second, end = path.read_text().splitlines()
    path.write_text("\n".join([*begin, second, first, end]) + "\n")


def facts_changed(folder: Path) -> None:
    in_cell(folder, lambda data: data["facts"].update(servers=["encode-0"]), f"EPD-INIT-001[e-pd/{MODEL}/init]")


def blocks_changed(folder: Path) -> None:
    in_cell(folder, lambda data: data["facts"].update(blocks={"encode-0": 2}), f"EPD-ROLE-001[e-pd/{MODEL}/encode]")


def evidence_damaged(folder: Path) -> None:
    in_cell(folder, lambda data: data["during"][0].pop("server"))


def evidence_cut(folder: Path) -> None:
    path = cell_file(folder, IMAGE)
    path.write_text(path.read_text()[:-20])


FORGERS: list[tuple[Forge, Kind]] = [
    (one_token, Kind.VERDICT),
    (one_token_of_the_baseline, Kind.BASELINE),
    (digest_in_the_cell, Kind.JOURNAL),
    (digest_in_the_journal, Kind.JOURNAL),
    (digest_in_both, Kind.VERDICT),
    (result_line_deleted, Kind.EXPECTED),
    (cell_deleted, Kind.JOURNAL),
    (cell_never_expected, Kind.EXPECTED),
    (expected_shortened_only, Kind.EXPECTED),
    (gap_made_up, Kind.EXPECTED),
    (gap_hidden, Kind.EXPECTED),
    (axes_changed, Kind.EXPECTED),
    (two_models, Kind.EXPECTED),
    (unknown_feature, Kind.EXPECTED),
    (evidence_swapped, Kind.EVIDENCE),
    (evidence_swapped_and_renamed, Kind.EVIDENCE),
    (evidence_deleted, Kind.EVIDENCE),
    (judge_swapped, Kind.EVIDENCE),
    (owner_swapped, Kind.EVIDENCE),
    (roles_swapped, Kind.EVIDENCE),
    (plan_without_power, Kind.EVIDENCE),
    (plan_of_another_seed, Kind.EVIDENCE),
    (local_encode_left_out, Kind.JOURNAL),
    (last_line_left_out, Kind.JOURNAL),
    (line_doubled, Kind.JOURNAL),
    (before_shortened, Kind.JOURNAL),
    (lines_deleted_everywhere, Kind.JOURNAL),
    (lines_moved_to_another_server, Kind.JOURNAL),
    (lines_moved_everywhere, Kind.JOURNAL),
    (journal_deleted, Kind.JOURNAL),
    (floor_raised_in_the_cell, Kind.BASELINE),
    (floor_raised_in_the_results, Kind.BASELINE),
    (rejected_prompt_admitted, Kind.BASELINE),
    (baseline_asked_once, Kind.BASELINE),
    (baseline_asked_twice_only, Kind.BASELINE),
    (prompts_never_offered, Kind.BASELINE),
    (easy_prompts_offered, Kind.BASELINE),
    (baseline_after_the_cells, Kind.BASELINE),
    (baseline_deleted, Kind.BASELINE),
    (answer_of_another_cell, Kind.EVIDENCE),
    (answer_of_the_baseline, Kind.VERDICT),
    (answers_of_another_day, Kind.EVIDENCE),
    (counts_embellished, Kind.VERDICT),
    (blame_shifted, Kind.VERDICT),
    (recorded_twice, Kind.EXPECTED),
    (results_reordered, Kind.JOURNAL),
    (facts_changed, Kind.EVIDENCE),
    (blocks_changed, Kind.EVIDENCE),
    (evidence_damaged, Kind.EVIDENCE),
    (evidence_cut, Kind.EVIDENCE),
]


class TestForged:
    @pytest.mark.parametrize(("forge", "kind"), FORGERS, ids=[forge.__name__ for forge, _ in FORGERS])
    def test_a_change_is_found_though_all_sums_are_new(self, folder: Path, forge: Forge, kind: Kind) -> None:
        forge(folder)
        rewrite(folder, SUITE)
        found = kinds(folder)
        assert kind in found
        assert Kind.ARTIFACT not in found, "the forger has made all sums anew"

    def test_a_verdict_turned_by_hand(self, tmp_path: Path) -> None:
        MadeRun(tmp_path, SUITE, changes={MOVED: spoiled_load}).write()
        assert read_report(tmp_path).outcome is Outcome.NONCONFORMANT
        assert check(tmp_path).ok
        change_results(tmp_path, "cell", result(MOVED, verdict="pass", reason="", rung=None))
        assert rewrite(tmp_path, SUITE).outcome is Outcome.CONFORMANT
        found = check(tmp_path)
        assert {problem.kind for problem in found.problems} == {Kind.VERDICT, Kind.OUTCOME}
        assert found.outcome is Outcome.NONCONFORMANT
        assert any(
            line.startswith(
                f"verdict: {MOVED}: verdict is pass in the result, and the evidence gives fail (digest-differs)"
            )
            for line in found.lines()
        )

    def test_a_verdict_turned_in_the_report_only(self, tmp_path: Path) -> None:
        MadeRun(tmp_path, SUITE, changes={MOVED: spoiled_load}).write()

        def change(data: dict[str, Any]) -> None:
            data.update(outcome="conformant")
            data["summary"].update({"pass": data["summary"]["pass"] + 1, "fail": 0})
            for item in data["requirements"]:
                item["verdict"] = "pass"
                for cell in item["cells"]:
                    cell["verdict"] = "pass"

        change_json(tmp_path / REPORT_NAME, change)
        assert kinds(tmp_path) == {Kind.REPORT, Kind.OUTCOME}

    def test_a_good_report_over_the_results_of_a_bad_run(self, folder: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad"
        bad.mkdir()
        theirs = MadeRun(bad, SUITE, run_id="r2", changes={MOVED: spoiled_load}).write()
        shutil.copy(folder / REPORT_NAME, bad / REPORT_NAME)
        sums = [artifact.to_disk() for artifact in theirs.artifacts]
        change_json(bad / REPORT_NAME, lambda data: data.update(artifacts=sums))
        assert kinds(bad) == {Kind.REPORT, Kind.OUTCOME}

    def test_a_report_of_another_run_altogether_is_said_shortly(self, honest: dict[str, Path], folder: Path) -> None:
        theirs = json.loads((honest["aggregated"] / REPORT_NAME).read_text())
        change_json(folder / REPORT_NAME, lambda data: data.update({**theirs, "artifacts": data["artifacts"]}))
        change_json(
            folder / REPORT_NAME, lambda data: data["environment"].update(flags={str(n): [] for n in range(20)})
        )
        words = [problem.words for problem in check(folder).problems if problem.kind is Kind.REPORT]
        assert len(words) == 11
        assert words[-1].endswith("more differences: it is not the report of these results")

    def test_a_result_of_no_requirement(self, folder: Path) -> None:
        change_results(folder, "cell", result(IMAGE, requirement="EPD-TOK-999"))
        assert {Kind.REPORT, Kind.SCHEMA} <= kinds(folder)

    def test_the_evidence_of_another_run(self, folder: Path, tmp_path: Path) -> None:
        bad = tmp_path / "bad"
        bad.mkdir()
        MadeRun(bad, SUITE, changes={MOVED: spoiled_load}).write()
        shutil.copy(cell_file(folder, MOVED), cell_file(bad, MOVED))
        (good,) = [cell for item in read_report(folder).requirements for cell in item.cells if cell.id == MOVED]
        change_results(bad, "cell", result(MOVED, **good.to_disk()))
        rewrite(bad, SUITE)
        assert kinds(bad) == {Kind.JOURNAL}

    @pytest.mark.parametrize("missing", ["error", "inconclusive", "fail"])
    def test_a_verdict_without_evidence(self, folder: Path, missing: str) -> None:
        cell_file(folder, IMAGE).unlink()
        change_results(folder, "cell", result(IMAGE, verdict=missing, reason="tokens-differ", artifacts=[]))
        rewrite(folder, SUITE)
        assert Kind.EVIDENCE in kinds(folder)

    def test_a_warning_left_out(self, tmp_path: Path) -> None:
        MadeRun(tmp_path, SUITE).write()
        change_results(tmp_path, "end", lambda _: None)
        rewrite(tmp_path, SUITE)
        change_json(tmp_path / REPORT_NAME, lambda data: data.update(warnings=[]))
        assert Kind.REPORT in kinds(tmp_path)

    def test_a_certificate_of_less(self, folder: Path) -> None:
        change_results(folder, "run", lambda data: {**data, "run": {**data["run"], "level": "core"}})
        rewrite(folder, SUITE)
        assert any("certify takes full" in line for line in check(folder).lines())

    def test_a_cell_that_the_suite_does_not_have(self, folder: Path) -> None:
        extra = f"EPD-TOK-002[e-pd/{MODEL}/easy]"
        axes = {"id": extra, "case": "easy"}
        change_results(
            folder,
            "expected",
            lambda data: {
                **data,
                "cells": [*data["cells"], *({**c, **axes} for c in data["cells"] if c["id"] == IMAGE)],
            },
        )
        with ResultsLog(folder / RESULTS_NAME) as log:
            (cell,) = [cell for item in read_report(folder).requirements for cell in item.cells if cell.id == IMAGE]
            log.append(cell.model_copy(update=axes))
        rewrite(folder, SUITE)
        lines = check(folder).lines()
        assert f"expected: {extra}: stands in the expected set, and the suite has no such cell" in lines
        assert f"expected: {extra}: has a result, and is not expected" in lines


def spoiled_load(evidence: CellEvidence) -> CellEvidence:
    return replace(evidence, during=tuple(spoil_loads(dict(event)) for event in evidence.during))


# -- cells with a fault --------------------------------------------------------------------------------------------------

REPLACED = f"EPD-INTEG-002[e-pd/{MODEL}/replaced]"
OUTSIDE = f"EPD-SEC-001[e-pd/{MODEL}/parent]"


def in_fault(**changes: Any) -> Forge:
    return lambda folder: in_cell(folder, lambda data: data["facts"]["fault"].update(changes), REPLACED)


def in_receipt(**changes: Any) -> Forge:
    return lambda folder: in_cell(folder, lambda data: data["facts"]["fault"]["receipt"].update(changes), REPLACED)


def victim_moved(seconds: float) -> Forge:
    def change(data: dict[str, Any]) -> None:
        data["answers"][VICTIM]["started"] += seconds

    return lambda folder: in_cell(folder, change, REPLACED)


def fault_moved_behind_the_victim(folder: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["facts"]["fault"]["injected_at"] = data["answers"][VICTIM]["started"] + 0.001

    in_cell(folder, change, REPLACED)


def counted(**changes: int) -> Forge:
    return lambda folder: change_results(
        folder, "fault", lambda data: {**data, **changes} if data["kind"] == "replaced" else data
    )


def fault_line_dropped(folder: Path) -> None:
    change_results(folder, "fault", lambda data: None if data["kind"] == "replaced" else data)


def another_fault(folder: Path) -> None:
    in_cell(folder, lambda data: data["plan"].update(fault="deleted"), REPLACED)


def another_fault_everywhere(folder: Path) -> None:
    """An easier fault, in plan, receipt and counts."""
    another_fault(folder)
    in_receipt(kind="deleted")(folder)
    change_results(folder, "fault", lambda data: {**data, "kind": "deleted"} if data["kind"] == "replaced" else data)


def outside_changed(folder: Path) -> None:
    in_cell(folder, lambda data: data["facts"]["after"].update({"stack/new": "folder"}), OUTSIDE)


class TestFaults:
    def test_an_honest_run_tells_them_all(self, honest: dict[str, Path]) -> None:
        for profile in ("e-pd", "e-p-d"):
            told = {fault.kind: fault for fault in read_report(honest[profile]).faults}
            drawn = [
                plan_of(case, 0, "any").fault
                for requirement, cases in SUITE.cases.items()
                for case in cases
                if isinstance(case, Case) and profile in SUITE.catalogue[requirement].topologies
            ]
            names = [kind for kind in drawn if kind is not None]
            assert sorted(told) == sorted(set(names))
            for kind, record in told.items():
                assert (record.injected, record.verified, record.met_by_victim) == (names.count(kind),) * 3

    @pytest.mark.parametrize(
        ("forge", "kind"),
        [
            (in_fault(verified=False), Kind.VERDICT),
            (in_fault(verified=False), Kind.EVIDENCE),  # the counts
            (in_fault(healed=False), Kind.VERDICT),
            (in_fault(rehearsed=False), Kind.VERDICT),
            (in_fault(receipt=None), Kind.VERDICT),
            (in_fault(receipt=None), Kind.EVIDENCE),
            (in_receipt(kind="deleted"), Kind.VERDICT),
            (in_receipt(key=digest_of("another")), Kind.VERDICT),
            (another_fault, Kind.EVIDENCE),
            (another_fault_everywhere, Kind.EVIDENCE),
            (fault_moved_behind_the_victim, Kind.VERDICT),
            (victim_moved(-0.08), Kind.VERDICT),  # before the fault
            (victim_moved(-0.08), Kind.EVIDENCE),
            (victim_moved(-0.15), Kind.VERDICT),  # before its primer
            (victim_moved(0.05), Kind.EVIDENCE),  # behind what it made the consumer do
            (counted(injected=2, verified=2, metByVictim=2), Kind.EVIDENCE),
            (counted(metByVictim=0), Kind.EVIDENCE),
            (fault_line_dropped, Kind.EVIDENCE),
            (outside_changed, Kind.VERDICT),
            (lambda folder: in_cell(folder, lambda data: data["facts"].pop("fault"), REPLACED), Kind.EVIDENCE),
        ],
    )
    def test_a_change_is_found_though_all_sums_are_new(self, folder: Path, forge: Forge, kind: Kind) -> None:
        forge(folder)
        rewrite(folder, SUITE)
        assert kind in kinds(folder)

    def test_only_a_primer_may_come_before_its_request(self, folder: Path) -> None:
        victim_moved(0.05)(folder)
        rewrite(folder, SUITE)
        assert f"evidence: {REPLACED}: request 'victim' is in a journal before it was sent" in check(folder).lines()

    def test_a_damaged_object_that_was_taken_stays_a_failure(self, tmp_path: Path) -> None:
        report = MadeRun(tmp_path, SUITE, changes={REPLACED: loads(VICTIM, DAMAGE)}).write()
        assert report.outcome is Outcome.NONCONFORMANT
        assert check(tmp_path).ok
        change_results(tmp_path, "cell", result(REPLACED, verdict="pass", reason="", rung=None, observed=""))
        rewrite(tmp_path, SUITE)
        assert {Kind.VERDICT, Kind.OUTCOME} == kinds(tmp_path)
        # A fault that was never done excuses nothing.
        in_fault(receipt=None)(tmp_path)
        change_results(tmp_path, "fault", lambda d: {**d, "injected": 0, "verified": 0, "metByVictim": 0})
        rewrite(tmp_path, SUITE)
        assert Kind.VERDICT in kinds(tmp_path)


class TestKV:
    def test_baseline_without_kv(self, kv_folder: Path) -> None:
        """The p-d baseline computed the prompt itself, and its file says nothing of it."""
        changed = [
            change_lines(path, lambda line: {**line, "tokens": 0} if line["ev"] == "kv-take" else line)
            for path in journals(kv_folder, "baseline-p-d-e-p-d")
        ]
        assert sum(changed)
        rewrite(kv_folder, SUITE)
        assert kinds(kv_folder) == {Kind.BASELINE}

    def test_an_arm_left_out(self, kv_folder: Path) -> None:
        change_json(kv_folder / "baseline" / "e-p-d.json", lambda data: data["arms"].pop("p-d"))
        rewrite(kv_folder, SUITE)
        assert Kind.BASELINE in kinds(kv_folder)

    def test_only_the_lengthening_of_the_session_is_allowed(self) -> None:
        case = SUITE.case("EPD-XFER-002", "warm")
        assert case is not None
        cell = f"EPD-XFER-002[e-p-d/{MODEL}/warm]"
        drawn = plan_of(case, 0, cell)
        cold, warm = drawn.requests
        (contrast,) = drawn.contrasts

        def allowed(plan: Plan, topology: str = "e-p-d") -> bool:
            return SUITE.drawn(case, 0, cell, topology, plan)

        assert allowed(drawn)
        assert allowed(Plan((lengthen(cold, 2), lengthen(warm, 1)), (lengthen(contrast, 2),)))
        assert not allowed(Plan((lengthen(cold, 2), warm), (lengthen(contrast, 1),))), "contrast unlike its request"
        assert not allowed(Plan((lengthen(cold, 9), warm), (lengthen(contrast, 9),))), "more than a session would"
        assert not allowed(Plan((cold,), (contrast,))), "a request less"
        assert not allowed(Plan((warm, cold), (contrast,)))
        assert not allowed(Plan((lengthen(cold), warm), (lengthen(contrast),)), "e-pd"), "no KV connector there"


class TestSuite:
    def test_another_suite_version_is_said_and_the_rest_goes_on(self, folder: Path) -> None:
        other = Suite(SUITE.catalogue, SUITE.cases, "sha256:" + "0" * 64)
        one_token(folder)
        rewrite(folder, SUITE)
        found = check(folder, other)
        assert {problem.kind for problem in found.problems} == {Kind.SUITE, Kind.VERDICT, Kind.OUTCOME}
        assert "made with another suite version (0.1.0)" in found.lines()[0]

    def test_another_catalogue(self, folder: Path) -> None:
        change_results(folder, "run", lambda d: {**d, "suite": {**d["suite"], "catalogue": "sha256:" + "0" * 64}})
        change_json(folder / REPORT_NAME, lambda d: d["suite"].update(catalogue="sha256:" + "0" * 64))
        found = check(folder)
        assert {problem.kind for problem in found.problems} == {Kind.SUITE, Kind.ARTIFACT}
        assert found.outcome is Outcome.CONFORMANT

    def test_a_modified_suite_file_has_another_digest(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        copy = tmp_path / "suites"
        shutil.copytree(runs.suites_folder(), copy)
        tokens = copy / "live" / "test_tokens.py"
        text = tokens.read_text()
        tokens.write_text(text.replace('Case("img1", "equality", one)', 'Case("img1", "transported", one)'))
        assert tokens.read_text() != text
        monkeypatch.setattr(runs, "suites_folder", lambda: copy)
        modified = suites.installed()
        (case,) = modified.cases["EPD-TOK-002"]
        assert case.judge == "transported"
        assert Kind.SUITE in {problem.kind for problem in check(folder, modified).problems}

    def test_a_run_of_a_modified_suite_under_the_digest_of_the_real_one(self, tmp_path: Path) -> None:
        """Easier judge, easier plan, one case fewer, each with the digest of the real suite put in."""
        real = SUITE.cases
        (one,) = real["EPD-TOK-002"]

        def easier(*cases: Case, requirement: str = "EPD-TOK-002") -> Suite:
            return Suite(SUITE.catalogue, {**real, requirement: cases}, SUITE.digest)

        plan = easier(replace(one, build=lambda draw: Plan((draw.request("one image", draw.image()),))))
        for number, (suite, kind) in enumerate(
            [
                (easier(replace(one, judge="transported")), Kind.EVIDENCE),
                (plan, Kind.EVIDENCE),
                (easier(*real["EPD-TOK-003"][1:], requirement="EPD-TOK-003"), Kind.EXPECTED),
            ]
        ):
            folder = tmp_path / str(number)
            folder.mkdir()
            MadeRun(folder, suite).write()
            assert check(folder, suite).ok, "the modified suite itself sees nothing wrong"
            assert kind in kinds(folder)

    def test_the_suite_as_data_is_what_pytest_collects(self) -> None:
        active = {item.id for item in SUITE.catalogue if item.status == "active" and item.layer == "live"}
        assert active <= SUITE.cases.keys()

    @pytest.mark.parametrize("topology", ["aggregated", "e-pd", "e-p-d", "2e-1pd", "1e-2p-2d"])
    def test_a_layout_names_servers_as_a_stack_does(self, topology: str) -> None:
        layout = SUITE.layout(topology)
        names = {name for name, _ in layout.topology.servers()}
        roles = layout.roles
        assert roles.encode | roles.consumers | roles.decode == names
        assert set(layout.connected) == roles.encode | roles.consumers


class TestFiles:
    def test_sums_sizes_and_missing_files(self, folder: Path) -> None:
        cell = cell_file(folder, IMAGE)
        name = cell.relative_to(folder).as_posix()
        text = cell.read_text()
        cell.write_text(text.replace('"owner":"connector"', '"owner":"Connector"'))
        words = {problem.where: problem.words for problem in check(folder).problems if problem.kind is Kind.ARTIFACT}
        assert words == {name: "was changed: its SHA-256 is not the one in the report"}
        cell.write_text(text + "\n")
        assert f"has {len(text) + 1} bytes where the report says {len(text)}" in "\n".join(check(folder).lines())
        cell.unlink()
        assert f"artifact: {name}: is listed, and is not there" in check(folder).lines()

    @pytest.mark.parametrize("what", ["cells/", "stacks/", "baseline/", RESULTS_NAME])
    def test_all_evidence_must_be_listed(self, folder: Path, what: str) -> None:
        def change(data: dict[str, Any]) -> None:
            data["artifacts"] = [entry for entry in data["artifacts"] if not entry["path"].startswith(what)]

        change_json(folder / REPORT_NAME, change)
        found = check(folder).problems
        assert {problem.kind for problem in found} == {Kind.ARTIFACT}
        assert all(problem.words == "is evidence, and the report does not list it" for problem in found)

    def test_a_link_out_of_the_folder(self, folder: Path, tmp_path: Path) -> None:
        cell = cell_file(folder, IMAGE)
        outside = tmp_path / "outside.json"
        shutil.move(cell, outside)
        cell.symlink_to(outside)
        assert {Kind.ARTIFACT, Kind.EVIDENCE} <= kinds(folder)

    def test_a_report_that_does_not_fit_the_schema(self, folder: Path) -> None:
        change_json(folder / REPORT_NAME, lambda data: data.update(outcome="fine", surprise=1))
        found = [problem.words for problem in check(folder).problems if problem.kind is Kind.SCHEMA]
        assert any("surprise" in words for words in found) and any("'fine' is not one of" in words for words in found)
        (folder / REPORT_NAME).write_text("{")
        assert Kind.SCHEMA in kinds(folder)

    def test_damaged_results(self, folder: Path) -> None:
        results = folder / RESULTS_NAME
        text = results.read_text()
        results.write_text("no json\n" + text)
        assert kinds(folder) == {Kind.SCHEMA}
        results.write_text("\n".join(text.splitlines()[1:]) + "\n")
        assert kinds(folder) == {Kind.SCHEMA}


class TestWords:
    def test_json_and_lines_say_the_same(self, folder: Path) -> None:
        one_token(folder)
        found = check(folder)
        data = json.loads(json.dumps(found.to_json()))
        assert data["ok"] is False
        assert [f"{p['kind']}: {p['where']}: {p['words']}" for p in data["problems"]] == found.lines()[:-2]
        assert found.lines()[-1].startswith(f"not verified: {len(found.problems)} problems (")
        assert data["checked"] == dict(found.checked)


class TestLimits:
    """What docs/verify.md says cannot be seen. If one of these is found one day, the page has to say so."""

    def test_evidence_invented_as_a_whole(self, honest: dict[str, Path]) -> None:
        # No server ever ran here.
        assert check(honest["e-pd"]).ok

    def test_ids_copied_from_the_baseline_into_an_answer(self, tmp_path: Path) -> None:
        MadeRun(tmp_path, SUITE, changes={IMAGE: wrong_token}).write()

        def change(data: dict[str, Any]) -> None:
            right = data["baseline"][data["admitted"][0]]["aggregated"]
            data["answers"][0].update({name: right[name] for name in ("ids", "logprobs", "margins")})

        in_cell(tmp_path, change)
        change_results(tmp_path, "cell", result(IMAGE, verdict="pass", reason="", rung=None, blame=None, observed=""))
        rewrite(tmp_path, SUITE)
        assert check(tmp_path).ok

    def test_a_local_encode_hidden_in_both_places(self, tmp_path: Path) -> None:
        report = MadeRun(tmp_path, SUITE, changes={IMAGE: numbered(local_encode)}).write()
        assert report.outcome is Outcome.INCOMPLETE
        assert check(tmp_path).ok

        def change(line: dict[str, Any]) -> dict[str, Any]:
            hide = line["ev"] == "step" and line["server"] == "prefill_decode-0" and line["encode"]
            return {**line, "encode": {}} if hide else line

        # Hidden in the cell only, or in the journals only, or in both: without a load it does not help.
        in_cell(tmp_path, lambda data: data.update(during=[change(line) for line in data["during"]]))
        rewrite(tmp_path, SUITE)
        assert {Kind.JOURNAL, Kind.VERDICT} <= kinds(tmp_path)
        for path in journals(tmp_path, "e-pd"):
            # The miss has a local encode of its own, which stays.
            mine = {line["t"] for line in json.loads(cell_file(tmp_path, IMAGE).read_text())["during"]}
            change_lines(path, lambda line: change(line) if line["t"] in mine else line)  # noqa: B023
        rewrite(tmp_path, SUITE)
        assert kinds(tmp_path) == {Kind.VERDICT}, "not-loaded: the line of a load would have to be invented, too"

    @pytest.mark.parametrize(
        ("cell", "spoil", "hide"),
        [
            # Written down by the harness only, and by no server: whether a fault was done, whether it was seen in the store…
            (REPLACED, fault(verified=False), lambda facts: facts["fault"].update(verified=True)),
            # … what lay outside …
            (OUTSIDE, outside(new="folder"), lambda facts: facts.update(after=facts["before"])),
            # … and how the servers were afterwards.
            (REPLACED, says("health", "encode-0", 0), lambda facts: facts["health"].update({"encode-0": 200})),
        ],
    )
    def test_what_only_the_harness_saw(
        self, tmp_path: Path, cell: str, spoil: Callable[[CellEvidence], CellEvidence], hide: Callable[[Any], Any]
    ) -> None:
        assert MadeRun(tmp_path, SUITE, changes={cell: spoil}).write().outcome is not Outcome.CONFORMANT
        assert check(tmp_path).ok
        in_cell(tmp_path, lambda data: hide(data["facts"]), cell)
        good = judge(CellEvidence.from_json(json.loads(cell_file(tmp_path, cell).read_text())))
        line = {"verdict": "pass", "reason": "", "rung": None, "observed": "", "evidence": good.evidence.to_disk()}
        change_results(tmp_path, "cell", result(cell, **line))
        path = tmp_path / RESULTS_NAME
        path.write_text(path.read_text().replace('"verified": 0, "metByVictim": 0', '"verified": 1, "metByVictim": 1'))
        assert rewrite(tmp_path, SUITE).outcome is Outcome.CONFORMANT
        assert check(tmp_path).ok


def numbered(change: Callable[[CellEvidence], CellEvidence]) -> Callable[[CellEvidence], CellEvidence]:
    """A change that leaves a `none` line where it drops one, so that the lines stay numbered without a gap."""

    def wrapped(evidence: CellEvidence) -> CellEvidence:
        kept = {(event["server"], event["side"], event["seq"]): event for event in change(evidence).during}
        return replace(
            evidence,
            during=tuple(
                kept.get((e["server"], e["side"], e["seq"]), {**e, "ev": "lookup", "found": False})
                for e in evidence.during
            ),
        )

    return wrapped
