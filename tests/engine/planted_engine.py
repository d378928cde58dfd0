"""A small right connector, and many that are one change away from it. Each change is what a requirement forbids.

`PlainStore` keeps a file for each item: no more than the contract asks for, and nothing against damage.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import mmap
import os
import pickle
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import blake3
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

from epd_conformance import Feature, Implementation, StackInfo, Subject


@dataclass
class Loads(ECConnectorMetadata):
    keys: list[str] = field(default_factory=list)
    more: Any = None


class PlainStore(ECConnectorBase):
    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = vllm_config.ec_transfer_config.ec_connector_extra_config
        self.root = Path(settings["root"])
        self.check_settings(set(settings) - {"root"})
        self.check_store()
        # No worker of an encoder-decoder model would load anything.
        self.used = not vllm_config.model_config.is_encoder_decoder
        self.asked: dict[str, bool] = {}
        self.loads: list[str] = []

    def check_settings(self, unknown: set[str]) -> None:
        if unknown:
            logging.getLogger(__name__).warning("unknown settings: %s", unknown)

    def check_store(self) -> None:
        if not self.root.is_dir():
            logging.getLogger(__name__).warning("no folder: %s", self.root)

    def path(self, key: str) -> Path:
        return self.root / blake3.blake3(key.encode()).hexdigest()

    # ---- scheduler ----

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = self.is_consumer and self.used and self.path(identifier).exists()
        return self.asked[identifier]

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        key = request.mm_features[index].identifier
        if self.asked.get(key):
            self.loads.append(key)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        loads, self.loads = self.loads, []
        self.asked = {}
        return Loads(loads)

    # ---- worker ----

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.is_producer:
            self.put(mm_hash, encoder_cache[mm_hash])

    def put(self, key: str, tensor: torch.Tensor) -> None:
        path = self.path(key)
        temporary = path.with_name(f".{os.getpid()}-{id(self)}-{path.name}")
        try:
            temporary.write_bytes(self.pack(tensor))
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key in self._get_connector_metadata().keys:
            if key not in encoder_cache:
                encoder_cache[key] = self.unpack(self.path(key).read_bytes())

    def pack(self, tensor: torch.Tensor) -> bytes:
        head = json.dumps([list(tensor.shape), str(tensor.dtype)]).encode()
        return head + b"\n" + bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())

    def unpack(self, data: bytes) -> torch.Tensor:
        head, _, body = data.partition(b"\n")
        shape, dtype = json.loads(head)
        return torch.frombuffer(bytearray(body), dtype=getattr(torch, dtype.removeprefix("torch."))).view(shape)


# ---- the start ----


class AsksOnImport(PlainStore):
    """Its module asks a peer when it is imported."""


class AsksForMetrics(PlainStore):
    """Needs a peer to say which metrics there are."""

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> None:
        socket.create_connection(("192.0.2.1", 1), timeout=0.1)


class TakesAnySetting(PlainStore):
    """Does not look for settings that it does not know."""

    def check_settings(self, unknown: set[str]) -> None: ...


# ---- what is saved and found ----


class Noop(PlainStore):
    """Saves nothing."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        pass


class NeverHits(PlainStore):
    """Answers every look-up with no: the consumer encodes for itself, and every answer is right."""

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = False
        return False


class LoraBlind(PlainStore):
    """Takes the adapter off a key."""

    def path(self, key: str) -> Path:
        return super().path(key.rpartition(":")[2])


class ShapeBlind(PlainStore):
    """Keeps values and forgets their shape."""

    def unpack(self, data: bytes) -> torch.Tensor:
        return super().unpack(data).flatten()


class KeyPrefix(PlainStore):
    """Names an object by the first thousand characters of its key."""

    def path(self, key: str) -> Path:
        return super().path(key[:1000])


class IgnoresTheModel(PlainStore):
    """Promises to an encoder-decoder model as well."""

    def has_cache_item(self, identifier: str) -> bool:
        self.used = True
        return super().has_cache_item(identifier)


class SharedItemsLost(PlainStore):
    """An item that two requests of a step name is planned for neither."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        named = [{item.identifier for item in new.mm_features} for new in scheduler_output.scheduled_new_reqs]
        made = super().build_connector_meta(scheduler_output)
        made.keys = [key for key in made.keys if sum(key in keys for keys in named) < 2]
        return made


class CaseFolder(PlainStore):
    """Folds the case of keys."""

    def path(self, key: str) -> Path:
        return super().path(key.lower())


class PathJoiner(PlainStore):
    """Takes a key for a path below its store."""

    def path(self, key: str) -> Path:
        path = self.root / key / "item"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class NoEmptyKey(PlainStore):
    """Has no room for an empty key."""

    def has_cache_item(self, identifier: str) -> bool:
        assert identifier, "no identifier"
        return super().has_cache_item(identifier)


class AnswersWithPath(PlainStore):
    """Answers a look-up with a path instead of a boolean."""

    def has_cache_item(self, identifier: str) -> Any:
        return super().has_cache_item(identifier) and self.path(identifier)


class LastRowDropped(PlainStore):
    """Saves all rows but the last."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        super().put(key, tensor[:-1] if len(tensor) > 1 else tensor)


class Caster(PlainStore):
    """Saves in half precision."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        super().put(key, tensor.to(torch.bfloat16))


class OtherBytes(PlainStore):
    """Rounds what it saves."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        super().put(key, tensor.to(torch.float16).to(tensor.dtype))


class FlatBuffer(PlainStore):
    """Takes the memory behind the tensor for its values."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        memory = torch.as_strided(tensor, tensor.shape, (tensor.shape[1], 1))
        super().put(key, memory)


class ConsumerSaves(PlainStore):
    """Saves on consumers as well."""

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self.put(mm_hash, encoder_cache[mm_hash])


class LazySaver(PlainStore):
    """Keeps the tensor and saves it with the next step."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.kept: dict[str, torch.Tensor] = {}

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        self.kept[mm_hash] = encoder_cache[mm_hash]

    def start_save_caches(self, **kwargs: Any) -> None:
        for key, tensor in self.kept.items():
            self.put(key, tensor)
        self.kept.clear()


class PromisesEarly(LazySaver):
    """Lists an item when it is handed over, and saves it with the next step."""

    def listed(self, key: str) -> Path:
        return self.path(key).with_suffix(".listed")

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.is_producer:
            self.kept[mm_hash] = encoder_cache[mm_hash].clone()
            with contextlib.suppress(OSError):
                self.listed(mm_hash).touch()

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = self.is_consumer and self.used and self.listed(identifier).exists()
        return self.asked[identifier]


class AppendingRanks(PlainStore):
    """Adds what it saves to the end of the one file: so does every rank, and every further save."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        with self.path(key).open("ab") as file:
            file.write(self.pack(tensor) if not file.tell() else self.pack(tensor).partition(b"\n")[2])

    def unpack(self, data: bytes) -> torch.Tensor:
        head, _, body = data.partition(b"\n")
        shape, dtype = json.loads(head)
        return torch.frombuffer(bytearray(body), dtype=getattr(torch, dtype[6:])).view(-1, shape[1])


OUTPUTS: dict[str, torch.Tensor] = {}


class ModuleVariable(PlainStore):
    """A store that only one process sees."""

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = self.is_consumer and self.used and f"{self.root}{identifier}" in OUTPUTS
        return self.asked[identifier]

    def put(self, key: str, tensor: torch.Tensor) -> None:
        OUTPUTS[f"{self.root}{key}"] = tensor.clone()

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key in self._get_connector_metadata().keys:
            encoder_cache[key] = OUTPUTS[f"{self.root}{key}"].clone()


@dataclass
class Published:
    keys: set[str]

    def aggregate(self, other: Published) -> Published:
        return Published(self.keys | other.keys)


class NeedsWorkerReport(PlainStore):
    """A producer's scheduler publishes what its workers report to have saved."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.fresh: set[str] = set()

    def path(self, key: str) -> Path:
        return super().path(key).with_suffix(".object")

    def index(self, key: str) -> Path:
        return self.path(key).with_suffix(".listed")

    def put(self, key: str, tensor: torch.Tensor) -> None:
        super().put(key, tensor)
        self.fresh.add(key)

    def build_connector_worker_meta(self) -> Any:
        fresh, self.fresh = self.fresh, set()
        return Published(fresh) if fresh else None

    def update_connector_output(self, connector_output: Any) -> None:
        for key in connector_output.ec_connector_worker_meta.keys if connector_output.ec_connector_worker_meta else ():
            self.index(key).touch()

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = self.is_consumer and self.used and self.index(identifier).exists()
        return self.asked[identifier]


# ---- loads ----


class Swapper(PlainStore):
    """Mixes up the first two items of a step."""

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        super().start_load_caches(encoder_cache, **kwargs)
        keys = self._get_connector_metadata().keys
        if len(keys) > 1:
            encoder_cache[keys[0]], encoder_cache[keys[1]] = encoder_cache[keys[1]], encoder_cache[keys[0]]


class OrderBlind(PlainStore):
    """Gives the items of a step their rows in the order of their names."""

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        keys = self._get_connector_metadata().keys
        for key, other in zip(keys, sorted(keys), strict=True):
            encoder_cache[key] = self.unpack(self.path(other).read_bytes())


class WrongDevice(PlainStore):
    """Loads to a device on which no values are."""

    def unpack(self, data: bytes) -> torch.Tensor:
        return super().unpack(data).to("meta")


class LoadsOneOnly(PlainStore):
    """Loads the first item of a step."""

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key in self._get_connector_metadata().keys[:1]:
            encoder_cache[key] = self.unpack(self.path(key).read_bytes())


class LoadsLate(PlainStore):
    """Does the loads of a step with the next one."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.late: list[str] = []

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        keys, self.late = self.late, list(self._get_connector_metadata().keys)
        for key in keys:
            encoder_cache[key] = self.unpack(self.path(key).read_bytes())


class OtherOnReload(PlainStore):
    """Gives out the one buffer that it keeps for a key, and what became of it."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.given: dict[str, torch.Tensor] = {}

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key in self._get_connector_metadata().keys:
            if key in self.given:
                encoder_cache[key] = self.given[key] * 2
            else:
                self.given[key] = encoder_cache[key] = self.unpack(self.path(key).read_bytes())


class SharedMapping(PlainStore):
    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key in self._get_connector_metadata().keys:
            with self.path(key).open("r+b") as file:
                data = mmap.mmap(file.fileno(), 0)
            start = data.find(b"\n") + 1
            shape, dtype = json.loads(data[:start])
            kind = getattr(torch, dtype[6:])
            encoder_cache[key] = torch.frombuffer(data, dtype=kind, offset=start).view(shape)

    def pack(self, tensor: torch.Tensor) -> bytes:
        head = json.dumps([list(tensor.shape), str(tensor.dtype)]).encode()
        # Padded, so that the rows are aligned.
        return head.ljust(63) + b"\n" + tensor.contiguous().view(torch.uint8).numpy().tobytes()


class Unpickler(PlainStore):
    def pack(self, tensor: torch.Tensor) -> bytes:
        return pickle.dumps(tensor)

    def unpack(self, data: bytes) -> torch.Tensor:
        return pickle.loads(data)

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = False
        if self.is_consumer and self.used and self.path(identifier).exists():
            with contextlib.suppress(Exception):
                self.asked[identifier] = isinstance(self.unpack(self.path(identifier).read_bytes()), torch.Tensor)
        return self.asked[identifier]


# ---- metadata ----


class NoneWhenIdle(PlainStore):
    """Has no metadata for a step without loads."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made = super().build_connector_meta(scheduler_output)
        return made if made.keys else None


class Unpicklable(PlainStore):
    """Puts a lock into its metadata."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        made = super().build_connector_meta(scheduler_output)
        made.more = threading.Lock() if made.keys else None
        return made


class Changer(PlainStore):
    """Takes what it has seen out of the scheduler output."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        scheduler_output.free_encoder_mm_hashes.clear()
        scheduler_output.finished_req_ids.clear()
        return super().build_connector_meta(scheduler_output)


class PlansTwice(PlainStore):
    """Plans every load again with each step."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        self.ever = [*getattr(self, "ever", []), *self.loads]
        made = super().build_connector_meta(scheduler_output)
        made.keys = list(self.ever)
        return made


class UselessReport(PlainStore):
    """Reports statistics that cannot be added, and does not declare any."""

    def get_ec_connector_stats(self) -> Any:
        return {"loads": 1}


# ---- requests ----


class FirstItemOnly(PlainStore):
    """Takes every request for one with items."""

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        return False, {"first": request.mm_features[0].identifier}


class Delayer(PlainStore):
    """Asks to keep the blocks of a request that has ended."""

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        return True, None


class SetOfKeys(PlainStore):
    """Returns parameters that are no JSON."""

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        return False, {"keys": {feature.identifier for feature in request.mm_features}}


class ForgetsOnce(PlainStore):
    """Expects to hear of the end of a request once."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.known: dict[str, int] = {}

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        self.known[request.request_id] = num_computed_tokens
        return True

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        if request.mm_features:
            del self.known[request.request_id]
        return False, None


class RemembersAllocated(PlainStore):
    """An item that a request was given once needs no second load."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.given: set[tuple[str, int]] = set()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if (request.request_id, index) not in self.given:
            self.given.add((request.request_id, index))
            super().update_state_after_alloc(request, index)


class DropsAtTheEnd(PlainStore):
    """A consumer removes the objects of a request that has ended."""

    def request_finished(self, request: Any) -> tuple[bool, Any]:
        if self.is_consumer:
            for feature in request.mm_features:
                self.path(feature.identifier).unlink(missing_ok=True)
        return False, None

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        for key in self._get_connector_metadata().keys:
            if self.path(key).exists():
                encoder_cache[key] = self.unpack(self.path(key).read_bytes())


class WaitsForEver(PlainStore):
    """Holds a request back until its items are there, and does not declare that."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        keys = [feature.identifier for feature in request.mm_features]
        return not self.is_consumer or num_computed_tokens > 0 or all(self.path(key).exists() for key in keys)


@dataclass
class Ready:
    steps: int = 1

    def aggregate(self, other: Ready) -> Ready:
        return Ready(max(self.steps, other.steps))


class NeedsWorkerStep(PlainStore):
    """A request waits until the worker, which fetches its items, has reported from a step."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.steps = 0
        self.waiting: dict[str, int] = {}

    def build_connector_worker_meta(self) -> Any:
        return Ready()

    def update_connector_output(self, connector_output: Any) -> None:
        self.steps += connector_output.ec_connector_worker_meta is not None

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if not self.is_consumer or request.status.name == "RUNNING":
            return True
        return self.steps > self.waiting.setdefault(request.request_id, self.steps)


class EmptiesTheCache(PlainStore):
    """Empties the engine's cache when a consumer hands it what it has encoded."""

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        super().save_caches(encoder_cache, mm_hash)
        if not self.is_producer:
            encoder_cache.clear()


class DecodeWaits(PlainStore):
    """Holds running requests back."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        if not self.is_consumer or request.status.name != "RUNNING":
            return True
        self.turn = getattr(self, "turn", 0) + 1
        return self.turn % 2 == 0


class TrustsParameters(PlainStore):
    """Expects parameters to be as a proxy makes them."""

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        parameters = request.ec_transfer_params
        if parameters is not None:
            for item in parameters.get("ec_items", ()):
                item["transfer_id"].strip()
        return True


class NeverIdle(PlainStore):
    """Says that there is work, always."""

    def has_pending_push_work(self) -> bool:
        return True


class ClosesOnce(PlainStore):
    """Cannot be shut down twice."""

    def shutdown(self) -> None:
        del self.loads


# ---- the store ----


class RaisesWhenFull(PlainStore):
    def put(self, key: str, tensor: torch.Tensor) -> None:
        self.path(key).write_bytes(self.pack(tensor))


class LooksByTouching(PlainStore):
    def has_cache_item(self, identifier: str) -> bool:
        with contextlib.suppress(OSError):
            self.path(identifier).with_suffix(".asked").touch()
        return super().has_cache_item(identifier)


class GivesUpOnce(PlainStore):
    """Never looks again once its store was not there."""

    def has_cache_item(self, identifier: str) -> bool:
        self.gone = getattr(self, "gone", False) or not self.root.exists()
        if self.gone:
            self.asked[identifier] = False
            return False
        return super().has_cache_item(identifier)


class WritesInPlace(PlainStore):
    """No temporary file: a reader may come in between."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        data = self.pack(tensor)
        with self.path(key).open("wb") as file:
            for start in range(0, len(data), 4096):
                file.write(data[start : start + 4096])
                file.flush()


class KeepsRequests(PlainStore):
    """Waits for a release that an abort does not bring."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.pins: set[tuple[str, int]] = set()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self.pins.add((request.request_id, index))
        super().update_state_after_alloc(request, index)

    def update_state_after_free(self, request: Any, index: int) -> None:
        self.pins.discard((request.request_id, index))


class KeepsFiles(PlainStore):
    """Leaves the files open that it has loaded from."""

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        super().start_load_caches(encoder_cache, **kwargs)
        self.open = [
            *getattr(self, "open", []),
            *(self.path(key).open() for key in self._get_connector_metadata().keys),
        ]


class LongSave(PlainStore):
    """A save takes more operations than the store is slow for."""

    def put(self, key: str, tensor: torch.Tensor) -> None:
        for _ in range(10):
            self.path(key).exists()
        super().put(key, tensor)


class Aside(PlainStore):
    """Asks and fills its store in threads, and holds a request back meanwhile."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self.threads = ThreadPoolExecutor(4)
        self.looks: dict[str, Future[bool]] = {}

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        for feature in request.mm_features if self.is_consumer else ():
            key = feature.identifier
            self.looks[key] = self.looks.get(key) or self.threads.submit(self.path(key).exists)
        return all(self.looks[feature.identifier].done() for feature in request.mm_features if self.is_consumer)

    def has_cache_item(self, identifier: str) -> bool:
        self.asked[identifier] = identifier in self.looks and self.looks[identifier].result()
        return self.asked[identifier]

    def put(self, key: str, tensor: torch.Tensor) -> None:
        self.threads.submit(super().put, key, tensor.clone())


# ---- the process ----


class Hangs(PlainStore):
    """Does not come back from a look-up."""

    def has_cache_item(self, identifier: str) -> bool:
        time.sleep(1e6)
        return False


class Crashes(PlainStore):
    """Reads memory that is not there."""

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        ctypes.string_at(0)


class Exits(PlainStore):
    """Ends the process."""

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        os._exit(7)


class ExitsPolitely(PlainStore):
    """Raises SystemExit."""

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        sys.exit(7)


class Eats(PlainStore):
    """Takes memory without end."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        eaten = []
        while True:
            eaten.append(bytearray(64 << 20))


class NotMade(PlainStore):
    """Cannot be made."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        raise RuntimeError("no")


def _raises(self: Any, *arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError("no")


#: The hooks of a connector; `RaisesIn_<hook>` raises there.
HOOKS = (
    "start_worker_services",
    "ensure_cache_available",
    "has_cache_item",
    "update_state_after_alloc",
    "update_state_after_free",
    "build_connector_meta",
    "bind_connector_metadata",
    "clear_connector_metadata",
    "start_save_caches",
    "start_load_caches",
    "save_caches",
    "get_finished",
    "build_connector_worker_meta",
    "get_ec_connector_stats",
    "take_unavailable_requests",
    "update_connector_output",
    "request_finished",
    "has_pending_push_work",
    "shutdown",
)
for _hook in HOOKS:
    # Of what no worker reported nobody hears.
    _reports = {"build_connector_worker_meta": lambda self: Ready()}
    globals()[f"RaisesIn_{_hook}"] = type(f"RaisesIn_{_hook}", (PlainStore,), {**_reports, _hook: _raises})


class PlainSubject(Subject):
    """The subject of a connector of this module: `PlainSubject.of("Noop")`, or `planted_engine:Noop_` by name."""

    implementation = Implementation(organization="tests", project="planted", version="1")
    features = frozenset({Feature.EC_BOTH, Feature.MULTI_PRODUCER, Feature.MULTI_CONSUMER, Feature.PERSISTENT_STORE})
    connector = "PlainStore"

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            "ec_connector": self.connector,
            "ec_connector_module_path": "planted_import" if self.connector == "AsksOnImport" else "planted_engine",
            "ec_connector_extra_config": {"root": str(stack.store)},
        }

    def probe(self, stack: StackInfo) -> Any:
        return PlainProbe(stack.store)


class Elsewhere_(PlainSubject):
    """Its store is not where it is to be: neither made read-only nor removed when the harness does that."""

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        stack.store.with_name("elsewhere").mkdir(exist_ok=True)
        extra = {"root": str(stack.store.with_name("elsewhere"))}
        return {**super().connector_config(role, stack), "ec_connector_extra_config": extra}

    def probe(self, stack: StackInfo) -> Any:
        return PlainProbe(stack.store.with_name("elsewhere"))


class PlainProbe:
    """Damages whole files only: enough for what is planted here."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _path(self, key: str) -> Path:
        return self.root / blake3.blake3(key.encode()).hexdigest()

    def keys(self) -> list[str]:
        return []

    def read(self, key: str) -> bytes | None:
        return self._path(key).read_bytes() if self._path(key).exists() else None

    def write(self, key: str, data: bytes) -> None:
        self._path(key).write_bytes(data)

    def delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)


for _name, _class in list(globals().items()):
    if isinstance(_class, type) and issubclass(_class, PlainStore):
        globals()[f"{_name}_"] = type(f"{_name}_", (PlainSubject,), {"connector": _name})
