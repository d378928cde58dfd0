"""What a step of the verified store may take, asks for, loads and counts, with a clock that stands still until a test moves it.

Needs vLLM: the connector is a subclass of its base class.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
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
    ROWS,
    WITH_MEDIA,
    Deployment,
    FakeFeature,
    FakeRequest,
    damage,
    output,
)

from epd_conformance.connectors import reclaim  # noqa: E402
from epd_conformance.connectors import verified_store as vs  # noqa: E402
from epd_conformance.connectors.store_stats import StoreStats, WorkerTally  # noqa: E402
from epd_conformance.connectors.verified_store import StoreConfig  # noqa: E402

pytestmark = pytest.mark.needs_vllm


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setattr(vs, "STEP_WAIT_S", 30.0)
    return Deployment(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    fake = SimpleNamespace(now=1000.0, monotonic=lambda: fake.now, time_ns=time.time_ns)
    monkeypatch.setattr(vs, "time", fake)
    return fake


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(vs.logger, level, lambda message, *args: found.append(message % args))
    return found


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> Iterator[list[float]]:
    """A store that answers nothing: for how long it was waited for. A wait of any length at all takes four milliseconds."""
    opened = threading.Event()
    real = vs.open_object

    def open_object(path: Path) -> Any:
        opened.wait(20)
        return real(path)

    waits: list[float] = []

    def wait(self: object, seconds: float) -> bool:
        waits.append(round(seconds, 6))
        clock.now += min(0.004, max(seconds, 0))
        return False

    monkeypatch.setattr(vs, "open_object", open_object)
    monkeypatch.setattr(vs.Task, "wait", wait)
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.01)
    yield waits
    opened.set()


def item(key: str, data: Any = WITH_MEDIA, **more: Any) -> FakeFeature:
    return FakeFeature(key, data, **more)


# ---- how long a step waits ----


def test_all_look_ups_of_a_step_wait_for_so_long_together(deployment: Deployment, silent: list[float]) -> None:
    consumer = deployment.server("ec_consumer")
    for _ in range(2):
        for key in "abcde":
            assert consumer.schedule(FakeRequest([item(key)], key)) is None
        assert silent == [0.01, 0.006, 0.002, 0, 0]
        silent.clear()
        assert consumer.scheduler.build_connector_meta(SimpleNamespace()).loads == ()
    assert consumer.scheduler.counters["step_wait_seconds"] == pytest.approx(0.02)


def test_a_producers_checks_wait_for_so_long_together(deployment: Deployment, silent: list[float]) -> None:
    producer = deployment.server("ec_producer")
    for key in "abc":
        request = FakeRequest([item(key)], f"first-{key}")
        assert producer.schedule(request) == {key: False}
        producer.encoder_cache[key] = output()
    assert silent == []
    for key in "abc":
        assert producer.schedule(FakeRequest([item(key)], key)) is None
    assert silent == [0.01, 0.006, 0.002]
    assert producer.scheduler.counters["step_wait_seconds"] == pytest.approx(0.01)
    silent.clear()
    producer.scheduler.build_connector_meta(SimpleNamespace())
    assert producer.schedule(FakeRequest([item("a")], "a")) is None
    assert silent == [0.01]


def test_after_a_reset_the_wait_is_longer_once_and_the_rest_of_the_step_waits_no_more(
    deployment: Deployment, silent: list[float]
) -> None:
    consumer = deployment.server("ec_consumer")
    consumer.scheduler._in_engine.note("k")
    request = FakeRequest([item("k"), item("k", offset=20), item("l", offset=40)])
    assert consumer.scheduler.ensure_cache_available(FakeRequest([item("k")]), 0)
    assert not consumer.scheduler.has_cache_item("k")
    assert silent == [vs.RESET_WAIT_S]
    assert consumer.scheduler.counters["misses:slow-store"] == 1
    assert consumer.schedule(request) is None
    assert silent == [vs.RESET_WAIT_S, 0]


def test_the_usual_times_do(tmp_path: Path) -> None:
    assert 0 < vs.STEP_WAIT_S < vs.RESET_WAIT_S < vs.UNAVAILABLE_AFTER_S < vs.SAVE_WAIT_S
    deployment = Deployment(tmp_path)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    deadline = time.monotonic() + 10
    while not deployment.path("k").exists() or consumer.schedule(FakeRequest([item("k")])) is None:
        consumer.step()
        assert time.monotonic() < deadline


# ---- how often the store is asked ----


def submitted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []
    real = vs.StoreThreads.submit

    def submit(self: Any, call: Any, otherwise: Any) -> Any:
        calls.append(call)
        return real(self, call, otherwise)

    monkeypatch.setattr(vs.StoreThreads, "submit", submit)
    return calls


def test_one_look_up_serves_all_that_wait_for_it(
    deployment: Deployment, silent: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = submitted(monkeypatch)
    consumer = deployment.server("ec_consumer")
    for _ in range(3):
        for name in "ab":
            assert consumer.schedule(FakeRequest([item("k")], name)) is None
    assert len(calls) == 1
    assert consumer.scheduler._looks["k"].waiters == {"a", "b"}
    # One of them is gone: the other still waits, and what comes is not thrown away.
    consumer.scheduler.request_finished(FakeRequest([], "a"))
    assert consumer.scheduler._looks["k"].waiters == {"b"}
    producer = deployment.server("ec_producer")
    producer.scheduler._in_engine.note("k")
    for name in "abab":
        assert producer.schedule(FakeRequest([item("k")], name)) is None
    assert len(calls) == 2


def test_what_waits_without_media_is_asked_for_again_after_a_while_only(
    deployment: Deployment, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = submitted(monkeypatch)
    consumer = deployment.server("ec_consumer")
    request = FakeRequest([item("k", METADATA_ONLY), item("l", METADATA_ONLY, offset=20)])
    for number in (1, 1, 2, 2, 3):
        clock.now = 1000.0 + number * vs.POLL_S
        assert consumer.schedule(request) is None
        assert len(calls) == 2 * number


def test_what_is_not_at_rest_is_read_every_time(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody may still write: its state does not tell what is in it."""
    filled: list[object] = []
    real = vs.fill
    monkeypatch.setattr(vs, "fill", lambda *args: filled.append(args) or real(*args))
    consumer, producer = deployment.server("ec_consumer"), deployment.server("ec_producer")
    deployment.store("cd" * 32, "k", output())
    soon = time.time() + 3600
    os.utime(deployment.path("k"), (soon, soon))
    for name in "ab":
        assert consumer.schedule(FakeRequest([item("k")], name)) == {"k": False}
    assert consumer.scheduler.counters["refused:model"] == 2
    assert len(filled) == 2
    deployment.store(producer.scheduler._fingerprint, "l", output())
    os.utime(deployment.path("l"), (soon, soon))
    producer.scheduler._in_engine.note("l")
    producer.encoder_cache["l"] = output()
    for name in "ab":
        assert producer.schedule(FakeRequest([item("l")], name)) == {}
    assert len(filled) == 4


# ---- what is loaded ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nnodes", [1, 2])
def test_an_item_keeps_its_type_and_its_bytes(deployment: Deployment, dtype: torch.dtype, nnodes: int) -> None:
    real = deployment.config

    def config(role: str, **more: Any) -> Any:
        made = real(role, **more)
        made.model_config.dtype = dtype
        made.parallel_config = SimpleNamespace(nnodes=nnodes)
        return made

    deployment.config = config  # type: ignore[method-assign]
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    tensor = output(rows=7).to(dtype)
    producer.encode("k", tensor)
    assert consumer.schedule(FakeRequest([item("k", rows=7)])) == {"k": True}
    (plan,) = consumer.step()
    assert (plan.place is None) is (nnodes == 2)
    assert (plan.data is None) is (nnodes == 1)
    assert consumer.encoder_cache["k"].dtype == dtype
    assert torch.equal(consumer.encoder_cache["k"], tensor)
    assert consumer.scheduler.counters["loaded_bytes"] == 7 * HIDDEN * 2


def test_one_step_loads_all_that_is_not_there(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    for number, key in enumerate("abc"):
        producer.encode(key, output(seed=number))
    features = [item(key, offset=20 * number) for number, key in enumerate("abc")]
    assert consumer.schedule(FakeRequest(features)) == {"a": True, "b": True, "c": True}
    mine = consumer.encoder_cache["a"] = output(seed=7)
    assert [plan.key for plan in consumer.step()] == ["a", "b", "c"]
    assert consumer.encoder_cache["a"] is mine
    assert torch.equal(consumer.encoder_cache["b"], output(seed=1))
    assert torch.equal(consumer.encoder_cache["c"], output(seed=2))
    assert consumer.scheduler.counters["loads"] == 2


def test_a_worker_without_the_connectors_metadata(deployment: Deployment) -> None:
    worker = deployment.server("ec_both").worker
    cache = {"k": output()}
    worker.start_load_caches(cache)
    worker.start_save_caches(encoder_cache=cache)
    worker.bind_connector_metadata(SimpleNamespace(loads=(), publish=("k",), fingerprints={}))
    worker.start_save_caches(encoder_cache=cache)
    with pytest.raises(RuntimeError, match="metadata of another connector"):
        worker.start_load_caches(cache)
    worker.bind_connector_metadata(vs.VerifiedStoreMetadata(publish=("k",)))
    worker.start_save_caches()
    assert not deployment.path("k").exists()
    worker.start_save_caches(encoder_cache=cache)
    assert deployment.path("k").exists()
    worker.bind_connector_metadata(vs.VerifiedStoreMetadata())
    worker.start_load_caches(cache)
    worker.start_save_caches(encoder_cache=cache)
    assert set(cache) == {"k"}


def test_an_empty_output_needs_no_bytes() -> None:
    plan = vs.PlannedLoad("k", 0, HIDDEN, "float32", None)
    assert vs._load(plan).shape == (0, HIDDEN)
    for data in (None, bytes(3), bytes(HIDDEN * 4 + 1)):
        with pytest.raises(OSError, match="brought no bytes"):
            vs._load(vs.PlannedLoad("k", 1, HIDDEN, "float32", None, data))


def test_where_a_tensor_is_put(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    gpu = SimpleNamespace(device_type="cuda", is_cuda_alike=lambda: True, current_device=lambda: 3)
    monkeypatch.setattr(platforms, "current_platform", gpu)
    assert vs._device() == "cuda:3"
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(device_type="cpu", is_cuda_alike=lambda: False))
    assert vs._device() == "cpu"


# ---- what is counted ----


def test_time_is_counted_where_it_is_spent(
    deployment: Deployment, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(name: str, seconds: float) -> None:
        real = getattr(vs, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            clock.now += seconds
            return real(*args, **kwargs)

        monkeypatch.setattr(vs, name, call)

    slow("publish", 3)
    slow("check", 5)
    slow("_load", 7)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", v2=True)
    producer.encode("k", output())
    producer.encode("l", output())
    assert consumer.schedule(FakeRequest([item("k"), item("l", offset=20)])) == {"k": True, "l": True}
    consumer.step()
    assert producer.worker.counters == {"saves": 2, "saved_bytes": 2 * output().nbytes, "save_seconds": 6}
    assert consumer.worker.counters == {"loads": 2, "loaded_bytes": 2 * output().nbytes, "load_seconds": 14}
    assert (consumer.scheduler.counters["hits"], consumer.scheduler.counters["lookup_seconds"]) == (2, 10)


def test_an_answer_is_counted_once_for_each_request(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    for name in "ab":
        request = FakeRequest([item("k"), item("gone", offset=20)], name)
        for _ in range(3):
            assert consumer.schedule(request) == {"k": True, "gone": False}
    counters = consumer.scheduler.counters
    assert (counters["hits"], counters["misses:missing"]) == (2, 2)
    assert consumer.scheduler.get_ec_connector_stats().data["hits"] == 2
    assert consumer.scheduler.get_ec_connector_stats() is None


def test_a_worker_reports_once_and_by_one_way(deployment: Deployment) -> None:
    both, producer = deployment.server("ec_both").worker, deployment.server("ec_producer").worker
    for worker in (both, producer):
        worker.save_caches(encoder_cache={"k": output()}, mm_hash="k")
    told = both.build_connector_worker_meta()
    assert isinstance(told, WorkerTally)
    assert told.data["saves"] == 1
    assert both.build_connector_worker_meta() is None
    assert producer.build_connector_worker_meta() is None, "a V1 encode server drops it"
    assert producer.get_ec_connector_stats().data["saves"] == 1
    both.update_connector_output(SimpleNamespace())
    both.update_connector_output(SimpleNamespace(ec_connector_worker_meta={"saves": 5}))
    assert both.counters["saves"] == 1
    both.update_connector_output(SimpleNamespace(ec_connector_worker_meta=WorkerTally({"saves": 5})))
    assert both.counters["saves"] == 6
    assert vs.VerifiedStoreConnector.build_ec_connector_stats() == StoreStats({})


def test_letters_are_read_by_the_schedulers_side_alone(deployment: Deployment) -> None:
    server = deployment.server("ec_producer")
    server.worker.save_caches(encoder_cache={"k": output()}, mm_hash="k")
    server.worker.clear_connector_metadata()
    assert server.worker.get_ec_connector_stats() is None, "the letter has it"
    server.worker.save_caches(encoder_cache={"l": output()}, mm_hash="l")
    server.worker.clear_connector_metadata()
    assert server.scheduler.get_ec_connector_stats().data["saves"] == 2
    server.worker.clear_connector_metadata()
    assert server.scheduler.get_ec_connector_stats() is None


def test_the_log_names_so_many_refusals_of_each_reason(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(vs, "LINES_PER_REASON", 2)
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    for number in range(4):
        producer.encode(f"k{number}", output())
        request = FakeRequest([item(f"k{number}", rows=ROWS + 1)], f"r{number}")
        assert consumer.schedule(request) == {f"k{number}": False}
    assert consumer.scheduler.counters["refused:rows"] == 4
    assert sum("is not used (rows)" in line for line in lines) == 2


def test_a_refusal_after_a_reset_names_the_item(deployment: Deployment, lines: list[str]) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    consumer.scheduler._in_engine.note("k")
    assert consumer.schedule(FakeRequest([item("k", rows=ROWS + 1)])) == {"k": False}
    assert consumer.scheduler.counters["misses:rows"] == 1
    assert sum("the object of 'k' is not used (rows)" in line for line in lines) == 1


def test_what_is_reclaimed_is_counted(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(reclaim, "SCAN_EVERY_S", 0.01)
    producer = deployment.server("ec_producer", max_age_s=50)
    size = 0
    for key in ("old", "older"):
        deployment.store("ab" * 32, key, output())
        size += deployment.path(key).stat().st_size
        os.utime(deployment.path(key), (1, 1))
    producer.encode("k", output())
    deadline = time.monotonic() + 10
    while "reclaimed_bytes" not in producer.worker.counters:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert (producer.worker.counters["reclaimed"], producer.worker.counters["reclaimed_bytes"]) == (2, size)
    for _ in range(2):
        producer.worker._sweep_failed(OSError("no"))
    assert sum("cannot reclaim" in line for line in lines) == 1
    producer.worker.shutdown()


# ---- what is remembered ----


def test_of_too_many_keys_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vs, "REMEMBERED_KEYS", 3)
    memory = vs._Memory()
    for key in ("a", "b", "c", "a", "d"):
        memory.note(key, key * 2)
    assert list(memory.items()) == [("c", "cc"), ("a", "aa"), ("d", "dd")]


def test_an_evicted_item_is_no_longer_taken_for_held(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    for key in "kl":
        producer.encode(key, output())
    first = FakeRequest([item("k"), item("l", offset=20)], "first")
    assert consumer.schedule(first) == {"k": True, "l": True}
    consumer.step()
    consumer.finish(first)
    consumer.step(free=("k", "unknown"))
    calls = submitted(monkeypatch)
    assert consumer.schedule(FakeRequest([item("k"), item("l", offset=20)], "second")) == {"k": True}
    assert len(calls) == 1


def test_a_step_is_told_of_the_adapters_of_its_own_items(
    deployment: Deployment, tmp_path: Path, lines: list[str]
) -> None:
    producer = deployment.server("ec_producer")
    lora = SimpleNamespace(lora_name="a", lora_path="org/adapter")
    for name, key in (("r", "a:k"), ("s", "b:l")):
        assert producer.schedule(FakeRequest([item(key)], name, lora_request=lora)) == {key: False}
    metadata = producer.scheduler.build_connector_meta(SimpleNamespace())
    fingerprint = vs.adapter_fingerprint(producer.scheduler._fingerprint, "org/adapter")
    assert metadata.fingerprints == {"a:k": fingerprint}, "the key of the other does not begin with the adapter's name"
    assert producer.scheduler.build_connector_meta(SimpleNamespace()).fingerprints == {}
    assert producer.scheduler._fingerprint_of("a:k") == fingerprint
    assert producer.scheduler._fingerprint_of("b:l") == producer.scheduler._fingerprint
    # An adapter that cannot be read leaves the request alone.
    broken = SimpleNamespace(lora_name="c")
    assert producer.schedule(FakeRequest([item("c:k")], "t", lora_request=broken)) == {"c:k": False}
    assert sum("cannot read the adapter of 'c:k'" in line for line in lines) == 1


def test_what_a_worker_publishes_again_is_of_what_it_was_encoded_with(deployment: Deployment) -> None:
    worker = deployment.server("ec_producer").worker
    cache = {"a:k": output(), "a:l": output(seed=1), "m": output(seed=2)}

    def publish(*keys: str, fingerprints: dict[str, str]) -> set[str]:
        worker.bind_connector_metadata(vs.VerifiedStoreMetadata(publish=keys, fingerprints=fingerprints))
        worker.start_save_caches(encoder_cache=cache)
        found = {key for key in keys if deployment.path(key).exists()}
        for key in found:
            deployment.path(key).unlink()
        return found

    worker.bind_connector_metadata(vs.VerifiedStoreMetadata(fingerprints={"a:k": "ab" * 32}))
    worker.start_save_caches(encoder_cache={})
    worker.save_caches(encoder_cache=cache, mm_hash="a:k")
    deployment.path("a:k").unlink()
    assert publish("a:k", "a:l", "gone", "m", fingerprints={"a:l": "cd" * 32}) == {"a:k", "m"}
    assert worker.counters["republished"] == 2
    worker.bind_connector_metadata(vs.VerifiedStoreMetadata(publish=("a:k",), fingerprints={"a:k": "ef" * 32}))
    worker.start_save_caches(encoder_cache=cache)
    assert reclaim.header_of(deployment.path("a:k")).model_fingerprint == "ab" * 32


# ---- pins ----


def test_with_overlapping_steps_a_pin_stays_until_its_own_step_is_over(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", overlapping=True)
    for _ in range(3):  # idle steps: nothing was dispatched that could be over
        consumer.scheduler.take_unavailable_requests()
    for key in "kl":
        producer.encode(key, output())
        request = FakeRequest([item(key)], key)
        assert consumer.schedule(request) == {key: True}
        consumer.scheduler.build_connector_meta(SimpleNamespace())
        consumer.scheduler.request_finished(request)
    assert not consumer.scheduler._make_room(), "the steps that load them are under way"
    for left in ({"l"}, set()):
        consumer.scheduler.take_unavailable_requests()
        assert set(consumer.scheduler._pins) == left
    assert consumer.scheduler._area.used == 0


def test_a_preempted_request_keeps_its_pins_while_it_looks_for_more(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", pin_bytes=2 * 4096)
    for key in "kmn":
        producer.encode(key, output())
    request = FakeRequest([item("m"), item("k", METADATA_ONLY, offset=20)])
    assert consumer.schedule(request) == {"m": True, "k": True}
    consumer.step()
    for index in range(2):
        consumer.scheduler.update_state_after_free(request, index)
    consumer.step(free=("m", "k"))
    consumer.scheduler.take_unavailable_requests()
    assert set(consumer.scheduler._pins) == {"k"}, "the other can be encoded"
    assert consumer.schedule(FakeRequest([item("n")], "other")) == {"n": True}
    deployment.path("k").unlink()
    request.num_preemptions = 1
    assert consumer.schedule(request) == {"m": False, "k": True}
    assert consumer.scheduler.counters["misses:no-room"] == 1


def test_what_a_last_look_has_found_is_not_dropped_for_another(deployment: Deployment, clock: SimpleNamespace) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    request = FakeRequest([item("k", METADATA_ONLY)])
    assert consumer.schedule(request) is None
    producer.encode("k", output())
    clock.now += 10
    assert consumer.scheduler.take_unavailable_requests() == set()
    assert not consumer.scheduler._make_room()
    consumer.scheduler.request_finished(request)
    assert consumer.scheduler._area.used == 0


def test_the_pin_of_an_adapter_that_was_replaced_goes_with_its_last_user(
    deployment: Deployment, tmp_path: Path
) -> None:
    def lora(number: int) -> SimpleNamespace:
        return SimpleNamespace(lora_name="a", lora_path=f"org/adapter-{number}")

    consumer = deployment.server("ec_consumer", overlapping=True)
    requests = []
    for number in range(3):
        producer = deployment.server("ec_producer")
        request = FakeRequest([item("a:k")], f"r{number}", lora_request=lora(number))
        assert producer.schedule(request) == {"a:k": False}
        producer.step(encode={"a:k": output(seed=number)})
        assert consumer.schedule(request) == {"a:k": True}
        (plan,) = consumer.scheduler.build_connector_meta(SimpleNamespace()).loads
        assert torch.equal(vs._load(plan), output(seed=number))
        requests.append(request)
    size = consumer.scheduler._area.used // 3
    for _ in range(3):
        consumer.scheduler.take_unavailable_requests()
    assert consumer.scheduler._area.used == 3 * size, "all have users"
    for left in (2, 1):
        consumer.scheduler.request_finished(requests[2 - left])
        assert consumer.scheduler._area.used == left * size
    assert consumer.scheduler._replaced == []
    consumer.scheduler.request_finished(requests[2])
    consumer.scheduler.take_unavailable_requests()
    assert consumer.scheduler._area.used == 0


def test_a_server_that_pins_nothing_takes_no_memory(deployment: Deployment) -> None:
    both = deployment.server("ec_both")
    assert both.worker._area.reserve(1) is None
    assert deployment.server("ec_producer").scheduler._area.reserve(1) is None
    assert both.scheduler._area.reserve(1) is not None


def test_one_large_object_does_not_hold_up_the_small_ones(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    real = vs.open_object
    large = deployment.path("large")
    monkeypatch.setattr(vs, "open_object", lambda path: (path != large or opened.wait(20)) and real(path))
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", unavailable_after_s=60)
    producer.encode("large", output())
    producer.encode("small", output())
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.0)
    assert consumer.scheduler.build_connector_meta(SimpleNamespace()).loads == ()
    assert consumer.schedule(FakeRequest([item("large")], "a")) is None
    deadline = time.monotonic() + 10
    while consumer.schedule(FakeRequest([item("small")], "b")) != {"small": True}:
        assert time.monotonic() < deadline
    assert not opened.is_set()
    opened.set()


# ---- checks of a producer ----


def test_a_check_that_nobody_waits_for_is_dropped_and_one_that_is_awaited_is_kept(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    real = vs.open_object
    monkeypatch.setattr(vs, "open_object", lambda path: opened.wait(20) and real(path))
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.0)
    producer = deployment.server("ec_producer", unavailable_after_s=60)
    for key in "kl":
        producer.encode(key, output())
        producer.scheduler._in_engine.note(key)
    gone, waits = FakeRequest([item("k")], "gone"), FakeRequest([item("l")], "waits")
    calls = submitted(monkeypatch)
    assert [producer.schedule(request) for request in (gone, waits)] == [None, None]
    producer.scheduler.request_finished(gone)
    assert set(producer.scheduler._checks) == {"k", "l"}
    opened.set()
    tasks = list(producer.scheduler._checks.values())
    assert all(task.wait(10) for task in tasks)
    producer.scheduler.take_unavailable_requests()
    assert set(producer.scheduler._checks) == {"l"}
    assert producer.schedule(waits) == {}
    assert len(calls) == 2
    assert producer.scheduler._checks == {}
    assert producer.schedule(waits) == {}, "once for each request"
    assert len(calls) == 2


# ---- when a request is over ----


def test_of_a_finished_request_nothing_is_answered_and_of_another_one_all(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    one, other = (FakeRequest([item("k")], name) for name in ("one", "other"))
    assert consumer.scheduler.ensure_cache_available(other, 0)
    assert consumer.scheduler.ensure_cache_available(one, 0)
    consumer.scheduler.request_finished(other)
    consumer.scheduler.request_finished(FakeRequest([], "unknown"))
    assert consumer.scheduler.has_cache_item("k")
    consumer.scheduler.request_finished(one)
    assert not consumer.scheduler.has_cache_item("k")


# ---- when a request is given up ----


def test_only_what_is_late_is_given_up(deployment: Deployment, clock: SimpleNamespace) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", unavailable_after_s=2)
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([item("k")], "served")) == {"k": True}
    fresh, late = (FakeRequest([item(name, METADATA_ONLY)], name) for name in ("fresh", "late"))
    assert consumer.schedule(late) is None
    clock.now += 1
    assert consumer.schedule(fresh) is None
    # The engine comes to the older request last.
    requests = consumer.scheduler._requests
    requests["late"] = requests.pop("late")
    assert consumer.scheduler.take_unavailable_requests() == set()
    clock.now += 1.5
    assert consumer.schedule(late) is None
    assert consumer.scheduler.take_unavailable_requests() == {"late"}
    assert consumer.scheduler.counters["unavailable_requests"] == 1
    clock.now += 1
    assert consumer.scheduler.take_unavailable_requests() == {"fresh"}
    assert consumer.scheduler.counters["unavailable_requests"] == 2


def test_each_wait_has_a_time_of_its_own(deployment: Deployment, clock: SimpleNamespace) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", unavailable_after_s=2)
    request = FakeRequest([item("k", METADATA_ONLY), item("l", METADATA_ONLY, offset=20)])
    producer.encode("l", output())
    assert consumer.schedule(request) is None
    clock.now += 1.5
    producer.encode("k", output())
    assert consumer.schedule(request) == {"k": True, "l": True}
    consumer.step()
    # Both are consumed and evicted, and the second comes again.
    for index in range(2):
        consumer.scheduler.update_state_after_free(request, index)
    consumer.scheduler._pins.clear()
    deployment.path("l").unlink()
    consumer.step(free=("k", "l"))
    assert consumer.schedule(request, 10) is None
    clock.now += 1.5
    assert consumer.scheduler.take_unavailable_requests() == set()
    clock.now += 0.5
    assert consumer.scheduler.take_unavailable_requests() == {"r"}


def test_an_item_with_media_is_encoded_when_its_time_is_up(
    deployment: Deployment, silent: list[float], clock: SimpleNamespace
) -> None:
    consumer = deployment.server("ec_consumer", unavailable_after_s=2)
    request = FakeRequest([item("k")])
    assert consumer.schedule(request) is None
    (began,) = (state.deadline for state in consumer.scheduler._requests.values())
    assert began is not None
    clock.now = began - 0.5
    assert consumer.schedule(request) is None
    clock.now = began
    assert consumer.schedule(request) == {"k": False}
    assert consumer.scheduler.counters["misses:slow-store"] == 1


# ---- widths, media, settings that are passed on ----


def test_rows_of_several_levels_cross_and_are_checked_everywhere(
    deployment: Deployment, clock: SimpleNamespace
) -> None:
    """A DeepStack model: an image has wider rows than another item, so that the modality matters."""
    real = deployment.config

    def config(role: str, **more: Any) -> Any:
        made = real(role, **more)
        made.model_config.hf_config = SimpleNamespace(deepstack_visual_indexes=[1])
        return made

    deployment.config = config  # type: ignore[method-assign]
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    wide = output(width=2 * HIDDEN)
    late = FakeRequest([item("late", METADATA_ONLY)], "late")
    assert consumer.schedule(late) is None
    producer.step(encode={"k": wide, "late": wide})
    producer.scheduler._in_engine.note("k")
    assert producer.schedule(FakeRequest([item("k")], "again")) == {}
    assert producer.scheduler._publish == set()
    assert consumer.schedule(FakeRequest([item("k")])) == {"k": True}
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], wide)
    consumer.encoder_cache.clear()
    assert consumer.schedule(FakeRequest([item("k")], "reset")) == {"k": True}
    consumer.step()
    clock.now += 10
    assert consumer.scheduler.take_unavailable_requests() == set()
    assert consumer.schedule(late) == {"late": True}


def test_if_in_doubt_an_item_has_no_media(deployment: Deployment, lines: list[str]) -> None:
    consumer = deployment.server("ec_consumer")

    def fail(modality: str) -> set[str]:
        raise KeyError(modality)

    consumer.scheduler._resolver = SimpleNamespace(fields_for=fail)
    for name in "ab":
        assert consumer.schedule(FakeRequest([item("k")], name)) is None
    assert sum("cannot tell whether 'k' has media" in line for line in lines) == 1


def test_without_vllms_resolver_whatever_an_item_has_is_media(deployment: Deployment) -> None:
    """Before vLLM 0.30 there were no items without."""
    server = deployment.server("ec_both")
    server.scheduler._resolver = None
    request = FakeRequest([item("k", METADATA_ONLY)])
    assert server.schedule(request) == {"k": False}
    assert server.scheduler.request_finished(request) == (False, None)


@pytest.mark.parametrize("fsync", [True, False])
def test_flushing_is_left_to_the_setting(deployment: Deployment, monkeypatch: pytest.MonkeyPatch, fsync: bool) -> None:
    asked: list[bool] = []
    real = vs.publish

    def publish(*args: Any, fsync: bool) -> Any:
        asked.append(fsync)
        return real(*args, fsync=fsync)

    monkeypatch.setattr(vs, "publish", publish)
    producer = deployment.server("ec_producer", fsync=fsync)
    deployment.path("k").mkdir(parents=True)
    producer.encode("k", output())
    assert deployment.path("k").is_file()
    assert asked == [fsync, fsync], "also where a folder was in the way"


def test_a_configuration_that_says_little(deployment: Deployment) -> None:
    """Of another version of vLLM. Steps may then overlap, and all workers are on this host."""
    real = deployment.config

    def config(role: str, **more: Any) -> Any:
        made = real(role, **more)
        del made.max_concurrent_batches, made.model_config.is_encoder_decoder, made.model_config.multimodal_config
        return made

    deployment.config = config  # type: ignore[method-assign]
    deployment.root = deployment.root / "deep" / "inside"
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([item("k")])
    del request.lora_request
    assert consumer.schedule(request) == {"k": True}
    (plan,) = consumer.scheduler.build_connector_meta(SimpleNamespace()).loads
    assert plan.place is not None
    consumer.scheduler.request_finished(request)
    assert set(consumer.scheduler._pins) == {"k"}


# ---- settings, roles, the end ----


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("fsync", [True, False], [None, 0, 1, "true"]),
        ("unavailable_after_s", [0, 0.5, 3600], [-0.001, 3600.001, True, "1", None]),
        ("pin_bytes", [0, 1, 1 << 40], [-1, (1 << 40) + 1, 1.5, False, "1", None]),
        ("max_bytes", [None, 0, 1, 1 << 60], [-1, 1.5, True, "1"]),
        ("max_age_s", [None, 0, 0.5, 1e11], [-0.001, 1e12, float("nan"), True, "1"]),
    ],
)
def test_the_range_of_each_setting(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        found = getattr(StoreConfig.parse({"root": "/x", name: value}), name)
        assert found == value
        assert name.endswith("_s") is isinstance(found, float) or value is None
    for value in bad:
        with pytest.raises(ValueError, match=f"`{name}` in ec_connector_extra_config of VerifiedStoreConnector is"):
            StoreConfig.parse({"root": "/x", name: value})


def test_what_is_not_set() -> None:
    found = StoreConfig.parse({"root": "/x"})
    assert found == StoreConfig(Path("/x"), False, vs.UNAVAILABLE_AFTER_S, vs.PIN_BYTES, None, None)


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_who_makes_the_store_and_who_only_misses_it(deployment: Deployment, role: str, lines: list[str]) -> None:
    server = deployment.server(role)
    assert deployment.root.is_dir() is (role != "ec_consumer")
    assert sum("is not there (yet)" in line for line in lines) == 2 * (role == "ec_consumer")
    assert sum("model fingerprint" in line for line in lines) == 1
    assert (server.scheduler._mailbox is not None) is (role == "ec_producer")
    lines.clear()
    deployment.root.mkdir(exist_ok=True)
    again = deployment.server(role)
    assert [line for line in lines if "is not there" in line or "cannot make" in line] == []
    assert again.worker._reclaimer is None
    deployment.root.rmdir()
    deployment.root.write_text("a file")
    assert deployment.server(role).scheduler._fingerprint
    assert sum("cannot make" in line for line in lines) == (role != "ec_consumer")


@pytest.mark.parametrize("limit", ["max_bytes", "max_age_s"])
def test_who_keeps_the_limits(deployment: Deployment, limit: str) -> None:
    for role in ("ec_producer", "ec_consumer", "ec_both"):
        server = deployment.server(role, **{limit: 0})
        assert (server.worker._reclaimer is not None) is (role != "ec_consumer")
        assert server.scheduler._reclaimer is None
        server.worker.shutdown()


def test_an_object_says_who_made_it(deployment: Deployment) -> None:
    deployment.server("ec_producer").encode("k", output())
    header = reclaim.header_of(deployment.path("k"))
    assert header.creator == f"epd-conformance verified store, {socket.gethostname()}, process {os.getpid()}"


def test_after_the_end_nothing_is_saved_or_promised(deployment: Deployment) -> None:
    producer = deployment.server("ec_producer", max_bytes=1 << 30)
    producer.encode("k", output())
    consumer = deployment.server("ec_consumer")
    assert consumer.schedule(FakeRequest([item("k")])) == {"k": True}
    for server in (producer, consumer):
        server.worker.shutdown()
        server.scheduler.shutdown()
    producer.encode("l", output())
    assert not deployment.path("l").exists()
    assert producer.worker.counters["save_failures:RuntimeError"] == 1
    assert not producer.worker._mailbox.send({"saves": 1})
    assert producer.worker._reclaimer is not None
    assert consumer.schedule(FakeRequest([item("m")], "late")) == {"m": False}
    assert consumer.scheduler.counters["misses:unreadable"] == 1
    assert consumer.scheduler._area.reserve(1) is None


def test_what_cannot_be_moved_out_of_the_way_is_a_failed_save(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = deployment.server("ec_producer")
    producer.encode("k", output())
    damage(deployment, "folder", "")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no")

    with monkeypatch.context() as patched:
        patched.setattr(reclaim, "quarantine", refuse)
        producer.encode("k", output())
    assert producer.worker.counters["save_failures:PermissionError"] == 1
    assert deployment.path("k").is_dir()
    producer.encode("k", output())
    assert deployment.path("k").is_file()
    (moved,) = (deployment.root / reclaim.QUARANTINE).iterdir()
    assert ".unreadable." in moved.name
