"""The connector's two halves, called in the engine's order with fakes for request and configuration.

Needs vLLM: the connector is a subclass of its base class.
"""

from __future__ import annotations

import os
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
    HOSTILE_KEYS,
    METADATA_ONLY,
    ROWS,
    WITH_MEDIA,
    Deployment,
    FakeFeature,
    FakeItem,
    FakeRequest,
    damage,
    output,
)
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from epd_conformance.connectors import verified_store as vs  # noqa: E402
from epd_conformance.connectors.verified_store import StoreConfig  # noqa: E402

pytestmark = pytest.mark.needs_vllm


@pytest.fixture
def deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    # What a busy test machine takes for a look-up is no matter here.
    monkeypatch.setattr(vs, "STEP_WAIT_S", 30.0)
    return Deployment(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(now=1000.0, monotonic=lambda: fake.now, time_ns=time.time_ns)
    monkeypatch.setattr(vs, "time", fake)
    yield fake


@pytest.mark.parametrize("key", [*HOSTILE_KEYS, "k"], ids=lambda key: ascii(key)[:20])
def test_an_item_crosses_from_producer_to_consumer(deployment: Deployment, key: str) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    request = FakeRequest([FakeFeature(key, WITH_MEDIA)])
    assert producer.schedule(request) == {key: False}
    producer.encode(key, output())
    assert consumer.schedule(request) == {key: True}
    assert [plan.key for plan in consumer.step()] == [key]
    assert torch.equal(consumer.encoder_cache[key], output())
    assert sorted(path.name for path in deployment.root.parent.iterdir()) == ["model", "store"]


def test_a_non_contiguous_output_crosses(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    tensor = output(HIDDEN, ROWS).t()
    assert not tensor.is_contiguous()
    producer.encode("k", tensor)
    assert consumer.schedule(FakeRequest([FakeFeature("k", METADATA_ONLY)])) == {"k": True}
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], tensor)


def test_a_server_of_both_roles_loads_what_it_saved(deployment: Deployment) -> None:
    server = deployment.server("ec_both")
    assert server.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}
    server.encode("k", output())
    server.encoder_cache.clear()
    assert server.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], "r2")) == {"k": True}
    server.step()
    assert torch.equal(server.encoder_cache["k"], output())


def test_a_producer_never_skips_its_encode(deployment: Deployment) -> None:
    producer = deployment.server("ec_producer")
    producer.encode("k", output())
    assert deployment.path("k").is_file()
    assert deployment.server("ec_producer").schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}


def test_a_consumer_saves_nothing(deployment: Deployment) -> None:
    deployment.root.mkdir()
    deployment.server("ec_consumer").encode("k", output())
    assert not list(deployment.root.iterdir())


KINDS = {
    "deleted": "missing",
    "truncated": "truncated",
    "empty": "truncated",
    "garbage": "truncated",  # its first eight bytes are the length of a header far beyond the end
    "zero tail": "checksum",
    "folder": "unreadable",
    "another item": "key",
    "one row": "rows",
    "a row more": "rows",
    "one column": "width",
    "other dtype": "dtype",
    "another model": "model",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_object_with_media_is_encoded_at_once(deployment: Deployment, kind: str) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    damage(deployment, kind, consumer.scheduler._fingerprint)
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}
    assert consumer.step() == ()
    counters = consumer.scheduler.counters
    assert counters[f"misses:{KINDS[kind]}"] == 1
    assert counters.get(f"refused:{KINDS[kind]}", 0) == (kind != "deleted")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [METADATA_ONLY, None], ids=["metadata", "none"])
def test_a_damaged_object_without_media_fails_the_request_only(
    deployment: Deployment, clock: SimpleNamespace, kind: str, data: FakeItem | None
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    damage(deployment, kind, consumer.scheduler._fingerprint)
    request = FakeRequest([FakeFeature("k", data)])
    for _ in range(3):
        assert consumer.schedule(request) is None
        assert consumer.step() == ()
        assert consumer.scheduler.take_unavailable_requests() == set()
        clock.now += 0.6
    clock.now += 0.3
    assert consumer.scheduler.take_unavailable_requests() == {"r"}
    assert consumer.scheduler.take_unavailable_requests() == set()
    assert consumer.scheduler.request_finished(request) == (False, None)
    assert consumer.scheduler._requests == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [WITH_MEDIA, METADATA_ONLY], ids=["media", "metadata"])
def test_a_change_between_promise_and_load_changes_nothing(deployment: Deployment, kind: str, data: FakeItem) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", data)])) == {"k": True}
    damage(deployment, kind, consumer.scheduler._fingerprint)
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], output())


def test_overwriting_in_place_between_promise_and_load_changes_nothing(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": True}
    with deployment.path("k").open("r+b") as file:
        file.write(b"\xff" * deployment.path("k").stat().st_size)
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], output())


def test_a_late_object_lets_the_request_through(deployment: Deployment, clock: SimpleNamespace) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    assert consumer.schedule(request) is None
    clock.now += 1.9
    producer.encode("k", output())
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    clock.now += 10
    assert consumer.scheduler.take_unavailable_requests() == set()


def test_an_object_that_came_is_seen_before_giving_up(deployment: Deployment, clock: SimpleNamespace) -> None:
    """The scheduler may not reach a waiting request for seconds while others fill the batch."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    assert consumer.schedule(request) is None
    producer.encode("k", output())
    clock.now += 10
    assert consumer.scheduler.take_unavailable_requests() == set()
    assert consumer.schedule(request) == {"k": True}


def test_deadlines_are_kept_per_request(deployment: Deployment, clock: SimpleNamespace) -> None:
    consumer = deployment.server("ec_consumer", unavailable_after_s=1)
    early, late = (FakeRequest([FakeFeature("k", METADATA_ONLY)], name) for name in ("early", "late"))
    assert consumer.schedule(early) is None
    clock.now += 0.9
    assert consumer.schedule(late) is None
    clock.now += 0.2
    assert consumer.scheduler.take_unavailable_requests() == {"early"}
    clock.now += 0.9
    assert consumer.scheduler.take_unavailable_requests() == {"late"}


def test_the_store_is_asked_at_intervals_for_what_is_waited_for(
    deployment: Deployment, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    reads = count_looks(monkeypatch)
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    for _ in range(5):
        assert consumer.schedule(request) is None
        clock.now += vs.POLL_S / 10
    assert len(reads) == 1
    producer.encode("k", output())
    clock.now += vs.POLL_S
    assert consumer.schedule(request) == {"k": True}
    assert len(reads) == 2


def test_a_foreign_object_at_rest_is_read_once(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = deployment.server("ec_consumer")
    deployment.root.mkdir()
    deployment.store("cd" * 32, "k", output())
    os.utime(deployment.path("k"), (1, 1))
    filled: list[object] = []
    real = vs.fill
    monkeypatch.setattr(vs, "fill", lambda *args: filled.append(args) or real(*args))
    for name in "abc":
        assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], name)) == {"k": False}
    assert len(filled) == 1
    assert consumer.scheduler.counters["misses:model"] == 3
    deployment.store(consumer.scheduler._fingerprint, "k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)], "d")) == {"k": True}


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    looks: list[Path] = []
    real = vs.open_object

    def open_object(path: Path) -> Any:
        looks.append(path)
        return real(path)

    monkeypatch.setattr(vs, "open_object", open_object)
    return looks


def forbid_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> Any:
        raise AssertionError("the store was touched")

    monkeypatch.setattr(vs.StoreThreads, "submit", touched)


@pytest.mark.parametrize("stored", [True, False])
def test_decode_steps_do_not_touch_the_store(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    if stored:
        producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.schedule(request) == {"k": stored}
    consumer.step()
    request.status = RequestStatus.RUNNING
    forbid_store(monkeypatch)
    # n inside the item (chunked prefill), at its end, and far behind it.
    for n in (0, 1, ROWS, ROWS + 1, 500):
        assert consumer.scheduler.ensure_cache_available(request, n)


def test_a_running_request_keeps_what_it_holds_from_another_one(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local hit of the engine calls no hook but the question; later the object may go."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    consumer.encoder_cache["k"] = output()
    assert consumer.schedule(request) == {}
    deployment.path("k").unlink()
    request.status = RequestStatus.RUNNING
    forbid_store(monkeypatch)
    assert consumer.scheduler.ensure_cache_available(request, 2)


def test_a_promise_that_is_not_taken_up_is_kept(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the request in one step, deletion, next step."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    assert consumer.scheduler.ensure_cache_available(request, 0)
    assert consumer.scheduler.has_cache_item("k")
    assert consumer.step() == ()
    consumer.scheduler.take_unavailable_requests()
    deployment.path("k").unlink()
    forbid_store(monkeypatch)
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], output())


def test_a_preempted_request_without_media_loads_its_pin_again(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    consumer.scheduler.update_state_after_free(request, 0)
    consumer.scheduler.take_unavailable_requests()
    deployment.path("k").unlink()
    consumer.step(free=("k",))
    request.num_preemptions = 1
    request.status = RequestStatus.PREEMPTED
    forbid_store(monkeypatch)
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    assert torch.equal(consumer.encoder_cache["k"], output())


def test_a_preempted_request_is_decided_anew(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    consumer.scheduler.update_state_after_free(request, 0)
    consumer.scheduler.take_unavailable_requests()
    consumer.step(free=("k",))
    deployment.path("k").unlink()
    request.num_preemptions = 1
    request.status = RequestStatus.PREEMPTED
    assert consumer.schedule(request) == {"k": False}
    assert consumer.step() == ()


def test_a_consumed_item_that_comes_again_is_decided_anew(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA), FakeFeature("k", WITH_MEDIA, offset=100)])
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    consumer.scheduler.update_state_after_free(request, 0)
    consumer.scheduler.take_unavailable_requests()
    consumer.step(free=("k",))
    deployment.path("k").unlink()
    request.status = RequestStatus.RUNNING
    assert consumer.schedule(request, n=50) == {"k": False}


def test_one_uuid_for_two_contents_is_never_promised(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA), FakeFeature("k", WITH_MEDIA, offset=100, rows=9)])
    for _ in range(2):
        assert consumer.scheduler.ensure_cache_available(request, 0)
        assert not consumer.scheduler.has_cache_item("k")


def test_answers_are_of_the_request_being_scheduled(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    fits = FakeRequest([FakeFeature("k", WITH_MEDIA)], "fits")
    larger = FakeRequest([FakeFeature("k", WITH_MEDIA, rows=9)], "larger")
    assert consumer.scheduler.ensure_cache_available(fits, 0)
    assert consumer.scheduler.has_cache_item("k")
    assert consumer.scheduler.ensure_cache_available(larger, 0)
    assert not consumer.scheduler.has_cache_item("k")
    consumer.scheduler.update_state_after_alloc(larger, 0)
    assert consumer.scheduler.ensure_cache_available(fits, 0)
    assert consumer.scheduler.has_cache_item("k")
    assert consumer.step() == ()


def test_a_load_is_planned_only_after_the_answer(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.scheduler.ensure_cache_available(request, 0)
    consumer.scheduler.update_state_after_alloc(request, 0)  # an encode: nobody asked has_cache_item
    assert consumer.step() == ()


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=lambda key: ascii(key)[:20])
@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
def test_nothing_is_known_without_a_request(deployment: Deployment, role: str, key: str) -> None:
    assert deployment.server(role).scheduler.has_cache_item(key) is False


def test_metadata_drains_and_is_never_none(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    assert consumer.step() == ()
    producer.encode("k", output())
    two = [FakeRequest([FakeFeature("k", WITH_MEDIA), FakeFeature("k", WITH_MEDIA, offset=50)], name) for name in "ab"]
    for request in two:
        assert consumer.schedule(request) == {"k": True}
    assert len(consumer.step()) == 1
    assert consumer.step() == ()


def test_a_loaded_tensor_survives_changes_of_the_file(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)]))
    consumer.step()
    path = deployment.path("k")
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(0)
    assert torch.equal(consumer.encoder_cache["k"], output())


def test_what_is_cached_is_not_loaded_again(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)]))
    mine = consumer.encoder_cache["k"] = output(seed=5)
    forbid_store(monkeypatch)
    consumer.step()
    assert consumer.encoder_cache["k"] is mine


def test_another_model_on_the_same_root_shares_nothing(deployment: Deployment, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"a": 1}')
    deployment.server("ec_producer", model=other).encode("k", output())
    assert deployment.server("ec_consumer").schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": False}


@pytest.mark.parametrize("failure", ["vanished root", "root is a file", "bad tensor", "no such key"])
def test_saving_never_raises(deployment: Deployment, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if failure == "root is a file":
        deployment.root.write_text("x")
    producer = deployment.server("ec_producer")
    if failure == "vanished root":
        deployment.root.rmdir()
    tensor = torch.zeros(3, dtype=torch.int32) if failure == "bad tensor" else output()
    warned: list[str] = []
    monkeypatch.setattr(vs.logger, "warning", lambda message, *args: warned.append(message % args))
    for _ in range(3):
        producer.encode("k", tensor)
        if failure == "no such key":
            producer.worker.save_caches(encoder_cache={}, mm_hash="k")
    failed = {name: count for name, count in producer.worker.counters.items() if name.startswith("save_failures")}
    assert list(failed.values()) == [3]
    assert len(warned) == 1


def test_a_producer_reports_what_sizes_the_placeholders(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    request = FakeRequest([FakeFeature("k", WITH_MEDIA), FakeFeature("k", WITH_MEDIA, offset=50)])
    expected = {"k": {"item_indices": [0, 1], "metadata": {"image_grid_thw": [1, 2, 2]}}}
    assert producer.scheduler.request_finished(request) == (False, expected)
    assert producer.scheduler.request_finished(request) == (False, expected)
    assert producer.scheduler.request_finished(FakeRequest([])) == (False, None)
    assert consumer.scheduler.request_finished(request) == (False, None)
    broken = FakeRequest([FakeFeature("k", FakeItem(image_grid_thw=None))])  # an element without data
    assert producer.scheduler.request_finished(broken) == (False, None)


def test_finished_requests_leave_nothing(deployment: Deployment) -> None:
    consumer = deployment.server("ec_consumer")
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    consumer.schedule(request)
    consumer.scheduler.request_finished(request)
    consumer.scheduler.update_state_after_free(request, 0)
    consumer.scheduler.update_state_after_alloc(request, 0)
    assert not consumer.scheduler._requests
    assert not consumer.scheduler._pins
    assert consumer.scheduler._area.used == 0
    assert not consumer.scheduler.has_cache_item("k")


def test_an_encoder_decoder_model_loads_nothing(deployment: Deployment) -> None:
    deployment.server("ec_producer").encode("k", output())
    config = deployment.config("ec_consumer")
    config.model_config.is_encoder_decoder = True
    scheduler = ECConnectorFactory.create_connector(config, ECConnectorRole.SCHEDULER)
    assert scheduler.ensure_cache_available(FakeRequest([FakeFeature("k", WITH_MEDIA)]), 0)
    assert not scheduler.has_cache_item("k")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"`root` .* None; give the absolute path"),
        ({"root": "relative"}, r"`root` .*'relative'; give the absolute path"),
        ({"root": 1}, r"`root` .* 1; give the absolute path"),
        (
            {"root": "/x", "shared_storage_path": "/y"},
            r"'shared_storage_path' .*known are: root, fsync, unav.* max_age_s",
        ),
        ({"root": "/x", "fsync": "yes"}, r"`fsync` .*true or false"),
        ({"root": "/x", "unavailable_after_s": -1}, r"`unavailable_after_s` .*from 0"),
        ({"root": "/x", "unavailable_after_s": float("nan")}, r"`unavailable_after_s` .*from 0"),
        ({"root": "/x", "unavailable_after_s": True}, r"`unavailable_after_s` .*from 0"),
        ({"root": "/x", "pin_bytes": 1.5}, r"`pin_bytes` .*whole bytes"),
        ({"root": "/x", "max_bytes": -1}, r"`max_bytes` .*whole bytes"),
        ({"root": "/x", "max_age_s": "1d"}, r"`max_age_s` .*seconds"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_the_mend(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreConfig.parse(extra)


def test_good_settings() -> None:
    extra = {"root": "/x", "fsync": True, "unavailable_after_s": 3, "pin_bytes": 4, "max_bytes": 5, "max_age_s": 6}
    assert StoreConfig.parse(extra) == StoreConfig(Path("/x"), True, 3.0, 4, 5, 6.0)
    assert StoreConfig.parse({"root": "/x"}) == StoreConfig(Path("/x"))
