"""Small things of the verified store that a change of one line would spoil without anybody's noticing.

Needs vLLM: the connector is a subclass of its base class.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
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
    FakeResolver,
    damage,
    output,
)
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory  # noqa: E402

from epd_conformance.connectors import reclaim  # noqa: E402
from epd_conformance.connectors import verified_store as vs  # noqa: E402

pytestmark = pytest.mark.needs_vllm

COUNTER = "renderer0-mm-17-image-0"


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    monkeypatch.setattr(vs, "STEP_WAIT_S", 30.0)
    return Deployment(tmp_path)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for level in ("info", "warning", "error"):
        monkeypatch.setattr(vs.logger, level, lambda message, *args: found.append(message % args))
    return found


def request(name: str, key: str = "k", data: Any = WITH_MEDIA, **more: Any) -> FakeRequest:
    return FakeRequest([FakeFeature(key, data)], name, **more)


def lookups(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every call that touches the store, as it is made."""
    calls: list[object] = []
    real = vs.StoreThreads.submit
    monkeypatch.setattr(vs.StoreThreads, "submit", lambda *args: calls.append(args) or real(*args))
    return calls


# ---- what has media ----


def test_what_sizes_a_placeholder_vllm_says_of_this_servers_model(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(vs, "PlaceholderMetadataResolver", lambda model: asked.append(model) or FakeResolver())
    config = deployment.config("ec_consumer")
    connector = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    assert asked == [config.model_config]
    assert [connector._has_media(FakeFeature("k", data)) for data in (WITH_MEDIA, METADATA_ONLY)] == [True, False]
    monkeypatch.setattr(vs, "PlaceholderMetadataResolver", None)
    before = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    assert before._has_media(FakeFeature("k", METADATA_ONLY)), "before vLLM 0.30 there were no items without"


# ---- publishing again ----


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("deleted", "missing"),
        ("zero tail", "checksum"),
        ("folder", "unreadable"),
        ("another item", "key"),
        ("one row", "rows"),
        ("one column", "width"),
        ("another model", "model"),
    ],
)
def test_a_producer_counts_and_names_what_it_finds_bad(
    deployment: Deployment, kind: str, reason: str, lines: list[str]
) -> None:
    producer = deployment.server("ec_producer")
    assert producer.schedule(request("first")) == {"k": False}
    producer.step(encode={"k": output()})
    damage(deployment, kind, producer.scheduler._fingerprint)
    assert producer.schedule(request("second")) == {}
    counted = {name: value for name, value in producer.scheduler.counters.items() if "seconds" not in name}
    refused = {} if reason == "missing" else {f"refused:{reason}": 1}
    moved = {f"quarantined:{reason}": 1} if reason in ("checksum", "unreadable", "key") else {}
    assert counted == {"misses:never-loads": 1, **refused, **moved}
    assert sum(f"the object of 'k' is not used ({reason})" in line for line in lines) == len(refused)
    assert producer.scheduler.build_connector_meta(SimpleNamespace()).publish == ("k",)


def test_what_cannot_be_checked_is_published_again(deployment: Deployment) -> None:
    producer = deployment.server("ec_producer")
    assert producer.schedule(request("first")) == {"k": False}
    producer.step(encode={"k": output()})
    producer.scheduler._threads.stop()
    assert producer.schedule(request("second")) == {}
    assert producer.scheduler.build_connector_meta(SimpleNamespace()).publish == ("k",)


def test_an_item_under_an_adapter_is_looked_for_once_and_not_published_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = SimpleNamespace(lora_name="a", lora_path="org/adapter")
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    for name, answers in (("first", {"a:k": False}), ("second", {})):
        assert producer.schedule(request(name, "a:k", lora_request=lora)) == answers
        producer.step(encode=dict.fromkeys(answers, output()))
    assert "republished" not in producer.worker.counters
    calls = lookups(monkeypatch)
    for name in ("first", "second"):
        assert consumer.schedule(request(name, "a:k", METADATA_ONLY, lora_request=lora)) == {"a:k": True}
    assert len(calls) == 1, "it is pinned"


@pytest.mark.parametrize("why", ["a counter", "another rank", "a full disk"])
def test_what_was_not_published_does_not_count_as_published_again(
    deployment: Deployment, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = deployment.server("ec_producer").worker
    key = COUNTER if why == "a counter" else "k"
    if why == "another rank":
        monkeypatch.setattr(vs, "_saves_here", lambda: False)
    if why == "a full disk":
        monkeypatch.setattr(vs, "publish", lambda *args, **kwargs: (_ for _ in ()).throw(OSError(28, "full")))
    worker.bind_connector_metadata(vs.VerifiedStoreMetadata(publish=(key,)))
    worker.start_save_caches(encoder_cache={key: output()})
    assert "republished" not in worker.counters
    assert not deployment.path(key).exists()


def test_a_store_that_may_not_be_waited_for_is_still_used(deployment: Deployment) -> None:
    producer = deployment.server("ec_producer", unavailable_after_s=0)
    consumer = deployment.server("ec_consumer", unavailable_after_s=0)
    assert producer.schedule(request("first")) == {"k": False}
    producer.step(encode={"k": output()})
    assert consumer.schedule(request("first")) == {"k": True}
    deployment.path("k").unlink()
    assert producer.schedule(request("second")) == {}
    producer.step()
    assert deployment.path("k").is_file()


def test_of_an_evicted_item_a_producer_checks_nothing(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = deployment.server("ec_producer")
    assert producer.schedule(request("first")) == {"k": False}
    producer.step(encode={"k": output()})
    producer.step(free=("k",))
    calls = lookups(monkeypatch)
    assert producer.schedule(request("second")) == {"k": False}
    assert calls == [], "it is encoded and saved"


# ---- decisions ----


def test_an_item_that_waits_is_promised_to_nobody(deployment: Deployment) -> None:
    """One uuid for two items of a request: the first one's object is there, the second one's is not."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    two = [FakeFeature("k", METADATA_ONLY), FakeFeature("k", METADATA_ONLY, offset=40, rows=9)]
    assert consumer.schedule(FakeRequest(two)) is None
    assert not consumer.scheduler.has_cache_item("k")


def test_a_refusal_at_the_last_look_names_the_item(
    deployment: Deployment, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time_ns=time.time_ns)
    monkeypatch.setattr(vs, "time", clock)
    deployment.root.mkdir()
    consumer = deployment.server("ec_consumer")
    assert consumer.schedule(request("r", data=METADATA_ONLY)) is None
    deployment.store(consumer.scheduler._fingerprint, "k", output(rows=1))
    clock.now += vs.UNAVAILABLE_AFTER_S
    assert consumer.scheduler.take_unavailable_requests() == {"r"}
    assert sum("the object of 'k' is not used (rows)" in line for line in lines) == 1


def test_a_bad_object_at_rest_is_refused_for_the_same_reason_again(deployment: Deployment) -> None:
    deployment.root.mkdir()
    consumer = deployment.server("ec_consumer")
    deployment.store("cd" * 32, "k", output())
    os.utime(deployment.path("k"), (1, 1))
    for name in "ab":
        assert consumer.schedule(request(name)) == {"k": False}
    assert (consumer.scheduler.counters["misses:model"], consumer.scheduler.counters["refused:model"]) == (2, 1)


# ---- pins and look-ups ----


def test_what_was_loaded_after_a_reset_may_still_be_needed(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", pin_bytes=4096)
    for key in "kl":
        producer.encode(key, output())
    consumer.scheduler._in_engine.note("k")
    assert consumer.schedule(request("after the reset")) == {"k": True}
    consumer.step()
    consumer.scheduler.take_unavailable_requests()
    assert consumer.schedule(request("other", "l")) == {"l": False}
    assert consumer.scheduler.counters["misses:no-room"] == 1


def test_what_the_last_step_consumed_makes_room(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer", pin_bytes=4096)
    for key in "kl":
        producer.encode(key, output())
    first = request("first", data=METADATA_ONLY)
    assert consumer.schedule(first) == {"k": True}
    consumer.step()
    consumer.scheduler.update_state_after_free(first, 0)
    consumer.scheduler.take_unavailable_requests()
    other = request("other", "l")
    assert consumer.schedule(other) is None, "its look-up begins anew"
    assert consumer.schedule(other) == {"l": True}


def test_nobody_waits_while_he_sweeps_and_what_is_waited_for_stays(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment.server("ec_producer").encode("k", output())
    opened = threading.Event()
    real, real_wait = vs.open_object, vs.Task.wait
    waits: list[float] = []
    monkeypatch.setattr(vs, "open_object", lambda path: opened.wait(20) and real(path))
    monkeypatch.setattr(vs, "STEP_WAIT_S", 0.0)
    monkeypatch.setattr(vs.Task, "wait", lambda self, seconds: waits.append(seconds) or real_wait(self, 0))
    server = deployment.server("ec_both", unavailable_after_s=60)
    server.scheduler.build_connector_meta(SimpleNamespace())
    server.scheduler._in_engine.note("held")
    for one in (request("stays"), request("aborted", "l"), request("checks", "held")):
        assert server.schedule(one) is None
    waits.clear()
    server.scheduler.request_finished(request("aborted", "l"))
    server.scheduler.take_unavailable_requests()
    assert waits
    assert not any(waits)
    opened.set()
    look = server.scheduler._looks["k"].task
    deadline = time.monotonic() + 10
    while not look.wait(0):
        assert time.monotonic() < deadline
    calls = lookups(monkeypatch)
    server.scheduler.take_unavailable_requests()
    assert server.schedule(request("stays")) == {"k": True}
    assert calls == []


def test_a_tensor_is_put_where_the_runner_has_its_own(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    assert consumer.schedule(request("r")) == {"k": True}
    monkeypatch.setattr(vs, "_device", lambda: "meta")
    consumer.step()
    assert consumer.encoder_cache["k"].device == torch.device("meta")
    assert consumer.encoder_cache["k"].shape[1] == HIDDEN


# ---- limits ----


def test_what_counts_towards_the_limit_is_the_whole_object(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of small outputs the header is most: without it the last ones before a pause would wake nobody."""
    sizes: list[int] = []
    monkeypatch.setattr(reclaim.Reclaimer, "saved", lambda self, size: sizes.append(size))
    deployment.server("ec_producer", max_bytes=1 << 30).encode("k", output())
    assert sizes == [deployment.path("k").stat().st_size]


def test_a_reclamation_that_fails_is_told_once(
    deployment: Deployment, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def fail(*args: object, **kwargs: object) -> None:
        failed.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reclaim, "sweep", fail)
    producer = deployment.server("ec_producer", max_bytes=1)
    producer.encode("k", output())
    assert failed.wait(10)
    deadline = time.monotonic() + 10
    while not any("cannot reclaim" in line for line in lines):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    producer.worker.shutdown()


# ---- several ranks ----


@pytest.mark.parametrize("v2", [False, True])
def test_all_ranks_load_and_only_the_first_publishes_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, v2: bool
) -> None:
    """Tensor parallelism: two WORKER objects get the metadata of one SCHEDULER object, and what they count is added up."""
    server = deployment.server("ec_both", v2=v2)
    first = server.worker
    second = deployment.server("ec_both").worker
    caches: dict[Any, dict[str, torch.Tensor]] = {first: {}, second: {}}

    def step(encode: bool = False) -> vs.VerifiedStoreMetadata:
        metadata = server.scheduler.build_connector_meta(SimpleNamespace())
        told = []
        for worker, cache in caches.items():
            monkeypatch.setattr(vs, "_saves_here", lambda worker=worker: worker is first)
            worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
            worker.start_save_caches(encoder_cache=cache)
            worker.start_load_caches(cache)
            if encode:
                cache["k"] = output()
                worker.save_caches(encoder_cache=cache, mm_hash="k")
            told.append(worker.get_ec_connector_stats() if v2 else worker.build_connector_worker_meta())
            worker.clear_connector_metadata()
        found = [one for one in told if one is not None]
        if found:
            sums.append(found[0].aggregate(found[1]).data if len(found) > 1 else found[0].data)
        return metadata

    sums: list[dict[str, float]] = []
    assert server.schedule(request("encodes")) == {"k": False}
    step(encode=True)
    assert sums.pop()["saves"] == 1
    for cache in caches.values():
        cache.clear()
    assert server.schedule(request("loads")) == {"k": True}
    step()
    assert all(torch.equal(cache["k"], output()) for cache in caches.values())
    assert sums.pop()["loads"] == 2
    deployment.path("k").unlink()
    server.encoder_cache = caches[first]
    assert server.schedule(request("held")) == {}
    assert step().publish == ("k",)
    assert deployment.path("k").is_file()
    assert sums.pop()["republished"] == 1
