"""Scenes: a few operations that come to something together, and the inputs that make connectors stumble. Pure.

The last server of a plan (-1) consumes, the first one (0) produces.
"""

from __future__ import annotations

from typing import Any

#: Identifiers that a client may choose, each with the number of x's in front: what file names, paths, C strings and fixed buffers
#: get wrong, and pairs that become one when a key is shortened, normalized or its case is folded. No lone surrogate is among
#: them: it cannot cross from the front end to the engine (v1/serial_utils.py packs requests with msgpack).
HOSTILE: tuple[tuple[str, int], ...] = (
    ("", 0),
    ("a", 10_000),
    ("b", 10_000),
    ("a/b", 0),
    ("a/b/c", 0),
    ("a//b", 0),
    ("../x", 0),
    ("../../outside/x", 0),
    ("{outside}/x", 0),
    (".", 0),
    ("..", 0),
    ("nul\0x", 0),
    ("nul", 0),
    ("lora:ab", 0),
    ("ab", 0),
    ("AB", 0),
    ("ab ", 0),
    ("a", 255),
    ("\u00e9", 0),
    ("e\u0301", 0),
    ("%2e%2e", 0),
    ("~", 0),
    ("*", 0),
    ("line\nbreak", 0),
)

#: `ec_transfer_params` of every wrong kind: types, missing and unknown fields, foreign ids and addresses.
HOSTILE_PARAMETERS: tuple[Any, ...] = (
    {},
    [],
    "text",
    7,
    {"ec_items": None},
    {"ec_items": [None, 3, {}]},
    {"ec_items": [{"transfer_id": ["x"]}]},
    {"consumer_zmq": "tcp://192.0.2.1:1"},
    {"item-0": {"metadata": {"image_grid_thw": "x"}, "item_indices": [99, -1]}},
    {"item-0": {"peer_host": "192.0.2.1", "peer_port": -1, "size_bytes": 1 << 60}},
    {"": {"": {"": []}}},
    {"k" * 5_000: 1.5},
)


def save(items: list[int]) -> dict[str, Any]:
    # To a producer and to nobody: the consumer asks later.
    return {"op": "transfer", "items": items, "consumer": -1}


def transfer(items: list[int], producer: int = 0, consumer: int = 0, media: str = "all") -> list[dict[str, Any]]:
    return [{"op": "transfer", "items": items, "producer": producer, "consumer": consumer, "media": media}]


def ask(items: list[int], media: str = "all", tokens: int = 1) -> dict[str, Any]:
    """A request to the last server, which consumes in every plan."""
    return {"op": "request", "server": -1, "items": items, "media": media, "tokens": tokens}


def chunked(items: list[int], tokens: int, kv: str, evictions: int, media: str = "all") -> list[dict[str, Any]]:
    """Prefill in chunks, with a preemption or a full KV cache within."""
    return [
        save(items),
        ask(items, media, 3),
        ask(items[:1], media, 2),
        {"op": "step", "server": -1, "tokens": tokens, "times": 2},
        {"op": "step", "server": -1, "tokens": tokens, "kv": kv},
        *[{"op": "evict", "server": -1}][:evictions],
        {"op": "run", "server": -1, "tokens": tokens},
    ]


def spoiled(item: int, how: str, again: bool, evict: bool, media: str = "all") -> list[dict[str, Any]]:
    """An object is damaged before, or between, its loads; afterwards the item is primed again."""
    first = [save([item]), *([ask([item]), {"op": "run", "server": -1}] if again else [])]
    return [
        *first,
        damage(item, how),
        *([{"op": "evict", "server": -1}] if evict else []),
        ask([item], media),
        {"op": "run", "server": -1},
        {"op": "evict", "server": 0},
        {"op": "evict", "server": -1},
        *transfer([item]),
    ]


def overtaken(item: int, how: str, at: str) -> list[dict[str, Any]]:
    """An object is damaged within the step that loads it."""
    during = {"at": at, "how": how, "item": item}
    return [save([item]), ask([item]), {"op": "step", "server": -1, "during": during}, {"op": "run", "server": -1}]


def failing(items: list[int], fault: str) -> list[dict[str, Any]]:
    """The store fails while an item is saved and asked for, and comes back."""
    return [
        {"op": "store", "fault": fault},
        *transfer(items),
        {"op": "store", "fault": ""},
        {"op": "evict", "server": 0},
        {"op": "evict", "server": -1},
        *transfer(items),
    ]


def aborted(items: list[int], before: int, tokens: int, media: str = "all") -> list[dict[str, Any]]:
    """A client leaves while its request is under way; another one wants the same items."""
    return [
        save(items),
        ask(items, media, 3),
        {"op": "step", "server": -1, "tokens": tokens, "times": before},
        {"op": "abort", "server": -1, "request": 0},
        {"op": "again", "server": -1, "request": 0},
        ask(items, media),
        {"op": "run", "server": -1, "tokens": tokens},
    ]


def superseded(item: int, other: int) -> list[dict[str, Any]]:
    """A client leaves when the step that loads its item has been dispatched; the next request wants another item."""
    return [
        save([item, other]),
        ask([item]),
        {"op": "step", "server": -1},
        {"op": "abort", "server": -1, "request": 0},
        ask([other]),
        {"op": "run", "server": -1},
    ]


def restarted(items: list[int], server: int, graceful: bool) -> list[dict[str, Any]]:
    return [save(items), {"op": "restart", "server": server, "graceful": graceful}, *transfer(items)]


def reloaded(items: list[int]) -> list[dict[str, Any]]:
    """The consumer, then both sides forget an item and want it again."""
    evict = [{"op": "evict", "server": 0}, {"op": "evict", "server": -1}]
    return [
        *transfer(items),
        evict[1],
        ask(items),
        {"op": "run", "server": -1},
        *evict,
        *transfer(items),
    ]


def run() -> dict[str, Any]:
    return {"op": "run", "server": -1}


def damage(item: int, how: str) -> dict[str, Any]:
    return {"op": "damage", "item": item, "how": how}


def ask_and_run(items: list[int], media: str = "all") -> list[dict[str, Any]]:
    return [ask(items, media), run()]
