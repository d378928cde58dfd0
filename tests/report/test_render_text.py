"""What a person reads: the table at 80 columns, the first line, and the text of a failure."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from epd_conformance.catalogue import load
from epd_conformance.report.failure import Divergence, failure_text
from epd_conformance.report.render_text import not_passed, print_report, render, summary_lines, verdict_table
from epd_conformance.report.schema import (
    CellRecord,
    EnvironmentInfo,
    NotVerifiedRecord,
    Patch,
    Report,
    RequirementRecord,
    RunInfo,
    SubjectInfo,
    SuiteInfo,
)
from epd_conformance.verdict import PRECEDENCE, Cell, Mode, Owner, Verdict, summary

CATALOGUE = load()


def report(cells: list[CellRecord], **changes: Any) -> Report:
    grouped: dict[str, list[CellRecord]] = {}
    for cell in cells:
        grouped.setdefault(cell.requirement, []).append(cell)
    requirements = tuple(
        RequirementRecord(
            id=key,
            title=CATALOGUE[key].title,
            sentence=CATALOGUE[key].sentence,
            owner=CATALOGUE[key].owner,
            level=CATALOGUE[key].level,
            verdict=min((cell.verdict for cell in group), key=PRECEDENCE.index),
            cells=tuple(group),
        )
        for key, group in grouped.items()
    )
    counts = summary(
        Cell(
            cell.id,
            cell.requirement,
            CATALOGUE[cell.requirement].level,
            CATALOGUE[cell.requirement].owner,
            cell.verdict,
        )
        for cell in cells
    )
    values: dict[str, Any] = {
        "suite": SuiteInfo(version="0.1.0", catalogue=CATALOGUE.digest()),
        "run": RunInfo(
            id="r",
            mode="certify",
            profile="all",
            level="full",
            seed=1,
            command=("run",),
            started=datetime.now(UTC),
        ),
        "subject": SubjectInfo(name="reference"),
        "environment": EnvironmentInfo(),
        "environment_class": "cpu-v1",
        "complete": True,
        "interrupted": False,
        "outcome": "conformant",
        "engine_outcome": "conformant",
        "proxy_outcome": "conformant",
        "summary": counts,
        "requirements": requirements,
    }
    return Report.model_validate(values | changes)


def cell(requirement: str, topology: str, verdict: str = "pass", case: str = "one", **more: Any) -> CellRecord:
    return CellRecord(
        id=f"{requirement}[{topology}/tiny/{case}]",
        requirement=requirement,
        topology=topology,
        model="tiny",
        case=case,
        verdict=Verdict(verdict),
        **more,
    )


def text_of(thing: Any, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, highlight=False).print(thing)
    return out.getvalue()


class TestTable:
    def test_fits_80_columns_with_every_title_and_verdict(self) -> None:
        verdicts = list(Verdict)
        cells = [
            cell(item.id, topology, verdicts[number % len(verdicts)])
            for number, item in enumerate(CATALOGUE)
            for topology in ("aggregated", "e-pd", "e-p-d")
        ]
        lines = text_of(verdict_table(report(cells))).splitlines()
        assert max(len(line) for line in lines) <= 80
        assert len(lines) == 1 + len(CATALOGUE), "one line a requirement"
        for line, item in zip(lines[1:], CATALOGUE, strict=True):
            assert line.startswith(f"{item.id} ")
            assert f" {item.owner} " in line
        assert {line.split()[-1] for line in lines[1:]} == {str(verdict) for verdict in verdicts}

    def test_a_wider_terminal_shows_whole_titles(self) -> None:
        cells = [cell(item.id, "e-pd", "could-not-run") for item in CATALOGUE]
        narrow, wide = (text_of(verdict_table(report(cells), width), 120) for width in (60, 120))
        assert all(item.title in wide for item in CATALOGUE)
        assert max(len(line) for line in narrow.splitlines()) <= 60
        assert narrow.count("could-not-run") == len(CATALOGUE)

    def test_counts_by_topology(self) -> None:
        cells = [
            cell("EPD-TOK-002", "e-pd"),
            cell("EPD-TOK-002", "2e-1pd", "fail"),
            cell("EPD-TOK-002", "e-p-d", "inconclusive"),
            cell("EPD-TOK-003", "e-pd"),
        ]
        head, first, second = text_of(verdict_table(report(cells))).splitlines()
        assert head.split() == ["requirement", "level", "owner", "e-pd", "e-p-d", "verdict"]
        assert first.split()[-3:] == ["1/2", "0/1", "fail"]
        assert second.split()[-2:] == ["1/1", "pass"]


class TestSummary:
    def test_first_line_says_what_it_holds_for(self) -> None:
        first = summary_lines(report([cell("EPD-TOK-002", "e-pd")]))[0]
        assert first == "reference: conformant on cpu-v1 (profile all, level full, certify mode)"

    def test_a_run_cut_short_says_so_at_once(self) -> None:
        whole = report([], outcome="incomplete", interrupted=True, warnings=("line 3 was cut off",))
        lines = summary_lines(whole)
        assert "incomplete on cpu-v1" in lines[0]
        assert "cut short" in lines[0]
        assert lines[-1] == "warning: line 3 was cut off"

    def test_the_outcome_in_front_is_the_certified_owners(self) -> None:
        whole = report([], proxy_outcome="nonconformant")
        proxy = whole.model_copy(update={"run": whole.run.model_copy(update={"certifies": Owner.PROXY})})
        assert summary_lines(proxy)[0].startswith("reference: nonconformant")
        assert summary_lines(proxy)[1] == "beside it: connector conformant, engine conformant"

    def test_counts_patches_and_gaps_are_told(self) -> None:
        gaps = [
            NotVerifiedRecord(kind="planned", requirement="EPD-SEC-001", detail="no test yet"),
            NotVerifiedRecord(kind="feature", requirement="EPD-TOK-002", detail="e-pd: x"),
            NotVerifiedRecord(kind="feature", requirement="EPD-TOK-002", detail="e-p-d: x"),
        ]
        patch = Patch(name="torchvision-operators", what="w", why="y")
        lines = summary_lines(
            report(
                [cell("EPD-TOK-002", "e-pd"), cell("EPD-TOK-003", "e-pd", "could-not-run")],
                environment=EnvironmentInfo(patches=(patch,)),
                not_verified=gaps,
            )
        )
        assert "cells: 2 expected, 1 ran: 1 pass, 1 could-not-run" in lines
        assert "patched in the servers: torchvision-operators" in lines
        assert "not verified: 1 feature, 1 planned" in lines

    def test_a_develop_run_is_no_certificate(self) -> None:
        whole = report([])
        develop = whole.model_copy(update={"run": whole.run.model_copy(update={"mode": Mode.DEVELOP})})
        assert any("no certificate" in line for line in summary_lines(develop))
        assert not any("no certificate" in line for line in summary_lines(whole))


class TestRender:
    def test_every_cell_that_did_not_pass_speaks(self) -> None:
        cells = [cell("EPD-TOK-002", "e-pd", str(verdict), case=str(verdict)) for verdict in Verdict]
        whole = report(cells)
        assert {item.verdict for item in not_passed(whole)} == set(Verdict) - {
            Verdict.PASS,
            Verdict.NOT_SUPPORTED,
        }
        text = text_of(render(whole))
        for item in not_passed(whole):
            if item.verdict is not Verdict.COULD_NOT_RUN:  # these are counted in one line
                assert f"{item.verdict}  {item.id}" in text

    def test_reason_blame_and_message(self) -> None:
        failed = cell("EPD-TOK-002", "e-pd", "fail", reason="ids differ", blame="engine", message="[bold]x[/]")
        text = text_of(render(report([failed])))
        assert "fail: ids differ (points at: engine)  EPD-TOK-002[e-pd/tiny/one]" in text
        assert "[bold]x[/]" in text, "messages are no markup"

    def test_without_a_message_the_sentence_stands(self) -> None:
        text = text_of(render(report([cell("EPD-TOK-002", "e-pd", "error")])), width=200)
        assert CATALOGUE["EPD-TOK-002"].sentence in text

    def test_cells_that_did_not_run_are_one_line_not_a_screenful(self) -> None:
        cells = [cell(item.id, "e-pd", "could-not-run") for item in CATALOGUE if "e-pd" in item.topologies]
        text = text_of(render(report(cells)), width=200)
        assert f"could-not-run: {len(cells)} expected cells did not run, which is never a pass" in text
        assert CATALOGUE["EPD-TOK-002"].sentence not in text

    def test_prints_to_a_console(self) -> None:
        out = io.StringIO()
        print_report(report([cell("EPD-TOK-002", "e-pd")]), Console(file=out, width=80))
        assert "conformant on cpu-v1" in out.getvalue()


class TestFailureText:
    requirement = CATALOGUE["EPD-TOK-002"]

    def test_everything_of_the_contract_in_order(self) -> None:
        text = failure_text(
            self.requirement,
            "EPD-TOK-002[e-pd/tiny/one]",
            expected="the ids of aggregated",
            observed="other ids",
            divergence=Divergence(5, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 0, 7, 8], 0.25),
            rung="tokens",
            causes=["wrong rows", "wrong order"],
            reproduce="epd-conformance run -k x",
            artifacts=["stacks/1/journal.ndjson"],
        )
        assert text.splitlines() == [
            f"EPD-TOK-002 (MUST, connector): {self.requirement.sentence}",
            "cell: EPD-TOK-002[e-pd/tiny/one]",
            "expected: the ids of aggregated",
            "observed: other ids",
            "first divergence: output token 5, margin 0.25 nats",
            "  expected … 2 3 4 5 <6> 7 8 9 10 …",
            "  observed … 2 3 4 5 <0> 7 8",
            "rung: tokens",
            "likely causes:",
            "  - wrong rows",
            "  - wrong order",
            "run again: epd-conformance run -k x",
            "artifacts: stacks/1/journal.ndjson",
        ]

    def test_what_is_not_known_is_left_out(self) -> None:
        text = failure_text(self.requirement, "c", expected="a", observed="b")
        assert len(text.splitlines()) == 4

    @pytest.mark.parametrize(
        ("index", "ids", "shown"),
        [
            (0, [7, 8], "<7> 8"),
            (2, [7, 8], "7 8 <end>"),
            (0, [], "<end>"),
            (6, [0, 1, 2, 3, 4, 5], "… 2 3 4 5 <end>"),
        ],
    )
    def test_an_answer_that_ends_early_shows_its_end(self, index: int, ids: list[int], shown: str) -> None:
        assert Divergence(index, ids, []).lines()[1] == f"  expected {shown}"


def test_what_is_there_to_be_copied_is_not_broken() -> None:
    command = "epd-conformance replay " + "folder/" * 20 + "cell.json"
    stream = io.StringIO()
    failed = cell("EPD-TOK-002", "e-pd", "fail", message=f"carry it out: {command}")
    print_report(report([failed]), Console(file=stream, width=80))
    assert f"carry it out: {command}\n" in stream.getvalue()
