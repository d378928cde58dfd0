"""What a proxy is told when it starts: where the servers are, what it may fetch for a client, and what it does beyond the plain
orchestration."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from epd_conformance.errors import UsageError


class ProxyConfig(BaseModel):
    """Where the servers are. `e-pd` has no `prefill`, `p-d` no `encode`; `decode` alone is a plain proxy.

    All that would hide a fault from the harness is off unless asked for: `retries`, `affinity`, `metadata_only`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    encode: list[str] = []
    prefill: list[str] = []
    decode: list[str] = Field(min_length=1)
    timeout_s: float = Field(
        # A hang must end as an error of this request, so there must be a bound; it is longer than any
        # non-streaming generation on a slow CPU server that also waits behind others, in which the upstream
        # sends nothing at all.
        default=300.0,
        gt=0,
        description="seconds that an upstream, or a client that is still sending or reading, may stay silent",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, description="seconds that a request may take as a whole; none where left out"
    )
    retries: int = Field(default=0, ge=0, le=10, description="how often a leg that got no answer is sent again")
    affinity: bool = Field(default=False, description="equal items go to the same encode server, instead of in turn")
    group_items: int = Field(
        default=1, ge=1, le=256, description="items of one kind for one encode server that share a primer"
    )
    metadata_only: bool = Field(
        default=False,
        description="the stage after encode gets what the encode server said about an item instead of the item",
    )
    max_body_bytes: int = Field(
        # One item of the largest size as base64, and some. A body is held in memory once for each leg in flight.
        default=512 << 20,
        gt=0,
        description="largest request body",
    )
    max_item_bytes: int = Field(
        # vLLM's own limit for what it fetches (VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB at 0.32).
        default=256 << 20,
        gt=0,
        description="largest media item in a data URL, or fetched",
    )
    media_hosts: list[str] = Field(
        default=[],
        description="a host that media URLs may name, *.HOST for all below it; may be repeated. Then no other may be named, and "
        "those that are may be private",
    )
    media_private: bool = Field(default=False, description="media URLs may lead to addresses that are not public")
    media_root: str | None = Field(default=None, description="directory below which file URLs may point")
    media_fetch: bool = Field(
        default=False, description="the proxy fetches media itself, once, and hands every stage the same bytes"
    )

    @field_validator("encode", "prefill", "decode")
    @classmethod
    def _base_urls(cls, urls: list[str]) -> list[str]:
        for url in urls:
            try:
                parts = urlsplit(url)
                usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
            except ValueError:
                usable = False
            if not usable or "?" in url or "#" in url:
                raise ValueError(f"'{url}' is no server address; write http://HOST:PORT")
        return [url.rstrip("/") for url in urls]

    @field_validator("media_hosts")
    @classmethod
    def _hosts(cls, hosts: list[str]) -> list[str]:
        for host in hosts:
            if not host.removeprefix("*.") or "/" in host or "@" in host or "*" in host.removeprefix("*."):
                raise ValueError(f"'{host}' is no host name; write example.org or *.example.org")
        return [host.lower().rstrip(".") for host in hosts]

    @field_validator("media_root")
    @classmethod
    def _absolute(cls, root: str | None) -> str | None:
        if root is not None and not root.startswith("/"):
            raise ValueError(f"'{root}' is no absolute path")
        return root


def make_config(**fields: Any) -> ProxyConfig:
    """A ProxyConfig from loose values. Raises UsageError with one sentence that names the wrong field."""
    try:
        return ProxyConfig(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "too_short":
            raise UsageError("the proxy needs at least one decode server; give --decode URL") from None
        raise UsageError(f"proxy configuration, {where}: {first['msg'].removeprefix('Value error, ')}") from None
