"""`run --known` over a fake live session, from the file to verdicts, exit code, output and report; and what certify pins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel_runs import WORKERS, Fakes
from run_fakes import Call, Ended, read, start

from epd_conformance import deviations, release
from epd_conformance import run as runs
from epd_conformance.catalogue import load
from epd_conformance.report.schema import CellRecord, KnownDeviation, RunStart
from epd_conformance.report.writer import ResultLines, build_report, read_results
from epd_conformance.run import result_code, suites_folder

TOKEN = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"
FAILS = {"TOK-002": "fail"}


def known(cells: str = TOKEN, message: str = "digest", expires: str = "2999-12-31") -> str:
    return (
        f'[[known]]\ncells = "{cells}"\nmessage = "{message}"\nissue = "https://example.com/1"\nexpires = {expires}\n'
    )


def waiver(cells: str = TOKEN, expires: str = "2999-12-31") -> str:
    return f'[[waiver]]\ncells = "{cells}"\nreason = "not here"\nissue = "OPS-7"\nexpires = {expires}\n'


def flaky(cells: str = TOKEN) -> str:
    return f'[[flaky]]\ncells = "{cells}"\nissue = "OPS-8"\n'


@pytest.fixture
def listed(fake_run: Call, tmp_path: Path) -> Call:
    """`listed({"TOK-002": "fail"}, known())`: a run with a list."""

    def call(script: dict[str, str] | None, text: str, *words: object) -> Ended:
        path = tmp_path / "known.toml"
        path.write_text(text)
        return fake_run(script, "--known", path, *words)

    return call


def one(ended: Ended) -> tuple[int, str, str]:
    """Exit code, outcome and the verdict of the cell that the lists are about."""
    assert ended.report is not None, ended.err
    return ended.code, ended.report["outcome"], ended.cells[TOKEN]["verdict"]


def warnings(ended: Ended) -> list[str]:
    assert ended.report is not None
    found: list[str] = ended.report["warnings"]
    return found


# -- lists that are true ------------------------------------------------------------------------------------------------


def test_a_known_failure(listed: Call) -> None:
    ended = listed(FAILS, known())
    assert one(ended) == (0, "partial", "known-failing")
    cell = ended.cells[TOKEN]
    assert (cell["excused"], cell["excusedBy"]) == ("fail", [0])
    assert "known deviation: https://example.com/1, until 2999-12-31" in cell["message"]
    # It is still told, in full.
    assert f"(by the evidence: fail) {TOKEN}" in " ".join(ended.out.split())
    assert "run again: " in ended.out
    assert ended.report is not None
    (entry,) = ended.report["knownDeviations"]
    assert (entry["kind"], entry["cells"], entry["problems"]) == ("known", [TOKEN], [])
    assert ended.report["summary"]["known-failing"] == 1
    assert {words for name, words in ended.verdicts.items() if name != TOKEN} == {"pass"}


@pytest.mark.parametrize("action", ["fail", "inconclusive"])
def test_a_waiver(listed: Call, action: str) -> None:
    ended = listed({"TOK-002": action}, waiver())
    assert one(ended) == (0, "partial", "waived")
    assert ended.cells[TOKEN]["excused"] == action
    assert f"waived until 2999-12-31: not here, OPS-7; it is {action}" in ended.cells[TOKEN]["message"]


def test_a_failure_beside_a_known_one_counts(listed: Call) -> None:
    assert one(listed({"TOK-002": "fail", "TOK-004": "fail"}, known())) == (1, "nonconformant", "known-failing")


def test_flaky_is_named_and_changes_nothing(listed: Call, fake_run: Call) -> None:
    ended = listed(FAILS, flaky())
    assert one(ended) == one(fake_run(FAILS)) == (1, "nonconformant", "fail")
    assert "known flaky, which changes no verdict: OPS-8" in ended.cells[TOKEN]["message"]
    assert f"known flaky: {TOKEN} (OPS-8): 1 fail" in " ".join(ended.out.split())
    passed = listed({}, flaky("*"))
    assert one(passed) == (0, "conformant", "pass")
    assert "known flaky: * (OPS-8): " in passed.out


# -- lists that are not --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "text", "code", "says"),
    [
        ({}, known(), 3, "passes: take it out"),
        ({}, waiver(), 3, "passes: take it out"),
        ({}, known("EPD-TOK-002[e-pd/other/*]"), 3, "matches no cell of this run"),
        (FAILS, known("EPD-TOK-00[23][*"), 1, "matches no cell of this run"),
        (FAILS, known(expires="2020-01-01"), 1, "expired on 2020-01-01"),
        (FAILS, waiver(expires="2020-01-01"), 1, "expired on 2020-01-01"),
        (FAILS, known(message="another failure"), 1, "fails otherwise (digest-differs)"),
        ({"TOK-002": "inconclusive"}, known(), 3, "is inconclusive"),
        ({"TOK-002": "harness"}, known(), 3, "is error (harness), which no list excuses"),
        ({"TOK-002": "stack"}, waiver(), 3, "is error (stack), which no list excuses"),
        ({"TOK-002": "interrupt"}, known(), 3, "is could-not-run"),
        (FAILS, known("EPD-TOK-00?[*"), 3, "passes: take it out, or narrow the pattern"),
    ],
)
def test_an_untrue_entry_makes_the_run_fail(
    listed: Call, script: dict[str, str], text: str, code: int, says: str
) -> None:
    ended = listed(script, text)
    assert ended.code == code
    assert ended.report is not None
    assert ended.report["outcome"] == ("nonconformant" if code == 1 else "incomplete")
    (warning,) = [line for line in warnings(ended) if "[[" in line]
    assert says in warning
    assert says in " ".join(ended.out.split())
    assert says in ended.report["knownDeviations"][0]["problems"][0]


def test_what_is_wrong_whatever_comes_out_is_said_before_the_run(listed: Call) -> None:
    first, *_ = [line for line in listed({}, known("nothing") + known()).err.splitlines() if "warning" in line]
    assert "[[known]] nothing: matches no cell of this run" in first


def test_a_selection_leaves_a_known_cell_open(listed: Call) -> None:
    ended = listed({}, known(), "--cell", "EPD-TOK-003[e-pd/tiny-qwen2.5-vl/img2]")
    assert one(ended) == (3, "incomplete", "could-not-run")
    assert any("is could-not-run (did not run), which no list excuses" in line for line in warnings(ended))


@pytest.mark.parametrize(
    ("text", "says"),
    [("[[known]]\n", "[[known]] number 1: `cells`: Field required"), ("x", "is not valid TOML"), (None, "cannot read")],
)
def test_a_list_that_cannot_be_read(fake_run: Call, tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "known.toml"
    if text is not None:
        path.write_text(text)
    ended = fake_run({}, "--known", path)
    assert (ended.code, ended.report) == (2, None)
    assert [says in line for line in ended.errors] == [True]


# -- the law -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> ResultLines:
    """The results of a run in which one cell fails."""
    out = tmp_path_factory.mktemp("law") / "out"
    process = start(["-m", "run_fakes", "run", "--subject", "reference", "--out", out], FAILS)
    process.communicate(timeout=60)
    assert read(out) is not None
    return read_results(out / "results.ndjson")


def with_lists(lines: ResultLines, lists: list[KnownDeviation], cells: dict[str, dict[str, Any]]) -> ResultLines:
    """The same run as it would have been with these lists, and with these results of cells."""

    def data(kind: str, old: dict[str, Any]) -> dict[str, Any]:
        if kind == "run":
            return {**old, "knownDeviations": [entry.to_disk() for entry in lists]}
        return {**old, **cells.get(old["id"], {})} if kind == "cell" else old

    return replace(lines, lines=tuple(replace(line, data=data(line.kind, line.data)) for line in lines))


PATTERNS = st.sampled_from([TOKEN, "EPD-TOK-002[*", "EPD-TOK-*", "EPD-XFER-001[e-pd/*", "nothing", "*"])
DATES = st.sampled_from(["2020-01-01", "2999-12-31"])


@settings(deadline=None, max_examples=40)
@given(
    entries=st.lists(
        st.one_of(
            st.builds(known, PATTERNS, st.sampled_from(["digest", "another failure"]), DATES),
            st.builds(waiver, PATTERNS, DATES),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_run_ends_with_0_only_if_every_entry_is_true(lines: ResultLines, entries: list[str]) -> None:
    lists = [entry for text in entries for entry in deviations.parse(text, "known.toml")]
    (begin,) = lines.all(RunStart)
    changed = {}
    for record in lines.all(CellRecord):
        decision = deviations.decide(lists, record.id, record.verdict, record.reason, begin.day)
        changed[record.id] = {
            "verdict": str(decision.verdict),
            "excused": decision.excused,
            "excusedBy": list(decision.by),
        }
    report = build_report(with_lists(lines, lists, changed), load())
    in_order = not any(entry.problems for entry in report.known_deviations)
    assert (result_code(report) == 0) is in_order
    # And that takes entries that are about the cell that fails, its failure and no other cell.
    assert in_order is all(
        entry.cells == (TOKEN,) and entry.expires > begin.day and entry.message != "another failure"
        for entry in report.known_deviations
        if entry.expires is not None
    )


# -- certify -------------------------------------------------------------------------------------------------------------


def refused(ended: Ended) -> str:
    assert (ended.code, ended.report) == (2, None), ended.err
    (line,) = ended.errors
    return line


def test_certify_excuses_nothing(listed: Call) -> None:
    assert "--mode certify excuses nothing: leave out --known" in refused(listed(FAILS, known(), "--mode", "certify"))


def test_certify_fixes_the_seed(fake_run: Call) -> None:
    assert "--mode certify draws from seed 0" in refused(fake_run({}, "--mode", "certify", "--seed", "1"))
    assert fake_run({}, "--mode", "certify", "--seed", "0").code == 0


def test_certify_names_its_model(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = replace(runs.model_use(runs.Options("reference")), digest=None)
    monkeypatch.setattr(runs, "model_use", lambda options: unknown)
    said = refused(fake_run({}, "--mode", "certify", "--model", "org/name"))
    assert "that of org/name is not known: give a zoo name, a folder, or org/name@commit" in said
    assert fake_run({}).code == 0


def test_certify_takes_no_other_model_under_a_name_of_the_zoo(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are called after the model, so two models of one name would look like one in reports and comparisons."""
    other = replace(runs.model_use(runs.Options("reference")), name="tiny-qwen2.5-vl")
    monkeypatch.setattr(runs, "model_use", lambda options: other)
    assert "and holds another model: give it another name" in refused(fake_run({}, "--mode", "certify"))
    assert fake_run({}).code == 0


@pytest.mark.parametrize(("modified", "code"), [(None, 0), (False, 0), (True, 2)])
def test_certify_refuses_a_modified_suite(
    fake_run: Call, monkeypatch: pytest.MonkeyPatch, modified: bool | None, code: int
) -> None:
    monkeypatch.setattr(release, "modified", lambda package, now: modified)
    ended = fake_run({}, "--mode", "certify")
    assert ended.code == code
    if code:
        assert "not the one that was released as" in refused(ended)
    developed = fake_run({})
    assert developed.code == 0
    assert developed.report is not None
    assert developed.report["suite"]["modified"] is modified


# -- pytest itself -------------------------------------------------------------------------------------------------------


def test_under_pytest_an_excused_cell_is_an_expected_failure(tmp_path: Path) -> None:
    path, out = tmp_path / "known.toml", tmp_path / "out"
    path.write_text(known())
    options = ["-p", "run_fakes", "-p", "no:cacheprovider", "-p", "no:xdist", "--subject", "reference"]
    process = start(["-m", "pytest", suites_folder(), *options, "--known", path, "--out", out], FAILS)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 0, text
    assert "1 xfailed" in text
    report = read(out)
    assert report is not None
    assert report["outcome"] == "partial"


def test_workers_judge_by_the_same_list(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    path, out = tmp_path / "known.toml", tmp_path / "out"
    path.write_text(known() + flaky("EPD-XFER-*"))
    fakes = Fakes(out, {"EPD-TOK-002[e-pd/": "fail"})
    ended = fakes.run(*WORKERS, "--known", path)
    assert ended.code == 0, ended.err
    assert ended.report is not None
    assert (ended.report["outcome"], ended.cells[TOKEN]["verdict"]) == ("partial", "known-failing")
    assert [entry["problems"] for entry in ended.report["knownDeviations"]] == [[], []]
