"""The connector's two halves, called in the engine's order with fakes for request and configuration.

Needs vLLM: the connector is a subclass of its base class.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


def _import_vllm() -> str | None:
    """Why vLLM cannot be imported here, or None. A broken torchvision gives other errors than ImportError."""
    try:
        from epd_conformance.runtime import repairs

        repairs.install()
        import vllm.distributed.ec_transfer.ec_connector.base  # noqa: F401
    except Exception as error:
        return f"vLLM cannot be imported: {error!r}"
    return None


if reason := _import_vllm():
    pytest.skip(reason, allow_module_level=True)

import torch  # noqa: E402
from vllm.config import ECTransferConfig  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory  # noqa: E402
from vllm.multimodal.inputs import PlaceholderRange  # noqa: E402
from vllm.v1.request import RequestStatus  # noqa: E402

from epd_conformance.connectors import verified_store as vs  # noqa: E402
from epd_conformance.connectors.object_format import Header, encode, object_name, publish  # noqa: E402
from epd_conformance.connectors.verified_store import StoreConfig, VerifiedStoreConnector  # noqa: E402

pytestmark = pytest.mark.needs_vllm

HIDDEN = 8
ROWS = 4
HOSTILE_KEYS = ["", "../../x", "/abs/x", "nul\0x", "x" * 10_000, "lora:ab", "\ud800", "ünï"]


class FakeResolver:
    """In the place of vLLM's PlaceholderMetadataResolver, which would need a real model."""

    def fields_for(self, modality: str) -> set[str]:
        return {"image_grid_thw"} if modality == "image" else set()


class FakeItem(dict[str, Any]):
    """In the place of MultiModalKwargsItem: elements by name."""

    def get_data(self) -> dict[str, Any]:
        return {name: element.data for name, element in self.items()}


GRID = SimpleNamespace(data=torch.tensor([1, 2, 2]))
PIXELS = SimpleNamespace(data=torch.zeros(3))
WITH_MEDIA = FakeItem(image_grid_thw=GRID, pixel_values=PIXELS)
METADATA_ONLY = FakeItem(image_grid_thw=GRID, image_embeds=SimpleNamespace(data=None))


@dataclass
class FakeFeature:
    identifier: str
    data: FakeItem | None = None
    offset: int = 0
    rows: int = ROWS
    modality: str = "image"

    @property
    def mm_position(self) -> PlaceholderRange:
        # One token of the placeholder is no embedding: length and rows differ.
        mask = torch.tensor([False] + [True] * self.rows)
        return PlaceholderRange(offset=self.offset, length=self.rows + 1, is_embed=mask)


@dataclass
class FakeRequest:
    mm_features: list[FakeFeature]
    request_id: str = "r"
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    ec_transfer_params: None = None


@dataclass
class Server:
    """Both halves of one server, driven as the engine drives them."""

    scheduler: VerifiedStoreConnector
    worker: VerifiedStoreConnector
    encoder_cache: dict[str, torch.Tensor] = field(default_factory=dict)

    def schedule(self, request: FakeRequest, n: int = 0) -> dict[str, bool] | None:
        """One pass over one request: None if it was deferred, else the answer for each item asked for."""
        if not self.scheduler.ensure_cache_available(request, n):
            return None
        answers: dict[str, bool] = {}
        indices = []
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length <= n or feature.identifier in answers:
                continue
            if feature.identifier not in self.encoder_cache:
                answers[feature.identifier] = self.scheduler.has_cache_item(feature.identifier)
                indices.append(index)
        for index in indices:
            self.scheduler.update_state_after_alloc(request, index)
        return answers

    def step(self) -> tuple[vs.PlannedLoad, ...]:
        """The worker's part of a step; returns what was planned."""
        metadata = self.scheduler.build_connector_meta(SimpleNamespace())
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
        if self.worker.is_consumer:
            self.worker.start_load_caches(self.encoder_cache)
        self.worker.clear_connector_metadata()
        return metadata.loads

    def encode(self, key: str, tensor: torch.Tensor) -> None:
        self.encoder_cache[key] = tensor
        self.worker.save_caches(encoder_cache=self.encoder_cache, mm_hash=key)


class Deployment:
    """Servers of one model over one root."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "store"
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")

    def config(self, role: str, *, model: Path | None = None, **extra: Any) -> Any:
        return SimpleNamespace(
            ec_transfer_config=ECTransferConfig(
                ec_connector="VerifiedStoreConnector",
                ec_connector_module_path="epd_conformance.connectors.verified_store",
                ec_role=role,
                ec_connector_extra_config={"root": str(self.root), **extra},
            ),
            model_config=SimpleNamespace(
                model=str(model or self.model),
                revision=None,
                dtype=torch.float32,
                multimodal_config=None,
                is_encoder_decoder=False,
                get_inputs_embeds_size=lambda: HIDDEN,
            ),
        )

    def server(self, role: str, *, model: Path | None = None, **extra: Any) -> Server:
        config = self.config(role, model=model, **extra)
        halves = []
        for half in (ECConnectorRole.WORKER, ECConnectorRole.SCHEDULER):
            connector = ECConnectorFactory.create_connector(config, half)
            assert isinstance(connector, VerifiedStoreConnector)
            connector._resolver = FakeResolver()
            halves.append(connector)
        return Server(worker=halves[0], scheduler=halves[1])

    def path(self, key: str) -> Path:
        return self.root / object_name(key)

    def store(self, fingerprint: str, key: str, tensor: torch.Tensor, under: str | None = None) -> None:
        """A well-formed object, if need be under another item's name."""
        header = Header.of(tensor, key=key, model_fingerprint=fingerprint, creator="test")
        publish(self.root, under if under is not None else key, encode(tensor, header))


@pytest.fixture
def deployment(tmp_path: Path) -> Deployment:
    return Deployment(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    fake = SimpleNamespace(now=1000.0, monotonic=lambda: fake.now)
    monkeypatch.setattr(vs, "time", fake)
    yield fake


def output(rows: int = ROWS, width: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))


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


def damage(deployment: Deployment, kind: str, fingerprint: str) -> None:
    """Change the stored object of `k`, whose right content is `output()`."""
    path = deployment.path("k")
    if kind == "deleted":
        path.unlink()
    elif kind == "truncated":
        os.truncate(path, path.stat().st_size - 1)
    elif kind == "empty":
        os.truncate(path, 0)
    elif kind == "garbage":
        path.write_bytes(b"garbage" * 100)
    elif kind == "zero tail":
        path.write_bytes(path.read_bytes()[:-16] + bytes(16))
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "another item":
        deployment.store(fingerprint, "other", output(seed=1), under="k")
    elif kind == "one row":
        deployment.store(fingerprint, "k", output(rows=1))
    elif kind == "a row more":
        deployment.store(fingerprint, "k", output(rows=ROWS + 1))
    elif kind == "one column":
        deployment.store(fingerprint, "k", output(width=1))
    elif kind == "other dtype":
        deployment.store(fingerprint, "k", output().to(torch.bfloat16))
    else:
        assert kind == "another model"
        deployment.store("cd" * 32, "k", output(seed=1))


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
    assert consumer.scheduler.counters == {f"refused:{KINDS[kind]}": 1}


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
def test_a_change_between_promise_and_load_stops_the_worker(deployment: Deployment, kind: str) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    assert consumer.schedule(FakeRequest([FakeFeature("k", WITH_MEDIA)])) == {"k": True}
    damage(deployment, kind, consumer.scheduler._fingerprint)
    with pytest.raises(RuntimeError, match=rf"'k'.*{KINDS[kind]}.*stops"):
        consumer.step()
    assert consumer.encoder_cache == {}


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


def test_a_bad_object_is_read_once_while_it_is_waited_for(
    deployment: Deployment, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    damage(deployment, "truncated", "")
    reads = count_loads(monkeypatch)
    request = FakeRequest([FakeFeature("k", METADATA_ONLY)])
    for _ in range(5):
        assert consumer.schedule(request) is None
    assert len(reads) == 1
    producer.encode("k", output())
    assert consumer.schedule(request) == {"k": True}
    assert len(reads) == 2


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reads: list[str] = []
    real = vs.load

    def load(root: Path, expect: Any) -> Any:
        reads.append(expect.key)
        return real(root, expect)

    monkeypatch.setattr(vs, "load", load)
    return reads


def forbid_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*args: object, **kwargs: object) -> Any:
        raise AssertionError("the store was touched")

    monkeypatch.setattr(vs, "load", touched)
    monkeypatch.setattr(vs, "stat_identity", touched)


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


def test_a_promise_that_is_not_taken_up_is_checked_again(deployment: Deployment) -> None:
    """No room for the request in one step, deletion, next step."""
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.scheduler.ensure_cache_available(request, 0)
    assert consumer.scheduler.has_cache_item("k")
    deployment.path("k").unlink()
    assert consumer.schedule(request) == {"k": False}
    assert consumer.step() == ()


def test_an_unchanged_object_is_verified_once(deployment: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    reads = count_loads(monkeypatch)
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    for _ in range(3):
        assert consumer.scheduler.ensure_cache_available(request, 0)
        assert consumer.scheduler.has_cache_item("k")
    assert reads == ["k"]


def test_a_preempted_request_is_decided_anew(deployment: Deployment) -> None:
    producer, consumer = deployment.server("ec_producer"), deployment.server("ec_consumer")
    producer.encode("k", output())
    request = FakeRequest([FakeFeature("k", WITH_MEDIA)])
    assert consumer.schedule(request) == {"k": True}
    consumer.step()
    consumer.encoder_cache.clear()
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
    consumer.encoder_cache.clear()
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
    failed = {name: count for name, count in producer.worker.counters.items() if name.startswith("publish-failed")}
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
            r"'shared_storage_path' .*known are: root, fsync, unav",
        ),
        ({"root": "/x", "fsync": "yes"}, r"`fsync` .*true or false"),
        ({"root": "/x", "unavailable_after_s": -1}, r"`unavailable_after_s` .*from 0"),
        ({"root": "/x", "unavailable_after_s": float("nan")}, r"`unavailable_after_s` .*from 0"),
        ({"root": "/x", "unavailable_after_s": True}, r"`unavailable_after_s` .*from 0"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_with_the_mend(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StoreConfig.parse(extra)


def test_good_settings() -> None:
    assert StoreConfig.parse({"root": "/x", "fsync": True, "unavailable_after_s": 3}) == StoreConfig(
        Path("/x"), fsync=True, unavailable_after_s=3.0
    )
