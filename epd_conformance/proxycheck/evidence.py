"""What a cell leaves behind: its plan, what the fake servers saw, and what the clients got. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from epd_conformance.proxycheck.made import Contents
from epd_conformance.proxycheck.plan import COMPLETIONS, MEDIA_HOST, ROLES, Plan, Send, marks

SCHEMA = "epd-conformance/proxy-cell/v1"

LEG_PATHS = ("/v1/chat/completions", COMPLETIONS)


@dataclass(frozen=True)
class Seen:
    """One request that a fake server got. Times are seconds since the cell began; None: it never came to that.

    `body`: the JSON, or the text where it is none. `status`: of the fake's answer; None where the connection was closed before one.
    `told`: the connector's parameters that the answer held. `ended`: when the answer was over; `abandoned`: the proxy left first.
    """

    server: str
    at: float
    method: str
    path: str
    request_id: str
    body: Any
    status: int | None = None
    told: Any = None
    head: float | None = None
    ended: float | None = None
    abandoned: bool = False

    @property
    def role(self) -> str:
        return self.server.partition("-")[0]


@dataclass(frozen=True)
class Got:
    """What became of a client's request. `headers`: those that say something about the request, lower case.

    `end`: `whole`; `broken` (the answer broke off); `refused` (no connection, or closed without an answer); `timeout`; `left`: the
    client closed it. `waited`: a client that leaves saw the server get the request.
    """

    label: str
    request_id: str
    at: float
    status: int | None
    headers: Mapping[str, str]
    body: str
    head: float | None
    ended: float
    end: str
    waited: bool = True


@dataclass(frozen=True)
class ProxyEvidence:
    """Everything that a judge may look at. `servers`: name → address; `media`: the address in the place of `MEDIA_HOST`.

    `limit_s`: how long a server may be silent before the proxy gives up, as the proxy states it. `proxy`: what it was.
    """

    cell: str
    judge: str
    arrangement: str
    plan: Plan
    seen: tuple[Seen, ...]
    got: tuple[Got, ...]
    servers: Mapping[str, str]
    media: str
    limit_s: float
    proxy: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "plan": self.plan.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ProxyEvidence:
        """Raises ValueError, KeyError or TypeError for what is no such evidence."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a cell of schema {SCHEMA}: {data.get('schema')!r}")
        fields = {name: value for name, value in data.items() if name != "schema"}
        fields["plan"] = Plan.from_json(data["plan"])
        fields["seen"] = tuple(Seen(**one) for one in data["seen"])
        fields["got"] = tuple(Got(**one) for one in data["got"])
        return cls(**fields)

    # -- looking things up -------------------------------------------------------------------------------------------------------

    def send(self, label: str) -> Send:
        return next(send for send in self.plan.sends if send.label == label)

    def answer(self, label: str) -> Got:
        return next(got for got in self.got if got.label == label)

    @property
    def pairs(self) -> list[tuple[Send, Got]]:
        """Each request with what became of it."""
        return [(send, self.answer(send.label)) for send in self.plan.sends]

    @property
    def prefills(self) -> bool:
        """Whether there are prefill servers."""
        return any(name.startswith("prefill-") for name in self.servers)

    @property
    def consumer(self) -> str:
        """The role that loads what the encode servers made."""
        return "prefill" if self.prefills else "decode"

    @property
    def consumers(self) -> tuple[str, ...]:
        """The roles that get a request after the encode servers."""
        return ("prefill", "decode") if self.prefills else ("decode",)

    @cached_property
    def calls(self) -> list[Seen]:
        """What the servers got as legs of requests: not health checks and the like."""
        return [seen for seen in self.seen if seen.method == "POST" and seen.path in LEG_PATHS]

    def legs(self, label: str, *roles: str) -> list[Seen]:
        """The legs of one request, in order; of these roles, or of all. A leg is known by the request's words and media."""
        texts = [text.replace(MEDIA_HOST, self.media) for text in marks(self.send(label)) if text not in self._shared]
        wanted = roles or ROLES
        return [seen for seen in self.calls if seen.role in wanted and any(text in str(seen.body) for text in texts)]

    @cached_property
    def _shared(self) -> set[str]:
        # What several requests name tells nothing about whose leg it is.
        return {f"{MEDIA_HOST}/media/{name}" for step in self.plan.steps for name in step.media}

    def contents(self, label: str) -> Contents:
        """What lay behind each URL when this request was sent."""
        known: dict[str, str] = {}
        for step in self.plan.steps:
            known.update({f"{MEDIA_HOST}/media/{name}": content for name, content in step.media.items()})
            if any(send.label == label for send in step.sends):
                break
        return lambda url, _: known.get(url, url)
