"""Replay: carry one cell's plan out again, exactly as it stands in the evidence of a run, and judge it anew.

The plan is not drawn again: an edited plan is carried out as edited. Everything else (subject, model, seed, dtype) is that of
the run whose folder holds the evidence, unless given.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import requests

from epd_conformance import catalogue as catalogues
from epd_conformance import subject as subjects
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live import http
from epd_conformance.live.case import Case
from epd_conformance.live.session import LiveSession, PlannedCell, write_evidence
from epd_conformance.oracle import judges
from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.plans.plan import Plan
from epd_conformance.report import schema, writer
from epd_conformance.report.failure import failure_text
from epd_conformance.run import Options, fresh_folder, model_use
from epd_conformance.runtime import doctor, vllm_info
from epd_conformance.topology.spec import Topology
from epd_conformance.topology.stack import Site, Stack
from epd_conformance.verdict import PRECEDENCE, Verdict

# As long as a server may take to let go of its cache: it does that between two steps.
RESET_S = 30.0


@dataclass(frozen=True)
class Recorded:
    """A cell as a run left it: its evidence, the verdict it had, and how its run was asked for (as far as known)."""

    path: Path
    evidence: CellEvidence
    verdict: Verdict
    reason: str
    options: Options
    model_digest: str = ""

    @property
    def exact(self) -> bool:
        """Whether its answers were compared with a baseline, which was asked only then."""
        return any(self.evidence.baseline.values())

    def cell(self) -> PlannedCell:
        """The cell with exactly the recorded plan."""
        found = self.evidence
        case = Case("replay", found.judge, lambda _: found.plan, exact=self.exact)
        return PlannedCell(found.cell, found.topology, found.owner, case)


@dataclass(frozen=True)
class Replayed:
    """One repetition. `evidence` is its file, None where the cell broke."""

    number: int
    judgement: Judgement
    evidence: Path | None

    def words(self) -> str:
        return f"{self.judgement.verdict} {self.judgement.reason}".strip()


def read(path: Path) -> Recorded:
    """A cell's evidence file with what the run beside it says. Raises UsageError for what is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}): name a file of a run's folder cells/") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON ({error}): name a file of a run's folder cells/") from error
    try:
        evidence = CellEvidence.from_json(data)
        Topology.parse(evidence.topology)
        Plan.from_json(data["plan"])
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise UsageError(
            f"{path} is no cell's evidence ({type(error).__name__}: {error}): name a file of a run's folder cells/"
        ) from error
    if evidence.judge not in judges.JUDGES:
        raise UsageError(
            f"{path} has the judge {evidence.judge!r}, which this version does not know: use its own version"
        )
    results = path.resolve().parent.parent / writer.RESULTS_NAME
    options = Options(subject="")
    if results.is_file():
        lines = writer.read_results(results)
        records = [record for record in lines.all(schema.CellRecord) if record.id == evidence.cell]
        options = _options(lines)
        models = [model for environment in lines.all(schema.EnvironmentInfo) for model in environment.models]
        if records:
            last = records[-1]
            return Recorded(path, evidence, last.verdict, last.reason, options, models[-1].digest if models else "")
    judgement = judges.judge(evidence)
    return Recorded(path, evidence, judgement.verdict, judgement.reason, options)


def _options(lines: writer.ResultLines) -> Options:
    """How the run was asked for; an empty subject where its servers were attached, so that it has to be given."""
    options = Options(subject="")
    for start in lines.all(schema.RunStart):
        options = replace(options, subject=start.subject.name, seed=start.run.seed)
        options = replace(options, device="cuda" if start.environment_class == "cuda" else "cpu")
    for environment in lines.all(schema.EnvironmentInfo):
        if environment.details.get("attached") is True:
            return Options(subject="", seed=options.seed)
        options = replace(options, dtype=environment.dtype, boot=str(environment.details.get("boot") or ""))
        if environment.models:
            options = replace(options, model=environment.models[0].id)
    return options


def replay(
    recorded: Recorded,
    options: Options,
    *,
    repeat: int = 1,
    restart: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Path, list[Replayed]]:
    """Boot the cell's topology and carry its plan out `repeat` times; returns the folder and what came of each.

    Repetitions share servers: each sends its requests with other salts, after every server has dropped its encoder cache. The
    store keeps what it holds. `restart` starts the stack under test again before each instead, with an empty store.
    Raises UsageError where nothing can be booted.
    """
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: repeat a cell at least once")
    if not options.subject:
        raise UsageError("nothing beside the file says what was tested: add --subject (and --model, if it is not tiny)")
    subject = subjects.load(options.subject)
    how = options.how()
    found = vllm_info.require()
    doctor.preflight(found)
    model = model_use(options)
    if recorded.model_digest and model.digest and model.digest != recorded.model_digest:
        say(f"warning: the model {model.name} is not the one of the run: its digest is another")
    out = fresh_folder(options.out, f"replay-{options.subject}")
    cell = recorded.cell()
    site = Site(out, model, device=options.device, boot=how, say=say, memory_wait_s=options.memory_wait_s)
    results: list[Replayed] = []
    with site:
        session = LiveSession(site, subject, out, seed=options.seed, cells=[cell], say=say)
        for number in range(1, repeat + 1):
            results.append(_once(session, cell, number, out, restart))
            say(f"{number} of {repeat}: {results[-1].words()}")
    return out, results


def _once(session: LiveSession, cell: PlannedCell, number: int, out: Path, restart: bool) -> Replayed:
    path = None
    try:
        if number > 1:
            forget(session, session.stage(cell.topology).stack, restart)
        evidence = session.run(cell)
        # Each repetition keeps its own evidence; the first under the name that any run would give it.
        path = write_evidence(out if number == 1 else out / f"repetition-{number}", evidence)
        return Replayed(number, judges.judge(evidence), path)
    except StackError as error:
        judgement = Judgement(
            Verdict.ERROR,
            reason="stack",
            expected="the servers of this topology come up and stay up",
            observed=str(error),
        )
        return Replayed(number, judgement, path)


def forget(session: LiveSession, stack: Stack, restart: bool) -> None:
    """Make the servers forget what the repetition before left in them. Raises StackError where one does not."""
    if restart:
        session.restart()
        return
    for server in stack.servers:
        try:
            status = http.post(f"{server.url}/reset_encoder_cache", timeout=RESET_S).status_code
        except requests.RequestException as error:
            raise StackError(f"{server.process.name} does not reset its encoder cache: {error}") from error
        if status != 200:
            raise StackError(f"{server.process.name} does not reset its encoder cache: it answers {status}")


def worst(results: list[Replayed]) -> Verdict:
    """The verdict over all repetitions: one failure is a failure."""
    return min((result.judgement.verdict for result in results), key=PRECEDENCE.index)


def exit_code(verdict: Verdict) -> int:
    """0 for a pass, 1 for a failure, 3 for what decides nothing."""
    return {Verdict.PASS: 0, Verdict.FAIL: 1}.get(verdict, 3)


def lines(recorded: Recorded, out: Path, results: list[Replayed]) -> list[str]:
    """The replay for a person: the text of the first repetition that did not pass, old and new verdict, counts."""
    found: list[str] = []
    odd = next((result for result in results if result.judgement.verdict is not Verdict.PASS), None)
    if odd is not None:
        requirement = catalogues.load()[recorded.evidence.cell.partition("[")[0]]
        judgement = odd.judgement
        artifacts = [str(path) for path in (odd.evidence, out / "logs") if path is not None]
        found.append(
            failure_text(
                requirement,
                recorded.evidence.cell,
                expected=judgement.expected,
                observed=judgement.observed,
                divergence=judgement.divergence,
                rung=judgement.rung,
                causes=judgement.causes,
                artifacts=artifacts,
            )
        )
    before = f"{recorded.verdict} {recorded.reason}".strip()
    if len(results) == 1:
        now = results[0].words()
    else:
        counts = Counter(result.words() for result in results)
        now = ", ".join(f"{count} × {words}" for words, count in counts.most_common())
    found.append(f"{recorded.evidence.cell}: was {before}, now {now}")
    found.append(f"evidence: {out}")
    return found


def to_json(recorded: Recorded, out: Path, results: list[Replayed]) -> dict[str, Any]:
    """The replay for programs."""
    return {
        "cell": recorded.evidence.cell,
        "before": {"verdict": str(recorded.verdict), "reason": recorded.reason},
        "now": [
            {
                "verdict": str(result.judgement.verdict),
                "reason": result.judgement.reason,
                "rung": result.judgement.rung,
                "evidence": None if result.evidence is None else str(result.evidence),
            }
            for result in results
        ],
        "counts": dict(Counter(str(result.judgement.verdict) for result in results)),
        "verdict": str(worst(results)),
        "out": str(out),
    }
