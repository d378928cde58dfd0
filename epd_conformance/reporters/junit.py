"""JUnit: pytest writes the file (`--junitxml`), this brings it in line with the report.

By itself pytest calls whatever made a test fail a failure, and says nothing of cells that never ran. Here `failure` means that
the subject was shown not to conform, `error` that nothing was shown either way, and every expected cell stands in the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from epd_conformance.catalogue.selection import cell_of_test
from epd_conformance.report.schema import CellRecord, Report, RequirementRecord
from epd_conformance.verdict import Verdict

# A `skipped` is what was declared beforehand; None leaves what pytest wrote, such as the error of another plug-in.
ELEMENTS: dict[Verdict, str | None] = {
    Verdict.PASS: None,
    Verdict.FAIL: "failure",
    Verdict.ERROR: "error",
    Verdict.INCONCLUSIVE: "error",
    Verdict.COULD_NOT_RUN: "error",
    Verdict.KNOWN_FAILING: "skipped",
    Verdict.WAIVED: "skipped",
    Verdict.NOT_SUPPORTED: "skipped",
}
# Stands where pytest writes the test's module, for cells whose test did not run.
CLASS = "epd_conformance"
# What XML 1.0 cannot hold; a server's log may hold anything.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def complete(path: Path, report: Report) -> None:
    """Rewrite a JUnit file of pytest so that its cells have the verdicts of the report, with all that the report says of them."""
    tree = ElementTree.parse(path)
    suite = tree.getroot().find("testsuite")
    assert suite is not None, "pytest writes one"
    missing = {cell.id: (item, cell) for item in report.requirements for cell in item.cells}
    for case in suite.findall("testcase"):
        if not case.get("name"):
            # A test that was cut off: pytest has its time, but no name yet.
            suite.remove(case)
        elif (found := missing.pop(_cell(case), None)) is not None:
            _fill(case, *found)
    for item, cell in missing.values():
        case = ElementTree.SubElement(suite, "testcase", classname=CLASS, name=cell.id, time=f"{cell.duration_s:.3f}")
        _fill(case, item, cell)
    _properties(suite, _of_the_run(report))
    cases = suite.findall("testcase")
    counts = {name: sum(case.find(name) is not None for case in cases) for name in ("failure", "error", "skipped")}
    suite.attrib |= {
        "tests": str(len(cases)),
        "failures": str(counts["failure"]),
        "errors": str(counts["error"]),
        "skipped": str(counts["skipped"]),
    }
    tree.write(path, encoding="utf-8", xml_declaration=True)


def _cell(case: ElementTree.Element) -> str:
    named = case.find("properties/property[@name='cell']")
    return named.get("value", "") if named is not None else cell_of_test(case.get("name", ""))


def _fill(case: ElementTree.Element, item: RequirementRecord, cell: CellRecord) -> None:
    facts = {
        "requirement": item.id,
        "level": str(item.level),
        "owner": str(item.owner),
        "topology": cell.topology,
        "cell": cell.id,
        "verdict": str(cell.verdict),
        "reason": cell.reason,
        "seconds": f"{cell.duration_s:.3f}",
    }
    _properties(case, facts | ({"blame": str(cell.blame)} if cell.blame else {}))
    name = ELEMENTS[cell.verdict]
    if name is None:
        return
    for old in ("failure", "error", "skipped"):
        for element in case.findall(old):
            case.remove(element)
    message = f"{cell.verdict}: {cell.reason}" if cell.reason else str(cell.verdict)
    element = ElementTree.SubElement(case, name, message=_clean(message), type=str(cell.verdict))
    element.text = _clean(cell.message or item.sentence)


def _of_the_run(report: Report) -> dict[str, str]:
    run, implementation = report.run, report.subject.implementation
    return {
        "subject": report.subject.name,
        "implementation": " ".join(filter(None, (implementation.project, implementation.version))),
        "environmentClass": str(report.environment_class),
        "vllm": report.environment.vllm_version,
        "suite": report.suite.version,
        "suiteDigest": report.suite.digest,
        "run": run.id,
        "mode": str(run.mode),
        "profile": run.profile,
        "level": str(run.level),
        "seed": str(run.seed),
        "outcome": str(report.outcome),
        "engineOutcome": str(report.engine_outcome),
        "proxyOutcome": str(report.proxy_outcome),
    }


def _properties(element: ElementTree.Element, facts: dict[str, str]) -> None:
    """Set properties; others that are there stay."""
    parent = element.find("properties")
    if parent is None:
        parent = ElementTree.Element("properties")
        element.insert(0, parent)
    for old in parent.findall("property"):
        if old.get("name") in facts:
            parent.remove(old)
    for name, value in facts.items():
        ElementTree.SubElement(parent, "property", name=name, value=_clean(value))


def _clean(text: str) -> str:
    return _ILLEGAL.sub(lambda found: f"#x{ord(found[0]):02X}", text)
