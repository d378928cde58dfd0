"""The reference EC connector: encoder outputs in a folder that all servers see, verified before they are
promised.

vLLM loads it with ``ec_connector_module_path`` = ``epd_conformance.connectors.verified_store`` and
``ec_connector`` = ``VerifiedStoreConnector``. How the stored object looks is in ``object_format.py``, how the
decisions fall in ``docs/verified-store.md``.

Rules of the engine that shape it (vLLM 0.32, ``v1/core/sched/scheduler.py`` and
``v1/worker/ec_connector_model_runner_mixin.py``):
    - Once ``has_cache_item`` said True there is no way back: the item is not encoded, and a key that is
      missing after ``start_load_caches`` ends the server. So an object is copied to private memory (a pin),
      verified there, and only then promised; nobody looks at the store again.
    - Only ``ensure_cache_available`` sees the request, hence rows and media; the scheduler calls it right
      before it asks ``has_cache_item`` for the items of the same request. The decision falls there,
      ``has_cache_item`` and ``update_state_after_alloc`` only repeat it.
    - The engine waits for no hook: what it takes is time of every running request. Threads read the store, a
      step waits for them for a few milliseconds altogether, and a request whose object takes longer is held
      back and asked about again in the next step. That needs the scheduler's process alone: on runner V1 no
      worker hook of a consumer runs in a step without tokens.
    - An item that came without media cannot be encoded here. The engine would try, and die. Its request is
      held back instead, and after a while named in ``take_unavailable_requests``: one failed request, a
      living server.
    - No hook is guarded: an exception ends the server. None of these raises, except ``start_load_caches``: it
      raises if a pin cannot be read after all, because a dead server is better than a wrong answer.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.logger import init_logger

from epd_conformance.connectors import reclaim
from epd_conformance.connectors.fingerprint import adapter_fingerprint, model_fingerprint
from epd_conformance.connectors.object_format import (
    Expectation,
    Header,
    ObjectError,
    Reason,
    StatIdentity,
    check,
    encode_parts,
    fill,
    identity_of,
    object_name,
    open_object,
    publish,
    show_key,
    verify_header,
)
from epd_conformance.connectors.pins import Pin, PinArea, Place, read_place
from epd_conformance.connectors.reclaim import Reclaimer, Swept
from epd_conformance.connectors.store_stats import Mailbox, StorePromMetrics, StoreStats, Tally, WorkerTally
from epd_conformance.connectors.store_threads import StoreThreads, Task
from epd_conformance.connectors.widths import widths_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorWorkerMetadata
    from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

try:
    from vllm.distributed.ec_transfer.ec_connector.utils import (
        PlaceholderMetadataResolver,
        collect_ec_item_metadata,
    )
except ImportError:
    # Before 0.30 there were no requests without media, so there is nothing to publish for them and nothing to
    # resolve.
    PlaceholderMetadataResolver = None
    collect_ec_item_metadata = None

try:
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed
except ImportError:  # older versions do not watch for synchronisation
    gpu_sync_allowed: Callable[[], AbstractContextManager[Any]] = nullcontext  # type: ignore[no-redef]

# vLLM configures the logger `vllm` and its children only; the lines of any other logger would be lost.
logger = init_logger("vllm." + __name__)

#: How long a request is held back for the store. With neither media nor an object it then fails: the encode
#: stage has answered before such a request is sent, so the object is there or lost; two seconds cover the
#: attribute caches of network file systems (NFS remembers for up to a second or so that a name did not exist)
#: without looking like a hang. With media it is then encoded here, as if there were no object.
UNAVAILABLE_AFTER_S = 2.0

#: What a scheduler step waits for look-ups, all its requests together. A decode step of a large model takes
#: 20 to 50 ms, and every running request pays for the wait; in 5 ms an object of about 4 MiB is read and
#: verified. What is not done by then is asked about again in the next step.
STEP_WAIT_S = 0.005

#: How long ``has_cache_item`` waits in the one case in which it has to look itself: the engine asks for an item
#: of which it was told before that it holds it (its encoder cache was reset). Rare, and the alternative is an
#: encode, which takes longer.
RESET_WAIT_S = 0.25

#: How often the store is asked for an object that was not there, for a request that cannot go on without it.
POLL_S = 0.02

#: How long a worker waits for one object to be published before it goes on without.
SAVE_WAIT_S = 5.0

#: Look-ups under way at once. More than one, so that one large object does not hold up the small ones.
LOOKUP_THREADS = 4

#: Memory for pins, see ``pins.py``. A pin lives as long as the requests that need it; the largest encoder caches
#: of today (64k rows of 8k values of 2 bytes) are 1 GiB.
PIN_BYTES = 1 << 30

#: A file's time of writing has the grain of the kernel's clock, 4 ms and more. Whether a file is still the one
#: that was looked at, its state tells only if it was at rest then: not written within the last two seconds.
AT_REST_NS = 2_000_000_000

#: How many keys are remembered: what the engine holds, which objects are known good or bad. A few MB.
REMEMBERED_KEYS = 65536

#: So many lines are logged about refused objects for each reason; the rest is only counted.
LINES_PER_REASON = 100

# What vLLM calls an item without a client's uuid where neither its processor cache nor its prefix cache needs a
# hash (renderers/base.py, _process_mm_uuids), with or without a LoRA's name in front.
_COUNTER_KEY = re.compile(r"(.*:)?renderer\d+-mm-\d+-\w+-\d+", re.DOTALL)

_KNOWN_KEYS = ("root", "fsync", "unavailable_after_s", "pin_bytes", "max_bytes", "max_age_s")


@dataclass(frozen=True)
class StoreConfig:
    """The connector's ``ec_connector_extra_config``.

    Attributes:
        root: absolute path of the folder that all servers of the deployment see.
        fsync: flush each object to the disk before it is published.
        unavailable_after_s: see ``UNAVAILABLE_AFTER_S``.
        pin_bytes: see ``PIN_BYTES``.
        max_bytes: producers delete what was not used for the longest time when the store is larger. None: no limit.
        max_age_s: producers delete what was neither written nor used for so many seconds. None: no limit.
    """

    root: Path
    fsync: bool = False
    unavailable_after_s: float = UNAVAILABLE_AFTER_S
    pin_bytes: int = PIN_BYTES
    max_bytes: int | None = None
    max_age_s: float | None = None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> StoreConfig:
        """
        Raises:
            ValueError: a key is missing, unknown or has an impossible value. An unknown key is never ignored:
                a setting that silently does nothing looks like one that works.
        """
        where = "in ec_connector_extra_config of VerifiedStoreConnector"
        for key in extra:
            if key not in _KNOWN_KEYS:
                raise ValueError(f"Unknown key {key!r} {where}; known are: {', '.join(_KNOWN_KEYS)}.")
        root = extra.get("root")
        if not isinstance(root, str) or not Path(root).is_absolute():
            raise ValueError(
                f"`root` {where} is {root!r}; give the absolute path of the folder that all servers share, "
                'for example {"root": "/mnt/shared/ec"}.'
            )
        fsync = extra.get("fsync", False)
        if not isinstance(fsync, bool):
            raise ValueError(f"`fsync` {where} is {fsync!r}; give true or false.")
        after = extra.get("unavailable_after_s", UNAVAILABLE_AFTER_S)
        # The upper limit also keeps out NaN and infinity, with which a request would wait for ever.
        if isinstance(after, bool) or not isinstance(after, int | float) or not 0 <= after <= 3600:
            raise ValueError(f"`unavailable_after_s` {where} is {after!r}; give seconds from 0 to 3600.")
        pins = extra.get("pin_bytes", PIN_BYTES)
        if isinstance(pins, bool) or not isinstance(pins, int) or not 0 <= pins <= 1 << 40:
            raise ValueError(f"`pin_bytes` {where} is {pins!r}; give whole bytes, from 0 to 2**40.")
        size = extra.get("max_bytes")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise ValueError(f"`max_bytes` {where} is {size!r}; give whole bytes, or leave it out for no limit.")
        age = extra.get("max_age_s")
        if age is not None and (isinstance(age, bool) or not isinstance(age, int | float) or not 0 <= age < 1e12):
            raise ValueError(f"`max_age_s` {where} is {age!r}; give seconds, or leave it out for no limit.")
        return cls(Path(root), fsync, float(after), pins, size, None if age is None else float(age))


@dataclass(frozen=True)
class PlannedLoad:
    """One verified item that the worker loads in this step.

    Attributes:
        place: where its rows lie in the scheduler's memory; None if they are here, in ``data``.
    """

    key: str
    rows: int
    width: int
    dtype: str
    place: Place | None
    # Not in the repr: vLLM logs the metadata of the step in which a server dies.
    data: bytes | None = field(default=None, repr=False)


@dataclass
class VerifiedStoreMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What goes from the scheduler's process to the workers in each step. Picklable; empty if there is nothing
    to do.

    Attributes:
        publish: keys whose object is missing or bad and which the worker may hold: it publishes them again.
        fingerprints: of items under a LoRA adapter that the worker may publish in this step, by key.
    """

    loads: tuple[PlannedLoad, ...] = ()
    publish: tuple[str, ...] = ()
    fingerprints: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Refused:
    """A look-up that found nothing to use. ``reason`` is one of ``Reason``, or says what kept it from looking."""

    reason: str


@dataclass(frozen=True)
class _Load:
    """Verified and pinned: will be loaded."""

    pin: Pin
    rows: int


@dataclass(frozen=True)
class _Encode:
    """The engine encodes it, for this reason. Final for the request."""

    reason: str


@dataclass(frozen=True)
class _Held:
    """The engine has it in its encoder cache, as far as can be told. It has media, so a False would do no harm."""

    rows: int
    modality: str


_Decision = _Load | _Encode | _Held


@dataclass
class _RequestState:
    """What was decided for one request since it was (last) admitted.

    Attributes:
        preemptions: the request's count; another one means that it lost what it held, and is decided anew.
        decisions: by key.
        held: keys that the engine has taken room for: it loads or encodes them in that step.
        answers: what has_cache_item said since the last ensure_cache_available.
        asked: keys whose answer was counted.
        awaited: keys for which it was held back when it was last asked for, with the number of rows and the
            modality; ``media`` of it: those that can be encoded here.
        next_look: key -> monotonic time before which the store is not asked for it again.
        checked: on a producer: keys whose object was looked at for this request.
        deadline: monotonic time at which the request is given up; None while nothing is awaited.
        named: it has been given up.
    """

    preemptions: int
    decisions: dict[str, _Decision] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    answers: dict[str, bool] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    awaited: dict[str, tuple[int, str]] = field(default_factory=dict)
    media: set[str] = field(default_factory=set)
    next_look: dict[str, float] = field(default_factory=dict)
    checked: set[str] = field(default_factory=set)
    deadline: float | None = None
    named: bool = False


@dataclass(eq=False)
class _Look:
    """A look-up under way, and the requests that wait for it."""

    task: Task[Pin | _Refused]
    waiters: set[str] = field(default_factory=set)


class _Memory(OrderedDict[str, Any]):
    """A dictionary of keys that forgets the oldest beyond ``REMEMBERED_KEYS``."""

    def note(self, key: str, value: Any = None) -> None:
        self[key] = value
        self.move_to_end(key)
        while len(self) > REMEMBERED_KEYS:
            self.popitem(last=False)


class VerifiedStoreConnector(ECConnectorBase):  # type: ignore[misc]
    """vLLM's ``ECConnectorBase`` over a folder of verified objects.

    Attributes:
        counters: what happened in this process (SCHEDULER: also what its workers have told), by the names of
            ``store_stats.COUNTERS``, with ``:reason`` where they have one.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        transfer = vllm_config.ec_transfer_config
        self._config = StoreConfig.parse(transfer.ec_connector_extra_config or {})
        model_config = vllm_config.model_config
        self._fingerprint = model_fingerprint(vllm_config)
        self._dtype = str(model_config.dtype).removeprefix("torch.")
        # Whisper and its like keep no encoder cache: vLLM asks, but its workers would load nothing.
        self._loads_possible = bool(self.is_consumer) and not getattr(model_config, "is_encoder_decoder", None)
        self._widths = widths_of(model_config)
        self._resolver = PlaceholderMetadataResolver(model_config) if PlaceholderMetadataResolver else None
        self._creator = f"epd-conformance verified store, {socket.gethostname()}, process {os.getpid()}"
        self._warned: set[str] = set()
        self._tally = Tally()
        self.counters = self._tally.total

        scheduler = role is ECConnectorRole.SCHEDULER
        # A lone step in flight is over when the next hook is called; else only update_from_output tells.
        self._overlapping = getattr(vllm_config, "max_concurrent_batches", None) != 1
        self._area = PinArea(
            self._config.pin_bytes if scheduler and self._loads_possible else 0, shared=_workers_are_here(vllm_config)
        )
        self._pins: dict[str, Pin] = {}
        self._replaced: list[Pin] = []  # pins of an adapter that was loaded anew under its name
        self._looks: dict[str, _Look] = {}
        self._checks: dict[str, Task[bool]] = {}
        self._requests: dict[str, _RequestState] = {}
        self._current: _RequestState | None = None
        self._current_id = ""
        self._loads: dict[str, Pin] = {}
        self._publish: set[str] = set()
        self._in_engine = _Memory()  # keys that the engine holds, unless its cache was reset
        self._adapted = _Memory()  # key -> fingerprint, of items under a LoRA adapter
        self._encoded = _Memory()  # worker: key -> fingerprint of what it was encoded with
        self._allocated: set[str] = set()
        self._good = _Memory()  # producer: key -> state of the file in which it was verified
        self._bad = _Memory()  # key -> (state of the file, reason)
        self._budget = STEP_WAIT_S
        self._dispatched = self._completed = 0
        self._threads = StoreThreads(LOOKUP_THREADS if scheduler else 1, "verified-store")
        # Only an encode server on runner V1 loses what its worker reports.
        lossy = self.is_producer and not self.is_consumer
        self._mailbox = Mailbox(str(transfer.engine_id), receive=scheduler) if lossy else None
        self._unsent: dict[str, float] = {}
        self._reclaimer: Reclaimer | None = None

        if self.is_producer and not scheduler:
            if self._config.max_bytes is not None or self._config.max_age_s is not None:
                self._reclaimer = Reclaimer(
                    self._config.root, self._config.max_bytes, self._config.max_age_s, self._swept, self._sweep_failed
                )
            try:
                self._config.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                logger.warning("verified store: cannot make %s, nothing is shared: %s", self._config.root, error)
        elif not self._config.root.is_dir():
            logger.warning("verified store: %s is not there (yet); no item is loaded until it is", self._config.root)
        if scheduler:
            logger.info("verified store: %s, model fingerprint %s", self._config.root, self._fingerprint)
            self._warn_of_counter_keys(vllm_config)

    # ---- scheduler's process ----

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Decide for each item of the request that is not computed yet whether it is loaded or encoded.

        Called for a waiting request when it could be admitted, and for a running one on every step, decode
        included: what ends at or before ``num_computed_tokens``, what the request already holds and what was
        decided is not looked up again.

        Returns:
            False if an item is still looked for, or has neither a usable object nor media; the request is then
            not scheduled in this step.
        """
        self._settle_steps()
        state = self._state(request)
        self._current, self._current_id = state, request.request_id
        state.answers.clear()
        state.awaited.clear()
        state.media.clear()
        lora = getattr(request, "lora_request", None)
        late = state.deadline is not None and time.monotonic() >= state.deadline
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens or feature.identifier in state.held:
                continue
            if lora is not None:
                self._note_adapter(lora, feature.identifier)
            if self._loads_possible:
                self._decide(request.request_id, state, feature, late)
            if self.is_producer and feature.identifier in self._in_engine and not late:
                self._check_published(state, feature)
        if not state.awaited:
            state.deadline = None
        elif state.deadline is None:
            state.deadline = time.monotonic() + self._config.unavailable_after_s
        return not state.awaited

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item is loaded, as decided for the request that is being scheduled.

        A pure producer always says no: it would not load the item either, so the engine would hold it cached
        and never encode or publish it again.
        """
        state = self._current
        if state is None:
            return False
        decision = state.decisions.get(identifier)
        if isinstance(decision, _Held):
            decision = self._decide_after_reset(state, identifier, decision)
        answer = isinstance(decision, _Load)
        state.answers[identifier] = answer
        if identifier not in state.asked:
            state.asked.add(identifier)
            if answer:
                self._tally.add("hits")
            else:
                reason = decision.reason if isinstance(decision, _Encode) else "never-loads"
                self._tally.add("misses", reason=reason)
        return answer

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The engine took room for the item: plan its load if that was the answer. Called for encodes too."""
        key = request.mm_features[index].identifier
        self._in_engine.note(key)
        self._allocated.add(key)
        state = self._requests.get(request.request_id)
        if state is None:
            return
        state.held.add(key)
        decision = state.decisions.get(key)
        if state is self._current and state.answers.get(key) and isinstance(decision, _Load):
            decision.pin.last_step = self._dispatched + 1
            self._loads[key] = decision.pin

    def update_state_after_free(self, request: Request, index: int) -> None:
        """The item is consumed and may be evicted: a later one with the same key is decided anew."""
        state = self._requests.get(request.request_id)
        if state is not None:
            key = request.mm_features[index].identifier
            state.held.discard(key)
            state.decisions.pop(key, None)
            pin = self._pins.get(key)
            if pin is not None and request.request_id in pin.users:
                pin.users[request.request_id] = True
                if self._has_media(request.mm_features[index]):
                    # Should it be preempted, it can be encoded.
                    del pin.users[request.request_id]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> VerifiedStoreMetadata:
        """The loads of this step, and what the worker publishes again in it, once."""
        self._budget = STEP_WAIT_S
        self._dispatched += 1
        for key in getattr(scheduler_output, "free_encoder_mm_hashes", None) or ():
            self._in_engine.pop(key, None)
        metadata = VerifiedStoreMetadata(
            loads=tuple(self._plan(key, pin) for key, pin in self._loads.items()),
            publish=tuple(sorted(self._publish)),
            fingerprints={key: self._adapted[key] for key in self._allocated | self._publish if key in self._adapted},
        )
        self._loads = {}
        self._allocated = set()
        self._publish = set()
        return metadata

    def take_unavailable_requests(self) -> set[str]:
        """The requests that have waited too long for an object; each is named once, and the engine fails it.

        Looks once more before it gives one up: the scheduler may not have come to the request since its
        object came. Called once after each step, also after those that scheduled nothing.
        """
        self._completed = min(self._completed + 1, self._dispatched)
        self._settle_steps()
        given_up: set[str] = set()
        now = time.monotonic()
        for request_id, state in self._requests.items():
            if state.deadline is None or now < state.deadline or state.named:
                continue
            missing = [
                key
                for key, (rows, modality) in sorted(state.awaited.items())
                if key not in state.media and not self._there(request_id, key, rows, modality)
            ]
            if not missing:
                # Its object came, or it has media and will be encoded when the scheduler comes to it.
                continue
            state.named = True
            given_up.add(request_id)
            self._tally.add("unavailable_requests")
            logger.error(
                "verified store: request %s fails: its item %s came without media and has no usable object "
                "after %.1f s",
                request_id,
                show_key(missing[0]),
                self._config.unavailable_after_s,
            )
        self._sweep_pins()
        return given_up

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. A producer reports each item's key and what sizes its placeholder, as vLLM's
        example connector does, so that a client can send the request on without the media.

        Always False in front: 0.32 never frees a request for which an EC connector said True.
        """
        self._settle_steps()
        state = self._requests.pop(request.request_id, None)
        if state is not None and state is self._current:
            self._current = None
        for look in self._looks.values():
            look.waiters.discard(request.request_id)
        for pin in (*self._pins.values(), *self._replaced):
            pin.users.pop(request.request_id, None)
        self._sweep_pins()
        if not self.is_producer or self._resolver is None:
            return False, None
        try:
            return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None
        except Exception as error:
            self._warn("metadata", error, "cannot report the items of request %s", request.request_id)
            return False, None

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Take in what the workers of this step counted (runner V1)."""
        tally = getattr(connector_output, "ec_connector_worker_meta", None)
        if isinstance(tally, WorkerTally):
            self._tally.merge(tally.data)

    def get_ec_connector_stats(self) -> ECConnectorStats | None:
        """What was counted since the last call, in either process; None if nothing was."""
        if self._mailbox is not None and self.role is ECConnectorRole.SCHEDULER:
            for letter in self._mailbox.receive():
                self._tally.merge(letter)
        data = self._tally.take()
        return StoreStats(data) if data else None

    def _state(self, request: Request) -> _RequestState:
        state = self._requests.get(request.request_id)
        if state is None or state.preemptions != request.num_preemptions:
            if state is not None:
                for pin in self._pins.values():
                    if request.request_id in pin.users:
                        pin.users[request.request_id] = False
            state = _RequestState(preemptions=request.num_preemptions)
            self._requests[request.request_id] = state
        return state

    def _decide(self, request_id: str, state: _RequestState, feature: Any, late: bool) -> None:
        """Decide for an item that the request does not hold yet, unless that was done; or note that it waits."""
        key = feature.identifier
        rows = feature.mm_position.get_num_embeds()
        before = state.decisions.get(key)
        media = self._has_media(feature)
        # A client may give one uuid to two items of a request: the rows tell them apart.
        if (isinstance(before, _Load) and before.rows == rows) or (isinstance(before, _Encode) and media):
            return
        if isinstance(before, _Held) and before.rows != rows:
            state.decisions[key] = _Encode(Reason.ROWS)
            return
        state.decisions.pop(key, None)
        if media and key in self._in_engine and not self.is_producer:
            state.decisions[key] = _Held(rows, feature.modality)
            return
        found = None
        if media or time.monotonic() >= state.next_look.get(key, 0.0):
            found = self._ask(request_id, key)
            if isinstance(found, _Refused):
                state.next_look[key] = time.monotonic() + POLL_S
        found = self._fitting(found, key, rows, feature.modality)
        if isinstance(found, Pin):
            found.users[request_id] = False
            state.decisions[key] = _Load(found, rows)
        elif media and isinstance(found, _Refused):
            state.decisions[key] = _Encode(found.reason)
        elif media and late:
            state.decisions[key] = _Encode("slow-store")
        else:
            state.awaited[key] = (rows, feature.modality)
            if media:
                state.media.add(key)

    def _decide_after_reset(self, state: _RequestState, key: str, held: _Held) -> _Decision:
        """The engine asks for an item that it was thought to hold: its cache was reset, or it evicted the item in
        this very pass. The item has media, so that no answer is dangerous."""
        self._in_engine.pop(key, None)
        self._budget = RESET_WAIT_S
        found = self._fitting(self._ask(self._current_id, key), key, held.rows, held.modality)
        self._budget = 0.0
        decision: _Decision = _Encode(found.reason if isinstance(found, _Refused) else "slow-store")
        if isinstance(found, Pin):
            found.users[self._current_id] = False
            decision = _Load(found, held.rows)
        state.decisions[key] = decision
        return decision

    def _ask(self, request_id: str, key: str) -> Pin | _Refused | None:
        """The verified object of a key; None if it is still looked for after what is left of this step's wait."""
        pin = self._pins.get(key)
        if pin is not None and pin.header.model_fingerprint == self._fingerprint_of(key):
            return pin
        if _COUNTER_KEY.fullmatch(key):
            return _Refused("counter-key")
        look = self._looks.get(key)
        if look is None:
            if self._threads.stuck_s() > self._config.unavailable_after_s:
                return _Refused("slow-store")
            look = self._looks[key] = _Look(self._threads.submit(partial(self._pin, key), _Refused(Reason.UNREADABLE)))
        look.waiters.add(request_id)
        began = time.monotonic()
        done = look.task.wait(self._budget)
        waited = time.monotonic() - began
        self._budget -= waited
        self._tally.add("step_wait_seconds", waited)
        if not done:
            return None
        del self._looks[key]
        found = look.task.result
        if isinstance(found, Pin):
            former = self._pins.get(key)
            if former is not None:
                self._replaced.append(former)
            self._pins[key] = found
        elif found.reason == "no-room" and self._make_room():
            return None
        return found

    def _fitting(self, found: Pin | _Refused | None, key: str, rows: int, modality: str) -> Pin | _Refused | None:
        """The same, refused if it is not what this item needs."""
        if not isinstance(found, Pin):
            return found
        header = found.header
        if header.rows != rows:
            self._refuse(key, Reason.ROWS, f"it has {header.rows} rows, the item needs {rows}")
            return _Refused(Reason.ROWS)
        if not self._widths.fits(header.width, modality):
            self._refuse(key, Reason.WIDTH, f"it is {header.width} wide, not {self._widths.wanted(modality)}")
            return _Refused(Reason.WIDTH)
        return found

    def _there(self, request_id: str, key: str, rows: int, modality: str) -> bool:
        """A last look for a request that is about to be given up."""
        found = self._fitting(self._ask(request_id, key), key, rows, modality)
        if isinstance(found, Pin):
            found.users[request_id] = False  # or it would be swept before the scheduler comes to the request
        return isinstance(found, Pin)

    def _note_adapter(self, lora: Any, key: str) -> None:
        """vLLM puts an adapter's name before the key if it changes the tower (--enable-tower-connector-lora)."""
        try:
            if key.startswith(f"{lora.lora_name}:"):
                self._adapted.note(key, adapter_fingerprint(self._fingerprint, str(lora.lora_path)))
        except Exception as error:
            self._warn("adapter", error, "cannot read the adapter of %s; its name stands for it", show_key(key))

    def _check_published(self, state: _RequestState, feature: Any) -> None:
        """Producer: an item that the engine will not encode, because it holds it. Have it published again if its
        object has gone or is bad; until that is known the request waits, since its answer says that it is there."""
        key = feature.identifier
        if key in state.checked or _COUNTER_KEY.fullmatch(key):
            return
        rows = feature.mm_position.get_num_embeds()
        check_ = self._checks.get(key)
        if check_ is None:
            if self._threads.stuck_s() > self._config.unavailable_after_s:
                return
            check_ = self._checks[key] = self._threads.submit(
                partial(self._is_good, key, rows, feature.modality), False
            )
        began = time.monotonic()
        done = check_.wait(self._budget)
        waited = time.monotonic() - began
        self._budget -= waited
        self._tally.add("step_wait_seconds", waited)
        if not done:
            state.awaited[key] = (rows, feature.modality)
            state.media.add(key)
            return
        self._checks.pop(key, None)
        state.checked.add(key)
        if not check_.result:
            self._publish.add(key)

    def _plan(self, key: str, pin: Pin) -> PlannedLoad:
        header = pin.header
        place = self._area.place(pin)
        data = bytes(pin.rows()) if place is None else None
        return PlannedLoad(key, header.rows, header.width, header.dtype, place, data)

    def _settle_steps(self) -> None:
        """Without overlapping steps, the step that was dispatched last has ended when the next hook is called."""
        if not self._overlapping:
            self._completed = self._dispatched

    def _sweep_pins(self) -> None:
        """Drop what no unfinished request and no dispatched step can name, and look-ups that nobody waits for."""
        for key, look in list(self._looks.items()):
            if not look.waiters and look.task.wait(0):
                del self._looks[key]
                if isinstance(look.task.result, Pin):
                    self._area.release(look.task.result.room)
        for key, task in list(self._checks.items()):
            if task.wait(0) and not any(key in state.awaited for state in self._requests.values()):
                del self._checks[key]
        for key, pin in list(self._pins.items()):
            if not pin.users and pin.last_step <= self._completed:
                del self._pins[key]
                self._area.release(pin.room)
        for pin in list(self._replaced):
            if not pin.users and pin.last_step <= self._completed:
                self._replaced.remove(pin)
                self._area.release(pin.room)

    def _make_room(self) -> bool:
        """At the limit: also drop pins that every request has consumed; a preempted one looks in the store again.
        Whether there were any."""
        spare = [key for key, pin in self._pins.items() if all(pin.users.values()) and pin.last_step <= self._completed]
        for key in spare:
            self._area.release(self._pins.pop(key).room)
        return bool(spare)

    def _has_media(self, feature: Any) -> bool:
        """Whether the engine could encode the item: it has anything besides what sizes its placeholder.

        Mirrors ``_fail_or_fallback`` of vLLM's ECCPUConnector. If in doubt, no: that fails one request, while
        the opposite error ends the server.
        """
        if not feature.data:
            return False
        try:
            sizing = self._resolver.fields_for(feature.modality) if self._resolver else set()
            return any(value.data is not None for name, value in feature.data.items() if name not in sizing)
        except Exception as error:
            self._warn("media", error, "cannot tell whether %s has media", show_key(feature.identifier))
            return False

    def _warn_of_counter_keys(self, vllm_config: VllmConfig) -> None:
        multimodal = getattr(vllm_config.model_config, "multimodal_config", None)
        cache = getattr(vllm_config, "cache_config", None)
        without_hash = getattr(multimodal, "mm_processor_cache_gb", None) == 0
        if without_hash and not getattr(cache, "enable_prefix_caching", True):
            logger.warning(
                "verified store: with --mm-processor-cache-gb 0 and without prefix caching this server numbers its "
                "items instead of hashing them, and equal numbers mean different media; items without a client's "
                "uuid are not shared"
            )

    # ---- threads of the scheduler's process ----

    def _pin(self, key: str) -> Pin | _Refused:
        """Copy the stored object to private memory and verify the copy, completely but for rows and width."""
        began = time.monotonic()
        path = self._config.root / object_name(key)
        room = identity = None
        try:
            with open_object(path) as (descriptor, status):
                identity = identity_of(status)
                known = self._bad.get(key)
                if known is not None and known[0] == identity:
                    return _Refused(known[1])
                room = self._area.reserve(status.st_size)
                if room is None:
                    return _Refused("no-room")
                filled = fill(descriptor, room.view)
                reclaim.touch(path, status)
            header, start = check(room.view[:filled])
            verify_header(header, Expectation(key, self._fingerprint_of(key), dtype=self._dtype))
            pin = Pin(header, room, start, filled)
            room = None  # the pin's now
            return pin
        except Exception as error:
            return _Refused(self._found_bad(key, path, identity, error))
        finally:
            if room is not None:
                self._area.release(room)
            self._tally.add("lookup_seconds", time.monotonic() - began)

    def _is_good(self, key: str, rows: int, modality: str) -> bool:
        """Producer: whether the object of a key is there and is what this server would publish."""
        path = self._config.root / object_name(key)
        identity = None
        try:
            with open_object(path) as (descriptor, status):
                identity = identity_of(status)
                if self._good.get(key) == (identity, rows):
                    return True
                buffer = memoryview(bytearray(status.st_size))
                filled = fill(descriptor, buffer)
            header, _ = check(buffer[:filled])
            verify_header(header, Expectation(key, self._fingerprint_of(key), rows=rows, dtype=self._dtype))
            if not self._widths.fits(header.width, modality):
                raise ObjectError(Reason.WIDTH, f"it is {header.width} wide, not {self._widths.wanted(modality)}")
        except Exception as error:
            self._found_bad(key, path, identity, error)
            return False
        if _at_rest(identity):
            self._good.note(key, (identity, rows))
        return True

    def _found_bad(self, key: str, path: Path, identity: StatIdentity | None, error: Exception) -> str:
        """Count, log and, if the object is damaged, quarantine it. Returns the reason."""
        reason = error.reason if isinstance(error, ObjectError) else Reason.UNREADABLE
        if reason is Reason.MISSING:
            return reason
        self._refuse(key, reason, str(error))
        if identity is not None and _at_rest(identity):
            self._bad.note(key, (identity, str(reason)))
        try:
            # What is no file at all keeps the key from ever being published.
            if reason in reclaim.DAMAGED or path.is_dir():
                moved = reclaim.quarantine(self._config.root, path, reason, identity)
                if moved is not None:
                    self._tally.add("quarantined", reason=reason)
        except OSError as trouble:
            self._warn("quarantine", trouble, "cannot quarantine the object of %s", show_key(key))
        return reason

    def _refuse(self, key: str, reason: Reason, message: str) -> None:
        if self._tally.add("refused", reason=reason) <= LINES_PER_REASON:
            logger.warning("verified store: the object of %s is not used (%s): %s", show_key(key), reason, message)

    # ---- worker's process ----

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Publish one encoder output. V1 calls it on every role, so it does nothing on a consumer. Never
        raises: what cannot be stored is not shared, and consumers with media encode it themselves."""
        if self.is_producer:
            fingerprint = self._fingerprint_of(mm_hash)
            self._encoded.note(mm_hash, fingerprint)
            self._save(encoder_cache, mm_hash, fingerprint)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Publish again what the scheduler's side named, if this worker holds it. Never raises."""
        metadata = self._connector_metadata
        encoder_cache = kwargs.get("encoder_cache")
        if not isinstance(metadata, VerifiedStoreMetadata) or encoder_cache is None:
            return
        for key, fingerprint in metadata.fingerprints.items():
            self._adapted.note(key, fingerprint)
        for key in metadata.publish:
            # Of what it was encoded with, whatever adapter has that name now. Not encoded here: loaded (a server of both
            # roles), or too long ago.
            made_with = self._encoded.get(key, None if key in self._adapted else self._fingerprint)
            # What it does not hold is encoded and saved in this step.
            if made_with is not None and key in encoder_cache and self._save(encoder_cache, key, made_with):
                self._tally.add("republished")
                logger.info("verified store: published %s again", show_key(key))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Load what the scheduler's side planned for this step.

        Raises:
            RuntimeError: a pin cannot be read. This ends the server; the engine has already given up encoding
                the item, and anything else put under its key would be wrong.
        """
        metadata = self._connector_metadata
        if metadata is None:
            return
        if not isinstance(metadata, VerifiedStoreMetadata):
            raise RuntimeError(f"VerifiedStoreConnector was bound to metadata of another connector: {type(metadata)}")
        for plan in metadata.loads:
            if plan.key in encoder_cache:
                continue
            began = time.monotonic()
            try:
                tensor = _load(plan)
            except OSError as error:
                raise RuntimeError(
                    f"The verified copy of {show_key(plan.key)} cannot be read in the worker: {error}. The server stops "
                    "rather than answer from a missing embedding; its worker must run on the host and as the user of "
                    "its scheduler, with the same /proc."
                ) from error
            with gpu_sync_allowed():
                encoder_cache[plan.key] = tensor.to(_device())
            self._tally.add("loads")
            self._tally.add("loaded_bytes", tensor.nbytes)
            self._tally.add("load_seconds", time.monotonic() - began)
            logger.debug("verified store: loaded %s", show_key(plan.key))

    def build_connector_worker_meta(self) -> ECConnectorWorkerMetadata | None:
        """What this worker counted since it last reported; None if nothing. V2 has taken it from
        ``get_ec_connector_stats`` before."""
        if self._mailbox is not None:
            return None
        data = self._tally.take()
        return WorkerTally(data) if data else None

    def clear_connector_metadata(self) -> None:
        """The last hook of a step: on a V1 encode server the only way to report what was counted is a letter."""
        super().clear_connector_metadata()
        if self._mailbox is not None:
            for name, value in self._tally.take().items():
                self._unsent[name] = self._unsent.get(name, 0) + value
            if self._mailbox.send(self._unsent):
                self._unsent = {}

    def _save(self, encoder_cache: dict[str, torch.Tensor], key: str, fingerprint: str) -> bool:
        """Whether the object was published."""
        if _COUNTER_KEY.fullmatch(key):
            self._tally.add("save_failures", reason="counter-key")
            return False
        if not _saves_here():
            return False
        began = time.monotonic()
        try:
            if self._threads.stuck_s() > SAVE_WAIT_S:
                raise TimeoutError("the store still has not answered an earlier call")
            with gpu_sync_allowed():
                tensor = encoder_cache[key].detach().cpu().contiguous()
            header = Header.of(tensor, key=key, model_fingerprint=fingerprint, creator=self._creator)
            parts = encode_parts(tensor, header)
            lost: Exception | None = RuntimeError("the call was lost")
            task = self._threads.submit(partial(self._publish_parts, key, parts), lost)
            if not task.wait(SAVE_WAIT_S):
                raise TimeoutError(f"the store has not answered within {SAVE_WAIT_S:g} s")
            if task.result is not None:
                raise task.result
        except Exception as error:
            self._tally.add("save_failures", reason=type(error).__name__)
            self._warn(f"save {type(error).__name__}", error, "cannot publish %s", show_key(key))
            return False
        finally:
            self._tally.add("save_seconds", time.monotonic() - began)
        self._tally.add("saves")
        self._tally.add("saved_bytes", tensor.nbytes)
        if self._reclaimer is not None:
            self._reclaimer.saved(sum(map(len, parts)))
        logger.debug("verified store: published %s", show_key(key))
        return True

    def _publish_parts(self, key: str, parts: tuple[bytes, memoryview]) -> Exception | None:
        try:
            publish(self._config.root, key, parts, fsync=self._config.fsync)
        except IsADirectoryError:
            return self._publish_over_folder(key, parts)
        except Exception as error:
            return error
        return None

    def _publish_over_folder(self, key: str, parts: tuple[bytes, memoryview]) -> Exception | None:
        """Nothing can be renamed over a folder: have it out of the way first."""
        root = self._config.root
        try:
            reclaim.quarantine(root, root / object_name(key), Reason.UNREADABLE, None)
            publish(root, key, parts, fsync=self._config.fsync)
        except OSError as error:
            return error
        return None

    def _swept(self, swept: Swept) -> None:
        self._tally.add("reclaimed", swept.objects)
        self._tally.add("reclaimed_bytes", swept.bytes)

    def _sweep_failed(self, error: OSError) -> None:
        self._warn("reclaim", error, "cannot reclaim in %s", self._config.root)

    # ---- both ----

    def _fingerprint_of(self, key: str) -> str:
        """Of the model, or of it under the adapter that the item of this key is encoded with."""
        return str(self._adapted.get(key, self._fingerprint))

    def shutdown(self) -> None:
        """Let go of memory, threads and sockets. Safe to repeat and with requests under way."""
        self._threads.stop()
        self._area.close()
        if self._mailbox is not None:
            self._mailbox.close()
        if self._reclaimer is not None:
            self._reclaimer.stop()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECConnectorStats | None:
        return StoreStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ECConnectorPromMetrics:
        return StorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _warn(self, kind: str, error: Exception, message: str, *args: object) -> None:
        """Log the first failure of its kind: a full disk fails every item."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("verified store: " + message + " (further ones are only counted): %s", *args, error)


def _load(plan: PlannedLoad) -> torch.Tensor:
    """The rows of a planned load, in memory of this process.

    Raises:
        OSError: they cannot be read.
    """
    import torch

    dtype = getattr(torch, plan.dtype)
    tensor = torch.empty((plan.rows, plan.width), dtype=dtype)
    if not tensor.numel():
        return tensor
    view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    if plan.place is not None:
        read_place(plan.place, view)
    elif plan.data is not None and len(plan.data) == len(view):
        view[:] = plan.data
    else:
        raise OSError(f"the step brought no bytes for {show_key(plan.key)}")
    return tensor


def _at_rest(identity: StatIdentity | None) -> bool:
    """Whether the file had not been written for a while, so that its state identifies its content."""
    return identity is not None and time.time_ns() - identity.mtime_ns > AT_REST_NS


def _workers_are_here(vllm_config: Any) -> bool:
    """Whether all workers run on the host of the scheduler, and can open files of its process."""
    parallel = getattr(vllm_config, "parallel_config", None)
    return getattr(parallel, "nnodes", 1) == 1 and getattr(parallel, "distributed_executor_backend", None) != "ray"


def _saves_here() -> bool:
    """Whether this is the rank that publishes: all ranks of a tensor-parallel encoder hold the same rows."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        return True
    return bool(parallel_state.get_tensor_model_parallel_rank() == 0)


def _device() -> str:
    """The runner's device. A bare ``cuda`` would put every rank's tensors on the first GPU."""
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    return f"{device}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else device
