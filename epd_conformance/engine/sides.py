"""A connector's two objects behind a watch: every hook is called in the engine's form, guarded, and what it returned is checked.

Call forms are those of vLLM 0.32: v1/core/sched/scheduler.py for the SCHEDULER object,
v1/worker/ec_connector_model_runner_mixin.py (V1) and v1/worker/gpu/ec_connector.py (V2) for the WORKER object.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from epd_conformance.engine import beacon
from epd_conformance.engine.events import EngineDied, Event, describe
from epd_conformance.engine.messages import pack, unpack

if TYPE_CHECKING:
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

Record = Callable[[Event], None]


class Side:
    """One connector object. `name`: `scheduler` or `worker 0`, as events call it."""

    def __init__(self, name: str, make: Callable[[], ECConnectorBase], record: Record) -> None:
        """Raises EngineDied when the object cannot be made."""
        self.name = name
        self.record = record
        self.connector = self._guarded("__init__", make)

    def call(self, hook: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a hook. Raises EngineDied when it raises anything: no hook is guarded in the engine."""
        return self._guarded(hook, getattr(self.connector, hook), *arguments, **keywords)

    def about(self, hook: str, *arguments: Any) -> list[str]:
        """The items that a call is about, where what became of their objects may be why it raises."""
        if hook == "has_cache_item":
            return [arguments[0]]
        if hook == "ensure_cache_available":
            return [feature.identifier for feature in arguments[0].mm_features]
        return []

    def returned(self, hook: str, problem: str) -> None:
        """The hook returned something that the engine cannot use. Raises EngineDied: most such values end it."""
        self.record(("returned", self.name, hook, problem))
        raise EngineDied(hook)

    def _guarded(self, hook: str, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        beacon.light(f"{self.name}.{hook}")
        try:
            return function(*arguments, **keywords)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit ends a server as well
            self.record(("raised", self.name, hook, describe(error), self.about(hook, *arguments)))
            raise EngineDied(hook) from error
        finally:
            beacon.light("engine")


class SchedulerSide(Side):
    """The SCHEDULER object. Has the hooks that vLLM's Scheduler calls on `ec_connector`, so that it can stand there.

    `unencodable(request, index)` says whether the item came without media. `before_alloc` is called once in each pass, before the
    first allocation: the place of the window between look-up and allocation.
    """

    def __init__(
        self,
        make: Callable[[], ECConnectorBase],
        record: Record,
        unencodable: Callable[[Request, int], bool],
    ) -> None:
        super().__init__("scheduler", make, record)
        self.before_alloc: Callable[[], None] | None = None
        # Keys of this pass: looked up with yes and allocated, and all that were allocated.
        self.promised: set[str] = set()
        self.allocated: set[str] = set()
        # Ids that the harness puts among those that the connector names as unavailable.
        self.named_too: set[str] = set()
        self._unencodable = unencodable
        self._asked_for: Request | None = None
        self._answers: dict[str, bool] = {}

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        self._asked_for = request
        answer: Any = self.call("ensure_cache_available", request, num_computed_tokens)
        if not isinstance(answer, bool):
            self.returned("ensure_cache_available", f"{answer!r} instead of a boolean")
        if not answer:
            pending, bare = [], []
            for index, feature in enumerate(request.mm_features):
                if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens:
                    pending.append(feature.identifier)
                    if self._unencodable(request, index):
                        bare.append(feature.identifier)
            running = request.status.name == "RUNNING"
            self.record(("deferred", request.request_id, running, num_computed_tokens, pending, bare))
        elif request.status.name == "RUNNING" and all(
            feature.mm_position.offset + feature.mm_position.length <= num_computed_tokens
            for feature in request.mm_features
        ):
            self.record(("went-on", request.request_id))
        return bool(answer)

    def has_cache_item(self, identifier: str) -> bool:
        answer = self.call("has_cache_item", identifier)
        if not isinstance(answer, bool):
            self.returned("has_cache_item", f"{answer!r} instead of a boolean")
        self._answers[identifier] = answer
        request = self._asked_for.request_id if self._asked_for is not None else ""
        self.record(("lookup", request, identifier, answer))
        return bool(answer)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if self.before_alloc is not None:
            window, self.before_alloc = self.before_alloc, None
            window()
        key = request.mm_features[index].identifier
        self.allocated.add(key)
        if self._answers.get(key):
            self.promised.add(key)
            self.record(("promised", request.request_id, key, request.num_preemptions > 0))
        self.call("update_state_after_alloc", request, index)

    def take_pass(self) -> tuple[frozenset[str], frozenset[str]]:
        """The promised and the allocated keys of the pass that has just been scheduled."""
        taken = frozenset(self.promised), frozenset(self.allocated)
        self.promised.clear()
        self.allocated.clear()
        return taken

    def update_state_after_free(self, request: Request, index: int) -> None:
        self.call("update_state_after_free", request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        before = pack(scheduler_output)
        metadata = self.call("build_connector_meta", scheduler_output)
        # Different bytes alone prove nothing: a cached property that the connector read is pickled as well.
        if pack(scheduler_output) != before and unpack(before) != scheduler_output:
            self.record(("metadata", "EPD-XFER-013", "build_connector_meta changed the scheduler output"))
        if metadata is None:
            # V1 asserts that there is one (ec_connector_model_runner_mixin.py).
            self.record(("metadata", "EPD-XFER-012", "build_connector_meta returned None"))
            raise EngineDied("build_connector_meta")
        self.record(("built", scheduler_output.total_num_scheduled_tokens > 0))
        self._answers.clear()
        self._asked_for = None
        return metadata

    def take_unavailable_requests(self) -> set[str]:
        named = self.call("take_unavailable_requests")
        if not isinstance(named, set | frozenset) or not all(isinstance(name, str) for name in named):
            self.returned("take_unavailable_requests", f"{named!r} instead of a set of request ids")
        if named:
            self.record(("named", sorted(named)))
        named, self.named_too = {*named, *self.named_too}, set()
        return set(named)

    def update_connector_output(self, connector_output: Any) -> None:
        self.call("update_connector_output", connector_output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        answer = self.call("request_finished", request)
        problem: tuple[str, str] | None = None
        if not isinstance(answer, tuple) or len(answer) != 2:
            self.record(("finished", request.request_id, request.status.name, ("EPD-LIFE-003", f"returned {answer!r}")))
            raise EngineDied("request_finished")
        delay, parameters = answer
        if delay:
            problem = "EPD-LIFE-003", "asks to keep the request's blocks"
        elif parameters is not None:
            problem = _serializable(parameters)
        self.record(("finished", request.request_id, request.status.name, problem))
        return bool(delay), parameters if problem is None else None

    def get_ec_connector_stats(self) -> Any:
        return self.call("get_ec_connector_stats")

    def has_pending_push_work(self) -> bool:
        return bool(self.call("has_pending_push_work"))

    def shutdown(self) -> None:
        self.call("shutdown")
        self.record(("shutdown", self.name))


def _serializable(parameters: Any) -> tuple[str, str] | None:
    """What is wrong with a request's transfer parameters, which become a part of the client's answer."""
    if not isinstance(parameters, dict):
        return "EPD-LIFE-005", f"returned {type(parameters).__name__} instead of a dict or None"
    for name, there_and_back in (("JSON", _json), ("msgpack", _msgpack)):
        try:
            back = there_and_back(parameters)
        except (TypeError, ValueError, RecursionError, OverflowError) as error:
            return "EPD-LIFE-005", f"not {name}: {describe(error)}"
        if back != parameters:
            return "EPD-LIFE-005", f"comes back from {name} as something else"
    return None


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _msgpack(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))
