"""What the page shows of a run, before it is HTML."""

from __future__ import annotations

import json
import tarfile
from collections import Counter
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from made_evidence import edited, passing
from made_page import DAMAGED, DIED, TOKENS

from epd_conformance.plans.windows import WINDOWS
from epd_conformance.report.html import Page, TrendPoint, read_page
from epd_conformance.report.html.evidence import shown
from epd_conformance.report.html.faults import Fate, fates
from epd_conformance.report.html.page import CellView, build
from epd_conformance.report.html.timeline import Mark, Span, Timeline, draw
from epd_conformance.report.writer import read_report
from epd_conformance.verdict import Outcome, Verdict

REPORTS = Path(__file__).parents[2] / "reports"


def cell(page: Page, name: str) -> CellView:
    return next(view for view in page.cells if view.record.id == name)


def test_every_cell_stands_once_in_matrix_and_list_and_failures_come_first(page: Page) -> None:
    every = Counter(record.id for item in page.report.requirements for record in item.cells)
    matrix = Counter(
        view.record.id for area in page.areas for row in area.rows for cells in row.cells.values() for view in cells
    )
    assert matrix == every == Counter(view.record.id for view in page.cells)
    assert set(every.values()) == {1}
    assert [view.record.verdict for view in page.cells[:3]] == [Verdict.FAIL] * 3
    assert {view.record.verdict for view in page.cells[3:-3]} == {Verdict.COULD_NOT_RUN}
    assert all(view.passed for view in page.cells[-3:])
    assert len({view.anchor for view in page.cells}) == len(page.cells)


def test_a_token_failure_shows_where_the_arms_part(page: Page) -> None:
    (strip,) = cell(page, TOKENS).shown.strips
    (first,) = [column for column in strip.columns if column.first]
    assert (strip.equal, first.index) == (False, 3)
    assert first.expected != first.observed
    assert first.margin is not None and f"{first.margin:.4g} nats" in strip.summary
    assert [column.differs for column in strip.columns[:4]] == [False, False, False, True]
    assert cell(page, TOKENS).causes == ("one", "two")
    assert cell(page, TOKENS).expected == f"what {TOKENS} expects"


def test_a_fault_cell_shows_the_fault_and_what_crossed(page: Page) -> None:
    timeline = cell(page, DAMAGED).shown.timeline
    assert timeline is not None
    kinds = Counter(mark.kind for mark in timeline.marks)
    assert kinds["save"] and kinds["load"] and kinds["lookup"]
    (fault,) = [span for span in timeline.spans if span.kind == "fault"]
    assert "one-row" in fault.text and fault.start < fault.end
    victim = next(span for span in timeline.spans if span.text.startswith("request victim"))
    assert fault.start <= victim.start <= victim.end <= fault.end
    assert [picture.labels for picture in cell(page, DAMAGED).shown.pictures] == [
        ("first",),
        ("twin",),
        ("victim",),
        ("fresh",),
    ]
    assert len({picture.source for picture in cell(page, DAMAGED).shown.pictures}) == 4


def test_faults_by_what_became_of_their_victims(page: Page) -> None:
    rows = {row.kind: row.cells for row in page.fault_rows}
    # The damaged bytes were loaded and, by luck, the made-up answer is right all the same.
    assert [view.record.id for view in rows["one-row"][Fate.RIGHT_BY_LUCK]] == [DAMAGED]
    assert {view.record.verdict for row in rows.values() for view in row.get(Fate.RECOMPUTED, ())} == {Verdict.PASS}
    assert Fate.DIED not in page.fates, "the server that died had no victim"


@pytest.mark.parametrize("window", WINDOWS)
def test_right_bytes_in_a_window_are_no_fault_that_was_not_met(window: str) -> None:
    story = passing("in-window", "e-p-d" if window == "prefilled" else "e-pd", window=window)
    assert list(fates(story)) == [(story.plan.fault, Fate.UNHARMED)]
    assert list(fates(edited(story, {"why": "timeout"}, ev="opened"))) == [(story.plan.fault, Fate.NOT_PROVEN)]


def test_what_was_not_verified_and_logs(page: Page) -> None:
    named = {name for gap in page.gaps for name, _ in gap.requirements}
    assert named == {gap.requirement for gap in page.report.not_verified}
    (log,) = page.logs
    assert log.lines[0] == "begin" and log.lines[-2:] == ("--api-key [redacted]", "last line")
    assert [view.logs for view in page.cells if view.passed and view.logs] == []
    assert cell(page, DIED).logs == (log,)


@pytest.mark.parametrize("name", ["vllm-example-0.32.0", "vllm-example-0.32.0-contract", "vllm-example-proxy-0.32.0"])
def test_published_runs_of_every_kind_can_be_shown(name: str) -> None:
    """Real evidence: over servers, without servers, and of a proxy before fakes."""
    report = read_report(REPORTS / name)
    wanted = {f"evidence/{path}" for item in report.requirements for one in item.cells for path in one.artifacts[:1]}
    with tarfile.open(REPORTS / name / "evidence.tar.xz") as archive:
        files = [archive.extractfile(member) for member in archive if member.name in wanted]
        found = [json.load(file) for file in files if file is not None]
    page = build(report, {data["cell"]: data for data in found}, {})
    assert len(found) == len(page.cells)
    assert not [view.shown.note for view in page.cells if "cannot read" in view.shown.note]
    failed = [view for view in page.cells if not view.passed]
    # What a directed check of the contract layer found has no plan, and so no events.
    assert len([view for view in failed if view.shown.timeline is None]) < len(failed) / 4


@pytest.mark.parametrize("data", [{}, {"schema": "epd-conformance/cell/v9"}, {"schema": "epd-conformance/cell/v1"}])
def test_evidence_that_cannot_be_read_is_said_to_be(data: dict[str, str]) -> None:
    assert "cannot read" in shown(data).note


def test_a_report_without_evidence_has_a_page(page: Page, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(page.report.to_disk()))
    alone = read_page(tmp_path / "report.json")
    assert alone.counts == page.counts
    assert not [view for view in alone.cells if view.shown.strips]


def test_evidence_outside_the_folder_is_not_shown(page: Page, failing: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps(page.report.to_disk()))
    (tmp_path / "logs").symlink_to(failing / "logs")
    (tmp_path / "cells").symlink_to(failing / "cells")
    alone = read_page(tmp_path)
    assert not alone.logs and not [view for view in alone.cells if view.shown.strips]


def test_a_trend_has_the_newest_run_first_and_this_run_among_them(page: Page) -> None:
    def point(days: int, outcome: Outcome) -> TrendPoint:
        return TrendPoint(page.report.run.started + timedelta(days=days), outcome, {Verdict.PASS: 1}, str(days))

    history = [point(-1, Outcome.CONFORMANT), point(3, Outcome.NONCONFORMANT), point(-2, Outcome.INCOMPLETE)]
    trend = build(page.report, {}, {}, history).trend
    assert [one.name for one in trend] == ["3", "this run", "-1", "-2"]
    assert (trend[1].outcome, trend[1].total) == (page.report.certified_outcome, page.report.summary["expected"])
    assert page.trend == build(page.report, {}, {}, [trend[1]]).trend == (), "the run alone is no trend"


def test_a_drawing_keeps_the_order_and_no_two_moments_share_a_place() -> None:
    marks = tuple(Mark("a", at, "save", "") for at in (0.0, 1e-6, 0.5, 3600.0))
    drawing = draw(Timeline(("client", "a"), marks, (Span("client", 0.0, 3600.0, "answer", ""),)))
    places = [shape.x for shape in drawing.shapes if not shape.width]
    assert places == sorted(places)
    assert min(b - a for a, b in pairwise(places)) >= 10
    assert drawing.width < 400, "an idle hour takes no more room than any gap"
