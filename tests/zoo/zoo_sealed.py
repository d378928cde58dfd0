"""Right connectors that stand up to damage, wait for references or report statistics, and others one small change away from them.

`planted_engine` has those whose store nobody damages.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import pickle
import time
from dataclasses import dataclass, field
from typing import Any

import blake3
import torch
from planted_engine import PlainProbe, PlainStore, PlainSubject
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorMetadata

from epd_conformance import Feature, StackInfo
from epd_conformance.probe import Rows


@dataclass
class Bytes(ECConnectorMetadata):
    """What the worker loads: it looks at no store, so that nothing can happen to an object between look-up and load."""

    objects: dict[str, bytes] = field(default_factory=dict)


def sealed(key: str, body: bytes, shape: list[int], dtype: str) -> bytes:
    head = {"key": key, "shape": shape, "dtype": dtype, "digest": blake3.blake3(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


class Bad(Exception):
    """An object that is not what it should be."""


class SealedStore(PlainStore):
    """Reads and checks an object when it is looked up."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.dtype = vllm_config.model_config.dtype
        self.hidden = vllm_config.model_config.get_inputs_embeds_size()
        self.rows: dict[str, int] = {}
        self.objects: dict[str, bytes] = {}

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self.write(key, sealed(key, body_of(tensor), list(tensor.shape), str(tensor.dtype)))

    def write(self, key: str, data: bytes) -> None:
        path = self.path(key)
        temporary = path.with_name(f".{path.name}-{id(self)}-{time.perf_counter_ns()}")
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        for item in request.mm_features:
            mask = item.mm_position.is_embed
            self.rows[item.identifier] = item.mm_position.length if mask is None else int(mask.sum())
        return True

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = False
        if self.is_consumer and self.used:
            data = self.found(identifier)
            self.asked[identifier] = data is not None
            if data is not None:
                self.objects[identifier] = data
        return self.asked[identifier]

    def found(self, key: str) -> bytes | None:
        try:
            data = self.path(key).read_bytes()
            self.opened(key, data)
        except (OSError, Bad):
            return None
        return data

    def opened(self, key: str, data: bytes) -> torch.Tensor:
        head, body = self.parsed(data)
        self.check_key(key, head)
        self.check_digest(head, body)
        self.check_fit(key, head)
        return tensor_of(head, body)

    def parsed(self, data: bytes) -> tuple[dict[str, Any], bytes]:
        head, _, body = data.partition(b"\n")
        try:
            made = json.loads(head)
        except ValueError as error:
            raise Bad from error
        if not isinstance(made, dict):
            raise Bad
        return made, body

    def check_key(self, key: str, head: dict[str, Any]) -> None:
        if head["key"] != key:
            raise Bad

    def check_digest(self, head: dict[str, Any], body: bytes) -> None:
        if blake3.blake3(body).hexdigest() != head["digest"]:
            raise Bad

    def check_fit(self, key: str, head: dict[str, Any]) -> None:
        rows, width = head["shape"]
        if rows != self.rows.get(key, rows) or width % self.hidden or head["dtype"] != str(self.dtype):
            raise Bad

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        loads, self.loads = self.loads, []
        objects, self.objects = self.objects, {}
        return Bytes({key: objects[key] for key in loads})

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key, data in self._get_connector_metadata().objects.items():
            if key not in encoder_cache:
                encoder_cache[key] = self.unpacked(key, data)

    def unpacked(self, key: str, data: bytes) -> torch.Tensor:
        return tensor_of(*self.parsed(data))


def body_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def tensor_of(head: dict[str, Any], body: bytes) -> torch.Tensor:
    kind = getattr(torch, head["dtype"].removeprefix("torch."))
    return torch.frombuffer(bytearray(body), dtype=kind).view(head["shape"])


# ---- objects ----


class TrustsForm(SealedStore):
    """Takes rows, width and type as the object has them."""

    def check_fit(self, key: str, head: dict[str, Any]) -> None: ...


class RowBroadcast(SealedStore):
    """Spreads a single row over all."""

    def check_fit(self, key: str, head: dict[str, Any]) -> None:
        if head["shape"][0] != 1:
            super().check_fit(key, head)

    def has_cache_item(self, identifier: str) -> bool:
        found = super().has_cache_item(identifier)
        if found:
            head, body = self.parsed(self.objects[identifier])
            rows = self.rows.get(identifier, 1)
            if head["shape"][0] == 1:
                shape = [rows, head["shape"][1]]
                self.objects[identifier] = sealed(identifier, body * rows, shape, head["dtype"])
        return found


class NoChecksum(SealedStore):
    """Compares lengths and nothing else."""

    def check_digest(self, head: dict[str, Any], body: bytes) -> None:
        rows, width = head["shape"]
        if len(body) != rows * width * getattr(torch, head["dtype"][6:]).itemsize:
            raise Bad


class NoLength(SealedStore):
    """Checks nothing that is behind the head."""

    def check_digest(self, head: dict[str, Any], body: bytes) -> None: ...


class AnyKey(SealedStore):
    """Takes whatever object lies under the key for the key's own."""

    def check_key(self, key: str, head: dict[str, Any]) -> None: ...


class ParsesCarelessly(SealedStore):
    """Expects an object to be one."""

    def parsed(self, data: bytes) -> tuple[dict[str, Any], bytes]:
        head, _, body = data.partition(b"\n")
        return json.loads(head), body


class KeepsBadObjects(SealedStore):
    """A producer does not encode what is there already, whatever that is."""

    def has_cache_item(self, identifier: str) -> bool:
        if not self.is_consumer:
            return self.path(identifier).exists()
        return super().has_cache_item(identifier)


class ReadsLate(SealedStore):
    """Checks when it looks up, and reads again when it loads."""

    def unpacked(self, key: str, data: bytes) -> torch.Tensor:
        return tensor_of(*self.parsed(self.path(key).read_bytes()))


class ExistsIsEnough(SealedStore):
    """Looks up whether there is a file, and opens it when it loads."""

    def found(self, key: str) -> bytes | None:
        try:
            return self.path(key).read_bytes()
        except OSError:
            return None

    def unpacked(self, key: str, data: bytes) -> torch.Tensor:
        return self.opened(key, data)


class RemembersYes(SealedStore):
    """Does not look twice for an item that was there once."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.known: set[str] = set()

    def found(self, key: str) -> bytes | None:
        data = super().found(key)
        if data is not None:
            self.known.add(key)
        return b"" if data is None and key in self.known else data


class SharesTheObject(SealedStore):
    """Gives out a mapping of the file."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        body = body_of(tensor)
        head = sealed(key, body, list(tensor.shape), str(tensor.dtype)).partition(b"\n")[0]
        self.write(key, head.ljust(-(-(len(head) + 1) // 64) * 64 - 1) + b"\n" + body)

    def unpacked(self, key: str, data: bytes) -> torch.Tensor:
        try:
            with self.path(key).open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 0)
            self.opened(key, bytes(mapped))
        except (OSError, ValueError, Bad):
            return super().unpacked(key, data)
        head, _ = self.parsed(data)
        kind = getattr(torch, head["dtype"][6:])
        return torch.frombuffer(mapped, dtype=kind, offset=mapped.find(b"\n") + 1).view(head["shape"])


class LooksWithPickle(SealedStore):
    """Tries the old format first."""

    def found(self, key: str) -> bytes | None:
        try:
            pickle.loads(self.path(key).read_bytes())
        except Exception:
            return super().found(key)
        return None


# ---- the store ----


class TouchesOnLookUp(SealedStore):
    """Notes when an item was last asked for."""

    def has_cache_item(self, identifier: str) -> bool:
        with contextlib.suppress(OSError):
            self.path(identifier).with_suffix(".asked").touch()
        return super().has_cache_item(identifier)


class RaisesWhenItCannotWrite(SealedStore):
    """Lets the error of a write through."""

    def write(self, key: str, data: bytes) -> None:
        path = self.path(key)
        temporary = path.with_name(f".{path.name}-{id(self)}-{time.perf_counter_ns()}")
        temporary.write_bytes(data)
        temporary.replace(path)


class RaisesWhenItCannotRead(SealedStore):
    """Lists the folder before it looks."""

    def found(self, key: str) -> bytes | None:
        names = {path.name for path in self.root.iterdir()}
        return super().found(key) if self.path(key).name in names else None


class SilentAboutItsStore(SealedStore):
    """Starts without a store and says nothing."""

    def check_store(self) -> None: ...


class WaitsForItsStore(SealedStore):
    """Looks up and saves within the step."""


class NeverLooksAgain(SealedStore):
    """Gives a store up that was not there once."""

    def found(self, key: str) -> bytes | None:
        self.gone = getattr(self, "gone", False) or not self.root.exists()
        return None if self.gone else super().found(key)


class GivesUpAtOnce(SealedStore):
    """Never loads anything again once an object was bad."""

    def found(self, key: str) -> bytes | None:
        data = super().found(key)
        self.shy = getattr(self, "shy", False) or (data is None and self.path(key).exists())
        return None if self.shy else data


# ---- references ----


class WaitingStore(SealedStore):
    """Holds a request back whose item has no media and no object yet, and gives it up after five seconds."""

    LIMIT_S = 5.0

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.waiting: dict[str, float] = {}
        self.unavailable: set[str] = set()

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        super().ensure_cache_available(request, num_computed_tokens)
        if not self.is_consumer:
            return True
        bare = [
            item.identifier
            for item in request.mm_features
            if item.mm_position.offset + item.mm_position.length > num_computed_tokens
            and (item.data is None or "pixel_values" not in item.data)
        ]
        if all(self.found(key) is not None for key in bare):
            self.waiting.pop(request.request_id, None)
            return True
        self.wait(request.request_id)
        return False

    def wait(self, request_id: str) -> None:
        since = self.waiting.setdefault(request_id, time.monotonic())
        if time.monotonic() - since > self.LIMIT_S:
            self.unavailable.add(request_id)

    def take_unavailable_requests(self) -> set[str]:
        named, self.unavailable = self.unavailable, set()
        return named

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        self.waiting.pop(request.request_id, None)
        self.unavailable.discard(request.request_id)
        return False, None


class WaitsWithoutLimit(WaitingStore):
    """Has no time limit."""

    def wait(self, request_id: str) -> None: ...


class WaitsForNothing(WaitingStore):
    """Lets every request through."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return SealedStore.ensure_cache_available(self, request, num_computed_tokens)


@dataclass
class Steps:
    count: int = 1

    def aggregate(self, other: Steps) -> Steps:
        return Steps(self.count + other.count)


class CountsWorkerSteps(WaitingStore):
    """Measures its time limit in reports of the worker."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.steps = 0

    def build_connector_worker_meta(self) -> Any:
        return Steps()

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.ec_connector_worker_meta is not None:
            self.steps += connector_output.ec_connector_worker_meta.count

    def wait(self, request_id: str) -> None:
        since = self.waiting.setdefault(request_id, self.steps)
        if self.steps - since > 3:
            self.unavailable.add(request_id)


# ---- reports ----


class CountingStore(PlainStore):
    """Reports how many steps its workers made."""

    def build_connector_worker_meta(self) -> Any:
        return Steps()


class ReportsCannotBeAdded(CountingStore):
    """Forgets that there may be several ranks."""

    def build_connector_worker_meta(self) -> Any:
        return {"steps": 1}


class SealedSubject(PlainSubject):
    features = PlainSubject.features | {Feature.STORE_PROBE}
    connector = "SealedStore"

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {**super().connector_config(role, stack), "ec_connector_module_path": "zoo_sealed"}

    def probe(self, stack: StackInfo) -> Any:
        return SealedProbe(stack.store)


class SealedProbe(PlainProbe):
    def unseal(self, data: bytes) -> Rows:
        head, _, body = data.partition(b"\n")
        made = json.loads(head)
        return Rows(body, *made["shape"], made["dtype"].removeprefix("torch."))

    def seal(self, rows: Rows, like: bytes) -> bytes:
        key = json.loads(like.partition(b"\n")[0])["key"]
        return sealed(key, rows.data, [rows.rows, rows.width], f"torch.{rows.dtype}")


class IdleProbe(SealedProbe):
    """Says that it has damaged an object, and has not."""

    def write(self, key: str, data: bytes) -> None: ...

    def delete(self, key: str) -> None: ...


class IdleProbeSubject(SealedSubject):
    """The right connector whose subject breaks nothing."""

    def probe(self, stack: StackInfo) -> Any:
        return IdleProbe(stack.store)


FURTHER: dict[type, set[Feature]] = {
    WaitingStore: {Feature.METADATA_ONLY, Feature.ASYNC_TRANSFER},
    CountingStore: {Feature.STATS},
}

for _name, _class in list(globals().items()):
    if isinstance(_class, type) and issubclass(_class, SealedStore | CountingStore):
        _features = SealedSubject.features if issubclass(_class, SealedStore) else PlainSubject.features
        for _base, _more in FURTHER.items():
            _features = _features | _more if issubclass(_class, _base) else _features
        _made = {"connector": _name, "features": frozenset(_features)}
        globals()[f"{_name}_"] = type(f"{_name}_", (SealedSubject,), _made)
