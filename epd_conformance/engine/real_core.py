"""The engine core of the scheduler layer: vLLM's own Scheduler and EncoderCacheManager, with the connector under watch.

What it decides is recorded for `schedule_judge`: calls that it makes, and what a pass and its results leave behind.

Built as v1/engine/core.py builds it (block sizes, a KV cache without groups for an encode-only server), with a KV cache that exists
on paper only. What a plan says about room in the KV cache is done at `KVCacheManager.allocate_slots`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import KVTransferConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from epd_conformance.engine.core import StepOrder, check_statistics, empty_of_unheld
from epd_conformance.engine.events import EngineDied, describe
from epd_conformance.engine.plan import ServerSpec
from epd_conformance.engine.sides import Record, SchedulerSide
from epd_conformance.engine.worker import SAMPLED

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

#: Tokens of a KV block. Small, so that requests of a few tokens have several.
BLOCK = 16
#: As in `plan.KV`.
LAST = "preempt-last"
#: Blocks of a KV cache that never runs out in a plan.
BLOCKS = 1024


def scheduler_core(side: SchedulerSide, record: Record, spec: ServerSpec, config: Any) -> RealCore:
    """For `machine.run(make_core=...)`: the plan's servers are scheduled by vLLM itself."""
    scheduler = make_scheduler(
        config,
        _Heard(side, record),
        asynchronous=spec.asynchronous,
        cache=spec.cache,
        budget=spec.budget,
        # One of them is vLLM's own (`BlockPool.null_block`).
        blocks=spec.blocks + 1 if spec.blocks else BLOCKS,
        block_hashing=spec.prefix_caching,
        kv_connector=spec.kv_connector,
        options={
            "disable_chunked_mm_input": spec.whole_items,
            "policy": "priority" if spec.priority else "fcfs",
        },
    )
    # As a drafter sets them in the configuration (`VllmConfig.num_speculative_tokens`, `num_prefill_lookahead_tokens`).
    scheduler.num_spec_tokens = spec.drafts
    scheduler.num_prefill_lookahead = spec.lookahead
    if spec.asynchronous:
        scheduler._spec_token_placeholders = [-1] * spec.drafts
    return RealCore(scheduler, record, spec)


def make_scheduler(
    config: Any,
    connector: Any,
    *,
    asynchronous: bool = False,
    cache: int | None = None,
    budget: int | None = None,
    blocks: int = BLOCKS,
    block_hashing: bool = False,
    kv_connector: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A real Scheduler with this object as its `ec_connector`.

    Args:
        config: a VllmConfig, as `configs.make` gives it; not changed.
        connector: has the hooks of a SCHEDULER object (`SchedulerSide`), or None for a server without a connector.
        cache: rows that the encoder cache holds, and `budget`: rows that may be encoded in a step; None: what vLLM computes.
        blocks: of `BLOCK` tokens in the KV cache.
        block_hashing: prefix caching on; requests need a block hasher then.
        kv_connector: with `held_kv.HeldKV`.
        options: of vLLM's SchedulerConfig.
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
    for name, value in (options or {}).items():
        setattr(config.scheduler_config, name, value)
    if kv_connector and not encode_only:
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="HeldKV", kv_connector_module_path="epd_conformance.engine.held_kv", kv_role="kv_both"
        )
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


class _Heard:
    """The watched SCHEDULER object where vLLM's Scheduler sees it: what the engine asks of it and tells it is recorded too."""

    def __init__(self, side: SchedulerSide, record: Record) -> None:
        self.reported: Any = None  # statistics of the workers, which the results hold that are being taken in
        self._side = side
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._side, name)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        answer = self._side.ensure_cache_available(request, num_computed_tokens)
        self._record(("asked", request.request_id, num_computed_tokens, answer))
        return answer

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._record(("told", request.request_id, index))
        self._side.update_state_after_alloc(request, index)

    def update_state_after_free(self, request: Request, index: int) -> None:
        self._record(("consumed", request.request_id, index))
        self._side.update_state_after_free(request, index)

    def get_ec_connector_stats(self) -> Any:
        own = self._side.get_ec_connector_stats()
        # Where they cannot be used vLLM's Scheduler raises, and it is not its fault. Adding up may change them.
        check_statistics(self._side, copy.deepcopy(self.reported), copy.deepcopy(own))
        return own

    def build_connector_meta(self, output: SchedulerOutput) -> Any:
        # It leads to the whole scheduler, which nobody could pickle, and is taken out before a worker gets the output.
        state, output.kv_connector_block_state = output.kv_connector_block_state, None
        try:
            return self._side.build_connector_meta(output)
        finally:
            output.kv_connector_block_state = state


class RealCore:
    """vLLM's Scheduler in the form that `server.EngineProcess` drives."""

    def __init__(self, scheduler: Any, record: Record, spec: ServerSpec) -> None:
        self.scheduler = scheduler
        self.block_hasher = _block_hasher() if spec.prefix_caching else None
        self._record = record
        self._drafts = spec.drafts
        self._kv = ""
        self._passes = 0
        # Passes whose results are not known yet: the output's identity -> number, and where each request stands behind it.
        self._under_way: dict[int, tuple[int, dict[str, int]]] = {}
        self._allocate = self._replace(scheduler.kv_cache_manager, "allocate_slots", self._slots)
        manager = scheduler.encoder_cache_manager
        self._freed = self._replace(manager, "get_freed_mm_hashes", self._evicted)
        self._can_allocate = self._replace(manager, "can_allocate", self._room)
        self._take = self._replace(manager, "allocate", self._took)

    @staticmethod
    def _replace(target: Any, name: str, by: Callable[..., Any]) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(target, name)
        setattr(target, name, by)
        return original

    @property
    def requests(self) -> dict[str, Request]:
        found: dict[str, Request] = self.scheduler.requests
        return found

    def add_request(self, request: Request) -> None:
        features = [
            (feature.identifier, feature.mm_position.offset, _mask(feature.mm_position), feature.data is None)
            for feature in request.mm_features
        ]
        self._record(("queued", request.request_id, request.num_prompt_tokens, features))
        self.scheduler.add_request(request)

    def has_requests(self) -> bool:
        return bool(self.scheduler.has_requests())

    def schedule(self, order: StepOrder) -> SchedulerOutput:
        self.scheduler.max_num_scheduled_tokens = order.tokens
        self._kv = order.kv
        if freed := self.scheduler.encoder_cache_manager.freed:
            self._record(("unasked", list(freed)))
        preemptions = {name: request.num_preemptions for name, request in self.requests.items()}
        output: SchedulerOutput = self._guarded("schedule", self.scheduler.schedule)
        self._kv = ""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        self._passes += 1
        ends = {name: computed[name] + count for name, count in output.num_scheduled_tokens.items()}
        self._under_way[id(output)] = self._passes, ends
        facts = {
            "number": self._passes,
            "limit": order.tokens,
            "kv": order.kv,
            "tokens": dict(output.num_scheduled_tokens),
            "computed": computed,
            "encodes": {name: list(indices) for name, indices in output.scheduled_encoder_inputs.items()},
            "preempted": [
                name for name, request in self.requests.items() if request.num_preemptions > preemptions.get(name, 0)
            ],
            "evicted": list(output.free_encoder_mm_hashes),
            "room": self.scheduler.encoder_cache_manager.num_free_slots,
        }
        self._record(("pass", facts))
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        reported = result.ec_connector_output
        self.scheduler.ec_connector.reported = reported.ec_connector_stats if reported else None
        if self.scheduler.connector is not None:
            result.kv_connector_output = self.scheduler.connector.reported()
        self._guarded("update_from_output", self.scheduler.update_from_output, output, result)
        number, ends = self._under_way.pop(id(output))
        held = {
            key: sorted(references)
            for key, references in self.scheduler.encoder_cache_manager.cached.items()
            if references
        }
        blocks = self.scheduler.kv_cache_manager.block_pool
        self._record(("settled", number, ends, held, blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks()))
        if self._drafts and not self.scheduler.is_mm_encoder_only:
            # v1/engine/core.py (post_step); with asynchronous scheduling the drafts stay with the workers.
            names = [name for name, request in self.requests.items() if request.status is RequestStatus.RUNNING]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[SAMPLED] * self._drafts for _ in names]))

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        self.scheduler.finish_requests(list(request_ids), status)

    def evict(self) -> None:
        """What another request's need for room does, as `Core.evict`."""
        manager = self.scheduler.encoder_cache_manager
        self._record(("cleared", list(manager.freeable)))
        empty_of_unheld(manager)

    def reset_encoder_cache(self) -> None:
        self._record(("cleared", None))
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
        last = running and request is self.scheduler.running[-1]
        if (self._kv == "refuse" and not running) or (running and self._kv == "preempt") or (last and self._kv == LAST):
            if running:
                self._kv = ""
            return None
        return self._allocate(request, *arguments, **keywords)

    def _room(self, request: Request, index: int, budget: int, pending: int) -> bool:
        freed = self.scheduler.encoder_cache_manager.freed
        before = len(freed)
        answer = bool(self._can_allocate(request, index, budget, pending))
        self._record(("room", request.request_id, index, budget, pending, answer, freed[before:]))
        return answer

    def _took(self, request: Request, index: int) -> None:
        self._record(("took", request.request_id, index))
        self._take(request, index)

    def _guarded(self, where: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Whatever vLLM's Scheduler raises ends the server; what a hook raised has been recorded already."""
        try:
            return function(*arguments)
        except EngineDied:
            raise
        except Exception as error:
            self._record(("broke", where, describe(error)))
            raise EngineDied(where) from error


def _block_hasher() -> Any:
    """What v1/engine/core.py gives to requests where prefix caching is on."""
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK, sha256)


def _mask(position: Any) -> str:
    """Which tokens of a placeholder are embeddings, as a digit each."""
    if position.is_embed is None:
        return "1" * int(position.length)
    mask: list[bool] = position.is_embed.tolist()
    return "".join("1" if value else "0" for value in mask)


def _group() -> Any:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return KVCacheGroupSpec(["layer"], spec)
