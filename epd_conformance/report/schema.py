"""The report, schema `epd-conformance/report/v1`: attributes in snake_case here, camelCase on disk.

The models are the only definition. `report-v1.schema.json` beside this file is exported from them for readers
in other languages (`json_schema`, `export_json_schema`), and a test keeps the two equal.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, date
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue, field_validator
from pydantic.alias_generators import to_camel

from epd_conformance.catalogue.model import (
    ID_PATTERN,
    SIZED_TOPOLOGY_PATTERN,
    ConformanceLevel,
    EnvironmentClass,
)
from epd_conformance.catalogue.selection import ExpectedCell, NotVerifiedKind
from epd_conformance.report.redact import redact
from epd_conformance.verdict import Level, Mode, Outcome, Owner, Verdict

SCHEMA_ID: Final = "epd-conformance/report/v1"
SCHEMA_FILE = Path(__file__).with_name("report-v1.schema.json")

# Rule 5 of a fair comparison: on fewer stable prompts than these, equality says nothing about the subject.
MIN_ADMITTED = 8
MIN_ADMITTED_SHARE = 0.8

# What every certificate's contents are drawn from: with a seed of one's own one could try until a run comes out well.
CERTIFY_SEED = 0

# The reason of an expected cell without a result that has a test: the run was cut short, or told to leave the cell out.
DID_NOT_RUN = "did not run"

TopologyName = Annotated[str, Field(pattern=SIZED_TOPOLOGY_PATTERN)]
RequirementId = Annotated[str, Field(pattern=ID_PATTERN)]
Count = Annotated[int, Field(ge=0)]


class Model(BaseModel):
    """Frozen, camelCase on disk, unknown keys refused; may be built with either spelling."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, validate_by_name=True, validate_by_alias=True
    )

    def to_disk(self) -> dict[str, Any]:
        """The JSON object that is written, keys in camelCase."""
        return self.model_dump(mode="json", by_alias=True)


class Evidence(Model):
    """What the recorders saw in one cell, counted; None where it was not looked at or does not apply.

    `saves`, `loads`, `local_encodes` and `decode_encodes` count items, `kv_tokens` and `kv_tokens_expected`
    tokens.
    """

    saves: Count | None = None
    loads: Count | None = None
    local_encodes: Count | None = None
    digests_equal: bool | None = None
    kv_tokens: Count | None = None
    kv_tokens_expected: Count | None = None
    decode_encodes: Count | None = None


class CellRecord(Model):
    """What became of one cell. `artifacts` are paths relative to the report's directory, files or folders."""

    id: str
    requirement: RequirementId
    topology: TopologyName
    model: str = ""
    case: str = ""
    verdict: Verdict
    reason: str = ""
    """Short and stable, such as `local-encode` or `kv-recompute`; what `inconclusive: …` goes on with."""
    blame: Owner | None = None
    """Who a failure points at, where that is not the requirement's owner."""
    excused: Verdict | None = None
    """What the evidence gave, where the run's lists made `known-failing` or `waived` of it."""
    excused_by: tuple[Count, ...] = ()
    """The places, in `knownDeviations`, of the entries that did."""
    rung: str | None = None
    """The rung of the oracle ladder that failed, such as `digest` or `tokens`."""
    observed: str = ""
    """What was seen instead of what the requirement asks for; empty for a pass."""
    message: str = ""
    """The whole text for a person; see `report.failure.failure_text`."""
    evidence: Evidence = Evidence()
    duration_s: Annotated[float, Field(ge=0)] = 0.0
    artifacts: tuple[str, ...] = ()
    reproduce: str = ""
    """The command that runs this cell again."""

    @field_validator("artifacts")
    @classmethod
    def _relative(cls, paths: tuple[str, ...]) -> tuple[str, ...]:
        for path in paths:
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not pure.parts:
                raise ValueError(f"artifact {path!r} is not a path below the report's directory")
        return paths


class Artifact(Model):
    """A file of the evidence; `path` is relative to the report's directory."""

    path: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    bytes: Count


class SuiteInfo(Model):
    """Which suite this was. `digest` covers its files, `catalogue` is `Catalogue.digest()`.

    `modified`: whether its files are others than those that were released; None where nothing says what they were, as in a
    checkout.
    """

    version: str
    digest: str = ""
    catalogue: str
    modified: bool | None = None


class RunInfo(Model):
    """How the run was asked for. `certifies` is the owner whose outcome decides the exit code."""

    id: str
    mode: Mode
    profile: str
    level: ConformanceLevel
    seed: int
    command: tuple[str, ...]
    started: AwareDatetime
    finished: AwareDatetime | None = None
    certifies: Owner = Owner.CONNECTOR


class ImplementationInfo(Model):
    """Who made the subject."""

    organization: str = ""
    project: str = ""
    version: str = ""
    url: str = ""
    contact: str = ""


class ConfigurationRecord(Model):
    """What the subject gave for one role in one topology, as it was first asked.

    Paths and ports of the stack stand there as placeholders such as `{store}` and `{port:encode-0}`; secrets are redacted.
    """

    topology: TopologyName
    role: Annotated[str, Field(pattern=r"^ec_(producer|consumer|both)$")]
    config: dict[str, JsonValue]
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}


def config_digest(configurations: Sequence[ConfigurationRecord]) -> str:
    """`sha256:<hex>` over the configurations as they stand in a report, sorted; empty where there are none.

    Over what is shown and nothing else: anybody can compute it again, and no secret can be guessed from it. So two
    configurations that differ only in a secret have the same digest.
    """
    if not configurations:
        return ""
    texts = sorted(json.dumps(redact(one.to_disk()), sort_keys=True, separators=(",", ":")) for one in configurations)
    return "sha256:" + hashlib.sha256("\n".join(texts).encode()).hexdigest()


class SubjectInfo(Model):
    """What was certified. `config_digest` is that of `configurations`; both are known only when the stacks have been booted."""

    name: str
    implementation: ImplementationInfo = ImplementationInfo()
    features: tuple[str, ...] = ()
    config_digest: str = ""
    configurations: tuple[ConfigurationRecord, ...] = ()


class WarningRecord(Model):
    """Something about the subject that a reader of the report has to know, and that is no verdict."""

    text: str


class Results(Model):
    """Where the raw results lie: relative to the report's directory, or absolute where they lie outside of it."""

    ndjson: str = "results.ndjson"
    junit: str | None = None
    allure: str | None = None


class DeviationKind(StrEnum):
    """Which of the three lists an entry stands in: the name of its table in the file."""

    KNOWN = "known"
    WAIVER = "waiver"
    FLAKY = "flaky"


class KnownDeviation(Model):
    """One entry of the lists that a develop run was given; `epd_conformance.deviations` says what each does.

    `pattern` names cells, `message` is the expression that a known failure's words must hold, `reason` why a cell is waived,
    `expires` the last day on which the entry counts.
    """

    kind: DeviationKind
    pattern: str
    message: str = ""
    reason: str = ""
    issue: str
    expires: date | None = None
    note: str = ""


class RunStart(Model):
    """The first line of a results file: everything about the run that is known before it starts."""

    suite: SuiteInfo
    run: RunInfo
    subject: SubjectInfo
    environment_class: EnvironmentClass
    results: Results = Results()
    known_deviations: tuple[KnownDeviation, ...] = ()
    """The lists as they were given. A worker of a parallel run gets this whole record, so all judge by the same ones."""

    @property
    def day(self) -> date:
        """The day (UTC) that decides which entries of the lists have expired."""
        return self.run.started.astimezone(UTC).date()


class ModelInfo(Model):
    """The model that the servers ran."""

    id: str
    digest: str = ""


class Patch(Model):
    """A repair in force in the servers, what it changes and why: a patched engine is named as such."""

    name: str
    what: str
    why: str


class EnvironmentInfo(Model):
    """What the servers ran on and with. `flags` are the arguments of each role; `details` whatever else is
    worth knowing."""

    vllm_version: str = ""
    vllm_commit: str = ""
    platform: str = ""
    python: str = ""
    torch: str = ""
    devices: tuple[str, ...] = ()
    models: tuple[ModelInfo, ...] = ()
    dtype: str = ""
    attention_backend: str = ""
    flags: dict[str, tuple[str, ...]] = {}
    patches: tuple[Patch, ...] = ()
    details: dict[str, JsonValue] = {}


class RejectedPrompt(Model):
    """A prompt on which the baseline does not agree with itself well enough, and why."""

    prompt: str
    reason: str


class NoiseFloor(Model):
    """A baseline against itself, `runs` times: which prompts may be compared exactly.

    `max_logprob_delta` and `min_margin` are in nats: the largest difference between two runs, and the
    smallest distance between the first and the second choice among the admitted prompts.
    """

    baseline: TopologyName
    model: str
    runs: Annotated[int, Field(ge=2)]
    max_logprob_delta: Annotated[float, Field(ge=0)]
    min_margin: Annotated[float, Field(ge=0)] | None = None
    admitted: tuple[str, ...]
    rejected: tuple[RejectedPrompt, ...] = ()

    @property
    def sufficient(self) -> bool:
        """Whether enough prompts were admitted to decide anything: at least 8, and 80 % of those tried."""
        admitted, tried = len(self.admitted), len(self.admitted) + len(self.rejected)
        return admitted >= MIN_ADMITTED and admitted >= MIN_ADMITTED_SHARE * tried


class FaultRecord(Model):
    """How often a kind of fault was injected, provably happened, and was met by its victim."""

    kind: str
    injected: Count
    verified: Count
    met_by_victim: Count


class NotVerifiedRecord(Model):
    """Something that this run says nothing about, and why."""

    kind: NotVerifiedKind
    requirement: RequirementId
    detail: str


class ExpectedRecord(Model):
    """A cell that has to run. Level and owner are the catalogue's, and are not repeated here."""

    id: str
    requirement: RequirementId
    topology: TopologyName
    model: str = ""
    case: str = ""

    @classmethod
    def of(cls, cell: ExpectedCell) -> ExpectedRecord:
        return cls(
            id=cell.id,
            requirement=cell.requirement,
            topology=cell.topology,
            model=cell.model,
            case=cell.case,
        )


class ExpectedSet(Model):
    """The expected set of a run and what lies outside it, fixed before the first cell."""

    cells: tuple[ExpectedRecord, ...]
    not_verified: tuple[NotVerifiedRecord, ...] = ()


class RunEnd(Model):
    """The last line of a results file. Without one the run was cut short."""

    finished: AwareDatetime
    interrupted: bool = False
    reason: str = ""


class KnownDeviationRecord(KnownDeviation):
    """An entry, the cells that it covers, and what is wrong with it: each problem makes the run incomplete."""

    cells: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


class RequirementRecord(Model):
    """A requirement over all its cells."""

    id: RequirementId
    title: str
    sentence: str
    owner: Owner
    level: Level
    verdict: Verdict
    cells: tuple[CellRecord, ...]


class Report(Model):
    """`report.json`."""

    schema_id: Annotated[Literal["epd-conformance/report/v1"], Field(alias="schema")] = SCHEMA_ID
    suite: SuiteInfo
    run: RunInfo
    subject: SubjectInfo
    environment: EnvironmentInfo
    environment_class: EnvironmentClass
    complete: bool
    """The run ended by itself and every expected cell ran."""
    interrupted: bool
    """The run was stopped, or crashed, before its end."""
    warnings: tuple[str, ...] = ()
    """What a reader has to know about the evidence itself, such as a torn line or a missing artifact."""
    noise_floor: tuple[NoiseFloor, ...] = ()
    outcome: Outcome
    engine_outcome: Outcome
    proxy_outcome: Outcome
    summary: dict[str, int]
    not_verified: tuple[NotVerifiedRecord, ...] = ()
    requirements: tuple[RequirementRecord, ...] = ()
    faults: tuple[FaultRecord, ...] = ()
    known_deviations: tuple[KnownDeviationRecord, ...] = ()
    results: Results = Results()
    artifacts: tuple[Artifact, ...] = ()
    previous: str | None = None

    def outcome_of(self, owner: Owner) -> Outcome:
        """The outcome for one owner."""
        return {
            Owner.CONNECTOR: self.outcome,
            Owner.ENGINE: self.engine_outcome,
            Owner.PROXY: self.proxy_outcome,
        }[owner]

    @property
    def certified_outcome(self) -> Outcome:
        """The outcome that decides the exit code (`verdict.exit_code`)."""
        return self.outcome_of(self.run.certifies)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `report.json`."""
    schema = Report.model_json_schema(by_alias=True, mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_ID, **schema}


def export_json_schema(path: Path = SCHEMA_FILE) -> None:
    """Writes `json_schema()` to `path`; run it after a change of the models."""
    path.write_text(json.dumps(json_schema(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
