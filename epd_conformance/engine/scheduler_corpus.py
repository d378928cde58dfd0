"""The corpus of the scheduler layer: plans for the circumstances that requirements of the engine name. Pure.

The last server of a plan (-1) consumes, the first one (0) produces; it is the consumer's scheduler that the plans are about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from epd_conformance.engine import scenes
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.features import Feature

PRODUCER, CONSUMER = ServerSpec("ec_producer"), ServerSpec("ec_consumer")

#: Rows of an item, unless a plan is about others.
ROWS = 4

#: Requirement -> the beginnings of the names of the plans that exercise it, as `corpus.EXERCISES`.
EXERCISES: dict[str, tuple[str, ...]] = {
    "EPD-ERR-011": ("named-unknown", "named-ended"),
    "EPD-KV-010": ("given-up-",),
    "EPD-LIFE-014": ("adjacent-",),
    "EPD-LIFE-015": ("crowd-",),
    "EPD-LIFE-016": ("prefix-inside",),
    "EPD-LIFE-017": ("whole-",),
    "EPD-LIFE-018": ("again-", "adjacent-", "ways"),
    "EPD-LIFE-019": ("again-",),
    "EPD-LIFE-020": ("ahead-split-", "drafts-"),
    "EPD-RACE-012": ("preempted-with-",),
    "EPD-XFER-016": ("ways",),
    "EPD-XFER-017": ("loads-and-one-encode", "ways"),
    "EPD-XFER-018": ("loads-and-one-encode", "ways"),
    "EPD-XFER-019": ("ways", "stripped"),
    "EPD-XFER-020": ("prefix-covered",),
    "EPD-XFER-021": ("stripped",),
    "EPD-XFER-022": ("sparse-",),
}


def scheduler_corpus(features: frozenset[Feature]) -> dict[str, Plan]:
    """Name -> plan, for a subject with these features: what they are about needs none, but EPD-KV-010."""
    return dict(_plans(features))


def _plans(features: frozenset[Feature]) -> Iterator[tuple[str, Plan]]:
    yield from _small_caches()
    yield from _prefixes()
    yield from _repeated()
    yield from _preempted()
    evict = {"op": "evict", "server": -1}
    yield (
        "ways",
        # Load and encode, then both from the cache, then again as at first.
        _plan(4, scenes.save([0, 2]), *3 * [_ask([0, 1]), _run()], evict, _ask([0, 1, 2, 1]), _run()),
    )
    yield (
        "loads-and-one-encode",
        # Three items to load and one to encode, whose rows are all that may be encoded in a step.
        _plan(4, scenes.save([0, 1, 2]), _ask([0, 1, 3, 2]), _run(), consumer={"budget": ROWS}),
    )
    for tokens in (3, 64):
        # Six rows of two items fit where twelve tokens would not.
        items = tuple(ItemSpec(f"item-{index}", index, rows=6, gaps=4) for index in range(3))
        plan = _plan(
            3, scenes.save([0, 1]), _ask([0, 1]), _run(tokens), _ask([1, 2]), _run(tokens), consumer={"cache": 12}
        )
        yield f"sparse-{tokens}", replace(plan, items=items)
    for n in range(ROWS, 2 * ROWS + 3):
        # Four others, which decode, leave less of a step than the item has tokens; or than the two items have.
        requests = [*4 * [_ask([], text=1, tokens=9)], _step(64), _ask([0], text=3), _ask([1], text=3)]
        yield f"whole-{n}", _plan(2, *requests, _run(n), consumer={"whole_items": True})
    yield (
        "stripped",
        _plan(
            2,
            scenes.save([0, 1]),
            _ask([0]),
            _run(),
            _ask([0], media="stripped"),
            _run(),
            evict,
            _ask([0, 1], media="stripped"),
            _run(),
        ),
    )
    for who in ("unknown", "ended"):
        first = [scenes.save([0]), _ask([0]), _run(), _ask([0, 1], tokens=3), _step(3)]
        yield f"named-{who}", _plan(2, *first, {"op": "name", "server": -1, "who": who}, _step(3), _run())
    if Feature.ASYNC_TRANSFER in features:
        for name, text, steps in (("computing", 1, 2), ("fetching", 8, 2), ("fetched", 8, 4)):
            live = {"op": "name", "server": -1, "who": "live"}
            # Another one goes on beside it, so that there are results that it can be given up with.
            first = [_ask([], text=3, tokens=9), _ask([0, 1], text=text, tokens=3), *steps * [_step(3)]]
            operations = [scenes.save([0, 1]), *first, live, _step(3), _run()]
            yield f"given-up-{name}", _plan(2, *operations, consumer={"kv_connector": True})


def _small_caches() -> Iterator[tuple[str, Plan]]:
    """Items that do not fit into the cache together, and more requests than there is room for."""
    for saved in (True, False):
        where = "loaded" if saved else "encoded"
        first = [scenes.save([0, 1])] if saved else []
        for n in range(1, 2 * ROWS + 2):
            operations = [*first, _ask([0, 1], text=0, tokens=2), _run(n)]
            yield f"adjacent-{where}-{n}", _plan(2, *operations, consumer={"cache": ROWS})
    # With a drafter that reads one token ahead, as EAGLE does: the item behind a chunk has to be there already.
    for n in (1, 3, ROWS, ROWS + 1, 64):
        operations = [scenes.save([0, 1]), _ask([0, 1], text=0, tokens=2), _run(n)]
        yield f"adjacent-lookahead-{n}", _plan(2, *operations, consumer={"cache": ROWS, "lookahead": 1})
    # The third request waits with both of its items in the cache when the first one is preempted, and wants its own back.
    long, short = _ask([2, 3], text=0, tokens=9), _ask([0, 1])
    first = [long, short, _step(64), _step(64), _step(64), short, _step(64, kv="refuse"), _step(64, kv="preempt")]
    rest = [_ask([2 * index, 2 * index + 1]) for index in (2, 3, 4)]
    yield "crowd-held", _plan(10, *first, *rest, _run(), consumer={"cache": 2 * ROWS})
    # A block of 16 tokens is room for one prompt and what is generated, two blocks for one that outgrows its first.
    for blocks, tokens in ((1, 3), (2, 12)):
        for n in (5, 64):
            saves = [scenes.save([2 * index, 2 * index + 1]) for index in range(6)]
            asks = [_ask([2 * index, 2 * index + 1], tokens=tokens) for index in range(6)]
            # Half of the items are loaded, half encoded.
            operations = [*saves[:3], *asks, _run(n), _run(n)]
            yield f"crowd-{blocks}-{n}", _plan(12, *operations, consumer={"cache": 2 * ROWS, "blocks": blocks})


def _prefixes() -> Iterator[tuple[str, Plan]]:
    """A block of 16 tokens ends inside the third item: with two tokens of text around them, the items begin at 2, 8 and 14."""
    ask, evict = _ask([0, 1, 2], text=2), {"op": "evict", "server": -1}
    served = [scenes.save([0, 1, 2]), ask, _run(), evict]
    yield "prefix-covered", _plan(3, *served, ask, _run(), consumer={"prefix_caching": True})
    # Somebody else's item is in the only place for an item when the prompt comes again.
    other = _ask([3, 4], text=0, tokens=2)
    yield (
        "prefix-inside",
        _plan(5, *served, other, ask, _step(64), _run(), consumer={"prefix_caching": True, "cache": ROWS}),
    )


def _repeated() -> Iterator[tuple[str, Plan]]:
    """Items that occur again, and entries that are wanted while what read them is under way."""
    for n in (1, 3, 5, 6, 64):
        for name, wanted, text in (("soon", [0, 0], 0), ("later", [0, 1, 2, 0], 1)):
            operations = [scenes.save([0, 1, 2]), _ask(wanted, text=text, tokens=2), _run(n)]
            yield f"again-{name}-{n}", _plan(3, *operations, consumer={"cache": 2 * ROWS})
        for late in (False, True):
            ahead = {"cache": 2 * ROWS, "asynchronous": True, "late": late}
            operations = [scenes.save([0, 1, 2]), _ask([0, 1, 2, 1], text=0, tokens=3), _run(n)]
            yield f"ahead-split-{n}-{'late' if late else 'soon'}", _plan(3, *operations, consumer=ahead)
        for ahead_of in (False, True):
            drafts = {"cache": 2 * ROWS, "asynchronous": ahead_of, "drafts": 2}
            # The prompt ends with an item, and drafts follow at once.
            operations = [_ask([0, 1, 2], text=0, tokens=6), _run(n), _ask([1, 0], text=0, tokens=6), _run(n)]
            name = f"drafts-{n}{'-ahead' if ahead_of else ''}"
            yield name, _plan(3, scenes.save([0, 1]), *operations, consumer=drafts)


def _preempted() -> Iterator[tuple[str, Plan]]:
    """By priority, and not by age, so that it may be a request that has got its share of the pass already."""
    for where, first in (("encoded", []), ("loaded", [scenes.save([0, 1, 2])])):
        low, high = _ask([2, 1, 0], text=0, tokens=2, priority=1), _ask([], text=3, tokens=6)
        # In the third pass the low one takes room for its last item, and then there is no block for the high one.
        passes = [low, _step(64), high, _step(64), _step(64, kv="preempt-last")]
        yield (
            f"preempted-with-{where}",
            _plan(3, *first, *passes, _ask([0]), _run(), consumer={"cache": ROWS, "priority": True}),
        )


def _plan(items: int, *operations: Mapping[str, Any], consumer: Mapping[str, Any] | None = None) -> Plan:
    specs = tuple(ItemSpec(f"item-{index}", index, rows=ROWS) for index in range(items))
    return Plan((PRODUCER, replace(CONSUMER, **(consumer or {}))), specs, operations)


def _ask(items: list[int], **fields: Any) -> dict[str, Any]:
    return {"op": "request", "server": -1, "items": items, **fields}


def _step(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"op": "step", "server": -1, "tokens": tokens, **fields}


def _run(tokens: int = 64) -> dict[str, Any]:
    return {"op": "run", "server": -1, "tokens": tokens}
