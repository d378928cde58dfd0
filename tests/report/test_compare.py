"""`compare`: every pair of verdicts has its class, a regression is never called anything else, and a person can read it."""

from __future__ import annotations

import io
import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from epd_conformance import cli
from epd_conformance.catalogue import load
from epd_conformance.errors import UsageError
from epd_conformance.report import render_compare
from epd_conformance.report.compare import STATES, Change, Comparison, State, classify, compare
from epd_conformance.report.schema import (
    CellRecord,
    EnvironmentInfo,
    ExpectedRecord,
    ExpectedSet,
    ImplementationInfo,
    KnownDeviation,
    ModelInfo,
    NotVerifiedRecord,
    Report,
    RunEnd,
    RunInfo,
    RunStart,
    SubjectInfo,
    SuiteInfo,
)
from epd_conformance.report.writer import KINDS, ResultLine, ResultLines, build_report, write_report
from epd_conformance.verdict import Verdict

CATALOGUE = load()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

P, F, K, W = Verdict.PASS, Verdict.FAIL, Verdict.KNOWN_FAILING, Verdict.WAIVED
E, INC, C, N = Verdict.ERROR, Verdict.INCONCLUSIVE, Verdict.COULD_NOT_RUN, Verdict.NOT_SUPPORTED

# One row an old verdict, one letter a new one: the order is that of NEW. u unchanged, n new-fail, x fixed, s still-failing,
# k newly-skipped, v still-unverified, d disappeared, + new.
NEW: tuple[Verdict | None, ...] = (P, F, K, E, INC, C, W, N, None)
PAIRS: dict[Verdict | None, str] = {
    P: "unnkkkkkd",
    F: "xsskkkkkd",
    K: "xsskkkkkd",
    E: "xnnvvvvvd",
    INC: "xnnvvvvvd",
    C: "xnnvvvvvd",
    W: "xnnvvvvvd",
    N: "xnnvvvvvd",
    None: "+nn+++++",
}
LETTERS = {
    "u": Change.UNCHANGED,
    "n": Change.NEW_FAIL,
    "x": Change.FIXED,
    "s": Change.STILL_FAILING,
    "k": Change.NEWLY_SKIPPED,
    "v": Change.STILL_UNVERIFIED,
    "d": Change.DISAPPEARED,
    "+": Change.NEW,
}


class TestPairs:
    def test_every_pair_is_in_the_table_of_this_test(self) -> None:
        assert set(PAIRS) == set(NEW) == {*Verdict, None}

    @pytest.mark.parametrize(("old", "new"), [pair for pair in itertools.product(PAIRS, NEW) if pair != (None, None)])
    def test_every_pair(self, old: Verdict | None, new: Verdict | None) -> None:
        wanted = LETTERS[PAIRS[old][NEW.index(new)]]
        assert classify(old, new) is wanted
        turned = {STATES[old], STATES[new]} == {State.HOLDS, State.FAILS}
        assert classify(old, new, flaky=True) is (Change.FLAKY if turned else wanted)

    def test_a_cell_of_neither_is_none(self) -> None:
        with pytest.raises(ValueError, match="neither"):
            classify(None, None)

    @pytest.mark.parametrize(("old", "new"), list(itertools.product(PAIRS, NEW)))
    def test_less_is_a_regression_and_more_is_none(self, old: Verdict | None, new: Verdict | None) -> None:
        if (old, new) == (None, None):
            return
        if new is None or STATES[new] is State.NOT_SHOWN:
            assert not classify(old, new, asked=False).regression, "nobody asked"
        order = [State.HOLDS, State.NOT_SHOWN, State.FAILS]
        if new is None:
            assert classify(old, new).regression
        elif STATES[new] is State.HOLDS:
            assert not classify(old, new).regression
        elif old is not None and order.index(STATES[new]) > order.index(STATES[old]):
            assert classify(old, new).regression


def report(
    cells: dict[str, str | tuple[str, str]],
    *,
    environment: str = "cpu-v1",
    subject: str = "reference",
    version: str = "0.1.0",
    known: tuple[KnownDeviation, ...] = (),
    gaps: tuple[NotVerifiedRecord, ...] = (),
    interrupted: bool = False,
    vllm: str = "0.32.0",
    model: ModelInfo | None = None,
    suite: str = "sha256:" + "a" * 64,
    catalogue: str = "",
    **run: Any,
) -> Report:
    """A report of cells `{"EPD-TOK-002 img1": "fail", "EPD-TOK-003 img2": ("inconclusive", "prefix-hit")}`."""
    info = {"id": "r1", "mode": "develop", "profile": "e-pd", "level": "full", "seed": 0, "command": (), "started": NOW}
    expected, records = [], []
    for name, what in cells.items():
        requirement, case = name.split()
        verdict, reason = (what, "") if isinstance(what, str) else what
        place = {
            "id": f"{requirement}[e-pd/tiny/{case}]",
            "requirement": requirement,
            "topology": "e-pd",
            "model": "tiny",
            "case": case,
        }
        expected.append(ExpectedRecord(**place))
        excused = {"known-failing": "fail", "waived": "inconclusive"}.get(verdict)
        records.append(CellRecord(**place, verdict=verdict, reason=reason, excused=excused))
    lines = [
        RunStart(
            suite=SuiteInfo(version="0.1.0", digest=suite, catalogue=CATALOGUE.digest()),
            run=RunInfo.model_validate(info | run),
            subject=SubjectInfo(name=subject, implementation=ImplementationInfo(version=version)),
            environment_class=environment,
            known_deviations=known,
        ),
        EnvironmentInfo(vllm_version=vllm, models=(model or ModelInfo(id="tiny", digest="d" * 64),), dtype="float32"),
        ExpectedSet(cells=tuple(expected), not_verified=gaps),
        *records,
        RunEnd(finished=NOW, interrupted=interrupted),
    ]
    made = build_report(
        ResultLines(tuple(ResultLine(n, KINDS[type(line)], NOW, line.to_disk()) for n, line in enumerate(lines, 1))),
        CATALOGUE,
    )
    return made.model_copy(
        update={"suite": made.suite.model_copy(update={"catalogue": catalogue or made.suite.catalogue})}
    )


OLD = {"EPD-TOK-002 img1": "pass", "EPD-TOK-003 img2": "pass", "EPD-XFER-001 img1": ("fail", "digest-differs")}
NEWER = {"EPD-TOK-002 img1": ("fail", "tokens-differ"), "EPD-TOK-003 img2": "pass", "EPD-XFER-001 img1": "pass"}


def changes(found: Comparison) -> dict[str, Change]:
    return {cell.id.replace("[e-pd/tiny/", " ").rstrip("]"): cell.change for cell in found.cells}


def text(found: Comparison, width: int = 80) -> str:
    stream = io.StringIO()
    render_compare.print_comparison(found, Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


class TestCompare:
    def test_a_run_with_itself(self) -> None:
        found = compare(report(OLD), report(OLD))
        assert (found.regressions, found.warnings, found.outcomes, found.requirements) == (0, (), (), ())
        assert set(found.counts) == {Change.UNCHANGED, Change.STILL_FAILING}

    def test_classes_and_what_changed_with_them(self) -> None:
        found = compare(report(OLD), report(NEWER))
        assert changes(found) == {
            "EPD-TOK-002 img1": Change.NEW_FAIL,
            "EPD-TOK-003 img2": Change.UNCHANGED,
            "EPD-XFER-001 img1": Change.FIXED,
        }
        assert [item.to_json() for item in found.requirements] == [
            {"name": "EPD-TOK-002", "old": "pass", "new": "fail"},
            {"name": "EPD-XFER-001", "old": "fail", "new": "pass"},
        ]
        assert found.outcomes == ()

    def test_outcomes(self) -> None:
        found = compare(report({**OLD, "EPD-XFER-001 img1": "pass"}), report(NEWER))
        assert [item.to_json() for item in found.outcomes] == [
            {"name": "connector", "old": "conformant", "new": "nonconformant"}
        ]

    @pytest.mark.parametrize(
        ("old", "new", "change"),
        [
            (("waived", "prefix-hit"), ("inconclusive", "prefix-hit"), Change.STILL_UNVERIFIED),
            ("known-failing", "fail", Change.STILL_FAILING),
            ("pass", "known-failing", Change.NEW_FAIL),
            ("pass", "waived", Change.NEWLY_SKIPPED),
        ],
    )
    def test_an_excuse_changes_no_class(self, old: Any, new: Any, change: Change) -> None:
        found = compare(report({"EPD-TOK-002 img1": old}), report({"EPD-TOK-002 img1": new}))
        assert found.cells[0].change is change

    def test_a_waived_failure_is_a_failure(self) -> None:
        before = report({"EPD-TOK-002 img1": "fail"})
        (item,) = before.requirements
        waived = item.cells[0].model_copy(update={"verdict": Verdict.WAIVED, "excused": Verdict.FAIL})
        after = before.model_copy(update={"requirements": (item.model_copy(update={"cells": (waived,)}),)})
        assert compare(before, after).cells[0].change is Change.STILL_FAILING

    def test_a_flaky_cell_is_no_regression_where_the_new_list_names_it(self) -> None:
        flaky = KnownDeviation(kind="flaky", pattern="EPD-TOK-002[*]", issue="#1")
        named = compare(report(OLD), report(NEWER, known=(flaky,)))
        assert changes(named)["EPD-TOK-002 img1"] is Change.FLAKY
        assert named.regressions == 0
        assert compare(report(OLD, known=(flaky,)), report(NEWER)).regressions == 1
        gone = {name: what for name, what in NEWER.items() if "TOK-002" not in name}
        assert compare(report(OLD), report(gone, known=(flaky,))).regressions == 1, "only a change of pass and fail"

    def test_why_a_cell_disappeared(self) -> None:
        gap = {"kind": "feature", "requirement": "EPD-TOK-002"}
        gaps = (
            NotVerifiedRecord(**gap, detail="e-p-d: the subject does not declare kv_disaggregation"),
            NotVerifiedRecord(**gap, detail="e-pd: the subject does not declare stats"),
        )
        found = compare(report(OLD), report({"EPD-TOK-003 img2": "pass"}, gaps=gaps))
        assert [cell.words() for cell in found.of(Change.DISAPPEARED)] == [
            "pass → absent (e-pd: the subject does not declare stats)",
            "fail → absent",
        ]
        assert found.regressions == 2

    def test_both_reasons_where_they_differ(self) -> None:
        found = compare(
            report({"EPD-TOK-002 img1": ("fail", "digest-differs")}),
            report({"EPD-TOK-002 img1": ("fail", "tokens-differ")}),
        )
        assert found.cells[0].words() == "fail → fail (tokens-differ, was digest-differs)"


class TestNotAsked:
    """What the new run was told to leave out is not shown less; what it lost is."""

    LEFT = NEWER | {"EPD-TOK-003 img2": ("could-not-run", "did not run")}

    def test_a_selection(self) -> None:
        found = compare(report(OLD), report(self.LEFT))
        assert changes(found)["EPD-TOK-003 img2"] is Change.NOT_ASKED
        assert found.regressions == 1, "the failure is one all the same"

    def test_a_run_that_was_cut_short_was_asked(self) -> None:
        found = compare(report(OLD), report(self.LEFT, interrupted=True))
        assert changes(found)["EPD-TOK-003 img2"] is Change.NEWLY_SKIPPED

    def test_a_smaller_profile(self) -> None:
        whole = report(OLD)
        (item, *others) = whole.requirements
        elsewhere = tuple(cell.model_copy(update={"topology": "e-p-d", "id": f"{cell.id}-"}) for cell in item.cells)
        both = item.model_copy(update={"cells": item.cells + elsewhere})
        larger = whole.model_copy(update={"requirements": (both, *others)})
        (gone,) = elsewhere

        def change(new: Report) -> Change:
            return next(cell.change for cell in compare(larger, new).cells if cell.id == gone.id)

        assert change(report(OLD, profile="e-pd", id="r2")) is Change.DISAPPEARED, "the same profile, and no cell of it"
        larger = larger.model_copy(update={"run": larger.run.model_copy(update={"profile": "all"})})
        assert change(report(OLD)) is Change.NOT_ASKED
        assert change(report(OLD, profile="all")) is Change.DISAPPEARED

    def test_a_lower_level(self) -> None:
        core = {name: what for name, what in NEWER.items() if "TOK-003" not in name}
        gap = NotVerifiedRecord(
            kind="feature", requirement="EPD-TOK-003", detail="e-pd: the subject does not declare it"
        )
        found = compare(report(OLD), report(core, level="core"))
        assert changes(found)["EPD-TOK-003 img2"] is Change.NOT_ASKED
        for old, new in (("full", "full"), ("core", "core")):
            found = compare(report(OLD, level=old), report(core, level=new))
            assert changes(found)["EPD-TOK-003 img2"] is Change.DISAPPEARED
        found = compare(report(OLD), report(core, level="core", gaps=(gap,)))
        assert changes(found)["EPD-TOK-003 img2"] is Change.DISAPPEARED, "the subject gave it up"


class TestComparable:
    def test_environment_classes_are_never_mixed(self) -> None:
        with pytest.raises(UsageError, match="a run on cpu-v1 and one on cuda are not compared"):
            compare(report(OLD), report(OLD, environment="cuda"))

    def test_without_a_common_cell_there_is_nothing_to_compare(self) -> None:
        with pytest.raises(UsageError, match="no cell in common"):
            compare(report(OLD), report({"EPD-TOK-002 other": "pass"}))

    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"profile": "all"}, "profile differs (e-pd → all)"),
            ({"level": "core"}, "level differs (full → core)"),
            ({"seed": 5}, "seed differs (0 → 5)"),
            ({"vllm": "0.33.0"}, "vLLM differs (0.32.0 → 0.33.0)"),
            ({"suite": "sha256:" + "b" * 64}, "suite differs (aaaaaaaaaaaa → bbbbbbbbbbbb)"),
            ({"catalogue": "sha256:" + "c" * 64}, "catalogue differs"),
            ({"model": ModelInfo(id="tiny", digest="e" * 64)}, "model differs (tiny dddddddddddd → tiny eeeeeeeeeeee)"),
            ({"interrupted": True}, "the new run did not come to its end"),
        ],
    )
    def test_what_makes_cells_unlike_is_said(self, changed: dict[str, Any], says: str) -> None:
        (warning,) = compare(report(OLD), report(OLD, **changed)).warnings
        assert warning.startswith(says)

    def test_two_connectors_are_compared(self) -> None:
        found = compare(report(OLD), report(NEWER, subject="vllm-example", version="0.32.0"))
        assert found.warnings == ()
        assert found.first_line() == ("1 regression, 1 fixed, 1 unchanged: e-pd reference 0.1.0 → vllm-example 0.32.0")

    def test_titles(self) -> None:
        def title(**changed: Any) -> str:
            return compare(report(OLD), report(OLD, **changed)).title

        assert title() == "e-pd reference 0.1.0, 2026-01-02 03:04 → 2026-01-02 03:04"
        assert title(profile="all") == "e-pd reference 0.1.0 → all reference 0.1.0"
        assert title(version="") == "e-pd reference 0.1.0 → reference"


MANY = {f"EPD-ERR-001 case-{number}": "pass" for number in range(8)}
MANY |= {f"{item.id} img": "pass" for item in itertools.islice(CATALOGUE, 40)} | {"EPD-XFER-001 img1": "pass"}


class TestText:
    def test_the_sum_comes_first_and_unchanged_cells_are_only_counted(self) -> None:
        shown = text(compare(report(OLD), report(NEWER)))
        lines = shown.splitlines()
        assert lines[0].startswith("1 regression, 1 fixed, 1 unchanged: e-pd reference 0.1.0")
        assert "  EPD-TOK-002[e-pd/tiny/img1]  pass → fail (tokens-differ)" in lines
        assert "  EPD-XFER-001[e-pd/tiny/img1]  fail → pass (was digest-differs)" in lines
        assert "EPD-TOK-003" not in shown
        assert shown.index("new-fail (1)") < shown.index("fixed (1)")

    def test_no_regression(self) -> None:
        assert text(compare(report(OLD), report(OLD))).startswith("no regression, ")

    @pytest.mark.parametrize("width", [80, 60])
    def test_it_fits(self, width: int) -> None:
        long = {f"EPD-TOK-002 a-case-with-a-rather-long-name-{n}": ("fail", "r" * n) for n in range(4, 7)}
        found = compare(report(dict.fromkeys(long, "pass")), report(long))
        shown = text(found, width)
        assert max(map(len, shown.splitlines())) <= width
        for cell in found.cells:
            assert cell.id in shown, "an id is never cut"

    def test_long_lists_are_folded(self) -> None:
        lost = dict.fromkeys(MANY, ("error", "stack")) | {"EPD-XFER-001 img1": "pass"}
        found = compare(report(MANY), report(lost))
        shown = text(found)
        assert "EPD-ERR-001, 9 cells" in shown
        assert "more" in shown and "--json has all of them" in shown
        block = shown[shown.index("newly-skipped") :].splitlines()
        assert len(block) == render_compare.MOST_LINES + 2
        assert len(found.to_json()["cells"]) == len(MANY)

    def test_markdown(self) -> None:
        shown = render_compare.markdown(compare(report(OLD), report(NEWER, seed=1)))
        assert shown.startswith("**1 regression, 1 fixed, 1 unchanged: ")
        assert "* warning: seed differs" in shown
        assert "| EPD-TOK-002[e-pd/tiny/img1] | pass → fail (tokens-differ) |" in shown
        assert "<details open><summary>new-fail (1)" in shown
        assert "<details><summary>fixed (1)" in shown


class TestVerb:
    @pytest.fixture
    def folders(self, tmp_path: Path) -> tuple[Path, Path]:
        made = []
        for name, cells in (("old", OLD), ("new", NEWER)):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "results.ndjson").touch()
            write_report(folder, report(cells))
            made.append(folder)
        return made[0], made[1]

    def call(self, monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
        monkeypatch.setattr("sys.argv", ["epd-conformance", "compare", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def test_exit_codes_and_paths(
        self, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        old, new = folders
        assert self.call(monkeypatch, old, new) == 1
        assert self.call(monkeypatch, old / "report.json", new / "report.json") == 1
        assert self.call(monkeypatch, new, new) == 0
        capsys.readouterr()
        assert self.call(monkeypatch, old, new, "--json") == 1
        assert json.loads(capsys.readouterr().out)["counts"] == {"new-fail": 1, "fixed": 1, "unchanged": 1}
        assert self.call(monkeypatch, old, new, "--markdown") == 1
        assert capsys.readouterr().out.startswith("**1 regression")

    def test_usage(
        self, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        old, new = folders
        assert self.call(monkeypatch, old, new, "--json", "--markdown") == 2
        assert "ask for one" in capsys.readouterr().err
        assert self.call(monkeypatch, old, old / "nowhere") == 2
        assert "give the directory of a run" in capsys.readouterr().err
        (new / "report.json").write_text("{}")
        assert self.call(monkeypatch, old, new) == 2
        assert "is no report of this version" in capsys.readouterr().err
