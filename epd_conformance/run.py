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
import shlex
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import requests

import epd_conformance
from epd_conformance import catalogue as catalogues
from epd_conformance import subject as subjects
from epd_conformance.catalogue import Catalogue, ConformanceLevel, EnvironmentClass, ExpectedCell, Requirement, cell_id
from epd_conformance.errors import StackError, UsageError
from epd_conformance.live import http
from epd_conformance.live.case import Case
from epd_conformance.live.layout import Layout
from epd_conformance.live.session import LiveSession, PlannedCell, write_evidence
from epd_conformance.models import zoo
from epd_conformance.oracle import judges
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.oracle.judges import Judgement
from epd_conformance.progress import Progress
from epd_conformance.report import schema, writer
from epd_conformance.report.failure import failure_text
from epd_conformance.runtime import doctor, vllm_info
from epd_conformance.topology.launcher import Boot
from epd_conformance.topology.spec import Topology
from epd_conformance.topology.stack import ModelUse, Site, Stack
from epd_conformance.verdict import Mode, Verdict, exit_code

PROFILES: dict[str, tuple[str, ...]] = {
    "aggregated": ("aggregated",),
    "e-pd": ("e-pd",),
    "e-p-d": ("e-p-d",),
    "all": ("aggregated", "e-pd", "e-p-d"),
}
# The most items of each modality in one prompt: three images is what the largest case sends.
MEDIA_LIMITS = {"image": 4}


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line."""

    subject: str
    profile: str = "e-pd"
    level: ConformanceLevel = ConformanceLevel.FULL
    device: str = "cpu"
    model: str = "tiny-qwen2.5-vl"
    dtype: str = ""
    mode: Mode = Mode.DEVELOP
    out: Path | None = None
    seed: int = 0
    boot: str = ""
    cells: tuple[str, ...] = ()
    memory_wait_s: float = 600.0

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


@dataclass
class Planted:
    """Defects that the harness' own tests plant around the subject; a run for anybody else has none."""

    stages: str | None = None
    recorder: bool = True
    salted: bool = True
    before_cell: Callable[[LiveSession, PlannedCell], None] | None = None


@dataclass
class Run:
    """The state of one run."""

    options: Options
    planted: Planted = field(default_factory=Planted)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        options = self.options
        self.topologies = options.topologies()
        self.catalogue: Catalogue = catalogues.load()
        self.subject = subjects.load(options.subject)
        self.boot = options.how()
        if options.mode is Mode.CERTIFY and (options.cells or options.level is not ConformanceLevel.FULL):
            raise UsageError("--mode certify runs everything: leave out --cell, -k and --level core")
        self.environment_class = EnvironmentClass.CUDA if options.device == "cuda" else EnvironmentClass.CPU_V1
        self.selection = self.catalogue.select(
            topologies={Topology.parse(name).kind for name in self.topologies},
            environment=self.environment_class,
            features=self.subject.features,
            level=options.level,
        )
        self.label = model_label(options.model)
        self.collected: list[ExpectedCell] = []
        self.planned: dict[str, PlannedCell] = {}
        self.judged = 0
        self.interrupted = ""
        self.refused = ""
        self._site: Site | None = None
        self._session: LiveSession | None = None
        self._flags: dict[str, tuple[str, ...]] = {}
        self._devices: set[str] = set()
        self._backends: set[str] = set()

    # -- what runs -----------------------------------------------------------------------------------------------------

    def cells_of(self, requirement: Requirement, cases: Sequence[Case]) -> list[PlannedCell]:
        """The cells of one test: each case in each topology of the run that the requirement is selected for."""
        found = []
        for name in self.topologies:
            if (requirement.id, Topology.parse(name).kind) not in self.selection:
                continue
            for case in cases:
                axes = ExpectedCell(requirement.id, name, self.label, case.name)
                cell = PlannedCell(cell_id(*_axes(axes)), name, requirement.owner, case)
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
        self.vllm = vllm_info.require()
        doctor.preflight(self.vllm)
        self.model = model_use(options)
        self.out = fresh_folder(options.out, options.subject)
        self.log = writer.ResultsLog(self.out / writer.RESULTS_NAME)
        implementation = self.subject.implementation
        self.log.append(
            schema.RunStart(
                suite=schema.SuiteInfo(
                    version=epd_conformance.__version__, digest=suite_digest(), catalogue=self.catalogue.digest()
                ),
                run=schema.RunInfo(
                    id=uuid.uuid4().hex,
                    mode=options.mode,
                    profile=options.profile,
                    level=options.level,
                    seed=options.seed,
                    command=(Path(sys.argv[0]).name, *sys.argv[1:]),
                    started=datetime.now(UTC),
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
            )
        )
        self.log.append(self._environment())
        self.log.append(
            schema.ExpectedSet(
                cells=tuple(schema.ExpectedRecord.of(cell) for cell in expected),
                not_verified=tuple(
                    schema.NotVerifiedRecord(kind=gap.kind, requirement=gap.requirement, detail=gap.detail)
                    for gap in self.selection.not_verified
                ),
            )
        )
        self.chosen = [self.planned[cell] for cell in chosen]
        for cell in self.chosen:
            self.progress.expect(cell.topology)

    # -- running -------------------------------------------------------------------------------------------------------

    def session(self) -> LiveSession:
        """The live session; made, with its processes, when the first cell asks for it."""
        if self._session is None:
            site = Site(
                self.out,
                self.model,
                device=self.options.device,
                boot=self.boot,
                say=self.progress.say,
                memory_wait_s=self.options.memory_wait_s,
            )
            # A site that cannot be entered has closed itself.
            self._site = site.__enter__()
            self._session = LiveSession(
                self._site,
                self.subject,
                self.out,
                seed=self.options.seed,
                cells=self.chosen,
                say=self.progress.say,
                on_floor=self._floor,
                on_boot=self._learn,
                recorder=self.planted.recorder,
                stages=self.planted.stages,
                salted=self.planted.salted,
            )
        return self._session

    def carry_out(self, cell: PlannedCell) -> schema.CellRecord:
        """Run one cell, judge it, and write the result down. Raises UsageError where nothing of the run can work."""
        began = time.monotonic()
        artifacts: list[str] = []
        try:
            session = self.session()
            stage = session.stage(cell.topology)
            if self.planted.before_cell is not None:
                self.planted.before_cell(session, cell)
            began = time.monotonic()
            evidence = session.run(cell)
            artifacts.append(write_evidence(self.out, evidence).relative_to(self.out).as_posix())
            artifacts += Layout(stage.topology).paths(stage.stack.spec.name)
            judgement = judges.judge(evidence)
            if judgement.verdict is not Verdict.PASS:
                # It only explains: a capture that breaks (a full disk) must not hide a proven failure.
                with contextlib.suppress(Exception):
                    artifacts += self._capture(cell, stage.stack)
        except (StackError, UsageError) as error:
            usage = isinstance(error, UsageError)
            if usage and not self.judged:
                raise
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

    def record(
        self, cell: PlannedCell, judgement: Judgement, seconds: float, artifacts: Sequence[str] = ()
    ) -> schema.CellRecord:
        """Write one cell's result to the results file and to the progress display."""
        requirement_id = cell.id.partition("[")[0]
        reproduce = self.reproduce(cell)
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
        record = schema.CellRecord(
            id=cell.id,
            requirement=requirement_id,
            topology=cell.topology,
            model=self.label,
            case=cell.case.name,
            verdict=judgement.verdict,
            reason=judgement.reason,
            blame=judgement.blame,
            rung=judgement.rung,
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

    def reproduce(self, cell: PlannedCell) -> str:
        """The command that runs this cell again."""
        options = self.options
        words = ["epd-conformance", "run", "--subject", options.subject, "--profile", cell.topology]
        words += ["--model", options.model, "--device", options.device, "--seed", str(options.seed)]
        words += ["--dtype", options.dtype] if options.dtype else []
        words += ["--boot", options.boot] if options.boot else []
        return shlex.join([*words, "--cell", cell.id])

    def finish(self) -> schema.Report:
        """End every process, then write the report. Cells that never ran stand in it as could-not-run."""
        self.close()
        self.log.append(
            schema.RunEnd(finished=datetime.now(UTC), interrupted=bool(self.interrupted), reason=self.interrupted)
        )
        self.log.close()
        results = writer.read_results(self.out / writer.RESULTS_NAME)
        return writer.write_report(self.out, writer.build_report(results, self.catalogue))

    def close(self) -> None:
        """End every process of the run."""
        site, self._site, self._session = self._site, None, None
        if site is not None:
            site.close()

    # -- evidence ------------------------------------------------------------------------------------------------------

    def _floor(self, baseline: BaselineAnswers) -> None:
        self.log.append(baseline.line(self.model.name))

    def _learn(self) -> None:
        """Write the environment again when servers were started with flags that it does not hold yet."""
        site = self._site
        assert site is not None, "called after a boot"
        known = dict(self._flags)
        for stack in site.stacks:
            for server in stack.servers:
                self._flags[f"{stack.spec.name}/{server.role}"] = server.flags
                self._devices.add(server.placement.words)
                self._backends.update(attention_backends(server.process.log))
        if self._flags != known:
            self.log.append(self._environment(site))

    def _environment(self, site: Site | None = None) -> schema.EnvironmentInfo:
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
        local=resolved.digest is not None,
    )


def model_label(model: str) -> str:
    """How a model is called in cell ids: a zoo name as it is, a folder by its last part, a hub id with `~` for its slash."""
    name = Path(model).resolve().name if Path(model).is_dir() else model.replace("/", "~")
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


def fresh_folder(out: Path | None, subject: str) -> Path:
    """The run's folder, new or empty: two runs in one folder would mix their evidence."""
    if out is None:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in subject)
        out = Path("runs") / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}-{uuid.uuid4().hex[:4]}"
    out = out.resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = any(out.iterdir())
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
    """`sha256:<hex>` over the suites and the whole package (names and contents): what a certificate was made with."""
    digest = hashlib.sha256()
    folder = suites_folder()
    files = [(path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")]
    package = Path(__file__).parent
    files += [
        (f"epd_conformance/{path.relative_to(package).as_posix()}", path)
        for pattern in ("*.py", "*.toml")
        for path in package.rglob(pattern)
        if not path.is_relative_to(folder)
    ]
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return "sha256:" + digest.hexdigest()


def result_code(report: schema.Report) -> int:
    """The exit code of a run (design §6): that of the certified owner."""
    return exit_code(report.certified_outcome)
