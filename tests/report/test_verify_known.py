"""`verify` and the lists of a run: an excuse is computed again like a verdict, and what certify pins must be pinned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_run import MODEL, MadeRun, change_results, rewrite

from epd_conformance.catalogue import Catalogue
from epd_conformance.live import suites
from epd_conformance.live.suites import Suite
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.report.schema import DeviationKind, KnownDeviation
from epd_conformance.report.verify import Kind, Verification, verify
from epd_conformance.verdict import Outcome

# Three requirements are enough here, and their runs are quickly made.
WHOLE = suites.installed()
SUITE = Suite(
    Catalogue([WHOLE.catalogue[name] for name in ("EPD-TOK-002", "EPD-TOK-003", "EPD-XFER-001")]),
    WHOLE.cases,
    WHOLE.digest,
)
IMAGE = f"EPD-TOK-002[e-pd/{MODEL}/img1]"
OTHER = f"EPD-TOK-003[e-pd/{MODEL}/img2]"


def known(**changes: Any) -> KnownDeviation:
    values: dict[str, Any] = {"kind": DeviationKind.KNOWN, "pattern": IMAGE, "message": "digest", "issue": "#1"}
    return KnownDeviation(**{**values, "expires": "2999-12-31"} | changes)


def waiver(**changes: Any) -> KnownDeviation:
    return known(**{"kind": DeviationKind.WAIVER, "message": "", "reason": "later"} | changes)


def wrong_digest(evidence: CellEvidence) -> CellEvidence:
    """The consumer loaded other bytes than were saved."""
    during = tuple({**event, "digest": "0" * 64} if event["ev"] == "load" else event for event in evidence.during)
    return replace(evidence, during=during)


def excuse(folder: Path, *entries: KnownDeviation, cell: str = IMAGE, **result: Any) -> None:
    """Make of a run one that was given these lists, and of a cell's result whatever is said; all sums anew."""
    lists = [entry.to_disk() for entry in entries]
    if lists:
        change_results(folder, "run", lambda data: {**data, "knownDeviations": lists})
    if result:
        change_results(folder, "cell", lambda data: {**data, **result} if data["id"] == cell else data)
    rewrite(folder, SUITE)


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    MadeRun(tmp_path, SUITE, mode="develop", changes={IMAGE: wrong_digest}).write()
    assert verify(tmp_path, SUITE).outcome is Outcome.NONCONFORMANT
    return tmp_path


def problems(found: Verification, kind: Kind) -> str:
    return "\n".join(problem.words for problem in found.problems if problem.kind is kind)


EXCUSED = {"verdict": "known-failing", "excused": "fail", "excusedBy": [0]}


@pytest.mark.parametrize(
    ("entry", "result"),
    [(known(), EXCUSED), (waiver(), {**EXCUSED, "verdict": "waived"}), (known(message="^dig"), EXCUSED)],
)
def test_an_honest_excuse_verifies(failed: Path, entry: KnownDeviation, result: dict[str, Any]) -> None:
    excuse(failed, entry, **result)
    found = verify(failed, SUITE)
    assert (found.problems, found.outcome) == ((), Outcome.PARTIAL)


@pytest.mark.parametrize(
    ("entries", "result"),
    [
        # No list, or one that says something else.
        ((), EXCUSED),
        ((known(message="another failure"),), EXCUSED),
        ((known(pattern=OTHER),), EXCUSED),
        ((known(expires="1969-12-31"),), EXCUSED),
        ((waiver(),), EXCUSED),
        ((known(kind=DeviationKind.FLAKY),), EXCUSED),
        # The list says so, and the result says more.
        ((known(),), {**EXCUSED, "verdict": "pass"}),
        ((known(),), {**EXCUSED, "excused": "inconclusive"}),
        ((waiver(), known()), EXCUSED),
        ((known(),), {}),
    ],
)
def test_a_forged_excuse_does_not(failed: Path, entries: tuple[KnownDeviation, ...], result: dict[str, Any]) -> None:
    excuse(failed, *entries, **result)
    found = verify(failed, SUITE)
    assert "and the evidence gives" in problems(found, Kind.VERDICT)
    if not entries or entries[0].message == "another failure":
        assert found.outcome is Outcome.NONCONFORMANT
        assert problems(found, Kind.OUTCOME)


def test_a_passing_cell_cannot_be_excused(tmp_path: Path) -> None:
    MadeRun(tmp_path, SUITE, mode="develop").write()
    excuse(tmp_path, known(), **EXCUSED)
    found = verify(tmp_path, SUITE)
    assert "verdict is known-failing in the result, and the evidence gives pass" in problems(found, Kind.VERDICT)
    assert found.outcome is Outcome.INCOMPLETE, "and the entry is not true"


def test_an_untrue_entry_cannot_be_hidden(tmp_path: Path) -> None:
    """The report says what is wrong with its lists; taking that out does not help."""
    MadeRun(tmp_path, SUITE, mode="develop").write()
    excuse(tmp_path, known())
    assert verify(tmp_path, SUITE).outcome is Outcome.INCOMPLETE
    report = tmp_path / "report.json"
    report.write_text(report.read_text().replace('"outcome": "incomplete"', '"outcome": "conformant"'))
    found = verify(tmp_path, SUITE)
    assert problems(found, Kind.REPORT) and problems(found, Kind.OUTCOME)


def run(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_results(folder, "run", lambda data: {**data, "run": {**data["run"], **changes}})


def suite(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: change_results(folder, "run", lambda data: {**data, "suite": {**data["suite"], **changes}})


def nameless(folder: Path) -> None:
    change_results(folder, "environment", lambda data: {**data, "models": [{"id": MODEL, "digest": ""}]})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (run(seed=5), "a certificate of seed 5: certify takes 0"),
        (suite(modified=True), "a certificate of a modified suite"),
        (nameless, "a certificate without the digest of its model"),
        (lambda folder: excuse(folder, known()), "a certificate with known deviations: certify excuses nothing"),
    ],
)
@pytest.mark.parametrize("mode", ["certify", "develop"])
def test_what_certify_pins(tmp_path: Path, change: Callable[[Path], None], says: str, mode: str) -> None:
    MadeRun(tmp_path, SUITE, mode=mode).write()
    assert verify(tmp_path, SUITE).ok
    change(tmp_path)
    rewrite(tmp_path, SUITE)
    assert (says in problems(verify(tmp_path, SUITE), Kind.EXPECTED)) is (mode == "certify")
