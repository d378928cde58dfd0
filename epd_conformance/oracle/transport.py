"""Proof of transport and of KV, from journals: which path did the items of a request really take?

Equal answers prove nothing by themselves: a consumer that encodes locally, a prefix cache, or a decode server that computes
the whole prompt again gives them too. Design, rule 1 of a fair comparison.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = Mapping[str, Any]

# vLLM makes `chatcmpl-<X-Request-Id>-<random>` of the header; our proxy puts -e<i>, -p or -d behind the client's id. An item's
# number has at most six digits: with seven, the random part of a direct request (`-e1234567`) would look like a leg.
_PREFIX = "chatcmpl-"
_LEG = re.compile(r"(?:-(?P<leg>e\d{1,6}|p|d))?(?:-[0-9a-f]{8})?")


def leg_of(request: str, rid: str) -> str | None:
    """Which leg (`e0`, `p`, `d`, or `` for a request that went to a server directly) a server's request id is of `rid`.

    None for another request; an id that merely begins with `rid` is another one.
    """
    if not request.startswith(_PREFIX + rid):
        return None
    match = _LEG.fullmatch(request, len(_PREFIX) + len(rid))
    return None if match is None else match["leg"] or ""


@dataclass(frozen=True)
class Item:
    """One item of a request as the consumer saw it, with what is proven about it.

    `saved`: the digests that a load may have: those of the producers' saves under this key that were in force when the
    consumer asked (see `in_force`); of all saves where nothing was loaded. `digest`: of the bytes that the consumer loaded or
    holds; of several loads the first wrong one.
    """

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

    @property
    def digest_wrong(self) -> bool:
        """Whether other bytes were used than any producer had saved. Without a save nothing can be compared."""
        return self.digest is not None and bool(self.saved) and self.digest not in self.saved


@dataclass(frozen=True)
class Transport:
    """What the journals prove about one request's items.

    `saves`, `loads`, `local_encodes` count events of this cell. `digests_equal`: False where any digest is wrong, True where
    every item's is right, None where some could not be compared. `problem` is the reason for `inconclusive`, or None where
    transport is proven for every item. `server`: the consumer.
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
    primed_late: bool = False  # an encode server was not done with an item when the consumer began
    server: str = ""

    @property
    def order_kept(self) -> bool | None:
        """Whether the consumer got each primed item in the place that the client gave it; None where nothing was primed."""
        if not self.primed or not self.items:
            return None
        return all(index < len(self.items) and self.items[index].key == key for index, key in self.primed)


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
    primers = [
        (int((leg_of(event["req"], rid) or "")[1:]), event)
        for event in during
        if event["ev"] == "request"
        and event["server"] in roles.encode
        and (leg_of(event["req"], rid) or "").startswith("e")
    ]
    primed = tuple((index, item["id"]) for index, event in primers for item in event["items"])
    seen = [
        event
        for event in during
        if event["ev"] == "request"
        and event["server"] in roles.consumers
        and leg_of(event["req"], rid) in ("d", "p", "")
    ]
    if not seen:
        return Transport(0, 0, 0, None, (), "not-journalled: the consumer's journal does not show this request", primed)
    first = seen[0]
    server = first["server"]
    keys = {item["id"] for item in first["items"]}
    saves = _saves(everything, keys, roles)
    position = _scheduled(during, server, first["req"])
    computed = 0 if position is None else _computed(during[position], first["req"])
    # What was loaded before the request was scheduled is held then, or was evicted again.
    earlier, later = (during[: position + 1], during[position + 1 :]) if position is not None else ((), during)
    held = _held([*before, *earlier], server)
    fresh = _loads(later, server, keys)
    encodes = _encodes(during, keys, roles)
    items = []
    for entry in first["items"]:
        key = entry["id"]
        used = [event for event in fresh if event["id"] == key]
        if encodes[key]:
            how = "encoded"
        elif entry["offset"] + entry["length"] <= computed:
            how = "prefix-hit"
        elif used:
            how = "loaded"
        elif key in held:
            how, used = "held", [held[key]]
        else:
            how = "nothing"
        mine = [event for event in saves if event["id"] == key]
        judged = [(event["digest"], in_force(mine, event, everything)) for event in used]
        # One wrong load is enough: nobody can say which of them the model read.
        digest, saved = min(
            judged,
            key=lambda pair: pair[0] in pair[1] if pair[1] else 0.5,
            default=(None, tuple(event["digest"] for event in mine)),
        )
        items.append(Item(key, entry["offset"], entry["length"], entry["embeds"], how, saved, digest))
    if len({event["server"] for event in seen}) > 1:
        problem: str | None = "several-consumers: more than one server took the request, so whose work was used is open"
    elif position is None:
        problem = "not-journalled: the consumer's journal does not show that the request was scheduled"
    else:
        problem = _problem(items)
    return Transport(
        saves=len(_saves(during, keys, roles)),
        loads=len(_loads(during, server, keys)),
        local_encodes=sum(encodes.values()),
        digests_equal=_digests_equal(items),
        items=tuple(items),
        problem=problem,
        primed=primed,
        primed_late=any(not _finished_by(during, event, first["t"]) for _, event in primers),
        server=server,
    )


def _saves(events: Iterable[Event], keys: set[str], roles: Roles) -> list[Event]:
    producers = roles.encode | roles.both
    return [event for event in events if event["ev"] == "save" and event["server"] in producers and event["id"] in keys]


def _loads(events: Iterable[Event], server: str, keys: set[str]) -> list[Event]:
    return [event for event in events if event["ev"] == "load" and event["server"] == server and event["id"] in keys]


def in_force(saves: Sequence[Event], load: Event, events: Sequence[Event]) -> tuple[str, ...]:
    """Digests of the saves of one key that a load of it may have returned.

    Rule 1 asks for bytes that a producer saved, rule 7 for those that one saved *for this very content*. A key names its
    content, so two saves of one key with different bytes are either two encodings of the same content, made at the same time
    (both are right), or the later one replaces what was wrong or out of date (only it is right). So a save is out of force
    when another one began after it had ended, and ended before the consumer asked for the item; and a save that began after
    the load had ended cannot be its source.

    A save begins when its server decided to encode the item, since it is then that the producer found the key free; the
    consumer asks when it first sees a request with the item, since a connector may fetch from then on. Where these lines are
    missing, the calls' own durations serve.
    """
    asked = max(
        (
            event["t"]
            for event in events
            if event["ev"] == "request"
            and event["server"] == load["server"]
            and event["t"] <= load["t"]
            and any(item["id"] == load["id"] for item in event["items"])
        ),
        default=load["t"] - load["seconds"],
    )
    spans = [(_began(save, events), save["t"], save["digest"]) for save in saves]
    return tuple(
        digest
        for began, ended, digest in spans
        if began <= load["t"]
        and not any(later > ended and done < asked and other != digest for later, done, other in spans)
    )


def _began(save: Event, events: Iterable[Event]) -> float:
    """When the producer decided to encode what it then saved."""
    return float(
        max(
            (
                event["t"]
                for event in events
                if event["ev"] == "step"
                and event["server"] == save["server"]
                and event["t"] <= save["t"]
                and any(save["id"] in encoded for encoded in event["encode"].values())
            ),
            default=save["t"] - save["seconds"],
        )
    )


def _digests_equal(items: Sequence[Item]) -> bool | None:
    if any(item.digest_wrong for item in items):
        return False
    return True if items and all(item.digest_known for item in items) else None


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


def _encodes(events: Iterable[Event], keys: set[str], roles: Roles) -> Counter[str]:
    """How often each key was encoded after the encode stage, by any server and for any request.

    The scheduler's output says it on every runner; `encoded` lines, which the worker writes on V1, say it once more.
    """
    scheduled: Counter[str] = Counter()
    called: Counter[str] = Counter()
    for event in events:
        if event["server"] in roles.encode:
            continue
        if event["ev"] == "step":
            scheduled.update(key for encoded in event["encode"].values() for key in encoded if key in keys)
        elif event["ev"] == "encoded" and event["id"] in keys:
            called[event["id"]] += 1
    return scheduled | called


def _scheduled(events: Sequence[Event], server: str, request: str) -> int | None:
    """The position of the step that first scheduled a request. Without it, nothing is known of what its server encoded."""
    for position, event in enumerate(events):
        if event["ev"] == "step" and event["server"] == server and any(new["req"] == request for new in event["new"]):
            return position
    return None


def _computed(step: Event, request: str) -> int:
    """Tokens that were computed already when the request was first scheduled: what the prefix cache gave."""
    return next(int(new["computed"]) for new in step["new"] if new["req"] == request)


def _finished_by(events: Iterable[Event], primer: Event, moment: float) -> bool:
    """Whether an encode server had finished a primer at a moment."""
    return any(
        event["ev"] == "finished"
        and event["server"] == primer["server"]
        and event["req"] == primer["req"]
        and event["t"] <= moment
        for event in events
    )


def _held(events: Iterable[Event], server: str) -> dict[str, Event]:
    """Keys that the server loaded, and has neither been told to free nor encoded since, with the load.

    A start of the server ends what an earlier process of that name held.
    """
    held: dict[str, Event] = {}
    for event in events:
        if event["server"] != server:
            continue
        if event["ev"] == "init":
            held.clear()
        elif event["ev"] == "load":
            held[event["id"]] = event
        elif event["ev"] == "encoded":
            held.pop(event["id"], None)
        elif event["ev"] == "step":
            for key in (*event["free"], *(key for encoded in event["encode"].values() for key in encoded)):
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

    The decode server's `init` line says connector and block size; it lies in `before`, or in `during` after a restart.
    """
    seen = [
        event
        for event in during
        if event["ev"] == "kv-new" and event["server"] in roles.decode and leg_of(event["req"], rid) in ("d", "")
    ]
    if not seen:
        return KVTransfer(0, 0, 0, "not-journalled: the decode server's journal does not show this request")
    new = seen[0]
    server = new["server"]
    init = [
        event
        for event in (*before, *during)
        if event["ev"] == "init" and event["side"] == "kv-scheduler" and event["server"] == server
    ]
    if not init:
        return KVTransfer(0, 0, 0, "not-journalled: the decode server's journal does not show its KV connector")
    block = int(init[-1]["block_size"])
    takes = [
        int(event["tokens"])
        for event in during
        if event["ev"] == "kv-take" and event["server"] == server and event["req"] == new["req"]
    ]
    # A request that was preempted takes its KV again: the last time counts, two halves are not a whole.
    taken = takes[-1] if takes else 0
    if init[-1]["connector"].endswith(".ExampleConnector"):
        # What the scheduler counted on and what the worker put in must both be there.
        injected = sum(
            int(event["tokens"]) for event in during if event["ev"] == "kv-injected" and event["server"] == server
        )
        taken = min(taken, injected)
    # Of any request: in this cell's time nothing else has a reason to make a decode server encode.
    encodes = sum(
        len(indices)
        for event in during
        if event["ev"] == "kv-encode" and event["server"] in roles.decode
        for indices in event["encode"].values()
    )
    prompt = int(new["prompt"])
    expected = kv_expected(init[-1]["connector"], prompt, block)
    outside = [item for item in new["items"] if item["offset"] + item["length"] > expected]
    problem = None
    # A decode server that lacks KV encodes its items as well, so the lack comes first.
    if len({event["server"] for event in seen}) > 1:
        problem = "several-consumers: more than one decode server took the request, so whose answer it is is open"
    elif expected == 0:
        problem = f"no-whole-block: a prompt of {prompt} tokens has no whole block of {block} to hand over"
    elif taken < expected:
        problem = f"kv-recompute: the decode server took {taken} of {expected} tokens of KV and computed the rest"
    elif encodes:
        problem = "decode-encode: the decode server encoded the item itself"
    elif outside:
        problem = "item-outside-blocks: an item lies behind the last whole block, so decode saw its media"
    return KVTransfer(taken, expected, encodes, problem)
