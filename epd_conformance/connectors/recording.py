"""Recording connectors: wrap any EC or KV connector class and write every call that matters to the journal.

The wrapper is a dynamic *subclass*, not a proxy object: isinstance checks, classmethods (`build_prom_metrics`) and private
state go on working. vLLM loads it by `ec_connector_module_path` = this module and `ec_connector` = a name that carries the
wrapped class, `Recording:<module>:<Class>`; the module's `__getattr__` makes the class. It must have another name than the
wrapped one, since a name in vLLM's EC registry wins over the module path (ec_connector/factory.py); for a class that is only
in that registry the module part is empty.

All wrappers take `*args, **kwargs`, since call forms differ between releases and runners, and never change an argument, a
result or an exception: they look, write, and pass on. What the recorder itself does not understand or cannot write never
reaches the engine; it becomes a `lost` line, and a cell with one cannot pass. What a server encodes is read from
`scheduled_encoder_inputs` in `build_connector_meta`, which holds on runner V1 and V2 alike (`save_caches` shows local encodes
on V1 only).
"""

from __future__ import annotations

import contextlib
import importlib
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import blake3

from epd_conformance.connectors import barriers
from epd_conformance.connectors.journal import JournalWriter
from epd_conformance.connectors.names import EC_PREFIX, KV_PREFIX
from epd_conformance.connectors.observed import ObservedDict
from epd_conformance.observations import own_hooks


def describe(tensor: Any) -> dict[str, Any]:
    """Digest and form of a tensor (rows, width): blake3 over its bytes in row-major order, whatever device it is on."""
    import torch

    flat = tensor.detach().contiguous().cpu()
    # `view(uint8)` needs a dimension to view; a 0-d tensor has none.
    data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    shape = list(tensor.shape)
    return {
        "digest": blake3.blake3(data).hexdigest(),
        "rows": shape[0] if shape else 0,
        "width": shape[1] if len(shape) > 1 else 0,
        "shape": shape,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "bytes": len(data),
    }


def _items(features: Iterable[Any]) -> list[dict[str, Any]]:
    """Identifier and place of each item of a request, in prompt order."""
    return [
        {
            "id": feature.identifier,
            "modality": feature.modality,
            "offset": feature.mm_position.offset,
            "length": feature.mm_position.length,
            "embeds": feature.mm_position.get_num_embeds(),
            # Without the media only what sizes the placeholder is there.
            "data": sorted(name for name, value in (feature.data or {}).items() if value.data is not None),
        }
        for feature in features
    ]


class _Recorder:
    """The mixin that goes before the wrapped connector in the method resolution order; the hooks are added to the class."""

    _epd_wrapped: type
    _epd_prefix = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = _argument(args, kwargs, 0, "vllm_config")
        role = _argument(args, kwargs, 1, "role")
        self._epd_journal = JournalWriter(self._epd_prefix + str(getattr(role, "name", role)).lower())
        self._epd_seen: dict[str, list[str]] = {}  # request id -> identifiers in prompt order
        self._epd_request: str | None = None
        self._epd_deferred: set[str | None] = set()
        self._epd_lookups: dict[str, bool] = {}
        self._epd_allocated: list[tuple[str, str]] = []
        with self._epd_look("__init__"):
            self._epd_prepare(config)
        try:
            super().__init__(*args, **kwargs)
        except BaseException as error:
            self._epd_journal.write("raise", hook="__init__", error=repr(error)[:2000])
            raise
        with self._epd_look("__init__"):
            wrapped = self._epd_wrapped
            self._epd_journal.write(
                "init", connector=f"{wrapped.__module__}.{wrapped.__qualname__}", **self._epd_about(config)
            )

    def _epd_prepare(self, config: Any) -> None:
        """Before the connector is constructed."""

    def _epd_about(self, config: Any) -> dict[str, Any]:
        raise NotImplementedError

    @contextlib.contextmanager
    def _epd_look(self, hook: str) -> Iterator[None]:
        """Around everything that only looks: what it does not understand is said in the journal, never to the engine."""
        try:
            yield
        except Exception as error:
            self._epd_journal.write("lost", hook=hook, error=repr(error)[:2000])

    def _epd_call(self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the wrapped hook; an exception is written down and goes on its way."""
        try:
            return getattr(super(), hook)(*args, **kwargs)
        except BaseException as error:
            self._epd_journal.write("raise", hook=hook, error=repr(error)[:2000])
            raise


class _ECRecorder(_Recorder):
    """Recorder of an EC connector."""

    _epd_extra: ObservedDict | None = None
    _epd_told = 0
    _epd_gate: barriers.Gate | None = None

    def _epd_prepare(self, config: Any) -> None:
        """Let the configuration's free part note which of its keys the connector reads; make the gate of the barriers."""
        extra = getattr(config.ec_transfer_config, "ec_connector_extra_config", None)
        # Where two connectors share a process they share the configuration, and what either reads is read.
        if type(extra) is dict:
            extra = config.ec_transfer_config.ec_connector_extra_config = ObservedDict(extra)
        self._epd_extra = extra if isinstance(extra, ObservedDict) else None
        self._epd_gate = barriers.gate(self._epd_journal)

    def _epd_about(self, config: Any) -> dict[str, Any]:
        from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase

        transfer, cache = config.ec_transfer_config, config.cache_config
        about = {
            "asked": transfer.ec_connector,
            "ec_role": transfer.ec_role,
            "engine": transfer.engine_id,
            "blocks": getattr(cache, "num_gpu_blocks", None),
            "block_size": getattr(cache, "block_size", None),
            "hooks": own_hooks(self._epd_wrapped, ECConnectorBase),
        }
        if self._epd_extra is not None:
            # Names only: values may be secrets.
            about |= {"extra": list(self._epd_extra.given), "read": self._epd_extra.read}
            self._epd_told = len(about["read"])
        return about

    def _epd_configured(self) -> None:
        """Say which keys were read by now, when there are more than were told: some connectors read at the first use."""
        if self._epd_extra is not None and len(read := self._epd_extra.read) > self._epd_told:
            self._epd_told = len(read)
            self._epd_journal.write("config", read=read)

    def _epd_see(self, request_id: str, features: Iterable[Any], prompt: int) -> None:
        if request_id in self._epd_seen:
            return
        items = _items(features)
        self._epd_seen[request_id] = [item["id"] for item in items]
        self._epd_journal.write("request", req=request_id, items=items, prompt=prompt)


class _ECHooks:
    """The hooks of an EC connector that are recorded, as functions: a wrapper gets those that the wrapped class has."""

    # -- scheduler side ------------------------------------------------------------------------------------------------

    def ensure_cache_available(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = _argument(args, kwargs, 0, "request")
        with self._epd_look("ensure_cache_available"):
            self._epd_see(request.request_id, request.mm_features, request.num_prompt_tokens)
            self._epd_request = request.request_id
        ready = self._epd_call("ensure_cache_available", args, kwargs)
        if ready:
            self._epd_deferred.discard(self._epd_request)
        elif self._epd_request not in self._epd_deferred:
            # Once: a lone request is asked for every millisecond or so until its connector lets it through.
            self._epd_deferred.add(self._epd_request)
            self._epd_journal.write("defer", req=self._epd_request)
        return ready

    def has_cache_item(self: Any, *args: Any, **kwargs: Any) -> Any:
        identifier = _argument(args, kwargs, 0, "identifier")
        found = self._epd_call("has_cache_item", args, kwargs)
        with self._epd_look("has_cache_item"):
            self._epd_lookups[identifier] = bool(found)
            self._epd_journal.write("lookup", req=self._epd_request, id=identifier, found=bool(found))
        return found

    def update_state_after_alloc(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._epd_look("update_state_after_alloc"):
            request = _argument(args, kwargs, 0, "request")
            index = _argument(args, kwargs, 1, "index")
            self._epd_allocated.append((request.request_id, request.mm_features[index].identifier))
        return self._epd_call("update_state_after_alloc", args, kwargs)

    def build_connector_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._epd_look("build_connector_meta"):
            output = _argument(args, kwargs, 0, "scheduler_output")
            new = output.scheduled_new_reqs
            for request in new:
                self._epd_see(request.req_id, request.mm_features, len(request.prompt_token_ids or ()))
            encode = {
                req: [self._epd_seen[req][index] for index in indices]
                for req, indices in output.scheduled_encoder_inputs.items()
            }
            freed = list(output.free_encoder_mm_hashes)
            if new or encode or freed or self._epd_allocated:
                self._epd_journal.write(
                    "step",
                    new=[
                        {
                            "req": request.req_id,
                            "computed": request.num_computed_tokens,
                            "prompt": len(request.prompt_token_ids or ()),
                        }
                        for request in new
                    ],
                    encode=encode,
                    allocated=[
                        {"req": req, "id": identifier, "external": self._epd_lookups.get(identifier, False)}
                        for req, identifier in self._epd_allocated
                    ],
                    free=freed,
                )
        self._epd_allocated.clear()
        self._epd_lookups.clear()
        result = self._epd_call("build_connector_meta", args, kwargs)
        with self._epd_look("build_connector_meta"):
            self._epd_configured()
        return result

    def take_unavailable_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = self._epd_call("take_unavailable_requests", args, kwargs)
        with self._epd_look("take_unavailable_requests"):
            if named:
                self._epd_journal.write("unavailable", reqs=sorted(named))
        return named

    def request_finished(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._epd_call("request_finished", args, kwargs)
        with self._epd_look("request_finished"):
            request = _argument(args, kwargs, 0, "request")
            self._epd_seen.pop(request.request_id, None)
            self._epd_deferred.discard(request.request_id)
            self._epd_journal.write("finished", req=request.request_id, delayed=bool(result[0]))
        return result

    # -- worker side ---------------------------------------------------------------------------------------------------

    def start_load_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _argument(args, kwargs, 0, "encoder_cache")
        before: dict[str, Any] = {}
        with self._epd_look("start_load_caches"):
            # Weak, so that nothing lives longer; not the address, which a new tensor may take over.
            before = {key: weakref.ref(value) for key, value in list(cache.items())}
        began = time.perf_counter()
        result = self._epd_call("start_load_caches", args, kwargs)
        took = time.perf_counter() - began
        with self._epd_look("start_load_caches"):
            for key, tensor in list(cache.items()):
                if key not in before or before[key]() is not tensor:
                    self._epd_journal.write("load", id=key, seconds=took, **describe(tensor))
            self._epd_configured()
        return result

    def save_caches(self: Any, *args: Any, **kwargs: Any) -> Any:
        form = None
        with self._epd_look("save_caches"):
            key = _argument(args, kwargs, 1, "mm_hash")
            form = {"id": key, **describe(_argument(args, kwargs, 0, "encoder_cache")[key])}
        began = time.perf_counter()
        result = self._epd_call("save_caches", args, kwargs)
        took = time.perf_counter() - began
        with self._epd_look("save_caches"):
            # A consumer is called too on runner V1, after an encode of its own; only a producer's call is a save.
            event = "save" if self.is_producer else "encoded"
            if form is not None:
                self._epd_journal.write(event, seconds=took, **form)
            self._epd_configured()
        return result

    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._epd_look("shutdown"):
            self._epd_configured()
        self._epd_journal.write("shutdown")
        return self._epd_call("shutdown", args, kwargs)


class _KVRecorder(_Recorder):
    """Recorder of a KV connector: what the decode side took from outside, for each request."""

    _epd_prefix = "kv-"

    def _epd_about(self, config: Any) -> dict[str, Any]:
        transfer = config.kv_transfer_config
        return {
            "kv_role": transfer.kv_role,
            "engine": transfer.engine_id,
            "block_size": config.cache_config.block_size,
        }


class _KVHooks:
    """The hooks of a KV connector that are recorded, as functions."""

    def get_num_new_matched_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._epd_call("get_num_new_matched_tokens", args, kwargs)
        with self._epd_look("get_num_new_matched_tokens"):
            request = _argument(args, kwargs, 0, "request")
            self._epd_journal.write(
                "kv-match", req=request.request_id, tokens=result[0], prompt=request.num_prompt_tokens
            )
        return result

    def update_state_after_alloc(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._epd_look("update_state_after_alloc"):
            tokens = _argument(args, kwargs, 2, "num_external_tokens")
            if tokens:
                request = _argument(args, kwargs, 0, "request")
                self._epd_journal.write("kv-take", req=request.request_id, tokens=tokens)
        return self._epd_call("update_state_after_alloc", args, kwargs)

    def build_connector_meta(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A decode server has no EC connector, so what it encodes is seen here.
        with self._epd_look("build_connector_meta"):
            output = _argument(args, kwargs, 0, "scheduler_output")
            for request in output.scheduled_new_reqs:
                self._epd_journal.write(
                    "kv-new",
                    req=request.req_id,
                    computed=request.num_computed_tokens,
                    prompt=len(request.prompt_token_ids or ()),
                    items=_items(request.mm_features),
                )
            encode = {req: list(indices) for req, indices in output.scheduled_encoder_inputs.items()}
            if encode:
                self._epd_journal.write("kv-encode", encode=encode)
        return self._epd_call("build_connector_meta", args, kwargs)

    def start_load_kv(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._epd_call("start_load_kv", args, kwargs)
        with self._epd_look("start_load_kv"):
            # vLLM's file connector says in its metadata what it has just injected; others report by get_finished.
            for entry in getattr(self._connector_metadata, "requests", None) or ():
                if getattr(entry, "is_store", None) is False:
                    self._epd_journal.write("kv-injected", tokens=len(entry.slot_mapping))
        return result


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    """An argument of a hook, given by place or by name; None where the call has another form."""
    return kwargs[name] if name in kwargs else args[position] if len(args) > position else None


def _hooks(source: type, wrapped: type) -> dict[str, Any]:
    """The recorded hooks that the wrapped class has itself.

    One that it lacks (an older vLLM) or left abstract stays so: with the recorder, a connector must not be able to do more
    than without.
    """
    return {
        name: hook
        for name, hook in vars(source).items()
        if not name.startswith("_")
        and hasattr(wrapped, name)
        and not getattr(getattr(wrapped, name), "__isabstractmethod__", False)
    }


_made: dict[str, type] = {}


def __getattr__(name: str) -> type:
    """Make, once, the recording class that `name` asks for: `Recording:<module>:<Class>` or `RecordingKV:…`.

    Raises AttributeError for a name of another form or an unknown class, ImportError for a module that does not import.
    """
    if name in _made:
        return _made[name]
    kind, prefix, rest = name.partition(":")
    module, separator, connector = rest.partition(":")
    if kind + prefix not in (EC_PREFIX, KV_PREFIX) or not separator or not connector:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ec = kind + prefix == EC_PREFIX
    if module:
        wrapped = getattr(importlib.import_module(module), connector)
    else:
        wrapped = _registered_ec(connector) if ec else _registered_kv(connector)
    if not isinstance(wrapped, type):
        raise AttributeError(f"module {module!r} has no class {connector!r}: that is a {type(wrapped).__name__}")
    mixin, hooks = (_ECRecorder, _ECHooks) if ec else (_KVRecorder, _KVHooks)
    recorded = _hooks(hooks, wrapped)
    recorded = barriers.with_points(recorded) if ec else recorded
    content = {"__module__": __name__, "_epd_wrapped": wrapped, **recorded}
    _made[name] = type(f"Recording{wrapped.__name__}", (mixin, wrapped), content)
    return _made[name]


def _registered_ec(connector: str) -> Any:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    return _registered("EC", "ec_connector_module_path", connector, ECConnectorFactory._registry)


def _registered_kv(connector: str) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return _registered("KV", "kv_connector_module_path", connector, KVConnectorFactory._registry)


def _registered(kind: str, option: str, connector: str, registry: dict[str, Any]) -> Any:
    if connector not in registry:
        known = ", ".join(sorted(registry))
        raise AttributeError(f"vLLM has no {kind} connector {connector!r}; it has {known}; others need {option}")
    return registry[connector]()
