"""The engine core of the contract layer: what vLLM's Scheduler does with an EC connector, and nothing else.

No KV cache, no sampling, no limits but those that a plan gives: a step costs a fraction of a millisecond, and a plan says itself
when KV blocks run out. The order of calls is that of v1/core/sched/scheduler.py of vLLM 0.32 (`schedule`,
`_try_schedule_encoder_inputs`, `_allocate_encoder_inputs`, `_preempt_request`, `update_from_output`, `finish_requests`), with
v1/core/sched/async_scheduler.py for asynchronous scheduling; encoder cache and requests are vLLM's own. A test holds this core
and vLLM's Scheduler against each other, call by call.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.multimodal.utils import get_mm_features_in_window
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import RequestStatus

from epd_conformance.engine.sides import Record, SchedulerSide

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


@dataclass(frozen=True)
class StepOrder:
    """What a plan fixes for one step: at most so many `tokens`, and whether the KV cache has room (`plan.KV`)."""

    tokens: int = 64
    kv: str = ""


class Core:
    """Requests of one server between arrival and end. `connector` has the hooks of a SCHEDULER object."""

    def __init__(
        self,
        connector: SchedulerSide,
        record: Record,
        *,
        cache: int,
        budget: int,
        encode_only: bool,
        asynchronous: bool,
        v2: bool,
        mrope: bool = True,
    ) -> None:
        self.block_hasher = None  # nothing is cached by its prefix
        self.ec_connector = connector
        self.record = record
        self.encoder_cache_manager = EncoderCacheManager(cache_size=cache)
        self.budget = budget
        self.encode_only = encode_only
        self.asynchronous = asynchronous
        self.v2 = v2
        self.mrope = mrope
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.finished_req_ids: set[str] = set()
        self.preempted_req_ids: set[str] = set()

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def has_requests(self) -> bool:
        """`Scheduler.has_requests`: whether the engine's loop makes another step."""
        return bool(self.requests or self.finished_req_ids) or self.ec_connector.has_pending_push_work()

    # ---- schedule ----

    def schedule(self, order: StepOrder) -> SchedulerOutput:
        new: list[Request] = []
        resumed: list[Request] = []
        going_on: list[Request] = []
        tokens: dict[str, int] = {}
        encodes: dict[str, list[int]] = {}
        left, budget = order.tokens, self.budget
        preempt = order.kv == "preempt"
        preempted: list[Request] = []

        index = 0
        while index < len(self.running) and left > 0:
            request = self.running[index]
            if self._surely_done(request) or not self._available(
                request, request.num_computed_tokens - request.num_output_placeholders
            ):
                index += 1
                continue
            count = min(request.num_tokens + request.num_output_placeholders - request.num_computed_tokens, left)
            chosen = self._choose(request, request.num_computed_tokens, count, budget)
            if chosen.count == 0:
                index += 1
                continue
            if preempt:
                preempt = False
                victim = self.running.pop()
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            going_on.append(request)
            tokens[request.request_id] = chosen.count
            left -= chosen.count
            budget = self._allocate(request, chosen, encodes, budget)
            index += 1

        skipped: list[Request] = []
        while self.waiting and left > 0 and not preempted:
            request = self.waiting[0]
            stale = request.num_stale_output_tokens and not request.drop_stale_output
            if stale or not self._available(request, request.num_computed_tokens):
                skipped.append(self.waiting.popleft())
                continue
            computed = request.num_computed_tokens
            chosen = self._choose(request, computed, min(request.num_tokens - computed, left), budget)
            if chosen.count == 0:
                break
            if order.kv == "refuse":
                self.encoder_cache_manager.free(request)
                break
            self.waiting.popleft()
            self.running.append(request)
            (new if request.status is RequestStatus.WAITING else resumed).append(request)
            request.status = RequestStatus.RUNNING
            tokens[request.request_id] = chosen.count
            left -= chosen.count
            budget = self._allocate(request, chosen, encodes, budget)
        self.waiting.extendleft(reversed(skipped))

        output = self._output(new, resumed, going_on, tokens, encodes)
        output.ec_connector_metadata = self.ec_connector.build_connector_meta(output)
        self._after_schedule(tokens)
        return output

    def _available(self, request: Request, computed: int) -> bool:
        if not request.mm_features:
            return True
        return self.ec_connector.ensure_cache_available(request, computed)

    @staticmethod
    def _surely_done(request: Request) -> bool:
        """Asynchronous scheduling makes no step that is known to be superfluous."""
        ahead = request.num_output_placeholders
        return bool(ahead) and bool(
            request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
        )

    def _choose(self, request: Request, computed: int, count: int, budget: int) -> _Chosen:
        """`_try_schedule_encoder_inputs`: local hit, room, connector, encoder, in this order."""
        chosen = _Chosen(count, [], [], [], budget)
        if not count or not request.mm_features:
            return chosen
        manager = self.encoder_cache_manager
        taken: set[str] = set()
        rows = 0
        first, last = get_mm_features_in_window(request.mm_features, start=computed, end=computed + count)
        for index in range(first, last):
            feature = request.mm_features[index]
            position = feature.mm_position
            if feature.identifier in taken:
                chosen.duplicates.append(index)
                continue
            if manager.check_and_update_cache(request, index):
                continue
            if not manager.can_allocate(request, index, chosen.budget, rows):
                chosen.count = max(position.offset - computed, 0)
                break
            low = max(0, computed - position.offset)
            high = min(position.length, computed + count - position.offset)
            low, high = position.get_embeds_indices_in_range(low, high)
            if low == high:
                continue
            taken.add(feature.identifier)
            rows += position.get_num_embeds()
            if self.ec_connector.has_cache_item(feature.identifier):
                chosen.loads.append(index)
                continue
            chosen.budget -= position.get_num_embeds()
            chosen.encodes.append(index)
        return chosen

    def _allocate(self, request: Request, chosen: _Chosen, encodes: dict[str, list[int]], budget: int) -> int:
        """`_allocate_encoder_inputs`. Returns what is left of the encoder's budget."""
        if chosen.encodes:
            encodes[request.request_id] = chosen.encodes
            budget = chosen.budget
        if chosen.encodes or chosen.loads:
            for index in chosen.encodes + chosen.loads:
                self.encoder_cache_manager.allocate(request, index)
                self.ec_connector.update_state_after_alloc(request, index)
            for index in chosen.duplicates:
                self.encoder_cache_manager.check_and_update_cache(request, index)
        return budget

    def _preempt(self, request: Request) -> None:
        self.encoder_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.drop_stale_output = request.drop_stale_output and request.num_stale_output_tokens > 0
        request.num_stale_output_tokens = request.num_in_flight_tokens
        request.num_output_placeholders = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.preempted_req_ids.add(request.request_id)

    def _output(
        self,
        new: list[Request],
        resumed: list[Request],
        going_on: list[Request],
        tokens: dict[str, int],
        encodes: dict[str, list[int]],
    ) -> SchedulerOutput:
        if self.v2:
            new, resumed = new + resumed, []
        cached = going_on + resumed
        freed = self.encoder_cache_manager.get_freed_mm_hashes()
        for key in freed:
            self.record(("evicted", key, False))
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData.from_request(
                    request, ([1],), request._all_token_ids if self.v2 else None, uses_mrope=self.mrope
                )
                for request in new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in cached],
                resumed_req_ids={request.request_id for request in resumed},
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[None] * len(cached),
                num_computed_tokens=[request.num_computed_tokens for request in cached],
                num_output_tokens=[request.num_output_tokens + request.num_output_placeholders for request in cached],
            ),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs=encodes,
            preempted_req_ids=self.preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=freed,
        )

    def _after_schedule(self, tokens: dict[str, int]) -> None:
        """`_update_after_schedule`, of both schedulers."""
        for request_id, count in tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += count
            request.num_in_flight_tokens += count
            request.is_prefill_chunk = (
                request.num_computed_tokens < request.num_tokens + request.num_output_placeholders
            )
            if self.asynchronous and not request.is_prefill_chunk:
                request.num_output_placeholders += 1
        self.finished_req_ids = set()
        self.preempted_req_ids = set()

    # ---- update_from_output ----

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        stopped: list[Request] = []
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:  # aborted meanwhile
                continue
            request.num_in_flight_tokens -= count
            is_stale = request.num_stale_output_tokens > 0
            if is_stale:
                request.num_stale_output_tokens -= count
            if is_stale and request.drop_stale_output:
                continue
            sampled = result.sampled_token_ids[result.req_id_to_index[request_id]] if result.sampled_token_ids else []
            self._free_encoder_inputs(request)
            if sampled:
                request.append_output_token_ids(sampled[0])
                if self.asynchronous and not is_stale:
                    request.num_output_placeholders -= 1
                if request.num_output_tokens >= request.max_tokens:
                    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            elif self.encode_only and request.num_computed_tokens >= request.num_prompt_tokens:
                request.status = RequestStatus.FINISHED_STOPPED
            if request.is_finished():
                self._free_request(request)
                stopped.append(request)
        self._forget(stopped)

        self.finish_requests(self.ec_connector.take_unavailable_requests(), RequestStatus.FINISHED_ERROR)
        if result.ec_connector_output:
            self.ec_connector.update_connector_output(result.ec_connector_output)
        self._statistics(result)

    def _statistics(self, result: ModelRunnerOutput) -> None:
        reported = result.ec_connector_output.ec_connector_stats if result.ec_connector_output else None
        own = self.ec_connector.get_ec_connector_stats()
        check_statistics(self.ec_connector, reported, own)

    def _free_encoder_inputs(self, request: Request) -> None:
        for index in list(self.encoder_cache_manager.get_cached_input_ids(request)):
            position = request.mm_features[index].mm_position
            if position.offset + position.length <= request.num_computed_tokens - request.num_output_placeholders:
                self.encoder_cache_manager.free_encoder_input(request, index)
                self.ec_connector.update_state_after_free(request, index)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """`finish_requests`: an abort, or the connector gave up. Unknown ids are ignored."""
        found = [self.requests[request_id] for request_id in sorted(request_ids) if request_id in self.requests]
        self._forget(found)
        for request in found:
            request.status = status
            self._free_request(request)

    def _free_request(self, request: Request) -> None:
        self.ec_connector.request_finished(request)
        self.encoder_cache_manager.free(request)
        self.finished_req_ids.add(request.request_id)
        # Also where the connector asks to keep it: the finding is recorded, and the plan goes on.
        del self.requests[request.request_id]

    def _forget(self, requests: list[Request]) -> None:
        gone = {request.request_id for request in requests}
        if gone:
            self.running = [request for request in self.running if request.request_id not in gone]
            self.waiting = deque(request for request in self.waiting if request.request_id not in gone)

    # ---- from outside ----

    def evict(self) -> None:
        """What another request's need for room does."""
        empty_of_unheld(self.encoder_cache_manager)

    def reset_encoder_cache(self) -> None:
        self.encoder_cache_manager.reset()

    def shutdown(self) -> None:
        self.ec_connector.shutdown()


def check_statistics(side: SchedulerSide, reported: Any, own: Any) -> None:
    """What `update_from_output` and `make_stats` do with statistics: aggregate the two parts, read `.data`."""
    try:
        if own is not None and not own.is_empty():
            reported = reported.aggregate(own) if reported is not None else own
        if reported is not None and not isinstance(reported.data, dict):
            raise TypeError(f"data is {type(reported.data).__name__}, not a dict")
    except Exception as error:
        side.returned("get_ec_connector_stats", f"statistics that cannot be used: {error!r}"[:200])


@dataclass
class _Chosen:
    """What `_choose` gives: tokens of this step, indices to encode and to load, repeated ones, and the budget that is left."""

    count: int
    encodes: list[int]
    loads: list[int]
    duplicates: list[int]
    budget: int


def empty_of_unheld(manager: EncoderCacheManager) -> None:
    """Entries that nobody holds leave, as where another request needs their room (`EncoderCacheManager.can_allocate`)."""
    while manager.freeable:
        key, rows = manager.freeable.popitem(last=False)
        del manager.cached[key]
        del manager.num_embeds_by_hash[key]
        manager.freed.append(key)
        manager.num_free_slots += rows
