"""Made run folders: whole runs of the real suite over made-up servers, written by the real writers.

Every cell's plan, case and expected set are those of the suite, so that `verify` finds nothing wrong with an honest one.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# The stories of single cells; test folders are no packages.
sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))

import made_proxied
from made_evidence import Story, digest_of, good_answer

from epd_conformance.live.case import Case, plan_of
from epd_conformance.live.layout import Layout
from epd_conformance.live.session import relevant, write_evidence
from epd_conformance.live.suites import Suite
from epd_conformance.oracle import baselines, fault_judges, judges
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.plans.plan import Plan, Request, lengthen
from epd_conformance.report.schema import (
    CellRecord,
    EnvironmentInfo,
    ExpectedRecord,
    ModelInfo,
    Report,
    RunEnd,
    RunInfo,
    RunStart,
    SubjectInfo,
    SuiteInfo,
)
from epd_conformance.report.writer import RESULTS_NAME, ResultsLog, build_report, read_results, write_report
from epd_conformance.topology.spec import Topology
from epd_conformance.verdict import Verdict

MODEL = "tiny"
FEATURES = ("ec_both", "file_store", "kv_disaggregation", "metadata_only", "store_probe")
# A story's clock begins at 1000 seconds and no run takes a year.
STARTED, BASELINE_AT, CELLS_AT, FINISHED = 500.0, 600.0, 1000.0, 30_000_000.0

Change = Callable[[CellEvidence], CellEvidence]


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@dataclass
class MadeRun:
    """Writes a run into a folder.

    `changes`: by cell id, what befalls a cell before it is written down and judged. `only`: the cells that run; all if empty.
    `boots`: the cells before which the stack is booted again, as after a death.
    """

    folder: Path
    suite: Suite
    profile: str = "e-pd"
    mode: str = "certify"
    run_id: str = "r1"
    seed: int = 0
    changes: Mapping[str, Change] = field(default_factory=dict)
    only: frozenset[str] = frozenset()
    boots: frozenset[str] = frozenset()

    def write(self) -> Report:
        start = RunStart(
            suite=SuiteInfo(version="0.1.0", digest=self.suite.digest, catalogue=self.suite.catalogue.digest()),
            run=RunInfo(
                id=self.run_id,
                mode=self.mode,
                profile=self.profile,
                level="full",
                seed=self.seed,
                command=("epd-conformance", "run"),
                started=moment(STARTED),
            ),
            subject=SubjectInfo(name="reference", features=FEATURES),
            environment_class="cpu-v1",
        )
        expected = self.suite.expected(start, MODEL)
        by_topology: dict[str, list[ExpectedRecord]] = defaultdict(list)
        for cell in (cell for cell in expected.cells if not self.only or cell.id in self.only):
            by_topology[cell.topology].append(cell)
        with ResultsLog(self.folder / RESULTS_NAME) as log:
            log.append(start)
            log.append(EnvironmentInfo(models=(ModelInfo(id=MODEL, digest="0" * 64),)))
            log.append(expected)
            for topology, cells in by_topology.items():
                self._topology(log, Layout(Topology.parse(topology)), cells)
            log.append(RunEnd(finished=moment(FINISHED)))
        return rewrite(self.folder, self.suite)

    def _topology(self, log: ResultsLog, layout: Layout, cells: list[ExpectedRecord]) -> None:
        topology = layout.topology.name
        plans: dict[str, Plan] = {}
        cases: dict[str, Case] = {}
        for cell in cells:
            case = self.suite.case(cell.requirement, cell.case)
            assert case is not None
            cases[cell.id] = case
            plans[cell.id] = plan_of(case, self.seed, cell.id)
            if layout.topology.has_kv:  # as if the tokenizer had made every prompt one that cannot be served
                plan = plans[cell.id]
                plans[cell.id] = replace(
                    plan, requests=tuple(map(lengthen, plan.requests)), contrasts=tuple(map(lengthen, plan.contrasts))
                )
        exact = {cell: plan for cell, plan in plans.items() if cases[cell].exact}
        baseline = self._baseline(layout, exact)
        log.append(baseline.line(MODEL))
        stack: Story | None = None
        folder = layout.stack
        journals: dict[str, list[dict[str, Any]]] = {}
        for cell in cells:
            case = cases[cell.id]
            owner = self.suite.catalogue[cell.requirement].owner
            story = Story(case.judge, topology, plans[cell.id], owner=owner)
            if stack is None or cell.id in self.boots:
                later = 0.0 if stack is None else stack.now + 1.0 - CELLS_AT
                folder = f"{layout.stack}-{len(journals) + 1}" if journals else layout.stack
                journals[folder] = [{**event, "t": event["t"] + later} for event in story.before]
                story.now += later
            else:
                story.now, story.sequence = stack.now, stack.sequence
                story.held, story.encoder_holds = stack.held, stack.encoder_holds
            stack, journal = story, journals[folder]
            self._serve(story, case, cell.id, layout)
            evidence = self._evidence(story, case, cell, baseline, journal)
            evidence = self.changes.get(cell.id, lambda same: same)(evidence)
            journal += [dict(event) for event in evidence.during]
            path = write_evidence(self.folder, evidence)
            judgement = judges.judge(evidence)
            if (fault := fault_judges.fault_record(evidence)) is not None:
                log.append(fault)
            log.append(
                CellRecord(
                    **cell.model_dump(),
                    verdict=judgement.verdict,
                    reason=judgement.reason,
                    rung=judgement.rung,
                    blame=judgement.blame,
                    observed="" if judgement.verdict is Verdict.PASS else judgement.observed,
                    evidence=judgement.evidence,
                    artifacts=(path.relative_to(self.folder).as_posix(), *layout.paths(folder)),
                )
            )
        for name, journal in journals.items():
            write_journal(self.folder / "stacks" / name / "journal", journal)

    def _serve(self, story: Story, case: Case, cell: str, layout: Layout) -> None:
        # Request ids are made of the judge's name there, and must differ between cells.
        story.judge = cell
        requests = story.plan.requests
        if case.judge == "stage-error":
            story.facts = {"stage": layout.first_stage(bool(requests[0].images)), "status": 404}
            for request in requests:
                rid = digest_of(f"{cell}/{len(story.answers)}")[:32]
                error = {"stage": story.facts["stage"], "upstream_status": 404, "request_id": rid, "message": "none"}
                started = story.now = story.now + 0.1
                story.answers.append(
                    Answer(
                        request.label,
                        rid,
                        404,
                        body=json.dumps({"error": error}),
                        started=started,
                        streamed=request.stream,
                    )
                )
        elif case.judge == "constructed":
            story.facts = {"servers": layout.connected}
        elif case.judge == "encode-only":
            story.facts = {"blocks": {"encode-0": 1}, "status": 200, "completion_tokens": 0}
            story.prime(requests[0], digest_of(cell)[:32])
        elif case.judge == "both":
            story.send(requests[0], primed=False, direct=True)
            story.held.clear()
            story.facts = {"reset_status": 200}
            story.send(requests[1], direct=True)
        elif case.judge in ("recomputed", "contained", "fails-alone"):
            story.damaged()
        elif case.judge == "in-window":
            story.in_window()
        elif case.judge == "scripted":
            story.scripted()
        elif case.judge == "confined":
            story.confined()
        elif case.judge in (*made_proxied.EXCHANGED, *made_proxied.ANSWERED):
            made_proxied.carry(story, case.judge)
        elif case.judge in ("ended", "text-ended", "named"):
            story.asked_alone()
        elif case.judge == "miss":
            story.send(requests[0], primed=False, direct=not layout.topology.has_kv)
        else:
            for request in requests:
                story.send(request)

    def _evidence(
        self, story: Story, case: Case, cell: ExpectedRecord, baseline: BaselineAnswers, journal: list[dict[str, Any]]
    ) -> CellEvidence:
        digests = {request.digest() for request in (*story.plan.requests, *story.plan.contrasts)}
        keys = {item["id"] for event in story.events if event["ev"] == "request" for item in event["items"]}
        floor = baseline.floor()
        return replace(
            story.evidence(),
            cell=cell.id,
            judge=case.judge,
            baseline={digest: baseline.first(digest) for digest in digests},
            admitted=floor.admitted & digests,
            floor=floor.floor,
            floor_enough=floor.enough,
            before=tuple(relevant(journal, keys)),
        )

    def _baseline(self, layout: Layout, exact: Mapping[str, Plan]) -> BaselineAnswers:
        """The aggregated server three times, and a p-d pair twice whose journal proves its KV."""
        name = layout.topology.name
        offered = {request.digest(): request for request in self.suite.floor_requests(self.seed, name)}
        contrasts: dict[str, Request] = {}
        for cell, plan in exact.items():
            for request in plan.compared:
                offered.setdefault(request.digest(), replace(request, label=f"{cell} {request.label}"))
            contrasts |= {request.digest(): request for request in plan.contrasts}
        clock = iter(range(10**6))

        def ask(request: Request, rid: str = "") -> Answer:
            number = next(clock)
            started = BASELINE_AT + number / 1000
            return good_answer(request, rid=rid or digest_of(f"{name}/{number}")[:32], started=started, seconds=0.0005)

        aggregated: dict[str, list[Answer]] = defaultdict(list)
        for _ in range(self.suite.repetitions):
            for digest, request in offered.items():
                aggregated[digest].append(ask(request))
        for digest, request in contrasts.items():
            if digest not in aggregated:
                aggregated[digest].append(ask(request))
        arms = {"aggregated": dict(aggregated)}
        if layout.pd_journal is not None:
            pair = Story("p-d", "e-p-d", Plan(()))
            events = [
                {**event, "t": STARTED + event["t"] / 1e6} for event in pair.before if event["side"].startswith("kv-")
            ]
            arms["p-d"] = defaultdict(list)
            for _ in range(2):
                for digest, request in offered.items():
                    answer = ask(request)
                    pair.now, pair.events = answer.started, []
                    # So many lines within half a millisecond of the answer's time.
                    pair.decode(request, answer.request_id)
                    events += [{**event, "t": answer.started + n / 1e5} for n, event in enumerate(pair.events)]
                    arms["p-d"][digest].append(answer)
            write_journal(self.folder / layout.pd_journal, events)
        baseline = BaselineAnswers(name, tuple(offered.values()), arms)
        baselines.write(self.folder, baseline)
        return baseline


def rewrite(folder: Path, suite: Suite) -> Report:
    """Make the report from the results once more, all sums with it: what a forger does last."""
    return write_report(folder, build_report(read_results(folder / RESULTS_NAME), suite.catalogue))


def write_journal(folder: Path, events: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = defaultdict(list)
    for event in events:
        files[f"{event['server']}.{event['side']}.1.ndjson"].append(json.dumps(event) + "\n")
    for name, lines in files.items():
        (folder / name).write_text("".join(lines), encoding="utf-8")


# -- forging -----------------------------------------------------------------------------------------------------------


def cell_file(folder: Path, cell: str) -> Path:
    (found,) = [path for path in (folder / "cells").glob("*.json") if json.loads(path.read_text())["cell"] == cell]
    return found


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def change_lines(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> int:
    """Rewrite an ndjson file line by line (None drops one); returns how many lines became others."""
    old = [json.loads(line) for line in path.read_text().splitlines()]
    new = [change(json.loads(json.dumps(line))) for line in old]
    path.write_text("".join(json.dumps(line) + "\n" for line in new if line is not None))
    return sum(one != other for one, other in zip(old, new, strict=True))


def change_results(folder: Path, kind: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Change or drop (None) the data of every line of a kind; one at least must become another."""

    def line(whole: dict[str, Any]) -> dict[str, Any] | None:
        if whole["kind"] != kind:
            return whole
        data = change(whole["data"])
        return None if data is None else {**whole, "data": data}

    assert change_lines(folder / RESULTS_NAME, line), kind


def journals(folder: Path, stack: str) -> Iterator[Path]:
    yield from sorted((folder / "stacks" / stack / "journal").glob("*.ndjson"))
