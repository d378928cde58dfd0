"""JUnit: every expected cell stands in it with its verdict, and only a pass looks like one."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from parallel_runs import Fakes
from run_fakes import Call, Ended

from epd_conformance.reporters.junit import ELEMENTS
from epd_conformance.verdict import Verdict

FAILED = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"
BROKEN = "EPD-TOK-003[e-pd/tiny-qwen2.5-vl/img2]"
UNSHOWN = "EPD-TOK-004[e-pd/tiny-qwen2.5-vl/img-twice]"
LEFT_OUT = "EPD-TOK-005[e-pd/tiny-qwen2.5-vl/adjacent]"
SCRIPT = {"EPD-TOK-002": "fail", "EPD-TOK-003": "harness", "EPD-TOK-004": "inconclusive"}
RED = ("failure", "error")


class JUnit:
    def __init__(self, path: Path) -> None:
        suite = ElementTree.parse(path).getroot().find("testsuite")
        assert suite is not None
        self.suite = suite
        self.properties = properties(suite)
        cases = [(properties(case).get("cell", case.get("name", "")), case) for case in suite.findall("testcase")]
        self.cells = dict(cases)
        assert len(self.cells) == len(cases), "no cell stands there twice"

    def element(self, cell: str) -> str:
        """What stands in a test case beside its properties; empty for a pass."""
        return " ".join(child.tag for child in self.cells[cell] if child.tag != "properties")


def properties(element: ElementTree.Element) -> dict[str, str]:
    found = [(one.get("name", ""), one.get("value", "")) for one in element.findall("properties/property")]
    assert len(dict(found)) == len(found), "no property stands there twice"
    return dict(found)


def test_every_verdict_has_an_element_and_only_a_pass_has_none() -> None:
    assert set(ELEMENTS) == set(Verdict)
    assert [verdict for verdict, name in ELEMENTS.items() if name is None] == [Verdict.PASS]
    assert [verdict for verdict, name in ELEMENTS.items() if name == "failure"] == [Verdict.FAIL]
    for verdict in (Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.COULD_NOT_RUN):
        assert ELEMENTS[verdict] == "error"


@pytest.fixture
def ended(fake_run: Call, tmp_path: Path) -> Ended:
    return fake_run(SCRIPT, "--junitxml", tmp_path / "junit.xml")


def test_the_report_in_junit(ended: Ended, tmp_path: Path) -> None:
    found = JUnit(tmp_path / "junit.xml")
    assert set(found.cells) == set(ended.cells)
    for name, cell in ended.cells.items():
        said = properties(found.cells[name])
        assert (said["verdict"], said["reason"]) == (cell["verdict"], cell["reason"])
        assert (said["requirement"], said["topology"]) == (cell["requirement"], cell["topology"])
        assert found.element(name) == (ELEMENTS[Verdict(cell["verdict"])] or "")
    assert [found.element(name) for name in (FAILED, BROKEN, UNSHOWN)] == ["failure", "error", "error"]
    said = properties(found.cells[FAILED])
    assert (said["level"], said["owner"]) == ("MUST", "connector")
    failure = found.cells[FAILED].find("failure")
    assert failure is not None
    assert (failure.get("message"), failure.get("type")) == (f"fail: {ended.cells[FAILED]['reason']}", "fail")
    assert failure.text == ended.cells[FAILED]["message"]


def test_the_counts_are_those_of_the_elements(ended: Ended, tmp_path: Path) -> None:
    found = JUnit(tmp_path / "junit.xml")
    elements = Counter(found.element(name) for name in found.cells)
    assert found.suite.get("tests") == str(len(ended.cells))
    assert found.suite.get("failures") == str(elements["failure"]) == "1"
    assert found.suite.get("errors") == str(elements["error"])
    assert elements["error"] >= 2


def test_the_run_in_junit(ended: Ended, tmp_path: Path) -> None:
    said = JUnit(tmp_path / "junit.xml").properties
    assert ended.report is not None
    assert said["subject"] == "reference"
    assert said["environmentClass"] == "cpu-v1"
    assert said["suiteDigest"] == ended.report["suite"]["digest"]
    assert said["outcome"] == "nonconformant"
    assert said["run"] == ended.report["run"]["id"]
    assert ended.report["results"]["junit"] == str(tmp_path / "junit.xml")


def test_a_file_in_the_folder_of_the_run(fake_run: Call, tmp_path: Path) -> None:
    ended = fake_run(None, "--junitxml", tmp_path / "out" / "reports" / "junit.xml")
    assert ended.report is not None
    assert ended.report["results"]["junit"] == "reports/junit.xml"
    assert (tmp_path / "out" / "reports" / "junit.xml").is_file()


@pytest.mark.parametrize("words", [("--cell", FAILED), ("-k", "one_image")])
def test_what_was_left_out_is_no_pass(fake_run: Call, tmp_path: Path, words: tuple[str, ...]) -> None:
    fake_run(None, "--junitxml", tmp_path / "junit.xml", *words)
    found = JUnit(tmp_path / "junit.xml")
    assert found.element(FAILED) == ""
    assert {found.element(name) for name in found.cells if name != FAILED} == {"error"}


@pytest.mark.parametrize("action", ["interrupt", "terminate"])
def test_what_was_cut_off_is_no_pass(fake_run: Call, tmp_path: Path, action: str) -> None:
    """pytest itself writes a test that it could not end as one without name and fault."""
    ended = fake_run({"EPD-TOK-002": action}, "--junitxml", tmp_path / "junit.xml")
    found = JUnit(tmp_path / "junit.xml")
    assert set(found.cells) == set(ended.cells)
    for name, cell in ended.cells.items():
        assert (found.element(name) == "") == (cell["verdict"] == "pass"), name
    assert found.element(FAILED) == "error"


def test_what_xml_cannot_hold(fake_run: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epd_conformance.run.failure_text", lambda *_, **__: "a \x1b[31mred\x1b[0m\x00 log")
    fake_run({"EPD-TOK-002": "fail"}, "--junitxml", tmp_path / "junit.xml")
    failure = JUnit(tmp_path / "junit.xml").cells[FAILED].find("failure")
    assert failure is not None
    assert failure.text == "a #x1B[31mred#x1B[0m#x00 log"


def test_the_results_of_workers(by_workers: tuple[Fakes, Ended]) -> None:
    fakes, ended = by_workers
    found = JUnit(fakes.out / "junit.xml")
    assert set(found.cells) == set(ended.cells)
    for name, cell in ended.cells.items():
        assert found.element(name) == (ELEMENTS[Verdict(cell["verdict"])] or ""), name
    assert found.element(FAILED) == "failure"
    died = "EPD-TOK-002[e-p-d/tiny-qwen2.5-vl/img1]"
    assert properties(found.cells[died])["verdict"] == "could-not-run"
    assert found.element(died) == "error"
    assert found.properties["outcome"] == "nonconformant"
    assert ended.report is not None
    assert ended.report["results"] == {"ndjson": "results.ndjson", "junit": "junit.xml", "allure": "allure"}


def test_the_properties_are_there_for_other_plugins(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each test's report: what a plug-in of a CI reads, or a controller shows."""
    from epd_conformance import cli

    seen: list[tuple[str, dict[str, object]]] = []

    def keep(report: pytest.TestReport) -> None:
        seen.append((report.when, dict(report.user_properties)))

    monkeypatch.setattr(cli._Keep, "pytest_runtest_logreport", staticmethod(keep), raising=False)
    fake_run(SCRIPT, "--cell", FAILED)
    assert [when for when, _ in seen] == ["setup", "call", "teardown"]
    assert "verdict" not in seen[0][1]
    for _, said in seen[1:]:
        assert said["cell"] == FAILED
        assert said["verdict"] == "fail"
        assert {"requirement", "level", "owner", "topology", "reason", "seconds"} < set(said)
    assert os.environ["RUN_FAKES"]
