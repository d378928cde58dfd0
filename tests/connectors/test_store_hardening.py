"""What happens to the verified store when the store, the engine or another server does not do what one hopes.

Needs vLLM: the connector is a subclass of its base class.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_or_skip import import_vllm_or_skip

import_vllm_or_skip()

import torch  # noqa: E402
from store_fakes import (  # noqa: E402
    HIDDEN,
    METADATA_ONLY,
    WITH_MEDIA,
    Deployment,
    FakeFeature,
    FakeRequest,
    Server,
    damage,
    output,
)
from stored_objects import load  # noqa: E402

from epd_conformance.connectors import object_format as of  # noqa: E402
from epd_conformance.connectors import reclaim  # noqa: E402
from epd_conformance.connectors import verified_store as vs  # noqa: E402
from epd_conformance.connectors.pins import Place  # noqa: E402
from epd_conformance.connectors.store_stats import Mailbox  # noqa: E402

pytestmark = pytest.mark.needs_vllm

COUNTER = "renderer0-mm-17-image-0"


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    # What a busy test machine takes for a look-up is no matter, but where a test says so.
    monkeypatch.setattr(vs, "STEP_WAIT_S", 30.0)
    return Deployment(tmp_path)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(vs.logger, level, lambda message, *args: found.append(message % args))
    return found


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A store that answers no look-up until the event is set."""
    opened = threading.Event()
    real = vs.open_object

    def open_object(path: Path) -> Any:
        opened.wait(20)
        return real(path)

    monkeypatch.setattr(vs, "open_object", open_object)
    yield opened
    opened.set()


def whole(deployment: Deployment, key: str, tensor: torch.Tensor, server: Server) -> bool:
    expect = of.Expectation(key, server.scheduler._fingerprint, rows=tensor.shape[0])
    return bool(torch.equal(load(deployment.root, expect)[1], tensor))


def prime(producer: Server, request: FakeRequest, tensor: torch.Tensor) -> None:
    """A request to an encode server: what the engine holds is not encoded."""
    answers = producer.schedule(request)
    assert answers is not None
    producer.step(encode={key: tensor for key, found in answers.items() if not found})
    producer.finish(request)


# ---- publishing again ----

BAD = ["deleted", "truncated", "empty", "garbage", "zero tail", "folder", "another item", "one row", "a row more"]
BAD += ["one column", "other dtype", "another model"]


@pytest.mark.parametrize("role", ["ec_producer", "ec_both"])
@pytest.mark.parametrize("kind", BAD)
def test_priming_again_publishes_again_while_the_engine_holds_the_item(
    deployment: Deployment, kind: str, role: str
) -> None:
    producer = deployment.server(role)
    item = FakeFeature("k", WITH_MEDIA)
    prime(producer, FakeRequest([item], "first"), output())
    damage(deployment, kind, producer.scheduler._fingerprint)
    prime(producer, FakeRequest([item], "second"), output(seed=9))  # would be seen if it were encoded
    assert whole(deployment, "k", output(), producer)
    assert producer.worker.counters["republished"] == 1


def test_without_the_check_the_object_would_stay_away(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs.VerifiedStoreConnector, "_check_published", lambda *args: None)
    producer = deployment.server("ec_producer")
    item = FakeFeature("k", WITH_MEDIA)
    prime(producer, FakeRequest([item], "first"), output())
    deployment.path("k").unlink()
    prime(producer, FakeRequest([item], "second"), output())
    assert not deployment.path("k").exists()


@pytest.mark.parametrize("kind", ["deleted", "zero tail"])
def test_a_restarted_producer_publishes_again(deployment: Deployment, kind: str) -> None:
    item = FakeFeature("k", WITH_MEDIA)
    prime(deployment.server("ec_producer"), FakeRequest([item]), output())
    restarted = deployment.server("ec_producer")
    prime(restarted, FakeRequest([item]), output())
    damage(deployment, kind, restarted.scheduler._fingerprint)
    prime(restarted, FakeRequest([item], "again"), output(seed=9))
    assert whole(deployment, "k", output(), restarted)


def test_a_good_object_is_not_published_again(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = deployment.server("ec_producer")
    item = FakeFeature("k", WITH_MEDIA)
    prime(producer, FakeRequest([item], "first"), output())
    os.utime(deployment.path("k"), (1, 1))
    reads: list[object] = []
    real = vs.fill
    monkeypatch.setattr(vs, "fill", lambda *args: reads.append(args) or real(*args))
    for name in "abc":
        prime(producer, FakeRequest([item], name), output())
    assert len(reads) == 1, "an object at rest is read once"
    assert "republished" not in producer.worker.counters
    with deployment.path("k").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\xff\xff\xff\xff")
    prime(producer, FakeRequest([item], "d"), output())
    assert whole(deployment, "k", output(), producer)


def test_an_evicted_item_is_encoded_and_saved(deployment: Deployment) -> None:
    producer = deployment.server("ec_producer")
    item = FakeFeature("k", WITH_MEDIA)
    prime(producer, FakeRequest([item], "first"), output())
    producer.step(free=("k",))
    deployment.path("k").unlink()
    prime(producer, FakeRequest([item], "second"), output())
    assert whole(deployment, "k", output(), producer)
    assert "republished" not in producer.worker.counters


def test_a_producer_waits_for_its_check_and_not_for_ever(
    deployment: Deployment, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.0)
    producer = deployment.server("ec_producer", unavailable_after_s=0.05)
    item = FakeFeature("k", WITH_MEDIA)
    prime(producer, FakeRequest([item], "first"), output())
    request = FakeRequest([item], "second")
    assert producer.schedule(request) is None
    assert producer.scheduler.take_unavailable_requests() == set()
    time.sleep(0.06)
    assert producer.scheduler.take_unavailable_requests() == set()
    assert producer.schedule(request) == {}


# ---- a store that does not answer ----


def test_a_step_waits_a_few_milliseconds(
    deployment: Deployment, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.01)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", unavailable_after_s=60)
    producer.encode("k", output())
    requests = [FakeRequest([FakeFeature(key, WITH_MEDIA)], key) for key in ("k", "l", "m")]
    assert [consumer.schedule(request) for request in requests] == [None] * 3
    assert consumer.step() == ()
    gate.set()
    deadline = time.monotonic() + 10
    while (answers := [consumer.schedule(request) for request in requests]) != [
        {"k": True},
        {"l": False},
        {"m": False},
    ]:
        assert time.monotonic() < deadline, answers
        consumer.step()
    assert torch.equal(consumer.encoder_cache.get("k", output()), output())


def test_what_has_media_is_encoded_when_the_store_stays_silent(
    deployment: Deployment, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.0)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", unavailable_after_s=0.1)
    producer.encode("k", output())
    media, bare = FakeRequest([FakeFeature("k", WITH_MEDIA)], "m"), FakeRequest([FakeFeature("k", METADATA_ONLY)], "b")
    assert consumer.schedule(media) is None
    assert consumer.schedule(bare) is None
    time.sleep(0.12)
    assert consumer.scheduler.take_unavailable_requests() == {"b"}
    assert consumer.schedule(media) == {"k": False}
    assert consumer.scheduler.counters["misses:slow-store"] == 1
    # From now on nobody waits until the store has answered.
    assert consumer.schedule(FakeRequest([FakeFeature("l", WITH_MEDIA)], "next")) == {"l": False}
    assert consumer.scheduler.counters["misses:slow-store"] == 2
    gate.set()
    deadline = time.monotonic() + 10
    number = 0
    while consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], f"later-{number}")) != {"k": True}:
        assert time.monotonic() < deadline
        number += 1
        consumer.step()


def test_a_running_request_needs_no_store(deployment: Deployment, gate: threading.Event) -> None:
    consumer = deployment.server("ec_consumer")
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    began = time.monotonic()
    assert consumer.scheduler.ensure_cache_available(request, 5)  # its item ends at 5
    assert time.monotonic() - began < 1


def test_a_producer_goes_on_when_saving_hangs(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = threading.Event()
    real = vs.publish
    monkeypatch.setattr(vs, "publish", lambda *args, **kwargs: opened.wait(20) and real(*args, **kwargs))
    monkeypatch.setattr(vs, "SAVE_WAIT_S", 0.1)
    producer = deployment.server("ec_producer")
    producer.encode("k", output())
    while producer.worker._threads.stuck_s() <= 0.1:
        time.sleep(0.01)
    monkeypatch.setattr(vs.Task, "wait", lambda *args: pytest.fail("the second waited"))
    producer.encode("l", output())
    monkeypatch.undo()
    monkeypatch.setattr(vs, "SAVE_WAIT_S", 10.0)
    assert producer.worker.counters["save_failures:TimeoutError"] == 2
    opened.set()
    deadline = time.monotonic() + 10
    while not (deployment.path("k").exists() and producer.worker._threads.stuck_s() == 0):
        assert time.monotonic() < deadline
    producer.encode("l", output())
    assert whole(deployment, "l", output(), producer)


# ---- pins ----


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_dispatched_step_keeps_its_pin(deployment: Deployment, overlapping: bool) -> None:
    """With asynchronous scheduling a request ends while the step that loads its item is under way."""
    producer = deployment.server("ec_producer")
    consumer = deployment.server("ec_consumer", overlapping=overlapping)
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.schedule(request) == {"k": True}
    metadata = consumer.scheduler.build_connector_meta(SimpleNamespace())
    consumer.scheduler.request_finished(request)
    assert len(consumer.scheduler._pins) == overlapping
    if overlapping:
        consumer.worker.bind_connector_metadata(metadata)
        consumer.worker.start_load_caches(consumer.encoder_cache)
        assert torch.equal(consumer.encoder_cache["k"], output())
        consumer.scheduler.take_unavailable_requests()
    assert not consumer.scheduler._pins
    assert consumer.scheduler._area.used == 0


@pytest.mark.parametrize("left_out", ["nothing", "alloc", "free", "both"])
def test_requests_leave_no_memory_and_no_files(deployment: Deployment, left_out: str) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("warm", output())
    consumer.schedule(FakeRequest([FakeFeature("warm", WITH_MEDIA)]))
    consumer.step()
    consumer.finish(FakeRequest([]))
    before = list(Path("/proc/self/fd").iterdir())
    for number in range(20):
        key = f"k{number}"
        producer.encode(key, output())
        request = FakeRequest([FakeFeature(key, METADATA_ONLY)], key)
        assert consumer.scheduler.ensure_cache_available(request, 0)
        assert consumer.scheduler.has_cache_item(key)
        if left_out not in ("alloc", "both"):
            consumer.scheduler.update_state_after_alloc(request, 0)
        consumer.step()
        if left_out not in ("free", "both"):
            consumer.scheduler.update_state_after_free(request, 0)
        consumer.scheduler.request_finished(request)
    consumer.scheduler.request_finished(FakeRequest([]))
    assert not consumer.scheduler._pins
    assert consumer.scheduler._area.used == 0
    # What earlier tests have left may be collected meanwhile: fewer are no leak.
    assert len(list(Path("/proc/self/fd").iterdir())) <= len(before)


def test_at_the_limit_consumed_pins_make_room(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", pin_bytes=2 * 4096)
    for key in "abc":
        producer.encode(key, output())
    first, second = (FakeRequest([FakeFeature(key, METADATA_ONLY)], key) for key in "ab")
    for request in (first, second):
        assert consumer.schedule(request) == {request.request_id: True}
        consumer.step()
        consumer.scheduler.take_unavailable_requests()
    third = FakeRequest([FakeFeature("c", WITH_MEDIA)], "c")
    assert consumer.schedule(third) == {"c": False}  # both pins may still be needed
    assert consumer.scheduler.counters["misses:no-room"] == 1
    consumer.scheduler.update_state_after_free(first, 0)
    fourth = FakeRequest([FakeFeature("c", METADATA_ONLY)], "d")
    deadline = time.monotonic() + 10
    while consumer.schedule(fourth) != {"c": True}:
        consumer.step()
        assert time.monotonic() < deadline
    assert sorted(consumer.scheduler._pins) == ["b", "c"]


def test_an_object_larger_than_all_room_is_encoded(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", pin_bytes=0)
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}


def test_loading_from_the_store_itself_would_show(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pins are for: the same with a worker that reads the stored file, as vLLM's example connector does."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    monkeypatch.setattr(vs, "_load", lambda plan: of.decode(deployment.path(plan.key).read_bytes())[1])
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": True}
    deployment.store(consumer.scheduler._fingerprint, "k", output(seed=5))
    consumer.step()
    assert not torch.equal(consumer.encoder_cache["k"], output())


def test_a_pin_that_cannot_be_read_ends_the_server(deployment: Deployment) -> None:
    consumer = deployment.server("ec_consumer")
    for place in (Place("/proc/self/fd/987654", 1, 0), Place("/proc/self/exe", 1, 0), None):
        plan = vs.PlannedLoad("k", 4, HIDDEN, "float32", place)
        consumer.worker.bind_connector_metadata(vs.VerifiedStoreMetadata(loads=(plan,)))
        with pytest.raises(RuntimeError, match="'k' cannot be read in the worker"):
            consumer.worker.start_load_caches(consumer.encoder_cache)
        assert consumer.encoder_cache == {}


@pytest.mark.parametrize("where", [{"nnodes": 2}, {"distributed_executor_backend": "ray"}], ids=str)
def test_workers_on_other_hosts_get_the_bytes(
    deployment: Deployment, where: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Deployment.config

    def config(self: Deployment, role: str, **extra: Any) -> Any:
        made = real(self, role, **extra)
        made.parallel_config = SimpleNamespace(**where)
        return made

    monkeypatch.setattr(Deployment, "config", config)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": True}
    (plan,) = consumer.step()
    assert plan.place is None
    assert "data" not in repr(plan), "a dying server logs the metadata"
    assert torch.equal(consumer.encoder_cache["k"], output())


def test_an_aborted_request_leaves_no_look_up(
    deployment: Deployment, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.0)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.schedule(request) is None
    consumer.scheduler.request_finished(request)
    gate.set()
    deadline = time.monotonic() + 10
    while consumer.scheduler._looks:
        assert time.monotonic() < deadline
        consumer.scheduler.take_unavailable_requests()
    assert consumer.scheduler._area.used == 0


def test_what_the_engine_holds_is_not_looked_up_and_a_reset_is_noticed(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    first = FakeRequest([FakeFeature("k", WITH_MEDIA)], "first")
    assert consumer.schedule(first) == {"k": True}
    consumer.step()
    consumer.finish(first)
    with monkeypatch.context() as patched:
        patched.setattr(vs.StoreThreads, "submit", lambda *args: pytest.fail("the store was touched"))
        assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], "second")) == {}
    consumer.encoder_cache.clear()  # reset_encoder_cache calls no hook
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], "third")) == {"k": True}
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], output())
    consumer.encoder_cache.clear()
    deployment.path("k").unlink()
    consumer.finish(FakeRequest([], "third"))
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], "fourth")) == {"k": False}


def test_after_a_reset_rows_are_checked_too(deployment: Deployment) -> None:
    """One uuid for two contents: the engine would merge four rows into nine places, and die."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    first = FakeRequest([FakeFeature("k", WITH_MEDIA)], "first")
    assert consumer.schedule(first) == {"k": True}
    consumer.step()
    consumer.finish(first)
    consumer.encoder_cache.clear()
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA, rows=9)], "second")) == {"k": False}
    assert consumer.step() == ()
    two = [FakeFeature("k", WITH_MEDIA), FakeFeature("k", WITH_MEDIA, offset=40, rows=9)]
    assert consumer.schedule(FakeRequest(two, "third")) == {"k": False}
    assert consumer.scheduler.counters["misses:rows"] == 2


def test_an_item_without_media_is_never_answered_no(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the engine is thought to hold: it would encode nothing and die."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    first = FakeRequest([FakeFeature("k", METADATA_ONLY)], "first")
    assert consumer.schedule(first) == {"k": True}
    consumer.step()
    consumer.finish(first)
    consumer.encoder_cache.clear()
    deployment.path("k").unlink()
    assert consumer.schedule(FakeRequest([FakeFeature("k", METADATA_ONLY)], "second")) is None


# ---- keys that count ----


def test_counters_are_no_keys(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    for key in (COUNTER, f"lora:{COUNTER}", f"lo\nra:{COUNTER}"):
        producer.encode(key, output())
        assert not deployment.path(key).exists()
        deployment.store(consumer.scheduler._fingerprint, key, output())
        assert consumer.schedule(FakeRequest([FakeFeature(key, WITH_MEDIA)], key)) == {key: False}
    assert producer.worker.counters["save_failures:counter-key"] == 3
    assert consumer.scheduler.counters["misses:counter-key"] == 3
    producer.encode("doc-17-image-0", output())  # a client's uuid is none
    assert deployment.path("doc-17-image-0").exists()


@pytest.mark.parametrize(("cache_gb", "prefix", "warns"), [(0, False, 1), (0, True, 0), (4, False, 0)])
def test_a_server_that_counts_says_so_once(
    deployment: Deployment,
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    cache_gb: float,
    prefix: bool,
    warns: int,
) -> None:
    real = Deployment.config

    def config(self: Deployment, role: str, **extra: Any) -> Any:
        made = real(self, role, **extra)
        made.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=cache_gb)
        made.cache_config = SimpleNamespace(enable_prefix_caching=prefix)
        return made

    monkeypatch.setattr(Deployment, "config", config)
    deployment.server("ec_producer")
    assert sum("numbers its items" in line for line in lines) == warns


# ---- adapters ----


def test_an_adapter_of_the_same_name_and_other_weights_shares_nothing(deployment: Deployment, tmp_path: Path) -> None:
    adapters = []
    for number in range(2):
        folder = tmp_path / f"adapter-{number}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        (folder / "adapter_model.safetensors").write_bytes(bytes([number]) * 100)
        adapters.append(SimpleNamespace(lora_name="a", lora_path=str(folder)))
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")

    def request(name: str, lora: Any) -> FakeRequest:
        return FakeRequest([FakeFeature("a:k", WITH_MEDIA)], name, lora_request=lora)

    prime(producer, request("p", adapters[0]), output())
    assert deployment.path("a:k").is_file()
    assert consumer.schedule(request("other", adapters[1])) == {"a:k": False}
    assert consumer.scheduler.counters["misses:model"] == 1
    assert consumer.schedule(request("none", None)) == {"a:k": False}, "the name is remembered"
    same = deployment.server("ec_consumer")
    assert same.schedule(request("same", adapters[0])) == {"a:k": True}
    same.step()
    assert torch.equal(same.encoder_cache["a:k"], output())
    bare = deployment.server("ec_consumer")
    assert bare.schedule(request("bare", None)) == {"a:k": False}
    # Loaded anew under its name: what the engine still holds is of the former one, and must not pass for the new one's.
    (tmp_path / "adapter-0" / "adapter_model.safetensors").write_bytes(b"trained on")
    deployment.path("a:k").unlink()
    prime(producer, request("q", adapters[0]), output())
    assert deployment.path("a:k").exists()
    again = deployment.server("ec_consumer")
    assert again.schedule(request("again", adapters[0])) == {"a:k": False}
    prime(deployment.server("ec_producer"), request("r", adapters[0]), output(seed=3))
    assert again.schedule(request("fresh", adapters[0])) == {"a:k": True}


# ---- width ----


@pytest.mark.parametrize("width", [1, HIDDEN // 2, HIDDEN * 2, HIDDEN * 3])
def test_a_well_formed_object_of_another_width_is_refused(deployment: Deployment, width: int, lines: list[str]) -> None:
    consumer = deployment.server("ec_consumer")
    deployment.root.mkdir()
    deployment.store(consumer.scheduler._fingerprint, "k", output(width=width))
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}
    assert consumer.scheduler.counters["misses:width"] == 1
    assert any("'k'" in line and f"{width} wide, not {HIDDEN}" in line for line in lines)


# ---- quarantine ----


@pytest.mark.parametrize(
    ("kind", "moved"),
    [
        ("truncated", True),
        ("zero tail", True),
        ("another item", True),
        ("folder", True),
        ("another model", False),
        ("one row", False),
        ("one column", False),
        ("other dtype", False),
    ],
)
def test_what_is_damaged_is_quarantined_with_its_reason(
    deployment: Deployment, kind: str, moved: bool, lines: list[str]
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    damage(deployment, kind, consumer.scheduler._fingerprint)
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}
    (missed,) = [name for name in consumer.scheduler.counters if name.startswith("misses:")]
    reason_ = missed.partition(":")[2]
    assert consumer.scheduler.counters.get(f"quarantined:{reason_}", 0) == moved
    assert deployment.path("k").exists() is not moved
    names = [path.name for path in (deployment.root / reclaim.QUARANTINE).glob("*")] if moved else []
    assert [f".{reason_}." in name for name in names] == [True] * moved
    assert sum("'k'" in line and f"({reason_})" in line for line in lines) == 1


def test_a_store_that_may_not_be_changed_is_read(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    producer.encode("l", output())
    damage(deployment, "zero tail", "")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(reclaim, "quarantine", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    request = FakeRequest([FakeFeature("k", WITH_MEDIA), FakeFeature("l", WITH_MEDIA, offset=20)])
    assert consumer.schedule(request) == {"k": False, "l": True}


@pytest.mark.parametrize("number", [28, 30], ids=["full", "read-only"])
def test_a_store_that_takes_nothing_costs_only_sharing(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    with monkeypatch.context() as patched:

        def refuse(*args: object) -> int:
            raise OSError(number, os.strerror(number))

        patched.setattr(of.os, "writev", refuse)
        producer.encode("k", output())
    assert producer.worker.counters == {
        "save_failures:OSError": 1,
        "save_seconds": producer.worker.counters["save_seconds"],
    }
    assert [path for path in deployment.root.rglob("*") if path.is_file()] == []
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], "later")) == {"k": True}


# ---- statistics ----


def test_a_v1_encode_server_reports_its_saves(deployment: Deployment) -> None:
    producer = deployment.server("ec_producer")
    prime(producer, FakeRequest([FakeFeature("k", WITH_MEDIA)]), output())
    stats = producer.scheduler.get_ec_connector_stats()
    assert stats is not None
    assert stats.data["saves"] == 1
    assert stats.data["saved_bytes"] == output().nbytes
    assert stats.data["misses:never-loads"] == 1
    assert producer.scheduler.get_ec_connector_stats() is None


def test_letters_that_do_not_arrive_are_sent_again(deployment: Deployment) -> None:
    server = deployment.server("ec_producer")
    server.scheduler._mailbox.close()
    prime(server, FakeRequest([FakeFeature("k", WITH_MEDIA)]), output())
    later = server.scheduler._mailbox = Mailbox(
        server.scheduler._vllm_config.ec_transfer_config.engine_id, receive=True
    )
    prime(server, FakeRequest([FakeFeature("l", WITH_MEDIA)], "l"), output())
    assert later.receive()[0]["saves"] == 2
    later.close()


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("role", ["ec_consumer", "ec_both"])
def test_loads_are_reported_with_either_runner(deployment: Deployment, v2: bool, role: str) -> None:
    deployment.server("ec_producer").encode("k", output())
    consumer = deployment.server(role, v2=v2)
    request = FakeRequest([FakeFeature("k", WITH_MEDIA), FakeFeature("gone", WITH_MEDIA, offset=30)])
    assert consumer.schedule(request) == {"k": True, "gone": False}
    consumer.step()
    stats = consumer.scheduler.get_ec_connector_stats()
    assert stats is not None
    if v2:
        assert consumer.worker_stats is not None
        stats = consumer.worker_stats.aggregate(stats)
    assert (stats.data["hits"], stats.data["loads"], stats.data["misses:missing"]) == (1, 1, 1)
    assert stats.data["loaded_bytes"] == output().nbytes
    assert not stats.is_empty()
    assert stats.reduce()["hits"] == 1


def test_metrics_show_what_was_counted(deployment: Deployment) -> None:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()
    types = {
        kind: (lambda *args, _kind=kind, **kwargs: _kind(*args, registry=registry, **kwargs))
        for kind in (Counter, Gauge, Histogram)
    }
    config = deployment.config("ec_consumer")
    metrics = vs.VerifiedStoreConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    stats = vs.VerifiedStoreConnector.build_ec_connector_stats({"hits": 2, "misses:missing": 1, "load_seconds": 0.5})
    assert stats is not None
    metrics.observe(json.loads(json.dumps(stats.data)), 0)
    metrics.observe({"hits": 1}, 0)
    text = generate_latest(registry).decode()
    assert 'vllm:ec_store_hits_total{engine="0",model_name="m"} 3.0' in text
    assert 'vllm:ec_store_misses_total{engine="0",model_name="m",reason="missing"} 1.0' in text
    assert 'vllm:ec_store_saves_total{engine="0",model_name="m"} 0.0' in text


def test_sums_do_not_depend_on_the_order() -> None:
    parts: list[Callable[[], Any]] = [
        lambda: vs.StoreStats({"saves": 1}),
        lambda: vs.StoreStats({"saves": 2, "misses:model": 1}),
        lambda: vs.StoreStats({}),
    ]
    one = parts[0]().aggregate(parts[1]()).aggregate(parts[2]())
    other = parts[2]().aggregate(parts[1]().aggregate(parts[0]()))
    assert one.data == other.data == {"saves": 3, "misses:model": 1}


# ---- limits and the end ----


def test_a_producer_keeps_the_store_within_its_limit(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "SCAN_EVERY_S", 0.01)
    one = len(of.encode(output(), of.Header.of(output(), key="k00", model_fingerprint="ab" * 32, creator="x" * 60)))
    producer = deployment.server("ec_producer", max_bytes=10 * one)
    for number in range(30):
        producer.encode(f"k{number:02}", output())
    deadline = time.monotonic() + 10
    while sum(stored.bytes for stored in reclaim.objects(deployment.root)) > 10 * one:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert deployment.path("k29").exists()
    producer.worker.shutdown()


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_shutdown_may_come_at_any_time(deployment: Deployment, role: str) -> None:
    server = deployment.server(role)
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    server.schedule(request)
    for _ in range(2):
        server.worker.shutdown()
        server.scheduler.shutdown()
    server.scheduler.take_unavailable_requests()
    server.scheduler.request_finished(request)


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_no_hook_raises_when_the_store_is_nonsense(
    deployment: Deployment, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **kwargs: object) -> Any:
        raise RuntimeError("nonsense")

    for name in ("open_object", "publish", "fill"):
        monkeypatch.setattr(vs, name, broken)
    server = deployment.server(role)
    for number in range(3):
        request = FakeRequest([FakeFeature("k", WITH_MEDIA)], str(number))
        assert server.schedule(request) in ({"k": False}, {})
        server.step(encode={"k": output()})
        server.finish(request)


def test_only_one_rank_of_a_tensor_parallel_encoder_publishes(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    for rank in (1, 0):
        monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        producer = deployment.server("ec_producer")
        producer.encode("k", output())
        assert deployment.path("k").exists() is (rank == 0)
