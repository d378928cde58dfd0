"""The engine core of the scheduler layer: vLLM's own Scheduler and EncoderCacheManager, with the connector under watch.

Built as v1/engine/core.py builds it (block sizes, a KV cache without groups for an encode-only server), with a KV cache that
exists on paper only. What a plan says about room in the KV cache is done at `KVCacheManager.allocate_slots`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from epd_conformance.engine.core import StepOrder
from epd_conformance.engine.plan import ServerSpec
from epd_conformance.engine.sides import Record, SchedulerSide

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

#: Tokens of a KV block. Small, so that requests of a few tokens have several.
BLOCK = 16
#: Blocks of a KV cache that never runs out in a plan.
BLOCKS = 1024


def scheduler_core(side: SchedulerSide, record: Record, spec: ServerSpec, config: Any) -> RealCore:
    """For `machine.run(make_core=...)`: the plan's servers are scheduled by vLLM itself."""
    scheduler = make_scheduler(config, side, asynchronous=spec.asynchronous, cache=spec.cache, budget=spec.budget)
    return RealCore(scheduler, record)


def make_scheduler(
    config: Any,
    connector: Any,
    *,
    asynchronous: bool = False,
    cache: int | None = None,
    budget: int | None = None,
    blocks: int = BLOCKS,
    block_hashing: bool = False,
) -> Any:
    """A real Scheduler with this object as its `ec_connector`.

    Args:
        config: a VllmConfig, as `configs.make` gives it; not changed.
        connector: has the hooks of a SCHEDULER object (`SchedulerSide`), or None for a server without a connector.
        cache: rows that the encoder cache holds, and `budget`: rows that may be encoded in a step; None: what vLLM computes.
        blocks: of `BLOCK` tokens in the KV cache.
        block_hashing: prefix caching on; requests need a block hasher then.
    """
    config = copy.copy(config)
    config.cache_config = copy.copy(config.cache_config)
    config.scheduler_config = copy.copy(config.scheduler_config)
    encode_only = config.is_mm_encoder_only
    config.cache_config.block_size = BLOCK
    config.cache_config.num_gpu_blocks = 1 if encode_only else blocks
    config.cache_config.enable_prefix_caching = block_hashing
    if encode_only:
        config.scheduler_config.enable_chunked_prefill = False
    groups = [] if encode_only else [_group()]
    # The Scheduler would make a SCHEDULER object of its own: it gets the watched one instead.
    config.ec_transfer_config = None
    scheduler: Any = (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=config.cache_config.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )
    scheduler.is_mm_encoder_only = encode_only
    scheduler.ec_connector = connector
    if cache is not None:
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=cache)
    if budget is not None:
        scheduler.max_num_encoder_input_tokens = budget
    return scheduler


class RealCore:
    """vLLM's Scheduler in the form that `server.EngineProcess` drives."""

    def __init__(self, scheduler: Any, record: Record) -> None:
        self.scheduler = scheduler
        self._record = record
        self._kv = ""
        self._allocate = scheduler.kv_cache_manager.allocate_slots
        scheduler.kv_cache_manager.allocate_slots = self._slots
        self._freed = scheduler.encoder_cache_manager.get_freed_mm_hashes
        scheduler.encoder_cache_manager.get_freed_mm_hashes = self._evicted

    @property
    def requests(self) -> dict[str, Request]:
        found: dict[str, Request] = self.scheduler.requests
        return found

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def has_requests(self) -> bool:
        return bool(self.scheduler.has_requests())

    def schedule(self, order: StepOrder) -> SchedulerOutput:
        self.scheduler.max_num_scheduled_tokens = order.tokens
        self._kv = order.kv
        output = self.scheduler.schedule()
        self._kv = ""
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.scheduler.update_from_output(output, result)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        self.scheduler.finish_requests(list(request_ids), status)

    def evict(self) -> None:
        """What another request's need for room does, as `Core.evict`."""
        manager = self.scheduler.encoder_cache_manager
        while manager.freeable:
            key, rows = manager.freeable.popitem(last=False)
            del manager.cached[key]
            del manager.num_embeds_by_hash[key]
            manager.freed.append(key)
            manager.num_free_slots += rows

    def reset_encoder_cache(self) -> None:
        self.scheduler.reset_encoder_cache()

    def shutdown(self) -> None:
        self.scheduler.shutdown()

    def _evicted(self) -> list[str]:
        """Asked for once a step, before the connector is: so that its events stand in the order of `Core`."""
        freed: list[str] = self._freed()
        for key in freed:
            self._record(("evicted", key, False))
        return freed

    def _slots(self, request: Request, *arguments: Any, **keywords: Any) -> Any:
        running = request.status is RequestStatus.RUNNING
        if self._kv == ("preempt" if running else "refuse"):
            if running:
                self._kv = ""
            return None
        return self._allocate(request, *arguments, **keywords)


def _group() -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheGroupSpec(["layer"], spec)
