"""One rank of a server: a WORKER object, a worker's encoder cache, and the steps of either model runner around them.

The order of V1 is that of v1/worker/gpu_model_runner.py (`execute_model`, `_update_states`, `_execute_mm_encoder`,
`_cache_encoder_output`, `_gather_mm_embeddings`) and v1/worker/ec_connector_model_runner_mixin.py; that of V2 of
v1/worker/gpu/model_runner.py and v1/worker/mm_encoder_model_runner.py (`execute_model`), v1/worker/gpu/ec_connector.py and
v1/worker/gpu/mm/encoder_runner.py, all of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    ECConnectorOutput,
    ModelRunnerOutput,
    make_empty_encoder_model_runner_output,
)

from epd_conformance.engine import beacon
from epd_conformance.engine.content import Content, digest, rows_of
from epd_conformance.engine.events import EngineDied, describe
from epd_conformance.engine.messages import pack, unpack
from epd_conformance.engine.requests import has_media
from epd_conformance.engine.sides import Record, Side

if TYPE_CHECKING:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.sched.output import SchedulerOutput

#: What the beacon says while rows are read.
READING = "reading rows"
#: The token that every forward pass samples.
SAMPLED = 3


class Source:
    """The synthetic encoder of a plan: identifier -> what it shows, and whether its output is contiguous."""

    def __init__(self, items: Mapping[str, tuple[Content, bool]]) -> None:
        self.items = items

    def encode(self, key: str) -> torch.Tensor:
        """A fresh output, as an encoder makes it: memory of its own, of shape (rows, width)."""
        content, strided = self.items[key]
        flat = torch.frombuffer(bytearray(rows_of(content)), dtype=getattr(torch, content.dtype))
        tensor = flat.view(content.rows, content.width)
        # Rows side by side in one buffer, as an encoder gives them that splits a batch along its width.
        return torch.cat([tensor, tensor], dim=1)[:, : content.width] if strided else tensor


def tensor_digest(tensor: torch.Tensor) -> str:
    """The digest of a tensor's values, whatever its layout. Where they are a file that was cut short, this is what dies of it."""
    if tensor.is_meta:
        return ""  # it has no values
    beacon.light(READING)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return digest(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else digest(b"")


class Worker:
    """See the module. `published()` lists what the store holds, for `save_caches` on a consumer; None: it is not watched."""

    def __init__(
        self,
        rank: int,
        runner: str,
        make: Callable[[], ECConnectorBase],
        source: Source,
        record: Record,
        published: Callable[[], frozenset[str]] | None = None,
    ) -> None:
        """Raises EngineDied as `Side` does."""
        self.rank = rank
        self.v2 = runner == "v2"
        self.record = record
        self.source = source
        self.encoder_cache: dict[str, torch.Tensor] = {}
        self._published = published
        self._own: set[str] = set()  # keys that were encoded here and not loaded
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}
        self._prompt: dict[str, int] = {}
        self.side = Side(f"worker {rank}", make, record)
        # v1/worker/gpu_worker.py (load_model): once the weights are there.
        self.side.call("start_worker_services")

    def execute(self, message: bytes, promised: frozenset[str], allocated: frozenset[str]) -> bytes:
        """One step: a pickled SchedulerOutput in, a pickled ModelRunnerOutput out, as the executor's queues carry them.

        `promised`, `allocated`: keys that this step loads, and all that it took room for; only to judge what the connector does.
        Raises EngineDied where the worker would end, also when what it has to send cannot be pickled.
        """
        try:
            received = unpack(message)
        except Exception as error:
            self.side.returned("build_connector_meta", f"the metadata cannot be unpickled: {describe(error)}")
            raise AssertionError from None  # `returned` raises
        output = self._step(received, promised, allocated)
        try:
            return pack(output)
        except Exception as error:
            problem = f"what the worker reports cannot be pickled: {describe(error)}"
            self.side.returned("build_connector_worker_meta", problem)
            raise AssertionError from None  # `returned` raises

    def reset(self) -> None:
        """v1/worker/gpu_model_runner.py (reset_encoder_cache)."""
        for key in list(self.encoder_cache):
            self._evict(key)
            self.record(("evicted", key, True))

    def save_again(self, message: bytes, key: str) -> None:
        """Encode and save an item within an empty step, whatever the connector said of it: another producer may have looked it
        up before it was there. Raises EngineDied as `execute` does."""
        with self._lifecycle(unpack(message), frozenset(), frozenset()):
            self.encoder_cache[key] = self.source.encode(key)
            self._save(key)
        del self.encoder_cache[key]

    def shutdown(self) -> None:
        """v1/worker/gpu_worker.py (shutdown)."""
        self.side.call("shutdown")
        self.record(("shutdown", self.side.name))

    def _step(self, output: SchedulerOutput, promised: frozenset[str], allocated: frozenset[str]) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._features.pop(request_id, None)
        for key in output.free_encoder_mm_hashes:
            self._evict(key)
        for new in output.scheduled_new_reqs:
            self._features[new.req_id] = new.mm_features
            self._prompt[new.req_id] = new.prompt_len

        consumer = self.side.connector.is_consumer
        if not self.v2 and not consumer:
            # On every step, empty ones included; what the connector reports is dropped.
            with self._lifecycle(output, promised, allocated):
                self._encode(output)
            return make_empty_encoder_model_runner_output(output)
        if not output.total_num_scheduled_tokens:
            if not self.v2:
                return EMPTY_MODEL_RUNNER_OUTPUT
            # `no_forward`: the connector sends and receives although there is no work.
            with self._lifecycle(output, promised, allocated) as reported:
                pass
            return ModelRunnerOutput.with_ec_conn_output_only(reported)
        with self._lifecycle(output, promised, allocated) as reported:
            self._encode(output)
            if consumer:
                self._gather(output)
        if not consumer:
            return ModelRunnerOutput.with_ec_conn_output(make_empty_encoder_model_runner_output(output), reported)
        return self._sampled(output, reported)

    @contextmanager
    def _lifecycle(
        self, output: SchedulerOutput, promised: frozenset[str], allocated: frozenset[str]
    ) -> Iterator[ECConnectorOutput]:
        """The connector's part of a step, around the encoder (`_get_ec_connector_output`, `ActiveECConnector`)."""
        side, cache = self.side, self.encoder_cache
        reported = ECConnectorOutput()
        side.call("bind_connector_metadata", output.ec_connector_metadata)
        if side.connector.is_producer:
            side.call("start_save_caches", encoder_cache=cache)
        if side.connector.is_consumer:
            before = dict(cache)
            if promised and not self.rank:
                self.record(("loading", sorted(promised)))
            side.call("start_load_caches", cache)
            self._loaded(before, promised, allocated)
        known = set(cache)
        try:
            yield reported
            if self.v2 and side.connector.is_producer:
                for key in cache.keys() - known:
                    self._save(key)
        except EngineDied:
            # In vLLM the hooks below would still run; the server ends all the same.
            raise
        finished = side.call("get_finished", output.finished_req_ids)
        if not isinstance(finished, tuple) or len(finished) != 2:
            side.returned("get_finished", f"{finished!r} instead of two sets or None")
        reported.finished_sending, reported.finished_recving = finished
        if self.v2:
            reported.ec_connector_stats = side.call("get_ec_connector_stats")
        reported.ec_connector_worker_meta = side.call("build_connector_worker_meta")
        side.call("clear_connector_metadata")

    def _loaded(self, before: dict[str, torch.Tensor], promised: frozenset[str], allocated: frozenset[str]) -> None:
        cache = self.encoder_cache
        for key, tensor in cache.items():
            if before.get(key) is tensor:
                continue
            if not isinstance(tensor, torch.Tensor):
                self.side.returned("start_load_caches", f"put a {type(tensor).__name__} into the encoder cache")
            shape = list(tensor.shape)
            device = tensor.device.type
            kind = str(tensor.dtype).removeprefix("torch.")
            asked = key in allocated and key not in before
            self.record(("loaded", self.rank, key, tensor_digest(tensor), shape, kind, device, asked))
            self._own.discard(key)
        for key in promised:
            if key not in cache:
                self.record(("missing", self.rank, key))

    def _encode(self, output: SchedulerOutput) -> None:
        made: list[tuple[str, torch.Tensor]] = []
        for request_id, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                feature = self._features[request_id][index]
                if feature.data is None or (self.v2 and feature.identifier in self.encoder_cache):
                    continue
                if not has_media(feature):
                    # v1/worker/utils.py (sanity_check_mm_encoder_outputs): the model gives no output for such an item.
                    self.record(("unencodable", request_id, feature.identifier))
                    raise EngineDied("encoder")
                made.append((feature.identifier, self.source.encode(feature.identifier)))
        for key, tensor in made:
            self.encoder_cache[key] = tensor
            self._own.add(key)
            self.record(("encoded", self.rank, key))
            if not self.v2:
                # At once, and on every role (`maybe_save_ec_to_connector`).
                self._save(key)

    def _save(self, key: str) -> None:
        before = self._published() if self._published is not None else frozenset()
        self.side.call("save_caches", encoder_cache=self.encoder_cache, mm_hash=key)
        more = sorted(self._published() - before) if self._published is not None else []
        self.record(("saved", self.rank, key, more))

    def _gather(self, output: SchedulerOutput) -> None:
        """`_gather_mm_embeddings`: which rows are merged into the prompt, here only looked at."""
        for request_id, start, count in _windows(output):
            features = self._features[request_id]
            first, last = get_mm_features_in_window(features, start=start, end=start + count)
            for feature in features[first:last]:
                position = feature.mm_position
                low = max(start - position.offset, 0)
                high = min(start - position.offset + count, position.length)
                low, high = position.get_embeds_indices_in_range(low, high)
                if low == high:
                    continue
                tensor = self.encoder_cache.get(feature.identifier)
                if tensor is None:
                    self.record(("lost", self.rank, feature.identifier))
                    raise EngineDied("Encoder cache miss")
                self.record(("used", self.rank, feature.identifier, tensor_digest(tensor)))

    def _sampled(self, output: SchedulerOutput, reported: ECConnectorOutput) -> ModelRunnerOutput:
        """A token for each request whose prompt is computed, and half of its drafts; none within it (chunked prefill)."""
        request_ids = list(output.num_scheduled_tokens)
        outputs = dict(
            zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_output_tokens, strict=True)
        )
        prefill = {new.req_id: len(new.prefill_token_ids or ()) for new in output.scheduled_new_reqs}
        tokens: list[list[int]] = []
        for request_id, start, count in _windows(output):
            known = max(prefill.get(request_id, 0), self._prompt[request_id] + outputs.get(request_id, 0))
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            tokens.append([SAMPLED] * (1 + drafts // 2) if start + count - drafts >= known else [])
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=tokens,
            ec_connector_output=reported,
        )

    def _evict(self, key: str) -> None:
        tensor = self.encoder_cache.pop(key, None)
        if tensor is not None and key in self._own:
            # The memory of an output that was evicted is used again for something else.
            tensor.fill_(float("nan"))
        self._own.discard(key)


def _windows(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """(request, tokens that were computed before, tokens of this step) in the order of the step's requests."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for request_id, count in output.num_scheduled_tokens.items():
        yield request_id, computed[request_id], count
