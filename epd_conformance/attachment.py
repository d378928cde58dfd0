"""Attachments: a TOML file that says where servers run that something else started, and what may be done with them.

Pure data and pure decisions; `live/attached.py` talks to the servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from epd_conformance.catalogue import EnvironmentClass
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.oracle.cell import Judgement
from epd_conformance.subject import Implementation, StackInfo, Subject
from epd_conformance.toml_file import read_toml
from epd_conformance.topology.spec import Role, Topology
from epd_conformance.verdict import Verdict

# The reason of a cell that needs what an attachment does not give; docs and `verify` know it by this word.
ATTACHED = "attached"
# The reason, as judges use it, of a cell that nothing but a journal could decide.
NOT_JOURNALLED = "not-journalled"


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "?" in text or "#" in text:
        raise ValueError(f"{text!r} is no server address: write http://HOST:PORT")
    if "@" in parts.netloc:
        # It would stand in the report.
        raise ValueError(f"the address of {parts.hostname} holds credentials: leave them out")
    return text.rstrip("/")


def _topology(value: Any) -> Topology:
    try:
        topology = Topology.parse(str(value))
    except UsageError as error:
        raise ValueError(str(error)) from None
    if topology.kind == "p-d":
        raise ValueError("p-d has no encode server: use aggregated, e-pd or e-p-d, or sizes such as 2e-1pd")
    return topology


Url = Annotated[str, AfterValidator(_url)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class AttachedImplementation(_Table):
    """The table `[subject]`: whose connector the attached servers run, for the report, and what it declares."""

    organization: str
    project: Annotated[str, Field(min_length=1)]
    version: str
    url: str = ""
    contact: str = ""
    features: frozenset[Feature] = frozenset()


class Attachment(_Table):
    """An attachment file. Addresses are base URLs; folders are relative to the file.

    `decode` lists the prefill+decode servers of an `e-pd` topology, as the proxy's own option does, and the only server of an
    `aggregated` one. Where `proxy` is given, requests go there; else a proxy of ours is started in front of the lists.
    """

    topology: Annotated[Topology, BeforeValidator(_topology)]
    model: Annotated[str, Field(min_length=1)]
    environment_class: EnvironmentClass
    baseline: Url
    baseline_pd: Url | None = None
    proxy: Url | None = None
    encode: tuple[Url, ...] = ()
    prefill: tuple[Url, ...] = ()
    decode: tuple[Url, ...] = ()
    journal: Path | None = None
    pd_journal: Path | None = None
    store: Path | None = None
    subject: AttachedImplementation | None = None

    @model_validator(mode="after")
    def _whole(self) -> Attachment:
        if self.topology.has_kv and self.baseline_pd is None:
            raise ValueError("e-p-d is compared with a p-d pair as well: add `baseline_pd`, the address of its proxy")
        if not self.topology.has_kv and (self.baseline_pd or self.pd_journal):
            raise ValueError(
                f"{self.topology} is not compared with a p-d pair: leave out `baseline_pd` and `pd_journal`"
            )
        if self.topology.kind == "aggregated" and self.proxy:
            raise ValueError("an aggregated server needs no proxy: write its address into `decode`")
        if self.store and self.subject:
            raise ValueError("a [subject] table has no probe that reads `store`: leave one out, and use --subject")
        counts = dict(self.topology.counts)
        given = [(name, len(getattr(self, name))) for name in ("encode", "prefill", "decode")]
        if any(count for _, count in given) or not self.proxy:
            for name, count in given:
                wanted = sum(counts.get(role, 0) for role in _ROLES[name])
                if count != wanted:
                    raise ValueError(f"{self.topology} wants {wanted} in `{name}`, and the list has {count}")
        return self

    def urls(self) -> dict[str, str]:
        """The address of each server of the topology by its name (`encode-0`); none where only a proxy is known."""
        lists = {role: getattr(self, name) for name, roles in _ROLES.items() for role in roles}
        rest = {role: iter(urls) for role, urls in lists.items()}
        return {name: url for name, role in self.topology.servers() if (url := next(rest[role], None)) is not None}

    @property
    def direct(self) -> bool:
        """Whether servers can be asked past the proxy."""
        return bool(self.decode)


_ROLES = {
    "encode": (Role.ENCODE,),
    "prefill": (Role.PREFILL,),
    "decode": (Role.DECODE, Role.PREFILL_DECODE, Role.AGGREGATED),
}


def load(path: Path) -> Attachment:
    """Read an attachment file. Raises UsageError, in one sentence, for what cannot be read or does not fit."""
    data = read_toml(path, f"the file {path} of --attach", "docs/attach.md")
    try:
        attachment = Attachment.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        words = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            words = "no such key: docs/attach.md lists them"
        raise UsageError(f"{path}: `{where}`: {words}" if where else f"{path}: {words}") from error
    folders = {
        name: path.parent / folder
        for name in ("journal", "pd_journal", "store")
        if (folder := getattr(attachment, name)) is not None
    }
    for name, folder in folders.items():
        if not folder.is_dir():
            raise UsageError(f"{path}: `{name}`: {folder} is no folder that this machine can read")
    return attachment.model_copy(update=folders)


class AttachedSubject(Subject):
    """What the table `[subject]` describes. The servers are configured already, so nothing is asked of it."""

    def __init__(self, described: AttachedImplementation) -> None:
        self.implementation = Implementation(
            organization=described.organization,
            project=described.project,
            version=described.version,
            url=described.url,
            contact=described.contact,
        )
        self.features = described.features

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        raise UsageError("a subject of an attachment configures no server: it only names what runs")


# -- what can be judged ------------------------------------------------------------------------------------------------


class Need(StrEnum):
    """What a cell needs beyond a place to send requests to, in the words of the message for who does not give it."""

    JOURNAL = "the journals of the servers (`journal`)"
    SERVERS = "the servers' own addresses (`encode`, `prefill`, `decode`)"
    RESET = "a server that can reset its encoder cache (start it with VLLM_SERVER_DEV_MODE=1)"
    STORE = "the connector's store (`store`)"


# By judge. A judge that looks at journals and is not said to need them finds by itself that there are none, and says
# `not-journalled`, unless the answer is wrong; the others would say something else of what nobody wrote down. One that is
# not listed here may do anything to its servers (so `confined`, which lays files beside the store, `scripted`, which restarts
# them, and `in-window`, which holds one), and is not carried out.
_NEEDS: dict[str, tuple[Need, ...]] = {
    "equality": (),
    "text-only": (),
    "transported": (),
    "warm": (),
    "twice": (),
    "kv-taken": (),
    "untouched": (),
    "stage-error": (),
    "primed-once": (Need.JOURNAL,),
    "distinct": (Need.JOURNAL,),
    "constructed": (Need.JOURNAL,),
    "encode-only": (Need.SERVERS, Need.JOURNAL),
    "ended": (Need.SERVERS,),
    "text-ended": (Need.SERVERS, Need.JOURNAL),
    "named": (Need.SERVERS, Need.JOURNAL),
    "miss": (Need.SERVERS,),
    "both": (Need.RESET, Need.JOURNAL),
    "recomputed": (Need.SERVERS, Need.STORE, Need.JOURNAL),
    "fails-alone": (Need.SERVERS, Need.STORE, Need.JOURNAL),
    "contained": (Need.SERVERS, Need.STORE, Need.JOURNAL),
    "as-direct": (),
    "refused": (),
    "not-begun": (),
    "passed-on": (),
    "order": (),
    "kept-apart": (),
    "prompt-tokens": (),
    "media-only": (),
    "encoding-options": (),
    "one-id": (),
    "one-token": (Need.SERVERS,),
    "work-ends": (Need.SERVERS,),
}


@dataclass(frozen=True)
class Given:
    """What an attachment gives, as found when it was looked at."""

    needs: frozenset[Need]

    def refusal(self, judge: str) -> Judgement | None:
        """Why a cell of this judge is not carried out; None where it is."""
        wanted = _NEEDS.get(judge)
        if wanted is None:
            observed = "the servers are not the harness's own, which this cell would do more to than ask them"
            return Judgement(
                Verdict.COULD_NOT_RUN, ATTACHED, expected="servers that the harness started", observed=observed
            )
        missing = next((need for need in wanted if need not in self.needs), None)
        if missing is None:
            return None
        observed = "the attachment does not give them" if missing is not Need.RESET else "this one cannot"
        if missing is Need.JOURNAL:
            return Judgement(Verdict.INCONCLUSIVE, NOT_JOURNALLED, expected=missing, observed=observed)
        return Judgement(Verdict.COULD_NOT_RUN, ATTACHED, expected=missing, observed=observed)
