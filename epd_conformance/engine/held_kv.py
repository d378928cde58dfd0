"""A made-up KV connector for the scheduler layer: it keeps and fetches nothing, but takes its time as one that does.

As with vLLM's own (NixlConnector), the blocks of a request that ended in the usual way are kept until they were sent, and a prompt
of more than a block waits until its first block has come. Both are over with the second step's results after they began.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput

if TYPE_CHECKING:
    from vllm.v1.request import Request

#: Results of steps until something that began is over.
_STEPS = 2


class HeldKV(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is untyped here
    """The SCHEDULER object; there is no worker side. `reported()` is what the workers would report with a step's results."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block = int(vllm_config.cache_config.block_size)
        self._sending: dict[str, int] = {}
        self._fetching: dict[str, int] = {}
        self._fetched: set[str] = set()

    def reported(self) -> KVConnectorOutput | None:
        """Called once for the results of each step."""
        over = []
        for under_way in (self._sending, self._fetching):
            for request_id in under_way:
                under_way[request_id] -= 1
            over.append({request_id for request_id, left in under_way.items() if left <= 0})
            for request_id in over[-1]:
                del under_way[request_id]
        sent, fetched = over
        return KVConnectorOutput(finished_sending=sent, finished_recving=fetched) if sent or fetched else None

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        fetch = (
            request.num_prompt_tokens > self._block > num_computed_tokens and request.request_id not in self._fetched
        )
        return (self._block - num_computed_tokens, True) if fetch else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._fetched.add(request.request_id)
            self._fetching[request.request_id] = _STEPS

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        sends = request.status.name == "FINISHED_LENGTH_CAPPED"
        if sends:
            self._sending[request.request_id] = _STEPS
        return sends, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def start_load_kv(self, forward_context: Any, **keywords: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **keywords: Any) -> None: ...

    def wait_for_save(self) -> None: ...
