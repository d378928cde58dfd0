"""`verify`: is this report what its raw evidence gives? For a third party that trusts neither the run nor whoever sends it.

Every verdict is computed again from `cells/*.json`, never from a verdict line; the evidence is held against the journals and
the raw baseline answers; judge, plan and expected set come from the suite of this installation and from nowhere else.
docs/verify.md says what is found by this, and what cannot be.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from jsonschema import Draft202012Validator
from pydantic import ValidationError

from epd_conformance import deviations, observations
from epd_conformance.attachment import ATTACHED, NOT_JOURNALLED
from epd_conformance.catalogue import cell_id
from epd_conformance.catalogue.model import IN_PROCESS, topology_kind
from epd_conformance.connectors.journal import Journal
from epd_conformance.connectors.names import ec_name
from epd_conformance.engine.pool import Pool, pool_path
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.live.layout import cell_path
from epd_conformance.oracle import fault_judges, judges, transport
from epd_conformance.oracle.baselines import FOLDER as BASELINE
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.transport import Roles
from epd_conformance.proxycheck import judges as proxy_judges
from epd_conformance.proxycheck.evidence import ProxyEvidence
from epd_conformance.report import schema, verify_engine, verify_journal, verify_proxy
from epd_conformance.report.redact import redact
from epd_conformance.report.schema import CellRecord, Report
from epd_conformance.report.writer import (
    KINDS,
    REPORT_NAME,
    RESULTS_NAME,
    ResultLines,
    build_report,
    read_results,
    sha256_file,
)
from epd_conformance.verdict import Mode, Outcome, Verdict

if TYPE_CHECKING:
    from epd_conformance.live.layout import Layout
    from epd_conformance.live.suites import Suite

E = TypeVar("E", CellEvidence, BaselineAnswers)

# How a verdict `error` comes about where there is nothing to judge: the test or the servers broke.
WITHOUT_EVIDENCE = frozenset({"harness", "stack", "usage"})
# How a cell against attached servers is left out: it claims nothing, so there is nothing to compute again.
REFUSALS = frozenset({(Verdict.COULD_NOT_RUN, ATTACHED), (Verdict.INCONCLUSIVE, NOT_JOURNALLED)})
# Each difference between two reports is a problem of its own, but a report of another run differs everywhere.
MOST_DIFFERENCES = 10
# Between the wall clock that says when a request was sent and the monotonic one that says how long it took.
CLOCK_SLACK_S = 0.05


class Kind(StrEnum):
    """What is wrong, by the place where somebody has to look."""

    SCHEMA = "schema"  # a file cannot be read as what it is
    SUITE = "suite"  # made with another version of the suite: this one cannot vouch for it
    REPORT = "report"  # report.json is not what the results give
    VERDICT = "verdict"  # a result is not what its evidence gives
    EVIDENCE = "evidence"  # the evidence is not there, or is not that of this cell
    JOURNAL = "journal"  # evidence and journals differ
    BASELINE = "baseline"  # noise floor, admitted prompts or baseline answers are not what was measured
    EXPECTED = "expected"  # cells are missing, or were never asked for
    ARTIFACT = "artifact"  # a file is missing, changed, or not listed
    OUTCOME = "outcome"  # the outcome is another one


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `where` names a cell or a file, `words` is a clause for a person."""

    kind: Kind
    where: str
    words: str

    def to_json(self) -> dict[str, str]:
        return {"kind": str(self.kind), "where": self.where, "words": self.words}


@dataclass(frozen=True)
class Verification:
    """What `verify` found. `checked` counts what was looked at.

    `outcome`: that of the certified owner as computed again; None where it could not be. `claim`: subject and environment
    class, for the sentence that sums up.
    """

    problems: tuple[Problem, ...]
    checked: Mapping[str, int]
    outcome: Outcome | None = None
    claim: tuple[str, str] = ("", "")

    @property
    def ok(self) -> bool:
        """Whether the report is what its evidence gives; says nothing about how good the outcome is."""
        return not self.problems

    def lines(self) -> list[str]:
        """One line a problem, then what was looked at, then the sum."""
        found = [f"{problem.kind}: {problem.where}: {problem.words}" for problem in self.problems]
        found.append("checked: " + ", ".join(f"{count} {name}" for name, count in self.checked.items()))
        subject, environment = self.claim
        if self.ok:
            return [*found, f"verified: the evidence gives {subject}: {self.outcome} on {environment}"]
        kinds = Counter(problem.kind for problem in self.problems)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        word = "problem" if len(self.problems) == 1 else "problems"
        return [*found, f"not verified: {len(self.problems)} {word} ({counts})"]

    def to_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "outcome": None if self.outcome is None else str(self.outcome),
            "problems": [problem.to_json() for problem in self.problems],
            "checked": dict(self.checked),
        }


def verify(directory: Path, suite: Suite | None = None) -> Verification:
    """Compute everything again that a run's folder claims.

    Reads the folder and the suite (that of this installation unless given), and changes nothing. Raises UsageError where the
    folder holds no report or no results: there is nothing to verify.
    """
    for name in (REPORT_NAME, RESULTS_NAME):
        if not (directory / name).is_file():
            raise UsageError(f"{directory} holds no {name}: give the folder of a run (what --out named)")
    if suite is None:
        # Not above: the live layer touches processes, and deciding must not need it.
        from epd_conformance.live import suites

        suite = suites.installed()
    return _Check(directory.resolve(), suite).run()


@dataclass
class _Check:
    directory: Path
    suite: Suite
    problems: list[Problem] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    evidence: dict[str, CellEvidence] = field(default_factory=dict)
    """By cell, in the order in which they ran."""
    judged: dict[str, Judgement] = field(default_factory=dict)
    pools: dict[str, Pool | None] = field(default_factory=dict)
    """What was carried out in each layer without servers."""

    def run(self) -> Verification:
        report, raw = self._report()
        try:
            results = read_results(self.directory / RESULTS_NAME)
            starts, self.expected = results.all(schema.RunStart), results.all(schema.ExpectedSet)
            self.records, self.floors = results.all(CellRecord), results.all(schema.NoiseFloor)
            self.ends = results.all(schema.RunEnd)
            self.environments = results.all(schema.EnvironmentInfo)
        except UsageError as error:
            self._say(Kind.SCHEMA, RESULTS_NAME, str(error))
            return self._done(None)
        if len(starts) != 1:
            self._say(Kind.SCHEMA, RESULTS_NAME, f"holds {len(starts)} runs where it must hold one")
            return self._done(None)
        (self.start,) = starts
        self.attached = any(environment.details.get("attached") is True for environment in self.environments)
        same_suite = self._suite()
        self._rebuilt(results, report, raw, same_suite)
        # Another version's catalogue and cases say nothing about what this run had to show.
        self.wanted = self._computed_set() if same_suite else None
        self._expected_set()
        for record in self.records:
            self._cell(record)
        self._leftovers()
        with self._whole(Kind.EVIDENCE, "cells"):
            self._times()
            self._faults(results.all(schema.FaultRecord))
        for topology in dict.fromkeys(record.topology for record in self.records):
            if topology_kind(topology) not in IN_PROCESS:
                self._topology(topology)
        with self._whole(Kind.JOURNAL, "stacks"):
            self._subject(results, report)
        if report is not None:
            self._artifacts(report)
        return self._done(self._outcome(results, report))

    def _say(self, kind: Kind, where: str, words: str) -> None:
        self.problems.append(Problem(kind, where, words))

    def _done(self, outcome: Outcome | None) -> Verification:
        names = ("cells", "answers", "journal lines", "baseline answers", "artifacts")
        counts = {name: self.checked[name] for name in names}
        for name in ("plans", "checks", "errors without evidence", "cells not carried out"):
            if self.checked[name]:
                counts[name] = self.checked[name]
        start: schema.RunStart | None = getattr(self, "start", None)
        claim = (start.subject.name, str(start.environment_class)) if start is not None else ("", "")
        return Verification(tuple(dict.fromkeys(self.problems)), counts, outcome, claim)

    # -- report and results ------------------------------------------------------------------------------------------

    def _report(self) -> tuple[Report | None, dict[str, Any]]:
        """report.json, held against the exported schema and the models; None where it does not fit."""
        try:
            raw = json.loads((self.directory / REPORT_NAME).read_bytes())
        except (ValueError, OSError) as error:
            self._say(Kind.SCHEMA, REPORT_NAME, f"cannot be read: {error}")
            return None, {}
        exported = json.loads(schema.SCHEMA_FILE.read_text(encoding="utf-8"))
        for wrong in sorted(Draft202012Validator(exported).iter_errors(raw), key=str)[:MOST_DIFFERENCES]:
            self._say(Kind.SCHEMA, REPORT_NAME, f"{wrong.json_path}: {wrong.message[:200]}")
        try:
            return Report.model_validate(raw), raw
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            self._say(Kind.SCHEMA, REPORT_NAME, f"`{where}`: {first['msg']}")
            return None, raw if isinstance(raw, dict) else {}

    def _suite(self) -> bool:
        """Whether suite and catalogue of the run are those of this installation."""
        info = self.start.suite
        differing = [
            name
            for name, theirs, ours in (
                ("suite", info.digest, self.suite.digest),
                ("catalogue", info.catalogue, self.suite.catalogue.digest()),
            )
            if theirs != ours
        ]
        for name in differing:
            self._say(
                Kind.SUITE,
                RESULTS_NAME,
                f"made with another suite version ({info.version}): its {name} digest is not the one of this installation; "
                "verify with the version that made it",
            )
        return not differing

    def _rebuilt(self, results: ResultLines, report: Report | None, raw: Mapping[str, Any], same_suite: bool) -> None:
        try:
            rebuilt = build_report(self._for_this_catalogue(results), self.suite.catalogue)
        except UsageError as error:
            self._say(Kind.REPORT, RESULTS_NAME, f"no report can be made from it: {error}")
            return
        if report is None:
            return
        ours = redact(rebuilt.model_copy(update={"suite": self.start.suite}).to_disk())
        theirs = dict(raw)
        # The sums are compared with the files; warnings about files are added when a report is written.
        for name in ("artifacts", "warnings", *(() if same_suite else ("requirements",))):
            ours.pop(name)
            theirs.pop(name)
        differences = list(_differences(theirs, ours, ""))
        for path, said, given in differences[:MOST_DIFFERENCES]:
            self._say(Kind.REPORT, REPORT_NAME, f"`{path}` is {said} where the results give {given}")
        if len(differences) > MOST_DIFFERENCES:
            more = len(differences) - MOST_DIFFERENCES
            self._say(Kind.REPORT, REPORT_NAME, f"{more} more differences: it is not the report of these results")
        for warning in rebuilt.warnings:
            if redact(warning) not in report.warnings:
                self._say(Kind.REPORT, REPORT_NAME, f"the warning is missing: {warning}")

    def _for_this_catalogue(self, results: ResultLines) -> ResultLines:
        """The results under the digest of this catalogue: that it differs is said already, and the rest is still looked at."""
        mine = self.suite.catalogue.digest()

        def change(data: dict[str, Any]) -> dict[str, Any]:
            return {**data, "suite": {**data["suite"], "catalogue": mine}}

        return _changed(results, schema.RunStart, change)

    def _subject(self, results: ResultLines, report: Report | None) -> None:
        """What the journals say about the subject itself: who was configured, and what has to be warned of."""
        if self.attached:
            return  # nobody asked the subject for anything, and the journals lie elsewhere
        told = {
            (one.topology, str(one.role)): ec_name(
                str(one.config.get("ec_connector")), str(one.config.get("ec_connector_module_path") or "")
            )
            for one in results.all(schema.ConfigurationRecord)
        }
        for topology in dict.fromkeys(cell.topology for cell in self.evidence.values()):
            for folder in self._journals(self.suite.layout(topology)):
                events = Journal(self.directory / folder).read()
                roles = {event["ec_role"] for event in events if event["ev"] == "init" and event.get("ec_role")}
                for role in sorted(roles - {role for name, role in told if name == topology}):
                    self._say(Kind.EVIDENCE, RESULTS_NAME, f"holds no configuration of {role} in {topology}, which ran")
                for event in events:
                    name = told.get((topology, str(event.get("ec_role"))))
                    if event["ev"] == "init" and name is not None and event.get("asked", name) != name:
                        words = (
                            f"{event['server']} ran {event['asked']}, and the results say that {name} was configured"
                        )
                        self._say(Kind.JOURNAL, folder, words)
        if report is None or not self.ends:
            return  # a run that crashed had no time to warn
        declared = [Feature(name) for name in self.start.subject.features]
        journals = [Journal(folder).read() for folder in sorted(self.directory.glob(observations.JOURNALS))]
        for warning in observations.warnings(declared, journals):
            if redact(warning) not in report.warnings:
                self._say(Kind.REPORT, REPORT_NAME, f"the warning is missing: {warning}")

    # -- expected set ------------------------------------------------------------------------------------------------

    def _computed_set(self) -> schema.ExpectedSet | None:
        models = sorted({cell.model for part in self.expected for cell in part.cells if cell.model})
        if len(models) > 1:
            self._say(Kind.EXPECTED, RESULTS_NAME, f"the expected cells name several models: {', '.join(models)}")
        try:
            return self.suite.expected(self.start, models[0] if models else "")
        except (UsageError, ValueError) as error:
            self._say(Kind.EXPECTED, RESULTS_NAME, f"the expected set cannot be computed: {error}")
            return None

    def _expected_set(self) -> None:
        listed = {cell.id: cell for part in self.expected for cell in part.cells}
        wanted = listed
        if self.wanted is not None:
            wanted = {cell.id: cell for cell in self.wanted.cells}
            for cell in sorted(wanted.keys() - listed.keys()):
                self._say(Kind.EXPECTED, cell, "the suite asks for this cell, and the expected set leaves it out")
            for cell in sorted(listed.keys() - wanted.keys()):
                self._say(Kind.EXPECTED, cell, "stands in the expected set, and the suite has no such cell")
            for cell in sorted(wanted.keys() & listed.keys()):
                if wanted[cell] != listed[cell]:
                    self._say(Kind.EXPECTED, cell, "its axes in the expected set do not fit its id")
            gaps = {gap for part in self.expected for gap in part.not_verified}
            for gap in (gap for gap in self.wanted.not_verified if gap not in gaps):
                self._say(Kind.EXPECTED, gap.requirement, f"not told that it is not verified: {gap.detail}")
            for gap in sorted(gaps - set(self.wanted.not_verified), key=str):
                self._say(Kind.EXPECTED, gap.requirement, f"said to be not verified, for no reason: {gap.detail}")
        ran = Counter(record.id for record in self.records)
        for cell, times in ran.items():
            if times > 1:
                self._say(Kind.EXPECTED, cell, f"has {times} results, and evidence for one")
            if cell not in wanted:
                self._say(Kind.EXPECTED, cell, "has a result, and is not expected")
        for environment in self.environments:
            gpus = [name.startswith("cuda") for name in environment.devices]
            if gpus and any(gpus) != (self.start.environment_class == "cuda"):
                devices = ", ".join(environment.devices)
                self._say(
                    Kind.EXPECTED, RESULTS_NAME, f"a run on {devices}, and its class is {self.start.environment_class}"
                )
        if topology_kind(self.start.run.profile) == "proxy":
            for words in verify_proxy.subject_problems(self.start):
                self._say(Kind.EXPECTED, RESULTS_NAME, words)
        if self.start.run.mode is Mode.CERTIFY and self.attached:
            self._say(Kind.EXPECTED, RESULTS_NAME, "a certificate of attached servers: nobody could pin what they run")
        if self.start.run.mode is Mode.CERTIFY:
            if self.start.run.level != "full":
                self._say(
                    Kind.EXPECTED, RESULTS_NAME, f"a certificate of level {self.start.run.level}: certify takes full"
                )
            for words in self._not_pinned():
                self._say(Kind.EXPECTED, RESULTS_NAME, words)
            if self.ends and not self.ends[-1].interrupted:
                for cell in sorted(wanted.keys() - ran.keys()):
                    self._say(Kind.EXPECTED, cell, "has no result, in a certification that came to its end")

    def _not_pinned(self) -> Iterator[str]:
        """What a certification would have refused to start with."""
        if self.start.run.seed != schema.CERTIFY_SEED:
            yield f"a certificate of seed {self.start.run.seed}: certify takes {schema.CERTIFY_SEED}"
        if self.start.known_deviations:
            yield "a certificate with known deviations: certify excuses nothing"
        if self.start.suite.modified:
            yield "a certificate of a modified suite"
        models = [model for environment in self.environments for model in environment.models]
        if topology_kind(self.start.run.profile) == "proxy":
            return  # fakes run no model
        if not models or not all(model.digest for model in models):
            yield "a certificate without the digest of its model"
        for model in models:
            if (known := self.suite.model_digest(model.id)) is not None and model.digest != known:
                yield f"a certificate of a model that is called {model.id} and is not the zoo's: its digest is another"

    # -- cells -------------------------------------------------------------------------------------------------------

    def _cell(self, record: CellRecord) -> None:
        self.checked["cells"] += 1
        if topology_kind(record.topology) == "proxy":
            self._proxy_cell(record)
            return
        if record.topology in IN_PROCESS:
            self._engine_cell(record)
            return
        try:
            if cell_id(record.requirement, record.topology, record.model, record.case) != record.id:
                raise UsageError("its requirement, topology, model and case do not fit its id")
            layout = self.suite.layout(record.topology)
        except UsageError as error:
            self._say(Kind.SCHEMA, record.id, str(error))
            return
        paths = [path for path in record.artifacts if path.startswith("cells/")]
        if not paths and record.verdict is Verdict.ERROR and record.reason in WITHOUT_EVIDENCE:
            self.checked["errors without evidence"] += 1
            return
        if not paths and self._refused(record):
            self.checked["cells not carried out"] += 1
            judgement = self.judged[record.id] = Judgement(record.excused or record.verdict, record.reason)
            if self._decided(record.id, judgement).verdict is not record.verdict:
                words = f"is {record.verdict} in the result, and no list of the run excuses it"
                self._say(Kind.VERDICT, record.id, words)
            return
        if len(paths) != 1:
            self._say(Kind.EVIDENCE, record.id, f"the result says {record.verdict} and names no evidence of the cell")
            return
        with self._whole(Kind.EVIDENCE, record.id):
            cell = self._read(paths[0], CellEvidence.from_json)
            if cell.cell != record.id:
                self._say(Kind.EVIDENCE, record.id, f"{paths[0]} is the evidence of {cell.cell}")
                return
            self.checked["answers"] += len(cell.answers)
            cell = self._bound(record, cell, layout)
            judgement = judges.judge(cell)
            self.evidence[record.id] = cell
            self.judged[record.id] = judgement
            self._compared(record, judgement)

    def _engine_cell(self, record: CellRecord) -> None:
        """A cell of a layer without servers: judged by everything that the run carried out there."""
        named = [path for path in record.artifacts if path.startswith("cells/")]
        if not named and record.verdict is Verdict.ERROR and record.reason in WITHOUT_EVIDENCE:
            self.checked["errors without evidence"] += 1
            return
        path = pool_path(record.topology)
        if named != [cell_path(record.id)] or path not in record.artifacts:
            words = f"the result says {record.verdict} and does not name {cell_path(record.id)} and {path}"
            self._say(Kind.EVIDENCE, record.id, words)
            return
        with self._whole(Kind.EVIDENCE, record.id):
            case = self.suite.engine_case(record.requirement, record.case)
            if case is None or record.requirement not in self.suite.catalogue:
                self._say(Kind.SUITE, record.id, "the suite of this installation has no such case")
                return
            written = self._json(named[0])
            told = {"cell": record.id, "layer": record.topology, "check": case.check, "pool": path}
            for name, value in told.items():
                if written[name] != value:
                    words = f"its {name} is {written[name]} in its evidence, and must be {value}"
                    self._say(Kind.EVIDENCE, record.id, words)
            pool = self._pool(record.topology)
            if pool is None:
                return
            judgement = self.judged[record.id] = pool.judge(
                record.requirement, case.check, self._asked(record.topology)
            )
            self._compared(record, judgement)
            for words in verify_engine.shrunk_problems(written, record.requirement, self._asked(record.topology)):
                self._say(Kind.EVIDENCE, record.id, words)

    def _proxy_cell(self, record: CellRecord) -> None:
        """A cell of a proxy before fake servers: judged by what the fakes saw and what the clients got."""
        named = [path for path in record.artifacts if path.startswith("cells/")]
        if not named and record.verdict is Verdict.ERROR and record.reason in WITHOUT_EVIDENCE:
            self.checked["errors without evidence"] += 1
            return
        if named != [cell_path(record.id)]:
            words = f"the result says {record.verdict} and does not name {cell_path(record.id)}"
            self._say(Kind.EVIDENCE, record.id, words)
            return
        with self._whole(Kind.EVIDENCE, record.id):
            case = self.suite.proxy_case(record.requirement, record.case, record.topology)
            if case is None or record.requirement not in self.suite.catalogue:
                self._say(Kind.SUITE, record.id, "the suite of this installation has no such case")
                return
            cell = ProxyEvidence.from_json(self._json(named[0]))
            for words in verify_proxy.problems(cell, case, record.id, record.topology, self.start):
                self._say(Kind.EVIDENCE, record.id, words)
            self.checked["answers"] += len(cell.got)
            cell = replace(cell, judge=case.judge, plan=case.plan)
            judgement = self.judged[record.id] = proxy_judges.judge(cell)
            self._compared(record, judgement)

    def _asked(self, layer: str) -> frozenset[str]:
        """The requirements that the run shows in a layer, as computed here where that can be done."""
        parts = [self.wanted] if self.wanted is not None else self.expected
        return frozenset(cell.requirement for part in parts for cell in part.cells if cell.topology == layer)

    def _pool(self, layer: str) -> Pool | None:
        """What the run carried out in a layer, held against what it had to carry out; None where it is not there."""
        if layer not in self.pools:
            path = pool_path(layer)
            self.pools[layer] = None
            with self._whole(Kind.EVIDENCE, path):
                pool = self.pools[layer] = Pool.read(self._inside(path))
                self.checked["plans"] += len(pool.plans)
                self.checked["checks"] += len(pool.checks)
                certifies = self.start.run.mode is Mode.CERTIFY
                for words in verify_engine.problems(pool, layer, self.start, self._asked(layer), certifies):
                    self._say(Kind.EVIDENCE, path, words)
        return self.pools[layer]

    def _refused(self, record: CellRecord) -> bool:
        """Whether a cell was not carried out since its servers were attached, and nothing is claimed of it."""
        return self.attached and (record.excused or record.verdict, record.reason) in REFUSALS

    def _bound(self, record: CellRecord, cell: CellEvidence, layout: Layout) -> CellEvidence:
        """The evidence with what it must not choose itself put right: judge, owner and roles."""

        def fits(name: str, theirs: object, ours: object) -> None:
            if theirs != ours:
                self._say(Kind.EVIDENCE, record.id, f"{name} is {theirs} in its evidence, and must be {ours}")

        fits("the topology", cell.topology, record.topology)
        fits("the part that each server plays", cell.roles.to_json(), layout.roles.to_json())
        cell = replace(cell, roles=layout.roles)
        case = self.suite.case(record.requirement, record.case)
        if case is None or record.requirement not in self.suite.catalogue:
            self._say(Kind.SUITE, record.id, "the suite of this installation has no such case")
            return cell
        owner = self.suite.catalogue[record.requirement].owner
        fits("the judge", cell.judge, case.judge)
        fits("the owner", str(cell.owner), str(owner))
        if not self.suite.drawn(case, self.start.run.seed, record.id, record.topology, cell.plan):
            seed = self.start.run.seed
            self._say(Kind.EVIDENCE, record.id, f"its plan is not the one that the suite draws for seed {seed}")
        asked = [request.stream for request in cell.plan.requests]
        if cell.answers and [answer.streamed for answer in cell.answers] != asked:
            self._say(Kind.EVIDENCE, record.id, "an answer was streamed where the plan says otherwise, or the reverse")
        cell = replace(cell, judge=case.judge, owner=owner)
        for name, value in self._facts(cell, layout).items():
            fits(f"the fact {name!r}", cell.facts.get(name), value)
        return cell

    def _facts(self, cell: CellEvidence, layout: Layout) -> dict[str, Any]:
        """Those facts of a cell that follow from what else is known."""
        if cell.judge == "constructed":
            return {"servers": layout.connected}
        if cell.judge == "stage-error":
            first = cell.plan.requests[0] if cell.plan.requests else None
            return {"stage": layout.first_stage(bool(first and first.images)), "status": 404}
        if cell.judge == "encode-only":
            blocks = {
                event["server"]: event["blocks"]
                for event in (*cell.before, *cell.during)
                if event["ev"] == "init" and event["side"] == "scheduler" and event["server"] in layout.roles.encode
            }
            return {"blocks": blocks}
        return {}

    def _compared(self, record: CellRecord, judgement: Judgement) -> None:
        decision = self._decided(record.id, judgement)
        pairs = [
            ("verdict", record.verdict, decision.verdict),
            ("excused", record.excused, decision.excused),
            ("excusedBy", list(record.excused_by), list(decision.by)),
            ("reason", record.reason, judgement.reason),
            ("rung", record.rung, judgement.rung),
            ("blame", record.blame, judgement.blame),
            ("observed", record.observed, redact("" if judgement.verdict is Verdict.PASS else judgement.observed)),
            *(
                (f"evidence.{name}", getattr(record.evidence, name), getattr(judgement.evidence, name))
                for name in schema.Evidence.model_fields
            ),
        ]
        for name, said, given in pairs:
            if said != given:
                because = f" ({judgement.reason})" if name == "verdict" and judgement.reason else ""
                self._say(
                    Kind.VERDICT,
                    record.id,
                    f"{name} is {_shown(said)} in the result, and the evidence gives {_shown(given)}{because}",
                )

    def _decided(self, cell: str, judgement: Judgement) -> deviations.Decision:
        """The verdict that a cell has to have: the judge's, as the lists of the run leave it."""
        text = deviations.words(judgement.reason, judgement.observed, judgement.divergence)
        return deviations.decide(self.start.known_deviations, cell, judgement.verdict, text, self.start.day)

    def _leftovers(self) -> None:
        named = {path for record in self.records for path in record.artifacts}
        for path in sorted((self.directory / "cells").glob("*.json")):
            name = path.relative_to(self.directory).as_posix()
            if name not in named:
                self._say(Kind.EVIDENCE, name, "lies there, and no result names it: the result of a cell was removed")

    def _times(self) -> None:
        """No answer may stand in two places, or come from outside of the run, or of its turn."""
        began = self.start.run.started.timestamp()
        ended = self.ends[-1].finished.timestamp() if self.ends else float("inf")
        seen: dict[str, str] = {}
        previous: dict[str, tuple[str, float]] = {}
        for cell in self.evidence.values():
            for index, answer in enumerate(cell.answers):
                if seen.setdefault(answer.request_id, cell.cell) is not cell.cell:
                    self._say(Kind.EVIDENCE, cell.cell, f"an answer of it is one of {seen[answer.request_id]}")
                if index not in cell.plan.together:
                    after, turn = previous.get(cell.topology, ("", began))
                if answer.started < turn - CLOCK_SLACK_S or answer.started + answer.seconds > ended + CLOCK_SLACK_S:
                    outside = f"before that to {after} had come" if after else "outside of the time of the run"
                    self._say(Kind.EVIDENCE, cell.cell, f"request {answer.label!r} was sent {outside}")
                # Requests that are sent at once have one turn, which ends with the last of them.
                last = previous[cell.topology][1] if index in cell.plan.together else 0.0
                previous[cell.topology] = (cell.cell, max(last, answer.started + answer.seconds))
                # What is primed by hand is sent when its object is ready.
                primed = index in cell.plan.primed
                if any(
                    event["t"]
                    < (turn - CLOCK_SLACK_S if primed and event["server"] in cell.roles.encode else answer.started)
                    for event in cell.during
                    if _names(event, answer.request_id)
                ):
                    self._say(Kind.EVIDENCE, cell.cell, f"request {answer.label!r} is in a journal before it was sent")

    # -- journals and baselines --------------------------------------------------------------------------------------

    def _faults(self, told: Sequence[schema.FaultRecord]) -> None:
        """How often each fault was done and met, by the evidence, against what the results say."""
        given = [record for cell in self.evidence.values() if (record := fault_judges.fault_record(cell)) is not None]
        if _fault_counts(given) != _fault_counts(told):
            words = f"the faults are {_fault_counts(told)}, and the evidence gives {_fault_counts(given)}"
            self._say(Kind.EVIDENCE, RESULTS_NAME, words)

    def _topology(self, topology: str) -> None:
        cells = [cell for cell in self.evidence.values() if cell.topology == topology]
        if not cells:
            return
        layout = self.suite.layout(topology)
        last = max((answer.started + answer.seconds for cell in cells for answer in cell.answers), default=0.0)
        broken = any(
            record.topology == topology and record.id not in self.evidence and not self._refused(record)
            for record in self.records
        )
        # Attached servers, and their journals, are older than the run.
        began = self.start.run.started.timestamp() if self.attached else 0.0
        cut_short = not self.ends or self.ends[-1].interrupted
        ran = {cell.cell: self._journal_of(cell.cell, layout) for cell in cells}
        for folder in sorted({*self._journals(layout), *ran.values()}):
            files = self._journal_files(folder)
            here = [cell for cell in cells if ran[cell.cell] == folder]
            if not files and any(cell.during or cell.before for cell in here):
                self._say(Kind.JOURNAL, folder, "holds no journal: the lines in the evidence cannot be looked up")
                continue
            with self._whole(Kind.JOURNAL, folder):
                for cell, words in verify_journal.compare(
                    files,
                    here,
                    self.suite.relevant,
                    lambda event: broken or event["t"] < began or (cut_short and event["t"] > last),
                ):
                    self._say(Kind.JOURNAL, cell or folder, words)
        path = f"{BASELINE}/{topology}.json"
        if not (self.directory / path).is_file():
            self._say(Kind.BASELINE, path, "is missing: the noise floor and the baseline's answers cannot be checked")
            return
        with self._whole(Kind.BASELINE, path):
            self._baseline(path, self._read(path, BaselineAnswers.from_json), cells, layout)

    def _journals(self, layout: Layout) -> list[str]:
        """The journal folders of all stacks under test of a topology that are there."""
        found = (path.relative_to(self.directory).as_posix() for path in self.directory.glob("*/*/journal"))
        return [path for path in found if layout.is_journal(path)]

    def _journal_of(self, cell: str, layout: Layout) -> str:
        """The journal of the stack that a cell ran on, as its result names it."""
        record = next(record for record in self.records if record.id == cell)
        named = [path for path in record.artifacts if layout.is_journal(path)]
        return named[0] if named else layout.paths(layout.stack)[0]

    def _journal_files(self, folder: str) -> dict[str, list[dict[str, Any]]]:
        files: dict[str, list[dict[str, Any]]] = {}
        with self._whole(Kind.JOURNAL, folder):
            files = verify_journal.read_files(self.directory / folder)
            for name, words in verify_journal.broken_files(files):
                self._say(Kind.JOURNAL, f"{folder}/{name}", words)
        self.checked["journal lines"] += sum(map(len, files.values()))
        return files

    def _baseline(self, path: str, baseline: BaselineAnswers, cells: Sequence[CellEvidence], layout: Layout) -> None:
        topology = layout.topology.name
        say = self._say
        if baseline.topology != topology:
            say(Kind.BASELINE, path, f"is that of {baseline.topology}")
        arms = ["aggregated", "p-d"] if layout.topology.has_kv else ["aggregated"]
        if sorted(baseline.arms) != arms:
            say(Kind.BASELINE, path, f"has the arms {', '.join(baseline.arms)}, and must have {', '.join(arms)}")
        self._offered(path, baseline, cells, topology)
        every = [answer for arm in baseline.arms.values() for runs in arm.values() for answer in runs]
        self.checked["baseline answers"] += len(every)
        used = Counter(answer.request_id for answer in every)
        used.update(answer.request_id for cell in cells for answer in cell.answers)
        if any(count > 1 for count in used.values()):
            say(Kind.BASELINE, path, "the answer to one request stands in two places")
        asked = max((answer.started + answer.seconds for answer in every), default=0.0)
        first = min((answer.started for cell in cells for answer in cell.answers), default=float("inf"))
        if asked > first + CLOCK_SLACK_S or any(a.started < self.start.run.started.timestamp() for a in every):
            say(Kind.BASELINE, path, "was not asked within this run and before the first cell")
        if layout.pd_journal is not None:
            baseline = self._proven(path, baseline, layout.pd_journal)
        floor = baseline.floor()
        lines = [line for line in self.floors if line.baseline == topology]
        if [line.model_copy(update={"model": ""}) for line in lines] != [baseline.line("")]:
            measured = f"the baseline's answers give {floor.words()}"
            told = "; ".join(
                f"{line.max_logprob_delta:.2g} nats over {line.runs} repetitions, {len(line.admitted)} admitted"
                for line in lines
            )
            say(Kind.BASELINE, topology, f"{measured}, and the results say {told or 'nothing'}")
        for cell in cells:
            digests = {request.digest() for request in (*cell.plan.requests, *cell.plan.contrasts)}
            if (cell.floor, cell.floor_enough) != (floor.floor, floor.enough):
                say(
                    Kind.BASELINE,
                    cell.cell,
                    f"was judged with a noise floor of {cell.floor:.2g}, not of {floor.floor:.2g}",
                )
            if cell.admitted != floor.admitted & digests:
                say(
                    Kind.BASELINE,
                    cell.cell,
                    "the prompts that its evidence admits are not those that the baseline admits",
                )
            if cell.baseline != {digest: baseline.first(digest) for digest in digests}:
                say(Kind.BASELINE, cell.cell, f"its baseline answers are not those of {path}")

    def _offered(self, path: str, baseline: BaselineAnswers, cells: Sequence[CellEvidence], topology: str) -> None:
        """The prompts of the noise floor: the fixed ones and those of the exact cells, no more and no fewer."""
        asked = {request.digest(): request for request in baseline.offered}
        fixed = {request.digest() for request in self.suite.floor_requests(self.start.run.seed, topology)}
        exact = {
            request.digest()
            for cell in cells
            if (case := self._case(cell.cell)) is not None and case.exact
            for request in cell.plan.compared
        }
        if missing := (fixed | exact) - asked.keys():
            self._say(Kind.BASELINE, path, f"{len(missing)} prompts that are compared exactly were never offered")
        # A cell that broke has offered its prompts all the same.
        broken = [cell.id for part in self.expected for cell in part.cells if cell.id not in self.evidence]
        for digest in asked.keys() - fixed - exact:
            if not asked[digest].label.startswith(tuple(f"{cell} " for cell in broken)):
                self._say(Kind.BASELINE, path, f"{asked[digest].label!r} was offered, and is the prompt of no cell")
        for digest in asked:
            runs = len(baseline.arms.get("aggregated", {}).get(digest, ()))
            if runs != self.suite.repetitions:
                self._say(
                    Kind.BASELINE, path, f"{asked[digest].label!r} was asked {runs} times, not {self.suite.repetitions}"
                )

    def _case(self, cell: str) -> Any:
        record = next(record for record in self.records if record.id == cell)
        return self.suite.case(record.requirement, record.case)

    def _proven(self, path: str, baseline: BaselineAnswers, folder: str) -> BaselineAnswers:
        """The baseline with proof of KV of the p-d arm looked up in its journal; what is not proven there is not proven."""
        files = self._journal_files(folder)
        events = sorted((event for lines in files.values() for event in lines), key=lambda event: float(event["t"]))
        answers = sorted(
            ((answer, digest) for digest, runs in baseline.arms.get("p-d", {}).items() for answer in runs),
            key=lambda pair: pair[0].started,
        )
        roles = Roles(decode=frozenset({"decode-0"}))
        unproven = dict(baseline.unproven)
        before = [event for event in events if not answers or event["t"] < answers[0][0].started]
        position = len(before)
        for number, (answer, digest) in enumerate(answers):
            stop = answers[number + 1][0].started if number + 1 < len(answers) else float("inf")
            start = position
            while position < len(events) and events[position]["t"] < stop:
                position += 1
            problem = transport.kv_transfer(before, events[start:position], answer.request_id, roles).problem
            if problem is not None and digest not in unproven:
                unproven[digest] = f"the p-d baseline: {problem}"
                self._say(Kind.BASELINE, path, f"the p-d answer to {answer.label!r} is not proven: {problem}")
        return replace(baseline, unproven=unproven)

    # -- files and sum -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _whole(self, kind: Kind, where: str) -> Iterator[None]:
        """A look at evidence that may be damaged. What somebody changed can break any code, so everything is caught here."""
        try:
            yield
        except Exception as error:
            self._say(kind, where, f"is damaged: {type(error).__name__}: {error}")

    def _read(self, path: str, parse: Callable[[Mapping[str, Any]], E]) -> E:
        """A file of the evidence."""
        return parse(self._json(path))

    def _json(self, path: str) -> Any:
        return json.loads(self._inside(path).read_text(encoding="utf-8"))

    def _inside(self, path: str) -> Path:
        """The file of that name; raises ValueError where it is not there, or elsewhere."""
        file = self.directory / path
        if not file.resolve().is_relative_to(self.directory):
            raise ValueError(f"{path} leads out of the folder")
        if not file.is_file():
            raise ValueError(f"{path} is not there")
        return file

    def _artifacts(self, report: Report) -> None:
        listed = {artifact.path for artifact in report.artifacts}
        for artifact in report.artifacts:
            self.checked["artifacts"] += 1
            file = self.directory / artifact.path
            if not file.resolve().is_relative_to(self.directory):
                self._say(Kind.ARTIFACT, artifact.path, "leads out of the folder")
            elif not file.is_file():
                self._say(Kind.ARTIFACT, artifact.path, "is listed, and is not there")
            elif file.stat().st_size != artifact.bytes:
                size = file.stat().st_size
                self._say(Kind.ARTIFACT, artifact.path, f"has {size} bytes where the report says {artifact.bytes}")
            elif sha256_file(file) != artifact.sha256:
                self._say(Kind.ARTIFACT, artifact.path, "was changed: its SHA-256 is not the one in the report")
        named = {RESULTS_NAME}
        for record in self.records:
            named.update(record.artifacts)
            if record.id in self.evidence:
                layout = self.suite.layout(record.topology)
                named.update((*layout.paths(layout.stack), *self._journals(layout)))
        needed = set(self._files(named))
        for path in sorted(needed - listed):
            self._say(Kind.ARTIFACT, path, "is evidence, and the report does not list it")

    def _files(self, paths: Iterable[str]) -> Iterator[str]:
        """The files that paths of the report name, folders opened; as `write_report` lists them."""
        for path in paths:
            whole = self.directory / path
            if whole.is_dir():
                found = (file for file in whole.rglob("*") if file.is_file() and not file.is_symlink())
                yield from (file.relative_to(self.directory).as_posix() for file in found)
            elif whole.is_file():
                yield path

    def _outcome(self, results: ResultLines, report: Report | None) -> Outcome | None:
        """The outcome of the certified owner, with every verdict and the expected set as computed here."""

        def change(data: dict[str, Any]) -> dict[str, Any]:
            judgement = self.judged.get(data["id"])
            if judgement is None:
                # What nothing shows is no pass, whatever the line says.
                good = data["verdict"] in (Verdict.PASS, Verdict.KNOWN_FAILING, Verdict.WAIVED)
                return {**data, "verdict": str(Verdict.ERROR)} if good else data
            decision = self._decided(data["id"], judgement)
            blame = None if judgement.blame is None else str(judgement.blame)
            return {**data, "verdict": str(decision.verdict), "excusedBy": list(decision.by), "blame": blame}

        whole = _changed(self._for_this_catalogue(results), CellRecord, change)
        if (wanted := self.wanted) is not None:
            whole = _changed(whole, schema.ExpectedSet, lambda _: wanted.to_disk())
        try:
            truth = build_report(whole, self.suite.catalogue)
        except UsageError:
            return None  # said already
        if report is not None and truth.certified_outcome is not report.certified_outcome:
            self._say(
                Kind.OUTCOME,
                REPORT_NAME,
                f"the outcome is {report.certified_outcome} there, and {truth.certified_outcome} by the evidence",
            )
        return truth.certified_outcome


def _fault_counts(records: Iterable[schema.FaultRecord]) -> dict[str, tuple[int, int, int]]:
    """By kind: injected, verified, met."""
    counts: dict[str, tuple[int, int, int]] = {}
    for record in records:
        injected, verified, met = counts.get(record.kind, (0, 0, 0))
        counts[record.kind] = (injected + record.injected, verified + record.verified, met + record.met_by_victim)
    return counts


def _changed(
    results: ResultLines, model: type[schema.Model], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> ResultLines:
    """The results with the data of every line of one kind changed."""
    kind = KINDS[model]
    lines = tuple(replace(line, data=change(line.data)) if line.kind == kind else line for line in results)
    return ResultLines(lines, results.torn)


def _differences(theirs: Any, ours: Any, path: str) -> Iterator[tuple[str, str, str]]:
    """Where two JSON values part: the place, theirs, ours."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name in sorted({*theirs, *ours}):
            yield from _differences(theirs.get(name), ours.get(name), f"{path}.{name}" if path else name)
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for index, (one, other) in enumerate(zip(theirs, ours, strict=True)):
            name = other.get("id", index) if isinstance(other, dict) else index
            yield from _differences(one, other, f"{path}[{name}]")
    elif theirs != ours:
        yield path, _shown(theirs), _shown(ours)


def _shown(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return "empty" if value in ("", None, {}) else f"{value}"[:120]


def _names(event: Mapping[str, Any], request_id: str) -> bool:
    requests = [event.get("req"), *(new["req"] for new in event.get("new") or ())]
    return any(request is not None and transport.leg_of(str(request), request_id) is not None for request in requests)
