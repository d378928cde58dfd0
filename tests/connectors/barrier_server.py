"""A stand-in for a server: a recording connector's hooks with points around an inner connector that does nothing.

Goes round for ever over all hooks, for item `item` of request `chatcmpl-rid-1`. Imports nothing heavy, so that a test may start
it as a process: `python barrier_server.py`, with the journal's and the gates' folders in the environment.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from epd_conformance.connectors import barriers
from epd_conformance.connectors.journal import JournalWriter

REQUEST = SimpleNamespace(request_id="chatcmpl-rid-1", mm_features=[SimpleNamespace(identifier="item")])
RUNNING = SimpleNamespace(req_ids=["chatcmpl-rid-1"], num_computed_tokens=[512])
STEP = SimpleNamespace(
    scheduled_new_reqs=[], scheduled_cached_reqs=RUNNING, num_scheduled_tokens={"chatcmpl-rid-1": 40, "other": 1}
)


class Inner:
    """What a recording connector is to the points: hooks, the items of requests, and a gate."""

    found = True

    def __init__(self, side: str) -> None:
        self._epd_journal = JournalWriter(side)
        self._epd_gate = barriers.gate(self._epd_journal)
        self._epd_request = REQUEST.request_id
        self._epd_seen = {REQUEST.request_id: ["item"]}
        self._connector_metadata: Any = {"loads": ["item"]}
        self.calls: list[str] = []

    @contextlib.contextmanager
    def _epd_look(self, hook: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._epd_journal.write("lost", hook=hook, error=repr(error))

    def has_cache_item(self, identifier: str) -> bool:
        self.calls.append("has_cache_item")
        return self.found

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self.calls.append("update_state_after_alloc")

    def build_connector_meta(self, scheduler_output: Any) -> str:
        self.calls.append("build_connector_meta")
        return "meta"

    def start_load_caches(self, encoder_cache: dict[str, Any]) -> None:
        self.calls.append("start_load_caches")
        encoder_cache["item"] = "rows"

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str) -> None:
        self.calls.append("save_caches")


HOOKS = {name: hook for name, hook in vars(Inner).items() if not name.startswith("_") and callable(hook)}


def held(side: str) -> Any:
    """An inner connector with points around its hooks."""
    return type("Held", (Inner,), barriers.with_points(HOOKS))(side)


def go(connector: Any, side: str) -> None:
    """All hooks of a side once, in the engine's order."""
    if side == "scheduler":
        connector.has_cache_item("item")
        connector.update_state_after_alloc(REQUEST, 0)
        connector.build_connector_meta(STEP)
    elif side == "worker":
        connector.start_load_caches({})
        connector.save_caches(encoder_cache={}, mm_hash="item")
    else:
        connector._epd_gate.reach("prefilled", (), ("rid",))


def main() -> None:
    sides = {side: held(side) for side in ("scheduler", "worker", "proxy")}
    while True:
        for side, connector in sides.items():
            go(connector, side)
        connector._epd_journal.write("round")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
