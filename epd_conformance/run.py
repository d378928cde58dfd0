"""One run: options in, report out. Between the two it owns the results file, the expected set and the live session.

pytest (through the plug-in) decides in which order cells run; this module decides what they are and what becomes of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shlex
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests

import epd_conformance
from epd_conformance import attachment as attachments
from epd_conformance import catalogue as catalogues
from epd_conformance import deviations, observations, release
from epd_conformance import subject as subjects
from epd_conformance.attachment import AttachedSubject, Attachment
from epd_conformance.catalogue import Catalogue, ConformanceLevel, EnvironmentClass, ExpectedCell, Requirement, cell_id
from epd_conformance.catalogue.model import IN_PROCESS, topology_kind
from epd_conformance.configuration import Configurations
from epd_conformance.connectors.journal import Journal
from epd_conformance.engine.case import EngineCase, EngineCell
from epd_conformance.engine.layers import examples
from epd_conformance.engine.pool import pool_path
from epd_conformance.engine.session import EngineSession
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live import attached, http
from epd_conformance.live.case import AnyCase, belongs
from epd_conformance.live.layout import Layout
from epd_conformance.live.session import LiveSession, PlannedCell, write_evidence
from epd_conformance.models import zoo
from epd_conformance.oracle import fault_judges, judges
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.oracle.cell import Judgement
from epd_conformance.parallel import Share
from epd_conformance.progress import Progress
from epd_conformance.proxy.app import create_app
from epd_conformance.proxycheck import made, under_test
from epd_conformance.proxycheck.case import OWN, ProxyCase, ProxyCell
from epd_conformance.proxycheck.plan import ARRANGEMENTS
from epd_conformance.proxycheck.session import LOG as PROXY_LOG
from epd_conformance.proxycheck.session import ProxySession
from epd_conformance.report import html, merge, schema, writer
from epd_conformance.report.failure import failure_text
from epd_conformance.runtime import doctor, vllm_info
from epd_conformance.topology import claims
from epd_conformance.topology.launcher import Boot
from epd_conformance.topology.spec import Topology
from epd_conformance.topology.stack import AnySite, ModelUse, Site, Stack
from epd_conformance.verdict import Mode, Owner, Verdict, exit_code

PROFILES: dict[str, tuple[str, ...]] = {
    "aggregated": ("aggregated",),
    "e-pd": ("e-pd",),
    "e-p-d": ("e-p-d",),
    "all": ("aggregated", "e-pd", "e-p-d"),
    "contract": ("contract",),
    "scheduler": ("scheduler",),
    "proxy": tuple(ARRANGEMENTS),
    **{name: (name,) for name in ARRANGEMENTS},
}
# The most items of each modality in one prompt: three images is what the largest case sends.
MEDIA_LIMITS = {"image": 4}


AnyCell = PlannedCell | EngineCell | ProxyCell


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line. `attach` names an attachment file; `subject` may be empty then."""

    subject: str
    profile: str = "e-pd"
    level: ConformanceLevel = ConformanceLevel.FULL
    device: str = "cpu"
    model: str = "tiny-qwen2.5-vl"
    dtype: str = ""
    mode: Mode = Mode.DEVELOP
    out: Path | None = None
    seed: int = schema.CERTIFY_SEED
    boot: str = ""
    cells: tuple[str, ...] = ()
    memory_wait_s: float = 600.0
    known: Path | None = None
    attach: Path | None = None
    junit: Path | None = None
    allure: Path | None = None
    examples: int | None = None
    """Plans that a layer without servers draws; None: as the mode has it."""
    foreign: under_test.Foreign | None = None
    """Somebody else's proxy, for the profile `proxy`; None: our own."""

    @property
    def in_process(self) -> bool:
        """Whether the profile is a layer without servers."""
        return topology_kind(self.profile) in IN_PROCESS

    @property
    def of_proxy(self) -> bool:
        """Whether the profile is about a proxy before fake servers, so that the proxy is what is certified."""
        return topology_kind(self.profile) == "proxy"

    def drawn(self) -> int:
        """How many plans a layer without servers draws."""
        return examples(self.profile, self.mode) if self.examples is None else self.examples

    def how(self) -> Boot:
        """How servers start on the device: forked on CPU, plainly on GPU, unless asked for. Raises UsageError."""
        if self.device not in ("cpu", "cuda"):
            raise UsageError(f"no device {self.device!r}: use cpu or cuda")
        if self.boot not in ("", *Boot):
            raise UsageError(f"no way to boot {self.boot!r}: use fork or plain")
        return Boot(self.boot or (Boot.FORK if self.device == "cpu" else Boot.PLAIN))

    def topologies(self) -> tuple[str, ...]:
        """The topologies of the profile; sizes such as `2e-1pd` are a profile of their own. Raises UsageError."""
        if self.profile in PROFILES:
            return PROFILES[self.profile]
        try:
            return (Topology.parse(self.profile).name,)
        except UsageError as error:
            raise UsageError(f"no profile {self.profile!r}: use {', '.join(PROFILES)}, or sizes ({error})") from None


def default_seed(attach: Path | None) -> int:
    """The seed where none is given: 0; a new one against attached servers, which may still hold the items of a run before."""
    return schema.CERTIFY_SEED if attach is None else secrets.randbelow(2**31)


def proxy_options(options: Options) -> Options:
    """The options of a profile `proxy`, with the arrangements that the proxy under test can stand in. Raises UsageError."""
    if not options.of_proxy:
        if options.foreign is not None:
            raise UsageError("--proxy-command and --proxy-url are for the profile proxy: add --profile proxy")
        return options
    if options.attach is not None:
        raise UsageError("the profile proxy has fake servers: leave out --attach")
    given = options.foreign
    if given is None:
        if options.subject not in ("", OWN):
            raise UsageError(
                f"the profile {options.profile} asks about the proxy, whatever connector runs behind it: leave out --subject, or "
                "say whose proxy it is with --proxy-command or --proxy-url"
            )
        return replace(options, subject=OWN)
    if options.mode is Mode.CERTIFY:
        raise UsageError(
            "--mode certify: nobody here knows which version of somebody else's proxy runs: leave out --mode certify"
        )
    standing = given.arrangements
    if options.profile != "proxy" and options.profile not in standing:
        raise UsageError(f"the proxy stands as {', '.join(standing)}: leave out --profile {options.profile}")
    if options.profile == "proxy" and len(standing) == 1:
        options = replace(options, profile=standing[0])
    return replace(options, subject=given.name)


def attached_options(options: Options, attachment: Attachment) -> Options:
    """The options with what the attachment says. Raises UsageError for one that it leaves nothing to say about."""
    if options.mode is Mode.CERTIFY:
        raise UsageError(
            "--attach cannot certify: model digest, flags and patches of attached servers are not the harness's to pin; "
            "leave out --mode certify"
        )
    for name, value in (("profile", attachment.topology.name), ("model", attachment.model)):
        if getattr(options, name) not in (value, _DEFAULTS[name]):
            raise UsageError(f"the attachment says what --{name} is ({value}): leave the option out")
    for name in ("device", "dtype", "boot"):
        if getattr(options, name) != _DEFAULTS[name]:
            raise UsageError(f"--{name} says how servers are started, and attached ones run already: leave it out")
    if options.subject and attachment.subject is not None:
        raise UsageError("the attachment has a [subject] table: leave out --subject, or the table")
    described = attachment.subject
    if not options.subject and described is None:
        raise UsageError("--attach needs to know whose connector runs: add a [subject] table, or --subject")
    return replace(
        options,
        profile=attachment.topology.name,
        model=attachment.model,
        subject=options.subject or (described.project if described is not None else ""),
    )


_DEFAULTS = {item.name: item.default for item in fields(Options)}


@dataclass
class Planted:
    """Defects that the harness' own tests plant around the subject; a run for anybody else has none."""

    stages: str | None = None
    recorder: bool = True
    salted: bool = True
    before_cell: Callable[[LiveSession, PlannedCell], None] | None = None
    proxy: under_test.App = create_app


@dataclass
class Run:
    """The state of one run."""

    options: Options
    planted: Planted = field(default_factory=Planted)
    progress: Progress = field(default_factory=Progress)
    share: Share | None = None
    """What this process has to do as a worker of a parallel run; None where it does everything, or hands it out."""

    def __post_init__(self) -> None:
        self.attachment: Attachment | None = None
        described = None
        self.options = proxy_options(self.options)
        if self.options.attach is not None:
            self.attachment = attachments.load(self.options.attach)
            described = self.attachment.subject
            self.options = attached_options(self.options, self.attachment)
        elif not self.options.subject:
            raise UsageError("a run needs a subject: add --subject reference (or your own)")
        options = self.options
        self.topologies = options.topologies()
        self._refuse_in_process()
        self.catalogue: Catalogue = catalogues.load()
        self.subject = self._subject(described)
        self.boot = options.how()
        self.suite_digest = suite_digest()
        self.modified = release.modified(Path(__file__).parent, self.suite_digest)
        if options.mode is Mode.CERTIFY:
            self._refuse_in_certify()
        self.known = deviations.read(options.known) if options.known is not None else ()
        self.environment_class = EnvironmentClass.CUDA if options.device == "cuda" else EnvironmentClass.CPU_V1
        if self.attachment is not None:
            self.environment_class = self.attachment.environment_class
        self.selection = self.catalogue.select(
            topologies={topology_kind(name) for name in self.topologies},
            environment=self.environment_class,
            features=self.subject.features,
            level=options.level,
        )
        self.label = made.FAKE_MODEL if options.of_proxy else model_label(options.model)
        self.collected: list[ExpectedCell] = []
        self.planned: dict[str, AnyCell] = {}
        self.judged = 0
        self.interrupted = ""
        self.refused = ""
        self.declined = ""
        """Why this worker could not begin: said by the controller, where no other worker could either."""
        self._turn: claims.Turn | None = None
        self._admitted = ""
        self._site: AnySite | None = None
        self._attached: attached.Found | None = None
        self._session: LiveSession | None = None
        self._engine: EngineSession | None = None
        self._proxies: ProxySession | None = None
        self._configurations = Configurations(strict=options.mode is Mode.CERTIFY, warn=self._warn)
        self._configured: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._flags: dict[str, tuple[str, ...]] = {}
        self._devices: set[str] = set()
        self._backends: set[str] = set()

    def _subject(self, described: attachments.AttachedImplementation | None) -> subjects.Subject:
        options = self.options
        if options.of_proxy:
            return under_test.ProxySubject(options.foreign, self.topologies)
        return AttachedSubject(described) if described is not None else subjects.load(options.subject)

    def _refuse_in_process(self) -> None:
        """Options that mean nothing for what is asked. Raises UsageError."""
        options = self.options
        if options.examples is not None and (not options.in_process or options.of_proxy):
            drawing = ", ".join(name for name in IN_PROCESS if name != "proxy")
            raise UsageError(f"--examples says how many plans the profiles {drawing} draw: leave it out")
        if not options.in_process:
            return
        for name in ("device", "model", "dtype", "boot"):
            if getattr(options, name) != _DEFAULTS[name]:
                raise UsageError(f"the profile {options.profile} has no servers: leave out --{name}")
        if options.examples is not None and options.examples < 0:
            raise UsageError(f"--examples {options.examples}: give a number of plans, 0 for the corpus alone")

    def _refuse_in_certify(self) -> None:
        """A certificate is the same for everybody: nothing is left out, excused, or drawn until it fits. Raises UsageError."""
        options = self.options
        if options.cells or options.level is not ConformanceLevel.FULL:
            raise UsageError("--mode certify runs everything: leave out --cell, -k and --level core")
        if options.known is not None:
            raise UsageError("--mode certify excuses nothing: leave out --known, or use --mode develop")
        if options.seed != schema.CERTIFY_SEED:
            raise UsageError(
                f"--mode certify draws from seed {schema.CERTIFY_SEED}: leave out --seed, or use --mode develop"
            )
        if options.examples is not None:
            raise UsageError("--mode certify draws as many plans for everybody: leave out --examples")
        if self.modified:
            raise UsageError(
                "the suite of this installation is not the one that was released as "
                f"{epd_conformance.__version__}: install it anew, or use --mode develop"
            )

    # -- what runs -----------------------------------------------------------------------------------------------------

    def cells_of(self, requirement: Requirement, cases: Sequence[AnyCase]) -> list[AnyCell]:
        """The cells of one test: each case in each topology of the run that the requirement is selected for."""
        found: list[AnyCell] = []
        for name in self.topologies:
            if (requirement.id, topology_kind(name)) not in self.selection:
                continue
            for case in (case for case in cases if belongs(case, name)):
                axes = ExpectedCell(requirement.id, name, self.label, case.name)
                identifier = cell_id(*_axes(axes))
                cell: AnyCell
                if isinstance(case, EngineCase):
                    cell = EngineCell(identifier, name, requirement.owner, case)
                elif isinstance(case, ProxyCase):
                    cell = ProxyCell(identifier, name, requirement.owner, case)
                else:
                    cell = PlannedCell(identifier, name, requirement.owner, case)
                if cell.id not in self.planned:
                    self.collected.append(axes)
                    self.planned[cell.id] = cell
                found.append(cell)
        return found

    def begin(self, chosen: Sequence[str]) -> None:
        """Fix the expected set and say so in the results, before anything runs. `chosen` are the cells that will run."""
        options = self.options
        unknown = sorted(set(options.cells) - set(self.planned))
        if unknown:
            raise UsageError(f"no cell {unknown[0]} in this profile; `epd-conformance list --cells` shows them")
        expected = self.selection.expected(self.collected)
        if not expected:
            raise UsageError(
                f"profile {options.profile} has no requirement to show for this subject: choose another profile, "
                "or declare the feature that it needs"
            )
        if not chosen:
            raise UsageError("no cell matches the selection: `epd-conformance list --cells` shows them")
        if self.attachment is not None:
            self._attached = attached.look(self.attachment)
            # A name is all that is known of it.
            self.model = ModelUse(self.attachment.model, self.attachment.model, "", MEDIA_LIMITS, local=False)
        elif options.of_proxy:
            # Fakes: neither vLLM nor a model.
            self.model = ModelUse("", "", "", {}, local=False)
        else:
            self.vllm = vllm_info.require()
            doctor.preflight(self.vllm)
            self.model = model_use(options)
        if options.mode is Mode.CERTIFY and not options.of_proxy and not self.model.digest:
            raise UsageError(
                f"--mode certify names the model by its digest, and that of {options.model} is not known: "
                "give a zoo name, a folder, or org/name@commit with all 40 digits of the commit"
            )
        known = zoo.MODELS.get(self.model.name)
        if options.mode is Mode.CERTIFY and known is not None and self.model.digest != known.digest:
            raise UsageError(
                f"--mode certify: the folder {options.model} is called as the zoo's {known.name} and holds another model: "
                "give it another name"
            )
        self.expected = schema.ExpectedSet(
            cells=tuple(schema.ExpectedRecord.of(cell) for cell in expected),
            not_verified=tuple(
                schema.NotVerifiedRecord(kind=gap.kind, requirement=gap.requirement, detail=gap.detail)
                for gap in self.selection.not_verified
            ),
        )
        if (share := self.share) is not None:
            if (self.expected, tuple(chosen)) != (share.expected, share.chosen):
                raise UsageError(f"worker {share.worker} collected other cells than its controller: run without -n")
            self.out, self.start = share.folder, share.start
            self.log = writer.ResultsLog(merge.worker_results(self.out, share.worker))
            cores = len(os.sched_getaffinity(0))
            self._turn = claims.Turn(share.progress.parent, claims.topologies_at_once(options.device, cores))
        else:
            self.out = fresh_folder(options.out, options.subject, options.allure)
            self.log = writer.ResultsLog(self.out / writer.RESULTS_NAME)
            self.start = self._start()
        self.log.append(self.start)
        self.log.append(self._environment())
        self.log.append(self.expected)
        self.chosen = [self.planned[cell] for cell in chosen]
        for cell in self.chosen:
            self.progress.expect(cell.topology)
        if self.share is None:
            ids = [cell.id for cell in self.expected.cells]
            for entry in self.known:
                # They make the run incomplete in the end: nobody should have to wait for that.
                if problem := deviations.early_problem(entry, ids, self.start.day):
                    self.progress.say(f"warning: {deviations.title(entry)}: {problem}")

    def _start(self) -> schema.RunStart:
        options = self.options
        implementation = self.subject.implementation
        return schema.RunStart(
            suite=schema.SuiteInfo(
                version=epd_conformance.__version__,
                digest=self.suite_digest,
                catalogue=self.catalogue.digest(),
                modified=self.modified,
            ),
            run=schema.RunInfo(
                id=uuid.uuid4().hex,
                mode=options.mode,
                profile=options.profile,
                level=options.level,
                seed=options.seed,
                command=(Path(sys.argv[0]).name, *sys.argv[1:]),
                started=datetime.now(UTC),
                certifies=Owner.PROXY if options.of_proxy else Owner.CONNECTOR,
            ),
            subject=schema.SubjectInfo(
                name=options.subject,
                implementation=schema.ImplementationInfo(
                    organization=implementation.organization,
                    project=implementation.project,
                    version=implementation.version,
                    url=implementation.url,
                    contact=implementation.contact,
                ),
                features=tuple(sorted(str(feature) for feature in self.subject.features)),
            ),
            environment_class=self.environment_class,
            results=schema.Results(junit=_located(options.junit, self.out), allure=_located(options.allure, self.out)),
            known_deviations=self.known,
        )

    # -- running -------------------------------------------------------------------------------------------------------

    def session(self) -> LiveSession:
        """The live session; made, with its processes, when the first cell asks for it."""
        if self._session is None:
            site = self._make_site()
            # A site that cannot be entered has closed itself.
            self._site = site.__enter__()
            self._session = LiveSession(
                self._site,
                self.subject,
                self.out,
                seed=self.options.seed,
                cells=[cell for cell in self.chosen if isinstance(cell, PlannedCell)],
                say=self.progress.say,
                on_floor=self._floor,
                # Of attached servers everything that can be learned is known by now.
                on_boot=self._learn if self._attached is None else lambda: None,
                recorder=self.planted.recorder,
                stages=self.planted.stages,
                salted=self.planted.salted,
            )
        return self._session

    def _make_site(self) -> AnySite:
        if self._attached is not None:
            return attached.AttachedSite(self.out, self._attached, say=self.progress.say)
        return Site(
            self.out,
            self.model,
            device=self.options.device,
            boot=self.boot,
            say=self.progress.say,
            memory_wait_s=self.options.memory_wait_s,
            configurations=self._configurations,
        )

    def engine(self) -> EngineSession:
        """The session of a layer without servers; it starts its process when the first cell asks for something."""
        if self._engine is None:
            options = self.options
            asked = frozenset(item.id for item, _ in self.selection.pairs)
            self._engine = EngineSession(
                options.subject,
                self.subject.features,
                self.out,
                layer=options.profile,
                seed=options.seed,
                examples=options.drawn(),
                asked=asked,
                say=self.progress.say,
            )
        return self._engine

    def _carry_out_proxy(self, cell: ProxyCell) -> schema.CellRecord:
        began = time.monotonic()
        artifacts: list[str] = []
        more: list[str] = []
        try:
            if self._proxies is None:
                self._proxies = ProxySession(
                    self.out, self.options.foreign, app=self.planted.proxy, say=self.progress.say
                )
            judgement, path = self._proxies.judge(cell)
            artifacts.append(path.relative_to(self.out).as_posix())
            if (self.out / PROXY_LOG).is_file():
                artifacts.append(PROXY_LOG)
            if judgement.verdict is not Verdict.PASS:
                more.append(f"carry it out: {shlex.join(['epd-conformance', 'replay', str(path)])}")
        except Exception as error:
            usage = isinstance(error, UsageError)
            if usage and not self.judged:
                raise
            reason = "usage" if usage else "stack" if isinstance(error, StackError) else "harness"
            observed = traceback.format_exc() if reason == "harness" else str(error)
            expected = "the proxy can be asked, and the cell judged"
            judgement = Judgement(Verdict.ERROR, reason=reason, expected=expected, observed=observed)
        return self.record(cell, judgement, time.monotonic() - began, artifacts, more)

    def _carry_out_engine(self, cell: EngineCell) -> schema.CellRecord:
        began = time.monotonic()
        artifacts: list[str] = []
        more: list[str] = []
        try:
            judged = self.engine().judge(cell)
            path = judged.evidence.relative_to(self.out).as_posix()
            artifacts += [path, pool_path(cell.topology)]
            judgement = judged.judgement
            if judged.shrunk is not None:
                more.append(f"smallest plan: {judged.shrunk.to_text()}")
                more.append(f"carry it out: {shlex.join(['epd-conformance', 'replay', str(self.out / path)])}")
        except UsageError as error:
            if not self.judged:
                raise
            judgement = Judgement(
                Verdict.ERROR, reason="usage", expected="the subject can be used", observed=str(error)
            )
        except StackError as error:
            expected = "the process that carries out plans goes on"
            judgement = Judgement(Verdict.ERROR, reason="stack", expected=expected, observed=str(error))
        except Exception:  # a defect of the harness: the cell is an error, and says which
            judgement = Judgement(
                Verdict.ERROR,
                reason="harness",
                expected="the harness carries the plans out and judges the cell",
                observed=traceback.format_exc(),
            )
        return self.record(cell, judgement, time.monotonic() - began, artifacts, more)

    def carry_out(self, cell: AnyCell) -> schema.CellRecord:
        """Run one cell, judge it, and write the result down. Raises UsageError where nothing of the run can work."""
        if isinstance(cell, EngineCell):
            return self._carry_out_engine(cell)
        if isinstance(cell, ProxyCell):
            return self._carry_out_proxy(cell)
        began = time.monotonic()
        if self._attached is not None and (refusal := self._attached.given.refusal(cell.case.judge)) is not None:
            return self.record(cell, refusal, 0.0)
        artifacts: list[str] = []
        try:
            self._wait_for_turn(cell.topology)
            session = self.session()
            stage = session.stage(cell.topology)
            if self.planted.before_cell is not None:
                self.planted.before_cell(session, cell)
            began = time.monotonic()
            evidence = session.run(cell)
            artifacts.append(write_evidence(self.out, evidence).relative_to(self.out).as_posix())
            artifacts += Layout(stage.topology).paths(stage.stack.spec.name)
            judgement = judges.judge(evidence)
            if (fault := fault_judges.fault_record(evidence)) is not None:
                self.log.append(fault)
            if judgement.verdict is not Verdict.PASS:
                # It only explains: a capture that breaks (a full disk) must not hide a proven failure.
                with contextlib.suppress(Exception):
                    artifacts += self._capture(cell, stage.stack)
        except (StackError, UsageError) as error:
            usage = isinstance(error, UsageError)
            if usage and not self.judged:
                if self.share is None:
                    raise
                # Other workers may have begun: the run goes on, as it does where a later topology cannot be had.
                self.declined = str(error)
            judgement = Judgement(
                Verdict.ERROR,
                reason="usage" if usage else "stack",
                expected="the servers of this topology come up and stay up",
                observed=str(error),
            )
            artifacts.append("logs")
        except Exception:  # a defect of the harness: the cell is an error, and says which
            judgement = Judgement(
                Verdict.ERROR,
                reason="harness",
                expected="the harness carries the cell out and judges it",
                observed=traceback.format_exc(),
            )
            artifacts.append("logs")
        return self.record(cell, judgement, time.monotonic() - began, artifacts)

    def _wait_for_turn(self, topology: str) -> None:
        """As a worker: have servers only when it is this one's turn, and for one topology at a time."""
        if self._turn is None or topology == self._admitted:
            return
        if self._session is not None:
            self._session.end_stage()
        self._turn.release()
        self._turn.take(self.progress.say)
        self._admitted = topology

    def record(
        self,
        cell: AnyCell,
        judgement: Judgement,
        seconds: float,
        artifacts: Sequence[str] = (),
        more: Sequence[str] = (),
    ) -> schema.CellRecord:
        """Write one cell's result, as the run's lists leave it, to the results file and to the progress display.

        `more`: further lines for who reads of a failure.
        """
        requirement_id = cell.id.partition("[")[0]
        reproduce = self.reproduce(cell)
        known = self.start.known_deviations
        text = deviations.words(judgement.reason, judgement.observed, judgement.divergence)
        decision = deviations.decide(known, cell.id, judgement.verdict, text, self.start.day)
        message = ""
        if judgement.verdict is not Verdict.PASS:
            message = failure_text(
                self.catalogue[requirement_id],
                cell.id,
                expected=judgement.expected,
                observed=judgement.observed,
                divergence=judgement.divergence,
                rung=judgement.rung,
                causes=judgement.causes,
                reproduce=reproduce,
                artifacts=[str(self.out / path) for path in artifacts],
            )
            message = "\n".join([message, *more, *deviations.remarks(known, cell.id, decision)])
        record = schema.CellRecord(
            id=cell.id,
            requirement=requirement_id,
            topology=cell.topology,
            model=self.label,
            case=cell.case.name,
            verdict=decision.verdict,
            reason=judgement.reason,
            blame=judgement.blame,
            excused=decision.excused,
            excused_by=decision.by,
            rung=judgement.rung,
            observed="" if judgement.verdict is Verdict.PASS else judgement.observed,
            message=message,
            evidence=judgement.evidence,
            duration_s=round(seconds, 3),
            artifacts=tuple(artifacts),
            reproduce=reproduce,
        )
        self.log.append(record)
        self.judged += 1
        self.progress.cell_done(cell.id, cell.topology, record.verdict, record.reason, seconds)
        return record

    def facts(self, cell: AnyCell) -> dict[str, str]:
        """What reports of other kinds (JUnit) say of a cell, beside its verdict."""
        requirement = self.catalogue[cell.id.partition("[")[0]]
        return {
            "requirement": requirement.id,
            "level": str(requirement.level),
            "owner": str(requirement.owner),
            "topology": cell.topology,
            "cell": cell.id,
        }

    def reproduce(self, cell: AnyCell) -> str:
        """The command that runs this cell again."""
        options = self.options
        if (attachment := self.attachment) is not None:
            words = ["epd-conformance", "run", "--attach", str(options.attach)]
            words += ["--subject", options.subject] if attachment.subject is None else []
            return shlex.join([*words, "--seed", str(options.seed), "--cell", cell.id])
        if options.of_proxy:
            words = ["epd-conformance", "run", "--profile", cell.topology]
            words += options.foreign.words() if options.foreign is not None else []
            return shlex.join([*words, "--cell", cell.id])
        words = ["epd-conformance", "run", "--subject", options.subject, "--profile", cell.topology]
        if options.in_process:
            words += ["--seed", str(options.seed)]
            words += ["--examples", str(options.examples)] if options.examples is not None else []
            return shlex.join([*words, "--cell", cell.id])
        words += ["--model", options.model, "--device", options.device, "--seed", str(options.seed)]
        words += ["--dtype", options.dtype] if options.dtype else []
        words += ["--boot", options.boot] if options.boot else []
        return shlex.join([*words, "--cell", cell.id])

    def end(self) -> None:
        """End every process, then the results: as a controller, with those of the workers in them."""
        self.close()
        if self.share is None:
            # A worker that ends early would not see what the others' servers still write.
            journals = [Journal(folder).read() for folder in sorted(self.out.glob(observations.JOURNALS))]
            for text in observations.warnings(self.subject.features, journals):
                self._warn(text)
        end = schema.RunEnd(finished=datetime.now(UTC), interrupted=bool(self.interrupted), reason=self.interrupted)
        workers = self.share is None and any((self.out / merge.WORKERS).glob("*.ndjson"))
        if not workers:
            self.log.append(end)
        self.log.close()
        if workers:
            merge.merge(self.out, end)

    def finish(self) -> schema.Report:
        """Write the report of a run that has ended, and its page. Cells that never ran stand in it as could-not-run."""
        results = writer.read_results(self.out / writer.RESULTS_NAME)
        report = writer.write_report(self.out, writer.build_report(results, self.catalogue))
        try:
            html.write_page(self.out, report)
        except Exception as error:  # the page decides nothing, so nothing about it may cost a run its outcome
            self.progress.say(f"warning: {writer.PAGE_NAME} could not be made ({type(error).__name__}: {error})")
        return report

    def close(self) -> None:
        """End every process of the run."""
        site, self._site, self._session = self._site, None, None
        engine, self._engine = self._engine, None
        proxies, self._proxies = self._proxies, None
        if proxies is not None:
            proxies.__exit__(None, None, None)
        if engine is not None:
            engine.__exit__(None, None, None)
        if site is not None:
            site.close()
        if self._turn is not None:
            self._turn.release()

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _floor(self, baseline: BaselineAnswers) -> None:
        self.log.append(baseline.line(self.model.name))

    def _warn(self, text: str) -> None:
        """Say something about the subject, once, now and in the report."""
        if text not in self._warned:
            self._warned.add(text)
            self.progress.say(f"warning: {text}")
            self.log.append(schema.WarningRecord(text=text))

    def _learn_subject(self, site: AnySite) -> None:
        """Write down what the subject configured for the stacks that were booted, and hold what it declares against them.

        Raises UsageError for a declared feature that is contradicted: every cell of it would judge what is not there.
        """
        new = [one for one in self._configurations if (one.topology, one.role) not in self._configured]
        for one in new:
            self._configured.add((one.topology, one.role))
            self.log.append(schema.ConfigurationRecord(topology=one.topology, role=one.role, **one.normal))
        booted = {one.topology for one in new}
        for stack in site.stacks:
            if stack.spec.subject is None or stack.info is None or stack.spec.topology.name not in booted:
                continue
            try:
                probe = self.subject.probe(stack.info)
            except (Exception, SystemExit) as error:  # a subject's own code may raise anything
                raise UsageError(f"the subject's probe raised {type(error).__name__} ({error}): mend it") from error
            hooks = observations.hooks_seen(stack.journal.read())
            for finding in observations.features(self.subject.features, hooks=hooks, probe=probe):
                if finding.state is observations.State.FAIL:
                    raise UsageError(f"the feature {finding.feature} is {finding.words}: {finding.mend}")
                if finding.state is observations.State.WARN:
                    self._warn(f"{finding.feature}: {finding.words}")

    def _learn(self) -> None:
        """Write the environment again when servers were started with flags that it does not hold yet."""
        site = self._site
        assert site is not None, "called after a boot"
        self._learn_subject(site)
        known = dict(self._flags)
        for stack in site.stacks:
            for server in stack.servers:
                self._flags[f"{stack.spec.name}/{server.role}"] = server.flags
                self._devices.add(server.placement.words)
                self._backends.update(attention_backends(server.process.log))
        if self._flags != known:
            self.log.append(self._environment(site))

    def _environment(self, site: AnySite | None = None) -> schema.EnvironmentInfo:
        if self._attached is not None:
            return self._attached.environment()
        if self.options.of_proxy:
            details: dict[str, Any] = {"fakes": True, "cores": os.cpu_count() or 0}
            system = f"{platform.system()} {platform.machine()}"
            return schema.EnvironmentInfo(platform=system, python=platform.python_version(), details=details)
        patches = site.patches() if site is not None else []
        return schema.EnvironmentInfo(
            vllm_version=self.vllm.version,
            vllm_commit=self.vllm.commit or "",
            platform=f"{platform.system()} {platform.machine()}, {self.vllm.platform}",
            python=platform.python_version(),
            torch=_version("torch"),
            devices=tuple(sorted(self._devices)),
            models=(schema.ModelInfo(id=self.model.name, digest=self.model.digest or ""),),
            dtype=self.model.dtype,
            attention_backend=", ".join(sorted(self._backends)),
            flags=self._flags,
            patches=tuple(schema.Patch(**patch) for patch in patches),
            details={
                "boot": str(self.boot),
                "cores": os.cpu_count() or 0,
                "transformers": _version("transformers"),
                # What servers get on top of the caller's environment.
                "serverEnvironment": {
                    name: value
                    for name, value in (site.environment if site is not None else {}).items()
                    if os.environ.get(name) != value
                },
            },
        )

    def _capture(self, cell: PlannedCell, stack: Stack) -> list[str]:
        """State before clean-up: metrics of every server, listing of the stores; logs and journals lie there already."""
        state: dict[str, Any] = {
            "cell": cell.id,
            "metrics": {},
            "store": _listing(stack.store),
            "kv": _listing(stack.kv_store),
        }
        for server in stack.servers:
            with contextlib.suppress(requests.RequestException):
                state["metrics"][server.name] = http.get(f"{server.url}/metrics", timeout=3).text
        name = hashlib.sha256(cell.id.encode()).hexdigest()[:16]
        path = self.out / "state" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(state), encoding="utf-8")
        logs = [
            process.log
            for process in [*(server.process for server in stack.servers), *([stack.proxy] if stack.proxy else [])]
        ]
        return [item.relative_to(self.out).as_posix() for item in (path, *logs)]


def model_use(options: Options) -> ModelUse:
    """The model that `--model` names, built where it is a zoo name. Raises UsageError."""
    resolved = zoo.resolve(options.model, zoo.default_cache())
    return ModelUse(
        name=resolved.name,
        path=resolved.path_or_id,
        # float32 on CPU makes the noise floor zero; on GPU the model's own dtype is what people run.
        dtype=options.dtype or ("float32" if options.device == "cpu" else "auto"),
        limits=MEDIA_LIMITS,
        digest=resolved.digest,
        local=resolved.digest is not None and resolved.revision is None,
        revision=resolved.revision,
    )


def model_label(model: str) -> str:
    """How a model is called in cell ids: a zoo name as it is, a folder by its last part, a hub id with `~` for its slash, without
    the commit: cells of two commits are compared with each other."""
    name = Path(model).resolve().name if Path(model).is_dir() else model.partition("@")[0].replace("/", "~")
    # Slashes and brackets structure an id; anything else that is unusual would only make it hard to type.
    return re.sub(r"[^\w.~+-]", "-", name) or "model"


def _axes(cell: ExpectedCell) -> tuple[str, str, str, str]:
    return cell.requirement, cell.topology, cell.model, cell.case


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _listing(folder: Path) -> list[dict[str, Any]]:
    """Every file under a store with size and time, as the harness itself sees it."""
    found = []
    for path in sorted(folder.rglob("*")):
        with contextlib.suppress(OSError):
            if path.is_file():
                status = path.stat()
                found.append({"path": str(path.relative_to(folder)), "bytes": status.st_size, "mtime": status.st_mtime})
    return found


def _located(path: Path | None, out: Path) -> str | None:
    """How a report names a file or folder: relative to its own folder where it lies there."""
    if path is None:
        return None
    whole = path.resolve()
    return whole.relative_to(out).as_posix() if whole.is_relative_to(out) else str(whole)


def fresh_folder(out: Path | None, subject: str, made: Path | None = None) -> Path:
    """The run's folder, new or empty: two runs in one folder would mix their evidence.

    `made`: what may lie there, since another plug-in has made it for this very run.
    """
    if out is None:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in subject)
        out = Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}-{uuid.uuid4().hex[:4]}"
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(path != (made.resolve() if made else None) for path in out.iterdir())
    except OSError as error:
        raise UsageError(f"the folder {out} cannot be used for --out ({error.strerror}): choose another") from error
    if taken:
        raise UsageError(f"the folder {out} is not empty: choose a new one with --out, a run keeps its evidence there")
    return out


def attention_backends(log: Path) -> set[str]:
    """Attention backends that a server's log names, such as `FLASH_ATTN` or `TORCH_SDPA (vit)`; vLLM tells them nowhere else."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = {
        match[1] for match in re.finditer(r"Using (?:AttentionBackendEnum\.)?([A-Z][A-Z0-9_]+) attention backend", text)
    }
    vision = re.finditer(r"AttentionBackendEnum\.(\w+) for (?:vit attention|MMEncoderAttention)", text)
    return found | {f"{match[1]} (vit)" for match in vision}


def suites_folder() -> Path:
    """Where the suites lie: inside the package when installed from a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "suites"
    return inside if inside.is_dir() else package.parent / "suites"


def suite_digest() -> str:
    """The digest of the suite of this installation, see `release.digest`."""
    return release.digest(Path(__file__).parent, suites_folder())


def result_code(report: schema.Report) -> int:
    """The exit code of a run (design §6): that of the certified owner."""
    return exit_code(report.certified_outcome)
