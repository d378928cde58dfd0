"""What one requirement says about itself, and the words that its fields are made of."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from epd_conformance.features import Feature
from epd_conformance.verdict import Level, Owner

# Layers without servers stand where a topology stands: what they show does not depend on how servers are arranged.
InProcess = Literal["contract", "scheduler", "proxy"]
IN_PROCESS: tuple[str, ...] = get_args(InProcess)

Topology = Literal["contract", "scheduler", "proxy", "aggregated", "e-pd", "p-d", "e-p-d"]
TOPOLOGIES: tuple[str, ...] = get_args(Topology)

# A kind, a kind with sizes such as 2e-1pd, or how fake servers stand behind a proxy.
SIZED_TOPOLOGY_PATTERN = (
    r"^(contract|scheduler|proxy-e-pd|proxy-e-p-d|aggregated|e-pd|p-d|e-p-d|\d+e-\d+pd|\d+p-\d+d|\d+e-\d+p-\d+d)$"
)


def topology_kind(topology: str) -> str:
    """The kind of a topology: `2e-1pd`, which carries sizes, is an `e-pd`; fakes behind a proxy are `proxy`, however they stand."""
    if topology.startswith("proxy-"):
        return "proxy"
    return re.sub(r"\d+", "", topology)


class EnvironmentClass(StrEnum):
    """What a certificate is valid for; two classes are never compared with each other."""

    CPU_V1 = "cpu-v1"
    CPU_V2_EMULATED = "cpu-v2-emulated"
    CUDA = "cuda"


class Status(StrEnum):
    """`active` has a test and counts; `planned` has none yet, is printed, and counts as nothing."""

    ACTIVE = "active"
    PLANNED = "planned"


class Layer(StrEnum):
    """The cheapest layer that shows it: connector objects in process, vLLM's scheduler without a model, a proxy before fake
    servers, or real servers."""

    CONTRACT = "contract"
    SCHEDULER = "scheduler"
    PROXY = "proxy"
    LIVE = "live"


class ConformanceLevel(StrEnum):
    """`core`: the path works and equality holds. `full`: everything, core included."""

    CORE = "core"
    FULL = "full"


ID_PATTERN = r"^EPD-[A-Z]+-\d{3}$"
# Plans run in both layers without servers, so what they show of a connector is asked in both.
_HOMES: dict[Layer, tuple[tuple[str, ...], ...]] = {
    Layer.CONTRACT: (("contract",), ("contract", "scheduler")),
    Layer.SCHEDULER: (("scheduler",),),
}
_LEVEL_WORD = re.compile(r"\b(MUST|SHOULD|MAY)\b")

# What a table of 80 columns leaves for it beside ids, owners and two topologies.
Title = Annotated[str, Field(min_length=1, max_length=30)]

# See `Requirement.covers`.
Label = Annotated[str, Field(pattern=r"^[ISCB]\d{1,2}$")]


class Requirement(BaseModel):
    """One numbered sentence of the catalogue.

    `title` is a few words for tables, `sentence` the requirement itself (one sentence, with its level as a
    word in it), `rationale` why it matters and what goes wrong without it, `source` where the rule comes from
    (a vLLM file, a public issue or pull request), `since` the version of this suite that released the id:
    from then on its meaning is fixed.

    `topologies` says where it is asked. A requirement of another layer than `live` has the name of its layer there, one of
    `contract` also `scheduler` where plans show it (they run in both); a live one may name `contract`, `scheduler` or `proxy`
    beside its topologies where it can be found broken without servers as well.

    `covers` says which of the facts that the catalogue was made from this requirement answers for: `I5` is an
    invariant of the contract between engine and EC connector, `S3` a line of the analysis of encoder
    disaggregation, `C16` a row of the table of failures, `B13` a public fault report. `labels.toml` says in
    words what each of them is, and `docs/requirements.md` shows who covers it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=ID_PATTERN)]
    title: Title
    level: Level
    owner: Owner
    status: Status
    sentence: Annotated[str, Field(min_length=1)]
    rationale: Annotated[str, Field(min_length=1)]
    source: Annotated[str, Field(min_length=1)]
    since: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    topologies: Annotated[tuple[Topology, ...], Field(min_length=1)]
    layer: Layer
    conformance: ConformanceLevel
    features: tuple[Feature, ...] = ()
    environments: Annotated[tuple[EnvironmentClass, ...], Field(min_length=1)] = tuple(EnvironmentClass)
    covers: tuple[Label, ...] = ()

    @property
    def area(self) -> str:
        """The middle part of the id, such as `XFER`."""
        return self.id.split("-")[1]

    @model_validator(mode="after")
    def _check(self) -> Requirement:
        words = set(_LEVEL_WORD.findall(self.sentence))
        if words != {str(self.level)}:
            found = " and ".join(sorted(words)) or "none of MUST, SHOULD, MAY"
            raise ValueError(f"level is {self.level}, but the sentence says {found}")
        if not self.sentence.endswith(".") or re.search(r"[.!?]\s", self.sentence):
            raise ValueError("`sentence` is not one sentence that ends with a full stop")
        if self.layer in _HOMES and self.topologies not in _HOMES[self.layer]:
            homes = " or ".join(", ".join(home) for home in _HOMES[self.layer])
            raise ValueError(f"layer is {self.layer}: `topologies` must name {homes}, and nothing else")
        if self.layer is Layer.LIVE and set(self.topologies) <= set(IN_PROCESS):
            raise ValueError("layer is live: `topologies` must name a topology with servers")
        for name in ("topologies", "features", "environments", "covers"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"`{name}` names something twice")
        return self


class NotTestable(BaseModel):
    """Something about encoder disaggregation that no test of this suite can show.

    `statement` is what one would like to know, `reason` why no test tells, `instead` what stands in for it;
    `covers` as in `Requirement`: facts of which at least this part stays untested.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    title: Annotated[str, Field(min_length=1)]
    statement: Annotated[str, Field(min_length=1)]
    reason: Annotated[str, Field(min_length=1)]
    instead: Annotated[str, Field(min_length=1)]
    covers: tuple[Label, ...] = ()
