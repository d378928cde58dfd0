"""What the store counts, and how it gets to the log and to `/metrics`. Needs vLLM: its containers are what is filled."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_or_skip import import_vllm_or_skip

import_vllm_or_skip()

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram  # noqa: E402

from epd_conformance.connectors import store_stats  # noqa: E402
from epd_conformance.connectors.store_stats import (  # noqa: E402
    COUNTERS,
    Mailbox,
    StorePromMetrics,
    StoreStats,
    Tally,
    WorkerTally,
)

pytestmark = pytest.mark.needs_vllm


def test_what_was_counted_is_taken_once() -> None:
    tally = Tally()
    assert tally.take() == {}
    assert [tally.add("saves"), tally.add("saves"), tally.add("save_seconds", 0.5)] == [1, 2, 0.5]
    assert tally.add("misses", reason="model") == 1
    assert tally.take() == {"saves": 2, "save_seconds": 0.5, "misses:model": 1}
    tally.merge({"saves": 3, "loads": 1})
    tally.add("save_seconds", 0)
    assert tally.take() == {"saves": 3, "loads": 1}
    assert tally.take() == {}
    assert tally.total == {"saves": 5, "save_seconds": 0.5, "misses:model": 1, "loads": 1}


def test_the_containers_that_vllm_carries_add_up() -> None:
    stats = StoreStats({"saves": 1, "save_seconds": 0.123456})
    both = stats.aggregate(StoreStats({"saves": 2, "hits": 1}))
    assert isinstance(both, StoreStats)
    assert list(both.reduce().items()) == [("hits", 1), ("save_seconds", 0.1235), ("saves", 3)]
    assert not both.is_empty()
    both.reset()
    assert both.is_empty()
    assert both.data == {}
    tally = WorkerTally({"saves": 1}).aggregate(WorkerTally({"saves": 1, "loads": 2}))
    assert isinstance(tally, WorkerTally)
    assert tally.data == {"saves": 2, "loads": 2}


# ---- letters ----


@pytest.fixture
def boxes(tmp_path: Path) -> Iterator[tuple[Mailbox, Mailbox]]:
    """A worker's and its SCHEDULER object's."""
    server = tmp_path.name
    sender, receiver = Mailbox(server, receive=False), Mailbox(server, receive=True)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_letters_come_in_their_order_and_once(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    assert receiver.receive() == []
    assert sender.send({"saves": 1})
    assert sender.send({"saves": 2, "save_failures:OSError": 1.5})
    assert receiver.receive() == [{"saves": 1}, {"saves": 2, "save_failures:OSError": 1.5}]
    assert receiver.receive() == []
    assert not sender.send({}), "nothing to tell"


def test_of_a_letter_only_counts_are_taken(boxes: tuple[Mailbox, Mailbox]) -> None:
    """Any process of the host can write to the address."""
    sender, receiver = boxes
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        for letter in (
            b"\xff",
            b"{",
            b"[1]",
            b'{"saves": "1", "loads": null, "mine": 1, "x:saves": 1, "misses:key": 2}',
        ):
            stranger.sendto(letter, receiver._address)
    assert sender.send({"saves": 1})
    assert receiver.receive() == [{"misses:key": 2}, {"saves": 1}]


def test_the_longest_letter_is_taken_whole(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    counts = {f"{name}:{'r' * 100}": 1.23456789 for name in COUNTERS}
    assert sender.send(counts)
    assert receiver.receive() == [counts]


def test_nobody_waits_for_a_letter(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    sent = 0
    while sender.send({"saves": 1}):
        sent += 1
        assert sent < 1_000_000
    assert len(receiver.receive()) == sent > 0
    assert sender.send({"saves": 1})
    other = Mailbox("nobody reads this", receive=False)
    assert not other.send({"saves": 1})
    other.close()


def test_a_second_server_of_the_same_name_gets_nothing(boxes: tuple[Mailbox, Mailbox], tmp_path: Path) -> None:
    sender, receiver = boxes
    second = Mailbox(tmp_path.name, receive=True)
    assert sender.send({"saves": 1})
    assert second.receive() == []
    assert receiver.receive() == [{"saves": 1}]
    second.close()


def test_a_closed_box_neither_sends_nor_receives(boxes: tuple[Mailbox, Mailbox]) -> None:
    sender, receiver = boxes
    for box in boxes:
        box.close()
        box.close()
    assert not sender.send({"saves": 1})
    assert receiver.receive() == []


def test_without_such_sockets_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError("no"), AttributeError("AF_UNIX")):

        def fail(*_: object, error: Exception = error) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(store_stats.socket, "socket", fail)
            box = Mailbox("x", receive=True)
        assert not box.send({"saves": 1})
        assert box.receive() == []
        box.close()


# ---- metrics ----


def metrics() -> tuple[StorePromMetrics, CollectorRegistry]:
    registry = CollectorRegistry()
    types: dict[Any, Any] = {
        kind: (lambda *args, _kind=kind, **kwargs: _kind(*args, registry=registry, **kwargs))
        for kind in (Counter, Gauge, Histogram)
    }
    labels: dict[int, list[object]] = {0: ["m", "0"], 1: ["m", "1"]}
    config: Any = SimpleNamespace(ec_transfer_config=None)
    return StorePromMetrics(config, types, ["model_name", "engine"], labels), registry


def samples(registry: CollectorRegistry) -> dict[tuple[str, str, str], float]:
    """(name, engine, reason) -> value."""
    return {
        (sample.name, sample.labels["engine"], sample.labels.get("reason", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


def documented() -> dict[str, bool]:
    """name -> whether it is counted by reason."""
    page = (Path(__file__).parents[2] / "docs" / "verified-store.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page.partition("## Metrics")[2].partition("\n## ")[0], re.MULTILINE)
    return {name: bool(by) for row in rows for name, by in re.findall(r"`(\w+)(\{reason\})?`", row)}


def test_every_counter_is_a_metric_as_documented() -> None:
    made, registry = metrics()
    names = documented()
    assert set(COUNTERS) == set(names)
    assert samples(registry) == {
        (f"vllm:ec_store_{name}_total", engine, ""): 0
        for name, by_reason in names.items()
        for engine in "01"
        if not by_reason
    }, "there from the start, as zero"
    made.observe({name + ":why" * by_reason: 2 for name, by_reason in names.items()}, 1)
    assert {key: value for key, value in samples(registry).items() if value} == {
        (f"vllm:ec_store_{name}_total", "1", "why" * by_reason): 2 for name, by_reason in names.items()
    }


def test_what_is_no_count_is_not_shown() -> None:
    made, registry = metrics()
    made.observe(json.loads('{"hits": 0, "misses:model": 0, "unknown": 3, "saves": 0.25, "loads": -1}'))
    shown = samples(registry)
    assert not any(reason for _, _, reason in shown), "of a reason that never was no line"
    assert shown["vllm:ec_store_saves_total", "0", ""] == 0.25
    assert sum(shown.values()) == 0.25
