"""What the engine layers find: one requirement that did not hold, with what was expected and what was seen. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """`kind` tells findings of one requirement apart, in a few words that do not depend on the plan.

    `operation`: index of the plan's operation, its length for what its end showed, -1 for what came before the first.
    """

    requirement: str
    kind: str
    expected: str
    observed: str
    server: str = ""
    operation: int = -1

    @property
    def name(self) -> tuple[str, str]:
        """Findings with equal names are one: the plans that show them are shrunk together."""
        return self.requirement, self.kind

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        place = f" ({self.server}, operation {self.operation})" if self.server else ""
        return f"{self.requirement} {self.kind}{place}\n  expected: {self.expected}\n  observed: {self.observed}"


#: A hook that raises -> the requirement that it broke, where nothing about the situation names a closer one. No hook is guarded
#: by vLLM 0.32 (v1/core/sched/scheduler.py, v1/worker/ec_connector_model_runner_mixin.py): an exception ends the server.
HOOK_REQUIREMENT: dict[str, str] = {
    "import": "EPD-INIT-002",
    "build_prom_metrics": "EPD-INIT-002",
    "__init__": "EPD-INIT-001",
    "start_worker_services": "EPD-INIT-001",
    "ensure_cache_available": "EPD-KEY-001",
    "has_cache_item": "EPD-KEY-001",
    "update_state_after_alloc": "EPD-XFER-011",
    "update_state_after_free": "EPD-LIFE-001",
    "build_connector_meta": "EPD-XFER-012",
    "bind_connector_metadata": "EPD-XFER-011",
    "clear_connector_metadata": "EPD-XFER-012",
    "start_save_caches": "EPD-KEY-001",
    "start_load_caches": "EPD-XFER-011",
    "save_caches": "EPD-KEY-001",
    "get_finished": "EPD-LIFE-004",
    "build_connector_worker_meta": "EPD-OBS-002",
    "get_ec_connector_stats": "EPD-OBS-002",
    "take_unavailable_requests": "EPD-LIFE-006",
    "update_connector_output": "EPD-OBS-002",
    "request_finished": "EPD-LIFE-004",
    "has_pending_push_work": "EPD-LIFE-009",
    "shutdown": "EPD-LIFE-010",
}

#: Damage -> the requirement about an object that was damaged so.
DAMAGE_REQUIREMENT: dict[str, str] = {
    "deleted": "EPD-ERR-001",
    "truncated": "EPD-INTEG-001",
    "empty": "EPD-INTEG-011",
    "garbage": "EPD-INTEG-011",
    "code": "EPD-INTEG-011",
    "replaced": "EPD-INTEG-002",
    "one-row": "EPD-INTEG-003",
    "rows-missing": "EPD-INTEG-004",
    "rows-added": "EPD-INTEG-005",
    "width": "EPD-INTEG-006",
    "dtype": "EPD-INTEG-007",
    "flipped-bit": "EPD-INTEG-009",
    "zero-tail": "EPD-INTEG-010",
    "scribbled": "EPD-INTEG-009",
    "cut-in-place": "EPD-INTEG-001",
}
