"""Proof of transport and of KV, from journals: which path did the items of a request really take?

Equal answers prove nothing by themselves: a consumer that encodes locally, a prefix cache, or a decode server that computes
the whole prompt again gives them too. Design, rule 1 of a fair comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

# vLLM makes `chatcmpl-<X-Request-Id>-<random>` of the header; our proxy puts -e<i>, -p or -d behind the client's id.
_LEG = re.compile(r"^chatcmpl-(?P<rid>.+?)(?:-(?P<leg>e\d+|p|d))?(?:-[0-9a-f]{8})?$")


def leg_of(request: str, rid: str) -> str | None:
    """Which leg (`e0`, `p`, `d`, or `` for a request that went to a server directly) a server's request id is of `rid`."""
    match = _LEG.match(request)
    if match is None or match["rid"] != rid:
        return None
    return match["leg"] or ""


@dataclass(frozen=True)
class Item:
    """One item of a request as the consumer saw it, with what is proven about it."""

    key: str
    offset: int
    length: int
    embeds: int
    how: str  # loaded | held | encoded | prefix-hit | nothing
    saved: tuple[str, ...] = ()
    digest: str | None = None

    @property
    def digest_known(self) -> bool:
        """Whether the bytes that were used are bytes that a producer of this stack saved under this key."""
        return self.digest is not None and self.digest in self.saved


@dataclass(frozen=True)
class Transport:
    """What the journals prove about one request's items.

    `saves`, `loads`, `local_encodes` count events of this cell; `digests_equal` is None where nothing was loaded or held.
    `problem` is the reason for `inconclusive`, or None where transport is proven for every item.
    """

    saves: int
    loads: int
    local_encodes: int
    digests_equal: bool | None
    items: tuple[Item, ...]
    problem: str | None
    primed: tuple[
        tuple[int, str], ...
    ] = ()  # (index of the item in the client's request, key), as encode servers saw them
    primed_late: bool = False  # an encode server saw an item only after the consumer had begun

    @property
    def order_kept(self) -> bool | None:
        """Whether the consumer got the items in the order in which the client gave them; None where nothing was primed."""
        if not self.primed:
            return None
        return [key for _, key in sorted(self.primed)] == [item.key for item in self.items]


@dataclass(frozen=True)
class KVTransfer:
    """What the decode server took. `problem` as in `Transport`."""

    tokens: int
    expected: int
    decode_encodes: int
    problem: str | None


@dataclass(frozen=True)
class Roles:
    """Which servers (by journal name) play which part in a stack."""

    encode: frozenset[str] = frozenset()
    consumers: frozenset[str] = frozenset()
    decode: frozenset[str] = field(default_factory=frozenset)
    both: frozenset[str] = frozenset()

    def to_json(self) -> dict[str, list[str]]:
        return {name: sorted(getattr(self, name)) for name in ("encode", "consumers", "decode", "both")}

    @classmethod
    def from_json(cls, data: Mapping[str, Sequence[str]]) -> Roles:
        return cls(**{name: frozenset(servers) for name, servers in data.items()})


def transport(before: Sequence[Event], during: Sequence[Event], rid: str, roles: Roles) -> Transport:
    """Prove the transport of every item of request `rid`.

    `before` are the stack's journal lines up to the cell, `during` those of the cell. The consumer's own request event says
    which items there are, in prompt order.
    """
    everything = [*before, *during]
    seen = _request(during, rid, roles.consumers, ("d", "p", ""))
    primers = [
        (int((leg_of(event["req"], rid) or "")[1:]), event)
        for event in during
        if event["ev"] == "request"
        and event["server"] in roles.encode
        and (leg_of(event["req"], rid) or "").startswith("e")
    ]
    primed = tuple((index, item["id"]) for index, event in primers for item in event["items"])
    if seen is None:
        return Transport(0, 0, 0, None, (), "not-journalled: the consumer's journal does not show this request", primed)
    server = seen["server"]
    keys = [item["id"] for item in seen["items"]]
    saved: dict[str, list[str]] = {}
    for event in everything:
        if event["ev"] == "save" and event["server"] in roles.encode | roles.both:
            saved.setdefault(event["id"], []).append(event["digest"])
    loads = [event for event in during if event["ev"] == "load" and event["server"] == server and event["id"] in keys]
    encodes = [
        key
        for event in during
        if event["ev"] == "step" and event["server"] not in roles.encode
        for encoded in event["encode"].values()
        for key in encoded
        if key in keys
    ]
    computed = _computed(during, rid, server)
    held = _held(_life(before, server), server)
    items = []
    for entry in seen["items"]:
        key = entry["id"]
        loaded = [event["digest"] for event in loads if event["id"] == key]
        if key in encodes:
            how, digest = "encoded", None
        elif loaded:
            how, digest = "loaded", loaded[-1]
        elif computed is not None and entry["offset"] + entry["length"] <= computed:
            how, digest = "prefix-hit", None
        elif key in held:
            how, digest = "held", held[key]
        else:
            how, digest = "nothing", None
        items.append(
            Item(key, entry["offset"], entry["length"], entry["embeds"], how, tuple(saved.get(key, ())), digest)
        )
    used = [item for item in items if item.digest is not None]
    return Transport(
        saves=sum(
            1
            for event in during
            if event["ev"] == "save" and event["server"] in roles.encode | roles.both and event["id"] in keys
        ),
        loads=len(loads),
        local_encodes=len(encodes),
        digests_equal=all(item.digest_known for item in used) if used else None,
        items=tuple(items),
        problem=_problem(items),
        primed=primed,
        primed_late=any(event["t"] > seen["t"] for _, event in primers),
    )


def _problem(items: Iterable[Item]) -> str | None:
    for item in items:
        if item.how == "encoded":
            return "local-encode: a server after the encode stage encoded the item itself"
        if item.how == "prefix-hit":
            return "prefix-hit: the prefix cache answered, the connector was not asked"
        if item.how == "nothing":
            return "not-loaded: the consumer neither loaded the item nor holds it from an earlier load"
        if not item.saved:
            return "not-saved: no producer of this stack saved what the consumer used"
    return None


def _request(events: Iterable[Event], rid: str, servers: frozenset[str], legs: tuple[str, ...]) -> Event | None:
    """The event in which a server of the given ones first saw the request."""
    found = [
        event
        for event in events
        if event["ev"] == "request" and event["server"] in servers and leg_of(event["req"], rid) in legs
    ]
    return found[0] if found else None


def _computed(events: Iterable[Event], rid: str, server: str) -> int | None:
    """Tokens that were computed already when the request was first scheduled: what the prefix cache gave."""
    for event in events:
        if event["ev"] == "step" and event["server"] == server:
            for new in event["new"]:
                if leg_of(new["req"], rid) is not None:
                    return int(new["computed"])
    return None


def _life(events: Sequence[Event], server: str) -> list[Event]:
    """The server's events since its last start: what an earlier process held is gone."""
    mine = [event for event in events if event["server"] == server]
    starts = [position for position, event in enumerate(mine) if event["ev"] == "init" and event["side"] == "scheduler"]
    return mine[starts[-1] :] if starts else mine


def _held(events: Iterable[Event], server: str) -> dict[str, str]:
    """Keys that the server loaded and has not been told to free since, with the digest they were loaded with."""
    held: dict[str, str] = {}
    for event in events:
        if event["ev"] == "load":
            held[event["id"]] = event["digest"]
        elif event["ev"] == "encoded":
            held.pop(event["id"], None)
        elif event["ev"] == "step":
            for key in event["free"]:
                held.pop(key, None)
    return held


def kv_expected(connector: str, prompt: int, block: int) -> int:
    """Tokens of a prompt whose KV a connector can hand over.

    vLLM's file connector (kv_connector/v1/example_connector.py) gives the whole blocks among all tokens but the last. Other
    connectors (NIXL) hand over at least as much.
    """
    return (prompt - 1) // block * block


def kv_servable(prompt: int, block: int) -> bool:
    """Whether the length is one that the file connector can serve: with (prompt − 1) % block == 0 its store key and its
    look-up key cover different blocks, and the decode server misses."""
    return (prompt - 1) % block != 0


def kv_transfer(before: Sequence[Event], during: Sequence[Event], rid: str, roles: Roles) -> KVTransfer:
    """Prove that the decode server took the KV of every whole block and encoded nothing.

    `before` holds the decode servers' `init` lines, which say connector and block size.
    """
    new = next(
        (
            event
            for event in during
            if event["ev"] == "kv-new" and event["server"] in roles.decode and leg_of(event["req"], rid) in ("d", "")
        ),
        None,
    )
    if new is None:
        return KVTransfer(0, 0, 0, "not-journalled: the decode server's journal does not show this request")
    server = new["server"]
    init = [
        event
        for event in before
        if event["ev"] == "init" and event["side"] == "kv-scheduler" and event["server"] == server
    ]
    connector = init[-1]["connector"] if init else ""
    block = int(init[-1]["block_size"]) if init else 1
    taken = sum(
        int(event["tokens"])
        for event in during
        if event["ev"] == "kv-take" and event["server"] == server and event["req"] == new["req"]
    )
    if connector.endswith(".ExampleConnector"):
        # What the scheduler counted on and what the worker put in must both be there.
        injected = sum(
            int(event["tokens"]) for event in during if event["ev"] == "kv-injected" and event["server"] == server
        )
        taken = min(taken, injected)
    encodes = sum(
        len(indices)
        for event in during
        if event["ev"] == "kv-encode" and event["server"] == server
        for req, indices in event["encode"].items()
        if req == new["req"]
    )
    expected = kv_expected(connector, int(new["prompt"]), block)
    outside = [item for item in new["items"] if item["offset"] + item["length"] > expected]
    problem = None
    if encodes:
        problem = "decode-encode: the decode server encoded the item itself"
    elif taken < expected or expected == 0:
        problem = f"kv-recompute: the decode server took {taken} of {expected} tokens of KV and computed the rest"
    elif outside:
        problem = "item-outside-blocks: an item lies behind the last whole block, so decode saw its media"
    return KVTransfer(taken, expected, encodes, problem)
