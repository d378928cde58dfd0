"""The reference EC connector: encoder outputs in a folder that all servers see, verified before they are
promised.

vLLM loads it with ``ec_connector_module_path`` = ``epd_conformance.connectors.verified_store`` and
``ec_connector`` = ``VerifiedStoreConnector``. How the stored object looks is in ``object_format.py``, how the
decisions fall in ``docs/verified-store.md``.

Rules of the engine that shape it (vLLM 0.32, ``v1/core/sched/scheduler.py`` and
``v1/worker/ec_connector_model_runner_mixin.py``):
    - Once ``has_cache_item`` said True there is no way back: the item is not encoded, and a key that is
      missing after ``start_load_caches`` ends the server. So an object is verified completely before it is
      promised.
    - Only ``ensure_cache_available`` sees the request, hence rows and media; the scheduler calls it right
      before it asks ``has_cache_item`` for the items of the same request. The decision falls there,
      ``has_cache_item`` and ``update_state_after_alloc`` only repeat it.
    - An item that came without media cannot be encoded here. The engine would try, and die. Its request is
      held back instead, and after a while named in ``take_unavailable_requests``: one failed request, a
      living server.
    - No hook is guarded: an exception ends the server. None of these raises, except ``start_load_caches``: it
      raises if a promised object cannot be verified after all, because a dead server is better than a wrong
      answer.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from epd_conformance.connectors.fingerprint import model_fingerprint
from epd_conformance.connectors.object_format import (
    Expectation,
    Header,
    ObjectError,
    Reason,
    StatIdentity,
    encode,
    load,
    publish,
    show_key,
    stat_identity,
)

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
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

#: How long a request whose item has neither media nor an object is held back before it fails. The encode
#: stage has answered before such a request is sent, so the object is there or lost; two seconds cover the
#: attribute caches of network file systems (NFS remembers for up to a second or so that a name did not exist)
#: without looking like a hang.
UNAVAILABLE_AFTER_S = 2.0

_KNOWN_KEYS = ("root", "fsync", "unavailable_after_s")


@dataclass(frozen=True)
class StoreConfig:
    """The connector's ``ec_connector_extra_config``.

    Attributes:
        root: absolute path of the folder that all servers of the deployment see.
        fsync: flush each object to the disk before it is published.
        unavailable_after_s: see ``UNAVAILABLE_AFTER_S``.
    """

    root: Path
    fsync: bool = False
    unavailable_after_s: float = UNAVAILABLE_AFTER_S

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
        return cls(root=Path(root), fsync=fsync, unavailable_after_s=float(after))


@dataclass(frozen=True)
class PlannedLoad:
    """One object that the worker loads in this step: what the scheduler's side saw when it verified it."""

    key: str
    rows: int
    width: int
    dtype: str


@dataclass
class VerifiedStoreMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """What goes from the scheduler's process to the workers in each step. Picklable; empty if there is no
    load."""

    loads: tuple[PlannedLoad, ...] = ()


@dataclass(frozen=True)
class _Available:
    """Verified at that state of the file: will be loaded."""

    plan: PlannedLoad
    identity: StatIdentity


@dataclass(frozen=True)
class _Local:
    """Not usable, but the media are here: the engine encodes it. Final for the request."""


@dataclass(frozen=True)
class _Awaited:
    """Not usable and no media. `identity` is the state of the bad file, None if there was none."""

    rows: int
    identity: StatIdentity | None


_Decision = _Available | _Local | _Awaited


@dataclass
class _RequestState:
    """What was decided for one request since it was (last) admitted.

    Attributes:
        preemptions: the request's count; another one means that it lost what it held, and is decided anew.
        decisions: by key.
        held: keys that the engine has taken room for: it loads or encodes them in that step.
        answers: what has_cache_item said since the last ensure_cache_available.
        awaited: keys for which it was held back when it was last asked for.
        deadline: monotonic time at which the request is given up; None while nothing is awaited.
        named: it has been given up.
    """

    preemptions: int
    decisions: dict[str, _Decision] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    answers: dict[str, bool] = field(default_factory=dict)
    awaited: set[str] = field(default_factory=set)
    deadline: float | None = None
    named: bool = False


class VerifiedStoreConnector(ECConnectorBase):  # type: ignore[misc]
    """vLLM's ``ECConnectorBase`` over a folder of verified objects.

    Attributes:
        counters: what happened in this process: ``published``, ``publish-failed:<exception>``, ``loaded``,
            ``available``, ``refused:<reason>``, ``given-up``.
    """

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        self._config = StoreConfig.parse(vllm_config.ec_transfer_config.ec_connector_extra_config or {})
        model_config = vllm_config.model_config
        self._fingerprint = model_fingerprint(vllm_config)
        self._dtype = str(model_config.dtype).removeprefix("torch.")
        # Whisper and its like keep no encoder cache: vLLM asks, but its workers would load nothing.
        self._loads_possible = bool(self.is_consumer) and not getattr(model_config, "is_encoder_decoder", False)
        # Every family packs one vector of this width for each decoder layer it feeds: one, or more with
        # DeepStack.
        self._width_multiple = int(model_config.get_inputs_embeds_size())
        self._resolver = PlaceholderMetadataResolver(model_config) if PlaceholderMetadataResolver else None
        self._creator = f"epd-conformance verified store, {socket.gethostname()}, process {os.getpid()}"
        self.counters: Counter[str] = Counter()

        self._requests: dict[str, _RequestState] = {}
        self._current: _RequestState | None = None
        self._loads: dict[str, PlannedLoad] = {}

        if self.is_producer and role is ECConnectorRole.WORKER:
            try:
                self._config.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                logger.warning("verified store: cannot make %s, nothing is shared: %s", self._config.root, error)
        elif not self._config.root.is_dir():
            logger.warning("verified store: %s is not there (yet); no item is loaded until it is", self._config.root)

    # ---- scheduler's process ----

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Decide for each item of the request that is not computed yet whether it is loaded or encoded.

        Called for a waiting request when it could be admitted, and for a running one on every step, decode
        included: what ends at or before ``num_computed_tokens`` and what the request already holds is not
        looked up again.

        Returns:
            False if an item has neither a usable object nor media; the request is then not scheduled in this
            step.
        """
        self._current = None
        if not self._loads_possible:
            return True
        state = self._requests.get(request.request_id)
        if state is None or state.preemptions != request.num_preemptions:
            state = _RequestState(preemptions=request.num_preemptions)
            self._requests[request.request_id] = state
        state.answers.clear()
        state.awaited.clear()
        self._current = state

        running = request.status is RequestStatus.RUNNING
        for feature in request.mm_features:
            position = feature.mm_position
            if position.offset + position.length <= num_computed_tokens or feature.identifier in state.held:
                continue
            decided = isinstance(state.decisions.get(feature.identifier), _Available | _Local)
            if decided and running and position.offset < num_computed_tokens:
                # Partly computed, so the engine holds it, perhaps from another request (it does not say so).
                continue
            if isinstance(self._decide(state, feature), _Awaited):
                state.awaited.add(feature.identifier)
        if not state.awaited:
            state.deadline = None
        elif state.deadline is None:
            state.deadline = time.monotonic() + self._config.unavailable_after_s
        return not state.awaited

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the item is loaded, as decided for the request that is being scheduled. Touches nothing.

        A pure producer always says no: it would not load the item either, so the engine would hold it cached
        and never encode or publish it again.
        """
        state = self._current
        if state is None:
            return False
        answer = isinstance(state.decisions.get(identifier), _Available)
        state.answers[identifier] = answer
        return answer

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The engine took room for the item: plan its load if that was the answer. Called for encodes too."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        key = request.mm_features[index].identifier
        state.held.add(key)
        decision = state.decisions.get(key)
        if state is self._current and state.answers.get(key) and isinstance(decision, _Available):
            self._loads[key] = decision.plan

    def update_state_after_free(self, request: Request, index: int) -> None:
        """The item is consumed and may be evicted: a later one with the same key is decided anew."""
        state = self._requests.get(request.request_id)
        if state is not None:
            key = request.mm_features[index].identifier
            state.held.discard(key)
            state.decisions.pop(key, None)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> VerifiedStoreMetadata:
        """The loads of this step, once."""
        metadata = VerifiedStoreMetadata(loads=tuple(self._loads.values()))
        self._loads = {}
        return metadata

    def take_unavailable_requests(self) -> set[str]:
        """The requests that have waited too long for an object; each is named once, and the engine fails it.

        Looks once more before it gives one up: the scheduler may not have come to the request since its
        object came.
        """
        given_up: set[str] = set()
        now = time.monotonic()
        for request_id, state in self._requests.items():
            if state.deadline is None or now < state.deadline or state.named:
                continue
            for key, before in list(state.decisions.items()):
                if key in state.awaited and isinstance(before, _Awaited):
                    state.decisions[key] = self._look(key, before.rows, before)
            missing = sorted(key for key in state.awaited if isinstance(state.decisions.get(key), _Awaited))
            if not missing:
                state.deadline = None
                continue
            state.named = True
            given_up.add(request_id)
            self.counters["given-up"] += 1
            logger.error(
                "verified store: request %s fails: its item %s came without media and has no usable object "
                "after %.1f s",
                request_id,
                show_key(missing[0]),
                self._config.unavailable_after_s,
            )
        return given_up

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. A producer reports each item's key and what sizes its placeholder, as vLLM's
        example connector does, so that a client can send the request on without the media.

        Always False in front: 0.32 never frees a request for which an EC connector said True.
        """
        state = self._requests.pop(request.request_id, None)
        if state is not None and state is self._current:
            self._current = None
        if not self.is_producer or self._resolver is None:
            return False, None
        try:
            return False, collect_ec_item_metadata(request.mm_features, self._resolver) or None
        except Exception as error:
            self._failed("metadata-failed", error, "cannot report the items of request %s", request.request_id)
            return False, None

    def _decide(self, state: _RequestState, feature: Any) -> _Decision:
        """The decision for an item that the request does not hold yet, taken now if there is none that still
        stands."""
        key = feature.identifier
        rows = feature.mm_position.get_num_embeds()
        before = state.decisions.get(key)
        if isinstance(before, _Local):
            if self._has_media(feature):
                return before
            before = None
        if isinstance(before, _Available):
            # Not loaded yet: the request may have waited for room since. A look at the file's state is cheap
            # and keeps the time between promise and load short.
            # A client may give one uuid to two items of the request: the rows tell them apart.
            if before.plan.rows == rows and stat_identity(self._config.root, key) == before.identity:
                return before
            before = None
        decision: _Decision = self._look(key, rows, before)
        if isinstance(decision, _Awaited) and self._has_media(feature):
            decision = _Local()
        state.decisions[key] = decision
        return decision

    def _look(self, key: str, rows: int, before: _Awaited | None) -> _Available | _Awaited:
        """Verify the stored object completely, unless it is in the same bad state as before. Never raises."""
        identity = stat_identity(self._config.root, key)
        if before is not None and identity == before.identity and before.rows == rows:
            return before
        expect = Expectation(
            key=key,
            fingerprint=self._fingerprint,
            rows=rows,
            dtype=self._dtype,
            width_multiple=self._width_multiple,
        )
        try:
            header, _, identity = load(self._config.root, expect)
        except Exception as error:
            reason = error.reason if isinstance(error, ObjectError) else Reason.UNREADABLE
            self._failed(
                f"refused:{reason}",
                error,
                "cannot use the object of %s",
                show_key(key),
                loud=reason is not Reason.MISSING,
            )
            return _Awaited(rows=rows, identity=identity)
        self.counters["available"] += 1
        return _Available(PlannedLoad(key=key, rows=rows, width=header.width, dtype=header.dtype), identity)

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
            self._failed("media-unknown", error, "cannot tell whether %s has media", show_key(feature.identifier))
            return False

    # ---- worker's process ----

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Publish one encoder output. V1 calls it on every role, so it does nothing on a consumer. Never
        raises: what cannot be stored is not shared, and consumers with media encode it themselves."""
        if not self.is_producer:
            return
        try:
            with gpu_sync_allowed():
                tensor = encoder_cache[mm_hash].detach().cpu()
            header = Header.of(tensor, key=mm_hash, model_fingerprint=self._fingerprint, creator=self._creator)
            publish(self._config.root, mm_hash, encode(tensor, header), fsync=self._config.fsync)
        except Exception as error:
            self._failed(f"publish-failed:{type(error).__name__}", error, "cannot publish %s", show_key(mm_hash))
        else:
            self.counters["published"] += 1
            logger.debug("verified store: published %s", show_key(mm_hash))

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Load what the scheduler's side planned for this step, verified again.

        Raises:
            RuntimeError: an object was verified when it was promised and is not any more. This ends the
                server; the engine has already given up encoding the item, and anything put under its key
                would be wrong.
        """
        metadata = self._connector_metadata
        if metadata is None:
            return
        if not isinstance(metadata, VerifiedStoreMetadata):
            raise RuntimeError(f"VerifiedStoreConnector was bound to metadata of another connector: {type(metadata)}")
        for plan in metadata.loads:
            if plan.key in encoder_cache:
                continue
            expect = Expectation(plan.key, self._fingerprint, plan.rows, plan.dtype, plan.width)
            try:
                _, tensor, _ = load(self._config.root, expect)
            except ObjectError as error:
                raise RuntimeError(
                    f"The encoder output of {show_key(plan.key)} was verified when this step was scheduled "
                    f"and cannot be loaded now ({error.reason}): {error}. The server stops rather than "
                    "answer from a wrong or missing embedding; find out what deletes or changes "
                    f"objects in {self._config.root} while they are in use."
                ) from error
            with gpu_sync_allowed():
                encoder_cache[plan.key] = tensor.to(_device())
            self.counters["loaded"] += 1
            logger.debug("verified store: loaded %s", show_key(plan.key))

    def _failed(self, counter: str, error: Exception, message: str, *args: object, loud: bool = True) -> None:
        """Count a contained failure and log the first of its kind: a full disk fails every item."""
        self.counters[counter] += 1
        if loud and self.counters[counter] == 1:
            logger.warning("verified store: " + message + " (further ones are only counted): %s", *args, error)


def _device() -> str:
    """The runner's device. A bare ``cuda`` would put every rank's tensors on the first GPU."""
    from vllm.platforms import current_platform

    device = str(current_platform.device_type)
    return f"{device}:{current_platform.current_device()}" if current_platform.is_cuda_alike() else device
