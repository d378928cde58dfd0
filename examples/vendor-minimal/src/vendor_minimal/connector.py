"""The EC connector: encoder outputs travel as files in a shared folder, and are verified before they are promised.

    --ec-transfer-config '{"ec_role": "ec_producer", "ec_connector": "MinimalConnector",
      "ec_connector_module_path": "vendor_minimal.connector", "ec_connector_extra_config": {"path": "/mnt/shared/ec"}}'

What shapes it (vLLM 0.32.0, v1/core/sched/scheduler.py): once `has_cache_item` said True nobody encodes the item, and one
that is missing after `start_load_caches` ends the server. So the scheduler's side reads and verifies the whole item first,
where the request is known, and sends the very bytes that it verified to the worker: no second look can find something else.
An exception in a hook ends the server too: none raises.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from vendor_minimal.store import About, Store, logger, pack

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass
class MinimalMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's process sends to the workers in each step: the items to load, by key."""

    # Not in the repr: the engine writes the metadata into its log when it dies.
    loads: dict[str, tuple[About, bytes]] = field(default_factory=dict, repr=False)


class MinimalConnector(ECConnectorBase):  # type: ignore[misc]
    """vLLM's `ECConnectorBase` over a `Store`. `ec_connector_extra_config` takes `path`, the shared folder, and no more."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        extra = vllm_config.ec_transfer_config.ec_connector_extra_config or {}
        if set(extra) != {"path"} or not Path(str(extra["path"])).is_absolute():
            raise ValueError(f'ec_connector_extra_config is {extra}: give exactly {{"path": "/an/absolute/folder"}}')
        self._store = Store(Path(extra["path"]))
        self._store.open()
        model = vllm_config.model_config
        self._model = model_identity(model)
        self._dtype = str(model.dtype).removeprefix("torch.")
        # An encoder puts out vectors of the language model's width, several side by side where it feeds several layers.
        self._width = int(model.get_inputs_embeds_size())
        # The workers of an encoder-decoder model have no encoder cache to load into.
        self._loads_possible = self.is_consumer and not model.is_encoder_decoder
        self._ready: dict[str, tuple[About, bytes]] = {}
        self._loads: dict[str, tuple[About, bytes]] = {}

    # -- scheduler's process: for each request the engine calls these in this order ------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Read and verify the items of the request that are not computed yet. Never defers: what is not there is encoded."""
        self._ready = {}
        for feature in request.mm_features if self._loads_possible else ():
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens:
                continue
            # The rows that the prompt has places for: one row too few would be spread over all of them.
            rows = position.get_num_embeds()
            item = self._store.find(feature.identifier, model=self._model, dtype=self._dtype, rows=rows)
            if item is not None and item[0].width and item[0].width % self._width == 0:
                self._ready[feature.identifier] = item
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """What was found for the request at hand. A producer says no: it would neither load the item nor save it again."""
        return identifier in self._ready

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The engine has taken room for the item, to load it or to encode it."""
        key = request.mm_features[index].identifier
        if key in self._ready:
            self._loads[key] = self._ready[key]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MinimalMetadata:
        """The loads of this step, once."""
        metadata = MinimalMetadata(self._loads)
        self._loads, self._ready = {}, {}
        return metadata

    # -- worker's process ----------------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Put the items of this step into the cache, on the worker's own device."""
        metadata = self._connector_metadata
        loads = metadata.loads if isinstance(metadata, MinimalMetadata) else {}
        device = current_platform.device_type
        if current_platform.is_cuda_alike():
            device = f"{device}:{current_platform.current_device()}"
        for key, (about, data) in loads.items():
            tensor = torch.frombuffer(bytearray(data), dtype=getattr(torch, about.dtype))
            with gpu_sync_allowed():
                encoder_cache[key] = tensor.view(about.rows, about.width).to(device)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Save one encoder output. What cannot be saved (a full disk) is not shared, and consumers encode it themselves."""
        if not self.is_producer:  # runner V1 calls it on consumers as well
            return
        try:
            with gpu_sync_allowed():
                tensor = encoder_cache[mm_hash].detach().cpu().contiguous()
            rows, width = tensor.shape
            about = About(mm_hash, self._model, str(tensor.dtype).removeprefix("torch."), rows, width)
            self._store.write(mm_hash, pack(about, tensor.view(torch.uint8).numpy().tobytes()))
        except Exception as error:
            logger.warning("vendor-minimal: %.80r is not shared: %s", mm_hash, error)


def model_identity(model: Any) -> str:
    """A digest of what decides the rows of an image and is not in the engine's key: weights, dtype, processor settings.

    Of a folder every file is read, which is right and, for a large model, slow; a connector for those would take samples.
    """
    folder, digest = Path(model.model), sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file() and path.suffix in (".safetensors", ".bin", ".json"):
            with path.open("rb") as file:
                digest.update(file_digest(file, "sha256").digest())
    name = "" if folder.is_dir() else f"{model.model}@{model.revision}"
    settings = dict(getattr(model.multimodal_config, "mm_processor_kwargs", None) or {})
    settings.pop("device", None)  # vLLM notes there where its processor runs, which may differ between servers
    rest = [name, str(model.dtype), model.quantization, settings]
    digest.update(json.dumps(rest, sort_keys=True, default=str).encode())
    return digest.hexdigest()
