"""Fakes for request and configuration, and both halves of a server driven as the engine drives them. Needs vLLM."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.outputs import ECConnectorOutput
from vllm.v1.request import RequestStatus

from epd_conformance.connectors import verified_store as vs
from epd_conformance.connectors.object_format import Header, encode, object_name, publish
from epd_conformance.connectors.verified_store import VerifiedStoreConnector

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
    lora_request: Any = None


@dataclass
class Server:
    """Both halves of one server, driven as the engine drives them."""

    scheduler: VerifiedStoreConnector
    worker: VerifiedStoreConnector
    encoder_cache: dict[str, torch.Tensor] = field(default_factory=dict)
    v2: bool = False

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

    def step(
        self, encode: dict[str, torch.Tensor] | None = None, free: tuple[str, ...] = ()
    ) -> tuple[vs.PlannedLoad, ...]:
        """The worker's part of a step, which evicts, loads and encodes; returns what was planned to be loaded."""
        metadata = self.scheduler.build_connector_meta(SimpleNamespace(free_encoder_mm_hashes=list(free)))
        for key in free:
            self.encoder_cache.pop(key, None)
        self.worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
        if self.worker.is_producer:
            self.worker.start_save_caches(encoder_cache=self.encoder_cache)
        if self.worker.is_consumer:
            self.worker.start_load_caches(self.encoder_cache)
        for key, tensor in (encode or {}).items():
            self.encode(key, tensor)
        output = ECConnectorOutput()
        if self.v2:
            output.ec_connector_stats = self.worker.get_ec_connector_stats()
        output.ec_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        if self.v2 or self.worker.is_consumer:  # a V1 encode server drops it
            self.scheduler.update_connector_output(pickle.loads(pickle.dumps(output)))
            self.worker_stats = output.ec_connector_stats
        return metadata.loads

    def finish(self, request: FakeRequest) -> None:
        self.scheduler.request_finished(request)
        self.scheduler.take_unavailable_requests()

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

    def config(self, role: str, *, model: Path | None = None, overlapping: bool = False, **extra: Any) -> Any:
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
            max_concurrent_batches=2 if overlapping else 1,
        )

    def server(
        self, role: str, *, model: Path | None = None, overlapping: bool = False, v2: bool = False, **extra: Any
    ) -> Server:
        config = self.config(role, model=model, overlapping=overlapping, **extra)
        halves = []
        for half in (ECConnectorRole.WORKER, ECConnectorRole.SCHEDULER):
            connector = ECConnectorFactory.create_connector(config, half)
            assert isinstance(connector, VerifiedStoreConnector)
            connector._resolver = FakeResolver()
            halves.append(connector)
        return Server(worker=halves[0], scheduler=halves[1], v2=v2)

    def path(self, key: str) -> Path:
        return self.root / object_name(key)

    def store(self, fingerprint: str, key: str, tensor: torch.Tensor, under: str | None = None) -> None:
        """A well-formed object, if need be under another item's name."""
        header = Header.of(tensor, key=key, model_fingerprint=fingerprint, creator="test")
        publish(self.root, under if under is not None else key, encode(tensor, header))


def output(rows: int = ROWS, width: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, width, generator=torch.Generator().manual_seed(seed))


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
