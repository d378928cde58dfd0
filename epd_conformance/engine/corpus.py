"""The corpus: plans that are the same on every run, one for each circumstance that a requirement names. Pure.

A drawn plan finds what nobody thought of; the corpus finds the rest for certain, also in a run of a few seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epd_conformance.engine import scenes
from epd_conformance.engine.plan import DAMAGES, SLOW, STORE_FAULTS, WINDOWS, ItemSpec, Plan, ServerSpec
from epd_conformance.features import Feature

PRODUCER, CONSUMER, BOTH = ServerSpec("ec_producer"), ServerSpec("ec_consumer"), ServerSpec("ec_both")

#: Pairs of near identifiers beyond those of `scenes.HOSTILE`: each differs from the first of its list in one way.
NEAR: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 0), ("A", 0), ("a ", 0), ("a/", 0), ("./a", 0), ("a\0", 0), ("a.", 0)),
    (("a", 2_000), ("b", 2_000), ("ab", 2_000)),
    (("a/b", 0), ("a//b", 0), ("a_b", 0), ("a%2Fb", 0), ("a/./b", 0)),
    (("", 0), ("./", 0), (".", 0), (" ", 0)),
    (("\u00e9", 0), ("e\u0301", 0), ("e", 0)),
    (("lora:a", 0), ("a", 0), ("lora", 0), ("other:a", 0)),
)

#: Rounds of a plan that wears a connector out: a limit that one has for a test may be some dozens of objects.
WORN = 48

#: Requirement -> the beginnings of the names of the plans that exercise it. A requirement that none of its plans could exercise,
#: for want of a feature, was not tested. What the directed checks exercise is not among them (`directed`).
EXERCISES: dict[str, tuple[str, ...]] = {
    "EPD-ERR-001": ("deleted-",),
    "EPD-ERR-002": ("reference-never-saved", "deleted-reference"),
    "EPD-ERR-003": ("store-full",),
    "EPD-ERR-004": ("store-read-only", "store-removed"),
    "EPD-INIT-006": ("apart",),
    "EPD-INTEG-001": ("truncated-", "cut-in-place-"),
    "EPD-INTEG-002": ("replaced-",),
    "EPD-INTEG-003": ("one-row-",),
    "EPD-INTEG-004": ("rows-missing-",),
    "EPD-INTEG-005": ("rows-added-",),
    "EPD-INTEG-006": ("width-",),
    "EPD-INTEG-007": ("dtype-",),
    "EPD-INTEG-009": ("flipped-bit-", "scribbled-"),
    "EPD-INTEG-010": ("zero-tail-",),
    "EPD-INTEG-011": ("empty-", "garbage-", "code-"),
    "EPD-INTEG-014": tuple(f"{how}-before" for how in DAMAGES),
    "EPD-KEY-001": ("key-", "transfer-", "miss", "single-row", "bfloat16-"),
    "EPD-KEY-002": ("lookup-watched",),
    "EPD-KEY-003": ("near-",),
    "EPD-LIFE-002": ("preempt-",),
    "EPD-LIFE-003": ("transfer-", "aborted-", "text-"),
    "EPD-LIFE-004": ("aborted-", "text-", "reference-never-saved"),
    "EPD-LIFE-005": ("transfer-", "text-"),
    "EPD-LIFE-006": ("store-slow", "reference-", "miss"),
    "EPD-LIFE-007": ("store-slow", "reference-never-saved", "reference-saved-late"),
    "EPD-LIFE-008": ("chunks-",),
    "EPD-LIFE-009": ("transfer-", "aborted-"),
    "EPD-LIFE-010": ("transfer-", "shutdown-order"),
    "EPD-OBS-002": ("transfer-", "ranks-"),
    "EPD-RACE-001": tuple(f"{how}-alloc" for how in DAMAGES),
    "EPD-RACE-002": tuple(f"{how}-load" for how in DAMAGES),
    "EPD-RACE-007": ("ranks-",),
    "EPD-RACE-011": ("ahead-", "superseded-"),
    "EPD-ROLE-010": ("transfer-v1", "chunks-v1"),
    "EPD-ROLE-011": ("miss", "key-0-miss"),
    "EPD-SEC-001": ("key-",),
    "EPD-SEC-004": ("parameters-",),
    "EPD-SEC-005": ("code-",),
    "EPD-XFER-006": ("transfer-", "sparse", "single-row", "bfloat16-"),
    "EPD-XFER-007": ("scribbled-", "cut-in-place-", "deleted-held"),
    "EPD-XFER-009": ("strided",),
    "EPD-XFER-010": ("saved-then-evicted",),
    "EPD-XFER-011": ("transfer-", "chunks-", "preempt-", "refuse-"),
    "EPD-XFER-012": ("transfer-", "text-", "miss", "ahead-"),
    "EPD-XFER-013": ("transfer-", "chunks-", "ahead-"),
    "EPD-XFER-014": ("shared",),
    "EPD-XFER-015": ("transfer-", "both-", "ranks-reloaded-"),
}


def corpus(features: frozenset[Feature], *, apart: bool = True) -> dict[str, Plan]:
    """Name -> plan, for a subject with these features; without `apart` none whose objects live in processes of their own."""
    found: dict[str, Plan] = {}
    for name, plan in _plans(features):
        if apart or not plan.apart:
            found[name] = plan
    return found


def _plans(features: frozenset[Feature]) -> Iterator[tuple[str, Plan]]:
    probe = Feature.STORE_PROBE in features
    items = _items(4)
    for runner in ("v1", "v2"):
        pair = (replace(PRODUCER, runner=runner), replace(CONSUMER, runner=runner))
        yield (
            f"transfer-{runner}",
            Plan(pair, items, _operations([scenes.transfer([0, 1, 1, 2])], [scenes.reloaded([0, 1])])),
        )
        yield (
            f"chunks-{runner}",
            Plan(pair, items, _operations(*[[scenes.chunked([0, 1], n, "", 0)] for n in range(1, 10)])),
        )
        for kv in ("preempt", "refuse"):
            plan = Plan(
                pair, items, _operations([scenes.chunked([0, 1], 3, kv, 2)], [scenes.chunked([2, 3], 2, kv, 1)])
            )
            yield f"{kv}-{runner}", plan
            narrow = tuple(replace(server, cache=8) for server in pair)
            yield f"{kv}-narrow-{runner}", replace(plan, servers=narrow)
        for late in (False, True):
            ahead = tuple(replace(server, asynchronous=True, late=late) for server in pair)
            aborted = [scenes.aborted([0, 1], before, tokens) for before in (1, 2) for tokens in (3, 64)]
            yield f"ahead-{runner}-{'late' if late else 'soon'}", Plan(ahead, items, _operations(aborted))
        # What a dispatched step names is not given away when its request goes and another one comes.
        overtaken = [scenes.superseded(0, 1), scenes.superseded(2, 3)]
        behind = tuple(replace(server, asynchronous=True, late=True) for server in pair)
        yield f"superseded-{runner}", Plan(behind, items, _operations(overtaken))
        yield (
            f"aborted-{runner}",
            Plan(pair, items, _operations([scenes.aborted([0, 1], 1, 3)], [scenes.aborted([2], 2, 64)])),
        )
        ranks = tuple(replace(server, ranks=2) for server in pair)
        yield f"ranks-{runner}", Plan(ranks, items, _operations([scenes.transfer([0, 1])]))
        yield f"ranks-reloaded-{runner}", Plan(ranks, items, _operations([scenes.reloaded([2])]))
        yield f"text-{runner}", Plan(pair, items, ({"op": "request", "items": []}, *scenes.ask_and_run([]), *_again()))
        yield f"bfloat16-{runner}", Plan(pair, _items(2), _operations([scenes.transfer([0, 1])]), dtype="bfloat16")
    pair = (PRODUCER, CONSUMER)
    yield "miss", Plan(pair, items, tuple(scenes.ask_and_run([0, 1])))
    yield "shared", Plan(pair, items, (scenes.save([0]), scenes.ask([0, 0]), scenes.ask([0]), scenes.run()))
    yield (
        "sparse",
        Plan(pair, tuple(replace(item, gaps=2) for item in items), _operations([scenes.chunked([0, 1], 3, "", 0)])),
    )
    yield "single-row", Plan(pair, (ItemSpec("item-0", 0, rows=1),), _operations([scenes.transfer([0])]))
    yield (
        "strided",
        Plan(pair, tuple(replace(item, strided=True) for item in items), _operations([scenes.transfer([0])])),
    )
    # The entry leaves the producer's cache, and its memory is used again, as soon as it is saved.
    saved = [scenes.save([0]), {"op": "evict"}, {"op": "step"}, scenes.save([1]), {"op": "reset"}]
    yield "saved-then-evicted", Plan(pair, items, _operations([saved, scenes.ask_and_run([0, 1])]))
    # Its cache is emptied and no hook is told: what it held is asked for again, and is still there.
    emptied = [{"op": "reset", "server": -1}, *scenes.ask_and_run([0, 1])]
    beside = [scenes.save([2]), {"op": "reset", "server": -1}, *scenes.ask_and_run([0, 2, 1])]
    yield "reset-held", Plan(pair, items, _operations([scenes.transfer([0, 1])], [emptied, beside]))
    # What is not given back each time is missed in the end.
    worn = [[*scenes.ask_and_run([0, 1]), {"op": "evict", "server": -1}] for _ in range(20)]
    yield "worn", Plan(pair, items, _operations([[scenes.save([0, 1])]], worn))
    yield (
        "lookup-watched",
        Plan(pair, items, (scenes.save([0]), scenes.ask([0, 1]), {"op": "step", "server": -1, "watch": True})),
    )
    yield (
        "restarts",
        Plan(pair, items, _operations([scenes.restarted([0], 0, True)], [scenes.restarted([1], 1, False)])),
    )
    yield "shutdown-order", Plan(pair, items, (scenes.save([0]), scenes.ask([0])), shutdown="scheduler-first")
    yield "apart", Plan(pair, items, _operations([scenes.transfer([0, 1])], [scenes.reloaded([0])]), apart=True)
    if Feature.EC_BOTH in features:
        for runner in ("v1", "v2"):
            yield f"both-{runner}", Plan((replace(BOTH, runner=runner),), items, _operations([scenes.reloaded([0, 1])]))
    if Feature.MULTI_PRODUCER in features:
        two = (PRODUCER, PRODUCER, CONSUMER)
        both = [scenes.transfer([0, 1], producer=1), scenes.transfer([0, 2])]
        yield "two-producers", Plan(two, items, _operations(both))
    if Feature.MULTI_CONSUMER in features:
        operations = [scenes.transfer([0, 1]), scenes.transfer([0, 1], consumer=1)]
        yield "two-consumers", Plan((PRODUCER, CONSUMER, CONSUMER), items, _operations(operations))
    yield from _keys()
    for number, parameters in enumerate(scenes.HOSTILE_PARAMETERS):
        arrive = [{"op": "request", "server": server, "items": [0], "params": parameters} for server in (0, -1)]
        yield f"parameters-{number}", Plan(pair, items, (scenes.save([0]), *arrive, {"op": "run"}, scenes.run()))
    for fault in STORE_FAULTS:
        # What was saved before shows that a removed store is gone.
        failing = [[scenes.save([2])], scenes.failing([0, 1], fault)]
        yield f"store-{fault}", Plan(pair, items, _operations(failing))
    if Feature.ASYNC_TRANSFER in features:
        # Whoever looks up in the background is not done in the first pass, and is before anybody's patience ends.
        looks = [scenes.ask([0]), {"op": "step", "server": -1}, *20 * [{"op": "wait", "seconds": 0}], scenes.run()]
        slow = [{"op": "store", "fault": SLOW}, *looks, {"op": "store"}]
        yield "store-slow", Plan(pair, items, (scenes.save([0]), *slow))
    if probe:
        yield from _damages(features)
    if Feature.METADATA_ONLY in features:
        yield (
            "reference-never-saved",
            Plan(pair, items, (scenes.ask([0], "none"), scenes.run(), scenes.transfer([1])[0])),
        )
        yield "reference-saved", Plan(pair, items, (scenes.save([0]), scenes.ask([0], "none"), scenes.run()))
        saved_late = (scenes.ask([0], "none"), scenes.run(), scenes.save([0]), scenes.run())
        yield "reference-saved-late", Plan(pair, items, saved_late)


def _damages(features: frozenset[Feature]) -> Iterator[tuple[str, Plan]]:
    pair, items = (PRODUCER, CONSUMER), _items(2)
    donor = [scenes.save([1])]
    for how in DAMAGES:
        for again in (False, True):
            name = f"{how}-{'between' if again else 'before'}"
            yield name, Plan(pair, items, _operations([donor, scenes.spoiled(0, how, again, True)]))
        yield f"{how}-held", Plan(pair, items, _operations([donor, scenes.spoiled(0, how, True, False)]))
        for at in WINDOWS:
            yield f"{how}-{at}", Plan(pair, items, _operations([donor, scenes.overtaken(0, how, at)]))
        if Feature.METADATA_ONLY in features:
            plan = Plan(pair, items, _operations([donor, scenes.spoiled(0, how, False, True, "none")]))
            yield f"{how}-reference", plan
        # The rows are held while a request is computed, in chunks, and the object changes.
        chunks = [scenes.save([0]), scenes.ask([0], tokens=3), {"op": "step", "server": -1, "tokens": 2}]
        yield f"{how}-computing", Plan(pair, items, _operations([donor, chunks, [scenes.damage(0, how), scenes.run()]]))

    # What a refused object took is given back as well.
    refused = [scenes.spoiled(0, "truncated", False, True)[:-1] for _ in range(WORN)]
    yield "worn-refused", Plan(pair, items, _operations(refused, [donor, scenes.transfer([0, 1])]))
    # An object of several pages: cut short in place, a mapping of it cannot be read any more.
    large = (ItemSpec("item-0", 0, rows=64),)
    yield "cut-in-place-large", Plan(pair, large, _operations([scenes.spoiled(0, "cut-in-place", True, False)]))


def _keys() -> Iterator[tuple[str, Plan]]:
    pair = (PRODUCER, CONSUMER)
    for number, (key, pad) in enumerate(scenes.HOSTILE):
        hostile = (ItemSpec(key, 0, pad=pad), ItemSpec("plain", 1))
        operations = [scenes.transfer([0]), scenes.reloaded([0]), scenes.transfer([1])]
        yield f"key-{number}", Plan(pair, hostile, _operations(operations))
        yield f"key-{number}-miss", Plan(pair, hostile, tuple(scenes.ask_and_run([0])))
    for number, near in enumerate(NEAR):
        items: tuple[ItemSpec, ...] = tuple(ItemSpec(key, seed, pad=pad) for seed, (key, pad) in enumerate(near))
        every = list(range(len(items)))
        # Saved one after the other and all asked for at the end; then those that were never saved beside one that was.
        yield (
            f"near-{number}",
            Plan(pair, items, _operations([[scenes.save([item]) for item in every], scenes.ask_and_run(every)])),
        )
        yield f"near-{number}-one", Plan(pair, items, _operations([[scenes.save([0])], scenes.ask_and_run(every)]))


def _items(count: int) -> tuple[ItemSpec, ...]:
    return tuple(ItemSpec(f"item-{index}", index) for index in range(count))


def _operations(*parts: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[Mapping[str, Any], ...]:
    return tuple(operation for part in parts for scene in part for operation in scene)


def _again() -> list[dict[str, Any]]:
    return [{"op": "again", "server": 0}, {"op": "again", "server": -1}]
