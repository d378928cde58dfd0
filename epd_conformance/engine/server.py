"""One server of a plan: an engine core and its workers, in this process or each in one of its own.

Steps follow v1/engine/core.py (`step`, `step_with_batch_queue`) and v1/executor/multiproc_executor.py of vLLM 0.32: messages are
pickled for each rank, and what ranks report is merged by vLLM's own `ECOutputAggregator`.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.utils import ECOutputAggregator
from vllm.v1.request import RequestStatus

from epd_conformance.engine import beacon, configs, site
from epd_conformance.engine.core import Core, StepOrder
from epd_conformance.engine.events import EngineDied, Event, HarnessBrokeError, describe
from epd_conformance.engine.evidence import KILLED
from epd_conformance.engine.exits import exit_text
from epd_conformance.engine.messages import pack, unpack
from epd_conformance.engine.plan import ServerSpec
from epd_conformance.engine.requests import has_media, make_request
from epd_conformance.engine.sides import Record, SchedulerSide
from epd_conformance.engine.site import Site
from epd_conformance.engine.worker import Source, Worker

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

#: The name and the arguments of a damage within a step, as a plan gives them.
During = Mapping[str, Any]
MakeCore = Callable[[SchedulerSide, Record, ServerSpec, Any], Any]

#: Batches that asynchronous scheduling has under way (`VllmConfig.max_concurrent_batches` of one rank).
AHEAD = 2


def contract_core(side: SchedulerSide, record: Record, spec: ServerSpec, config: Any) -> Core:
    """The core of the contract layer."""
    return Core(
        side,
        record,
        cache=spec.cache,
        budget=spec.budget,
        encode_only=config.is_mm_encoder_only,
        asynchronous=spec.asynchronous,
        v2=spec.runner == "v2",
        mrope=config.model_config.uses_mrope,
    )


class EngineProcess:
    """What runs in the engine core's process: the SCHEDULER object, requests, and batches under way."""

    def __init__(self, spec: ServerSpec, place: Site, engine_id: str, *, record: Record, make_core: MakeCore) -> None:
        """Raises EngineDied when the SCHEDULER object cannot be made."""
        self.site = place
        self.record = record
        config = _config(spec, place, engine_id)
        self.side = SchedulerSide(lambda: configs.connector(config, "SCHEDULER"), record, _unencodable)
        self.core = make_core(self.side, record, spec, config)
        self.ended: dict[str, Request] = {}
        self._batches: dict[int, SchedulerOutput] = {}
        self._number = 0

    def add(self, request_id: str, arguments: Mapping[str, Any]) -> None:
        request = make_request(request_id, block_hasher=self.core.block_hasher, **arguments)
        self.ended[request_id] = request
        self.core.add_request(request)

    def schedule(
        self, order: StepOrder, during: During | None, watch: bool
    ) -> tuple[int, bytes, frozenset[str], frozenset[str], int]:
        """One pass. Returns the batch's number, its message to the workers, what it promised and allocated, and its tokens."""
        if during is not None and during["at"] == "alloc":
            self.side.before_alloc = lambda: self._damage(during)
        before = self.site.state() if watch else None
        if watch:
            self.record(("watch", True))
        try:
            output = self.core.schedule(order)
        finally:
            if watch:
                self.record(("watch", False))
        self.side.before_alloc = None
        if before is not None and (after := self.site.state()) != before:
            changed = sorted(set(before.items()) ^ set(after.items()), key=repr)[0][0]
            self.record(("store", "EPD-KEY-002", f"{changed} was made, changed or removed while a step was scheduled"))
        promised, allocated = self.side.take_pass()
        self._number += 1
        self._batches[self._number] = output
        try:
            message = pack(output)
        except Exception as error:
            self.record(("metadata", "EPD-XFER-012", f"the metadata cannot be pickled: {describe(error)}"))
            raise EngineDied("build_connector_meta") from error
        return self._number, message, promised, allocated, output.total_num_scheduled_tokens

    def update(self, number: int, results: list[bytes]) -> None:
        """Merge what the ranks sent, and take it in."""
        try:
            merged = ECOutputAggregator().aggregate([unpack(result) for result in results], 0)
        except Exception as error:
            self.record(
                ("returned", "workers", "build_connector_worker_meta", f"cannot be aggregated: {describe(error)}")
            )
            raise EngineDied("aggregate") from error
        reported = merged.ec_connector_output if merged is not None else None
        self.record(("merged", bool(reported and (reported.ec_connector_stats or reported.ec_connector_worker_meta))))
        self.core.update_from_output(self._batches.pop(number), merged)

    def has_requests(self) -> bool:
        return bool(self.core.has_requests())

    def live(self) -> list[str]:
        """The ids of the requests that have not ended, in the order of their arrival."""
        return [request_id for request_id in self.ended if request_id in self.core.requests]

    def abort(self, request_id: str) -> None:
        self.core.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def give_up(self, request_id: str) -> None:
        """The connector names a request as unavailable with the next step's results, whatever it would say itself."""
        self.record(("made-to-name", request_id))
        self.side.named_too.add(request_id)

    def again(self, request_id: str) -> None:
        """The connector hears of a request's end once more."""
        self.side.request_finished(self.ended[request_id])

    def evict(self) -> None:
        self.core.evict()

    def reset(self) -> None:
        self.core.reset_encoder_cache()

    def fault(self, fault: str, mend: bool) -> None:
        (site.mend_process if mend else site.break_process)(fault)

    def shutdown(self) -> None:
        self.core.shutdown()

    def _damage(self, during: During) -> None:
        event = self.site.damage(during.get("item", 0), during["how"], "alloc")
        if event is not None:
            self.record(event)


class WorkerProcess(Worker):
    """A worker with what only a plan asks of its process."""

    def __init__(
        self, spec: ServerSpec, place: Site, rank: int, engine_id: str, source: Source, record: Record
    ) -> None:
        """Raises EngineDied when the WORKER object cannot be made."""
        config = _config(spec, place, engine_id)
        super().__init__(
            rank,
            spec.runner,
            lambda: configs.connector(config, "WORKER"),
            source,
            record,
            place.published if spec.role == "ec_consumer" else None,
        )

    def fault(self, fault: str, mend: bool) -> None:
        (site.mend_process if mend else site.break_process)(fault)


@dataclass
class _Batch:
    number: int
    message: bytes
    promised: frozenset[str]
    allocated: frozenset[str]
    during: During | None
    results: list[bytes] | None = None


class Server:
    """One server. After `EngineDied` it is of no more use; the event that says why has been recorded."""

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        place: Site,
        source: Source,
        record: Record,
        make_core: MakeCore = contract_core,
    ) -> None:
        """Makes the WORKER objects, then the SCHEDULER object, as vLLM does. Raises EngineDied when one cannot be made."""
        self.name = name
        self.spec = spec
        self.site = place
        self.record = record
        self.steps = 0
        self._queue: deque[_Batch] = deque()
        self.workers: list[Any] = []
        for rank in range(spec.ranks):
            self.workers.append(self._make(functools.partial(WorkerProcess, spec, place, rank, name, source)))
        self.engine: Any = self._make(functools.partial(EngineProcess, spec, place, name, make_core=make_core))

    def _make(self, make: Callable[..., Any]) -> Any:
        return Apart(make, self.record) if self.site.plan.apart else make(record=self.record)

    def add(self, request_id: str, arguments: Mapping[str, Any]) -> None:
        self.engine.add(request_id, arguments)

    def step(self, order: StepOrder, during: During | None = None, watch: bool = False, force: bool = False) -> bool:
        """`EngineCore.step` or `step_with_batch_queue`. Returns False when there was nothing to do, unless a step is forced."""
        if not self.engine.has_requests() and not force:
            return self._settle()
        self.steps += 1
        number, message, promised, allocated, tokens = self.engine.schedule(order, during, watch)
        self._queue.append(_Batch(number, message, promised, allocated, during))
        if not self.spec.late:
            self._execute(self._queue[-1])
        if self.spec.asynchronous and len(self._queue) < AHEAD and (tokens or self.engine.has_requests()):
            return True
        return self._settle()

    def idle(self) -> bool:
        """Whether no request is left and nothing is under way; a connector's pending work does not count."""
        return not self._queue and not self.engine.live()

    def abort(self, request_id: str) -> None:
        """Between two steps, or, where one is under way, before its results are taken in."""
        self.engine.abort(request_id)

    def give_up(self, request_id: str) -> None:
        """The connector is made to name a request as unavailable."""
        self.engine.give_up(request_id)

    def reset(self) -> None:
        """`EngineCore.reset_encoder_cache`. The workers do it in their queue's order, behind the steps they have been sent."""
        self.engine.reset()
        for batch in self._queue:
            self._execute(batch)
        for worker in self.workers:
            worker.reset()

    def fault(self, fault: str, mend: bool) -> None:
        """Apply a fault of the store in this server's own processes; where it has none, the machine's process has it."""
        for part in [*self.workers, self.engine]:
            if isinstance(part, Apart):
                part.fault(fault, mend)

    def shutdown(self, order: str) -> None:
        """Both sides, in either order (`EngineCore.shutdown`: the executor first)."""
        parts = [*self.workers, self.engine]
        for part in parts if order == "worker-first" else reversed(parts):
            part.shutdown()

    def end(self) -> None:
        """End processes of its own, whatever state they are in."""
        for part in [*self.workers, *([self.engine] if hasattr(self, "engine") else [])]:
            if isinstance(part, Apart):
                part.end()

    def _settle(self) -> bool:
        if not self._queue:
            return False
        batch = self._queue[0]
        self._execute(batch)
        self._queue.popleft()
        assert batch.results is not None
        self.engine.update(batch.number, batch.results)
        return True

    def _execute(self, batch: _Batch) -> None:
        if batch.results is not None:
            return
        during = batch.during
        if during is not None and during["at"] == "load":
            event = self.site.damage(during.get("item", 0), during["how"], "load")
            if event is not None:
                self.record(event)
        batch.results = [worker.execute(batch.message, batch.promised, batch.allocated) for worker in self.workers]


class Apart:
    """An object in a process of its own: its methods are called over a pipe, one at a time, and its events come back with them.

    A process that ends is an event of its own. One that hangs holds the caller up; the caller's own watchdog ends both.
    """

    def __init__(self, make: Callable[..., Any], record: Record) -> None:
        self._record = record
        ours, theirs = multiprocessing.Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _serve(make, theirs)
        theirs.close()
        self._pipe: Connection = ours
        self._answer("__init__")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            self._pipe.send((name, arguments))
            return self._answer(name)

        return call

    def end(self) -> None:
        self._pipe.close()
        if self._pid:
            try:
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
            except (ProcessLookupError, ChildProcessError):
                pass
            self._pid = 0

    def _answer(self, name: str) -> Any:
        try:
            events, died, broken, result = self._pipe.recv()
        except (EOFError, OSError):
            _, status = os.waitpid(self._pid, 0)
            self._pid = 0
            if os.waitstatus_to_exitcode(status) in KILLED:
                raise HarnessBrokeError(f"the process of {name} was killed from outside") from None
            ended = f"the process ended with {exit_text(os.waitstatus_to_exitcode(status))}"
            side, _, hook = beacon.last().partition(".")
            self._record(("raised", side, hook, ended, []) if hook else ("raised", "process", name, ended, []))
            raise EngineDied(name) from None
        for event in events:
            self._record(event)
        if broken:
            raise HarnessBrokeError(broken)
        if died:
            raise EngineDied(died)
        return result


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that forked it is gone: a killed caller leaves nobody behind."""
    import ctypes

    pr_set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _serve(make: Callable[..., Any], pipe: Connection) -> None:
    """The child's whole life."""
    die_with_parent()
    gc.disable()
    events: list[Event] = []

    def answer(function: Callable[..., Any], *arguments: Any) -> Any:
        died, broken, result = "", "", None
        try:
            result = function(*arguments)
        except EngineDied as error:
            died = str(error) or "engine"
        except MemoryError:
            raise  # as in `host`
        except Exception as error:
            broken = describe(error)
        sent = list(events)
        events.clear()
        # The object itself stays here.
        pipe.send((sent, died, broken, None if isinstance(function, functools.partial) else result))
        return result

    status = 1
    try:
        target = answer(functools.partial(make, record=events.append))
        while True:
            name, arguments = pipe.recv()
            answer(getattr(target, name), *arguments)
    except (EOFError, OSError):
        status = 0
    finally:
        os._exit(status)


def _unencodable(request: Request, index: int) -> bool:
    return not has_media(request.mm_features[index])


def _config(spec: ServerSpec, place: Site, engine_id: str) -> Any:
    """The VllmConfig of a server, the same for its SCHEDULER and its WORKER objects."""
    return configs.make(
        place.connector_config(spec.role),
        spec.role,
        runner=spec.runner,
        dtype=place.plan.dtype,
        asynchronous=spec.asynchronous,
        engine_id=engine_id,
    )
