"""Hypothesis strategies for engine plans.

Each plan has a theme and uses only the operations of that theme. Plans that use everything at once die of the first thing that
kills a connector and never come to the rest (Groce and others, "Swarm testing", 2012). The theme is not drawn but given, so that
each gets its share: Hypothesis varies what it has drawn before, and would leave out some for hundreds of plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from epd_conformance.engine import scenes
from epd_conformance.engine.plan import DAMAGES, STORE_FAULTS, WINDOWS, ItemSpec, Plan, ServerSpec
from epd_conformance.features import Feature

Draw = Callable[[st.SearchStrategy[Any]], Any]

#: The theme of a plan -> its operations beside requests, steps and transfers.
THEMES: dict[str, tuple[str, ...]] = {
    "plain": ("run",),
    "chunks": ("run", "preempt", "refuse", "evict"),
    "evict": ("run", "evict", "reset"),
    "abort": ("run", "abort", "again", "preempt"),
    "restart": ("run", "restart", "evict"),
    "damage": ("run", "damage", "evict", "reset"),
    "window": ("run", "during", "evict"),
    "store": ("run", "store", "evict", "reset"),
    "hostile-keys": ("run", "evict", "watch"),
    "hostile-parameters": ("run", "params", "abort"),
    "references": ("run", "references", "damage", "wait", "evict"),
    "everything": (
        "run",
        "evict",
        "reset",
        "abort",
        "again",
        "restart",
        "damage",
        "preempt",
        "refuse",
        "wait",
        "watch",
    ),
}


def themes_for(features: frozenset[Feature]) -> tuple[str, ...]:
    """The themes that a subject with these features can be asked for."""
    return tuple(
        theme
        for theme in THEMES
        if (theme not in ("damage", "window") or Feature.STORE_PROBE in features)
        and (theme != "references" or Feature.METADATA_ONLY in features)
    )


def plans(
    features: frozenset[Feature], theme: str, *, apart: bool = False, asynchronous: bool = True, size: int = 5
) -> st.SearchStrategy[Plan]:
    """Plans of one theme that a subject with these features can be asked to carry out.

    Args:
        apart: every object in a process of its own, which costs some tenths of a second for a plan.
        asynchronous: also servers that schedule one step ahead.
        size: scenes of a plan, at most; a scene is a handful of operations.
    """
    return _plans(features, theme, apart, asynchronous, size)


@st.composite
def _plans(
    draw: Draw,
    features: frozenset[Feature],
    theme: str,
    apart: bool,
    asynchronous: bool,
    size: int,
) -> Plan:
    extras = THEMES[theme]
    items = draw(_items(theme))
    servers = draw(_servers(features, max(item.rows for item in items), asynchronous))
    drawn = draw(st.lists(_scene(len(items), extras, Feature.STORE_PROBE in features), min_size=1, max_size=size))
    operations = [operation for scene in drawn for operation in scene]
    return Plan(
        servers=servers,
        items=items,
        operations=tuple(operations),
        dtype=draw(st.sampled_from(["float32", "float32", "float32", "bfloat16"])),
        apart=apart,
        shutdown=draw(st.sampled_from(["worker-first", "scheduler-first"])),
    )


@st.composite
def _items(draw: Draw, theme: str) -> tuple[ItemSpec, ...]:
    count = draw(st.integers(1, 6))
    if theme == "hostile-keys":
        names = draw(st.lists(st.sampled_from(scenes.HOSTILE), min_size=count, max_size=count, unique=True))
    else:
        names = [(f"item-{index}", 0) for index in range(count)]
    # All or none: a connector that saves no such output would die of it in half of the plans.
    strided = draw(st.sampled_from([False, False, False, False, True]))
    found = []
    for index, (key, pad) in enumerate(names):
        found.append(
            ItemSpec(
                key=key,
                pad=pad,
                seed=index,
                rows=draw(st.integers(1, 8)),
                gaps=draw(st.sampled_from([0, 0, 1, 2])),
                strided=strided,
            )
        )
    return tuple(found)


@st.composite
def _servers(draw: Draw, features: frozenset[Feature], rows: int, asynchronous: bool) -> tuple[ServerSpec, ...]:
    roles = [["ec_producer", "ec_consumer"]]
    if Feature.MULTI_CONSUMER in features:
        roles.append(["ec_producer", "ec_consumer", "ec_consumer"])
    if Feature.MULTI_PRODUCER in features:
        roles.append(["ec_producer", "ec_producer", "ec_consumer"])
    if Feature.EC_BOTH in features:
        roles.append(["ec_both"])
    chosen = draw(st.sampled_from(roles))
    return tuple(draw(_server(role, rows, asynchronous)) for role in chosen)


@st.composite
def _server(draw: Draw, role: str, rows: int, asynchronous: bool) -> ServerSpec:
    ahead = asynchronous and draw(st.sampled_from([False, False, True]))
    return ServerSpec(
        role=role,
        runner=draw(st.sampled_from(["v1", "v2"])),
        ranks=draw(st.sampled_from([1, 1, 1, 2])),
        asynchronous=ahead,
        late=ahead and draw(st.booleans()),
        # Room for one item, for two, and for all.
        cache=draw(st.sampled_from([64, rows, 2 * rows])),
        budget=draw(st.sampled_from([64, rows])),
    )


def _scene(items: int, extras: tuple[str, ...], probe: bool) -> st.SearchStrategy[list[dict[str, Any]]]:
    """A few operations that come to something together: single ones seldom meet what they need."""
    item = st.integers(0, items - 1)
    several = st.lists(item, min_size=1, max_size=4)
    one = _operation(items, extras, probe)
    medias = st.sampled_from(["all", "none", "odd"] if "references" in extras else ["all"])
    choices: list[st.SearchStrategy[list[dict[str, Any]]]] = [
        st.builds(scenes.transfer, several, st.integers(0, 1), st.integers(0, 1), medias),
        st.builds(scenes.chunked, several, st.integers(1, 9), st.sampled_from(_kv(extras)), st.integers(0, 2), medias),
        st.lists(one, min_size=1, max_size=3),
    ]
    if "damage" in extras and probe:
        choices += 2 * [st.builds(scenes.spoiled, item, st.sampled_from(DAMAGES), st.booleans(), st.booleans(), medias)]
    if "during" in extras and probe:
        choices += 2 * [st.builds(scenes.overtaken, item, st.sampled_from(DAMAGES), st.sampled_from(WINDOWS))]
    if "store" in extras:
        choices += 2 * [st.builds(scenes.failing, several, st.sampled_from(STORE_FAULTS))]
    if "abort" in extras:
        choices += 2 * [st.builds(scenes.aborted, several, st.integers(1, 3), st.integers(1, 9), medias)]
    if "restart" in extras:
        choices.append(st.builds(scenes.restarted, several, st.integers(0, 2), st.booleans()))
    if "evict" in extras:
        choices.append(st.builds(scenes.reloaded, several))
    return st.one_of(choices)


def _kv(extras: tuple[str, ...]) -> list[str]:
    return ["", *[name for name in ("preempt", "refuse") if name in extras]]


def _operation(items: int, extras: tuple[str, ...], probe: bool) -> st.SearchStrategy[dict[str, Any]]:
    server = st.integers(0, 2)
    item = st.integers(0, items - 1)
    several = st.lists(item, min_size=1, max_size=8)
    medias = st.sampled_from(["all", "none", "odd"] if "references" in extras else ["all"])
    during: st.SearchStrategy[Any] = st.none()
    if "during" in extras:
        during = st.fixed_dictionaries({"at": st.sampled_from(WINDOWS), "how": st.sampled_from(DAMAGES), "item": item})
    choices: list[st.SearchStrategy[dict[str, Any]]] = [
        _named("transfer", items=several, producer=st.integers(0, 1), consumer=st.integers(0, 1), media=medias),
        _named(
            "request",
            server=server,
            # Text-only requests reach every hook as well.
            items=st.one_of(several, several, st.just([])),
            media=medias,
            text=st.integers(0, 3),
            tokens=st.integers(1, 4),
            params=st.sampled_from(scenes.HOSTILE_PARAMETERS) if "params" in extras else st.none(),
        ),
        _named(
            "step",
            server=server,
            tokens=st.sampled_from([64, 1, 2, 3, 5, 9]),
            times=st.integers(1, 4),
            kv=st.sampled_from(_kv(extras)),
            during=during,
            watch=st.booleans() if "watch" in extras else st.just(False),
        ),
        _named("run", server=server, tokens=st.sampled_from([64, 4])),
    ]
    further = {
        "abort": _named("abort", server=server, request=st.integers(0, 3)),
        "again": _named("again", server=server, request=st.integers(0, 3)),
        "evict": _named("evict", server=server, same_pass=st.sampled_from([False, False, True])),
        "reset": _named("reset", server=server),
        "restart": _named("restart", server=server, graceful=st.booleans()),
        "wait": _named("wait", seconds=st.sampled_from([1, 5, 120])),
        "store": _named("store", fault=st.sampled_from(["", *STORE_FAULTS])),
    }
    if probe:
        further["damage"] = _named("damage", item=item, how=st.sampled_from(DAMAGES))
    choices += [strategy for name, strategy in further.items() if name in extras]
    return st.one_of(choices)


def _named(op: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"op": st.just(op), **fields})
