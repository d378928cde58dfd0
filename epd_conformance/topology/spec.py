"""Topologies as pure data: which servers there are, and with which vLLM flags each starts.

Words are those of the field: `encode` computes embeddings, `prefill` and `decode` generate, `prefill_decode` does both,
`aggregated` is one server that does everything and is the baseline.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from epd_conformance.errors import UsageError


class Role(StrEnum):
    """What a server does in a topology."""

    ENCODE = "encode"
    PREFILL = "prefill"
    DECODE = "decode"
    PREFILL_DECODE = "prefill_decode"
    AGGREGATED = "aggregated"


# How each role is abbreviated in a size such as `2e-1pd`.
_LETTERS = {"e": Role.ENCODE, "p": Role.PREFILL, "d": Role.DECODE, "pd": Role.PREFILL_DECODE}
_NAMED: dict[str, dict[Role, int]] = {
    "aggregated": {Role.AGGREGATED: 1},
    "e-pd": {Role.ENCODE: 1, Role.PREFILL_DECODE: 1},
    "p-d": {Role.PREFILL: 1, Role.DECODE: 1},
    "e-p-d": {Role.ENCODE: 1, Role.PREFILL: 1, Role.DECODE: 1},
}
# A typing error such as `200e-1pd` should be refused by name, not by running out of memory; nobody tests more than this on
# one host.
MOST_PER_ROLE = 64


@dataclass(frozen=True)
class Topology:
    """A kind (`aggregated`, `e-pd`, `p-d`, `e-p-d`) with a number of servers for each role."""

    kind: str
    counts: tuple[tuple[Role, int], ...]

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read a name (`e-pd`) or sizes (`2e-1pd`, `1e-2p-2d`).

        Raises UsageError for anything else.
        """
        name = text.strip().lower()
        if name in _NAMED:
            return cls(name, tuple(_NAMED[name].items()))
        counts: dict[Role, int] = {}
        for part in name.split("-"):
            match = re.fullmatch(r"([0-9]{1,3})(e|pd|p|d)", part)
            if match is None or _LETTERS[match[2]] in counts:
                raise _invalid(text)
            counts[_LETTERS[match[2]]] = int(match[1])
        if any(not 1 <= count <= MOST_PER_ROLE for count in counts.values()):
            raise _invalid(text)
        for kind, roles in _NAMED.items():
            if list(roles) == list(counts):
                return cls(kind, tuple(counts.items()))
        raise _invalid(text)

    @property
    def name(self) -> str:
        """The kind where every role has one server, else the sizes."""
        if all(count == 1 for _, count in self.counts):
            return self.kind
        letters = {role: letter for letter, role in _LETTERS.items()}
        return "-".join(f"{count}{letters[role]}" for role, count in self.counts)

    @property
    def has_kv(self) -> bool:
        """Whether prefill and decode are apart, so that a KV connector is needed."""
        return self.kind in ("p-d", "e-p-d")

    @property
    def has_ec(self) -> bool:
        """Whether there is an encode server, so that an EC connector is needed."""
        return self.kind in ("e-pd", "e-p-d")

    def servers(self) -> list[tuple[str, Role]]:
        """Name and role of each server: ('encode-0', Role.ENCODE), …"""
        return [(f"{role}-{i}", role) for role, count in self.counts for i in range(count)]

    def __str__(self) -> str:
        return self.name


def _invalid(text: str) -> UsageError:
    shown = text if len(text) <= 60 else f"{text[:60]}…"
    return UsageError(
        f"{shown!r} is no topology: use aggregated, e-pd, p-d or e-p-d, or sizes from 1 to {MOST_PER_ROLE} "
        "in that order, such as 2e-1pd or 1e-2p-2d"
    )


def ec_role(role: Role) -> str | None:
    """`ec_role` of vLLM's ECTransferConfig for a role; None where the server has no EC connector."""
    return {
        Role.ENCODE: "ec_producer",
        Role.PREFILL: "ec_consumer",
        Role.PREFILL_DECODE: "ec_consumer",
    }.get(role)


def kv_role(role: Role) -> str | None:
    """`kv_role` of vLLM's KVTransferConfig for a role; None where the server has no KV connector."""
    return {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}.get(role)


@dataclass(frozen=True)
class Shape:
    """Flags that shape batches. Both arms of a comparison get the same ones (design, rule 4 of a fair comparison)."""

    max_model_len: int = 2048
    max_num_seqs: int = 8
    # One prompt is prefilled in one step: vLLM's file KV connector stores only on a request's first scheduled step.
    max_num_batched_tokens: int = 4096
    # vLLM's CPU attention takes multiples of 32; small blocks let short prompts have whole blocks to transfer.
    block_size: int = 32
    prefix_caching: bool = True


def server_flags(
    role: Role,
    *,
    model: str,
    served_name: str,
    shape: Shape,
    device: str,
    dtype: str,
    media_limits: Mapping[str, int],
    ec_config: Mapping[str, Any] | None = None,
    kv_config: Mapping[str, Any] | None = None,
    extra: Sequence[str] = (),
) -> tuple[str, ...]:
    """vLLM's arguments for a role.

    `ec_config` and `kv_config` are the JSON of `--ec-transfer-config` and `--kv-transfer-config`; `media_limits` the most
    items of each modality in a prompt; `extra` comes last, so that a subject's own arguments win.
    """
    flags = [
        "--model", model,
        "--served-model-name", served_name,
        "--dtype", dtype,
        "--max-model-len", str(shape.max_model_len),
        "--max-num-seqs", str(shape.max_num_seqs),
        "--max-num-batched-tokens", str(shape.max_num_batched_tokens),
        "--seed", "0",
    ]  # fmt: skip
    if media_limits:
        flags += ["--limit-mm-per-prompt", json.dumps(dict(media_limits), sort_keys=True)]
        # Otherwise a request with processor options of its own is refused, and nobody sees what key they give.
        flags.append("--trust-request-mm-kwargs")
    if device == "cpu":
        # No compiled kernels: they would differ between batch shapes, and compiling costs minutes.
        flags += ["--enforce-eager", "--block-size", str(shape.block_size)]
    if role is Role.ENCODE:
        flags.append("--mm-encoder-only")
    elif not shape.prefix_caching:
        flags.append("--no-enable-prefix-caching")
    if ec_config is not None:
        flags += ["--ec-transfer-config", json.dumps(dict(ec_config), sort_keys=True)]
    if kv_config is not None:
        flags += ["--kv-transfer-config", json.dumps(dict(kv_config), sort_keys=True)]
    return (*flags, *extra)
