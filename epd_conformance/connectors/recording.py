"""Recording connectors: wrap any EC or KV connector class and write every call that matters to the journal.

The wrapper is a dynamic *subclass*, not a proxy object: isinstance checks, classmethods (`build_prom_metrics`) and private
state go on working. vLLM loads it by `ec_connector_module_path` = this module and `ec_connector` = a name that carries the
wrapped class, `Recording:<module>:<Class>`; the module's `__getattr__` makes the class. It must have another name than the
wrapped one, since a name in vLLM's EC registry wins over the module path (ec_connector/factory.py); for a class that is only
in that registry the module part is empty.

All wrappers take `*args, **kwargs`, since call forms differ between releases and runners, and never change an argument, a
result or an exception: they look, write, and pass on. What a server encodes is read from `scheduled_encoder_inputs` in
`build_connector_meta`, which holds on runner V1 and V2 alike (`save_caches` shows local encodes on V1 only).
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from typing import Any

import blake3

from epd_conformance.connectors.journal import JournalWriter

EC_PREFIX = "Recording:"
KV_PREFIX = "RecordingKV:"
MODULE = __name__


def ec_name(connector: str, module_path: str | None) -> str:
    """The value of `ec_connector` that makes vLLM load the recorded form of a connector."""
    return f"{EC_PREFIX}{module_path or ''}:{connector}"


def kv_name(connector: str, module_path: str | None) -> str:
    """The value of `kv_connector` that makes vLLM load the recorded form of a connector."""
    return f"{KV_PREFIX}{module_path or ''}:{connector}"


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
            "media": feature.data is not None,
        }
        for feature in features
    ]


class _ECRecorder:
    """The mixin that goes before the wrapped EC connector in the method resolution order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("vllm_config", args[0] if args else None)
        role = kwargs.get("role", args[1] if len(args) > 1 else None)
        self._epd_journal = JournalWriter(str(getattr(role, "name", role)).lower())
        self._epd_seen: dict[str, list[str]] = {}  # request id -> identifiers in prompt order
        self._epd_request: str | None = None
        self._epd_lookups: dict[str, bool] = {}
        self._epd_allocated: list[tuple[str, str]] = []
        try:
            super().__init__(*args, **kwargs)
        except BaseException as error:
            self._epd_journal.write("raise", hook="__init__", error=repr(error))
            raise
        wrapped = type(self).__mro__[2]
        transfer = config.ec_transfer_config  # type: ignore[union-attr]
        cache = config.cache_config  # type: ignore[union-attr]
        self._epd_journal.write(
            "init",
            connector=f"{wrapped.__module__}.{wrapped.__qualname__}",
            ec_role=transfer.ec_role,
            engine=transfer.engine_id,
            blocks=getattr(cache, "num_gpu_blocks", None),
            block_size=getattr(cache, "block_size", None),
        )

    def _epd_call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped hook; an exception is written down and goes on its way."""
        try:
            return getattr(super(), hook)(*args, **kwargs)
        except BaseException as error:
            self._epd_journal.write("raise", hook=hook, error=repr(error)[:2000])
            raise

    def _epd_remember(self, request_id: str, features: Iterable[Any]) -> list[dict[str, Any]]:
        items = _items(features)
        self._epd_seen[request_id] = [item["id"] for item in items]
        return items

    def _epd_see(self, request: Any) -> None:
        if request.request_id in self._epd_seen:
            return
        items = self._epd_remember(request.request_id, request.mm_features)
        self._epd_journal.write(
            "request",
            req=request.request_id,
            items=items,
            prompt=request.num_prompt_tokens,
        )

    # -- scheduler side ------------------------------------------------------------------------------------------------

    def ensure_cache_available(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.get("request", args[0] if args else None)
        self._epd_see(request)
        self._epd_request = request.request_id  # type: ignore[union-attr]
        ready = self._epd_call("ensure_cache_available", *args, **kwargs)
        if not ready:
            self._epd_journal.write("defer", req=self._epd_request)
        return ready

    def has_cache_item(self, *args: Any, **kwargs: Any) -> Any:
        identifier = kwargs.get("identifier", args[0] if args else None)
        found = self._epd_call("has_cache_item", *args, **kwargs)
        self._epd_lookups[str(identifier)] = bool(found)
        self._epd_journal.write("lookup", req=self._epd_request, id=identifier, found=bool(found))
        return found

    def update_state_after_alloc(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.get("request", args[0] if args else None)
        index = kwargs.get("index", args[1] if len(args) > 1 else None)
        identifier = request.mm_features[index].identifier  # type: ignore[union-attr]
        self._epd_allocated.append((request.request_id, identifier))  # type: ignore[union-attr]
        return self._epd_call("update_state_after_alloc", *args, **kwargs)

    def build_connector_meta(self, *args: Any, **kwargs: Any) -> Any:
        output = kwargs.get("scheduler_output", args[0] if args else None)
        new = output.scheduled_new_reqs  # type: ignore[union-attr]
        for request in new:
            if request.req_id not in self._epd_seen:
                items = self._epd_remember(request.req_id, request.mm_features)
                self._epd_journal.write(
                    "request",
                    req=request.req_id,
                    items=items,
                    prompt=len(request.prompt_token_ids or ()),
                )
        encode = {
            req: [self._epd_seen[req][index] for index in indices]
            for req, indices in output.scheduled_encoder_inputs.items()  # type: ignore[union-attr]
        }
        freed = list(output.free_encoder_mm_hashes)  # type: ignore[union-attr]
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
        self._epd_allocated = []
        self._epd_lookups = {}
        return self._epd_call("build_connector_meta", *args, **kwargs)

    def take_unavailable_requests(self, *args: Any, **kwargs: Any) -> Any:
        named = self._epd_call("take_unavailable_requests", *args, **kwargs)
        if named:
            self._epd_journal.write("unavailable", reqs=sorted(named))
        return named

    def request_finished(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.get("request", args[0] if args else None)
        result = self._epd_call("request_finished", *args, **kwargs)
        self._epd_seen.pop(request.request_id, None)  # type: ignore[union-attr]
        self._epd_journal.write("finished", req=request.request_id, delayed=bool(result[0]))  # type: ignore[union-attr]
        return result

    # -- worker side ---------------------------------------------------------------------------------------------------

    def start_load_caches(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("encoder_cache", args[0] if args else {})
        before = {key: id(value) for key, value in cache.items()}
        began = time.perf_counter()
        result = self._epd_call("start_load_caches", *args, **kwargs)
        took = time.perf_counter() - began
        for key, tensor in cache.items():
            if before.get(key) != id(tensor):
                self._epd_journal.write("load", id=key, seconds=took, **describe(tensor))
        return result

    def save_caches(self, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("encoder_cache", args[0] if args else {})
        key = kwargs.get("mm_hash", args[1] if len(args) > 1 else None)
        form = describe(cache[key])
        began = time.perf_counter()
        result = self._epd_call("save_caches", *args, **kwargs)
        # A consumer is called too on runner V1, after an encode of its own; only a producer's call is a save.
        event = "save" if self.is_producer else "encoded"  # type: ignore[attr-defined]
        self._epd_journal.write(event, id=key, seconds=time.perf_counter() - began, **form)
        return result

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        self._epd_journal.write("shutdown")
        return self._epd_call("shutdown", *args, **kwargs)


class _KVRecorder:
    """The mixin that goes before the wrapped KV connector: what the decode side took from outside, for each request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("vllm_config", args[0] if args else None)
        role = kwargs.get("role", args[1] if len(args) > 1 else None)
        self._epd_journal = JournalWriter("kv-" + str(getattr(role, "name", role)).lower())
        super().__init__(*args, **kwargs)
        wrapped = type(self).__mro__[2]
        transfer = config.kv_transfer_config  # type: ignore[union-attr]
        self._epd_journal.write(
            "init",
            connector=f"{wrapped.__module__}.{wrapped.__qualname__}",
            kv_role=transfer.kv_role,
            engine=transfer.engine_id,
            block_size=config.cache_config.block_size,  # type: ignore[union-attr]
        )

    def get_num_new_matched_tokens(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.get("request", args[0] if args else None)
        result = super().get_num_new_matched_tokens(*args, **kwargs)  # type: ignore[misc]
        self._epd_journal.write(
            "kv-match",
            req=request.request_id,  # type: ignore[union-attr]
            tokens=result[0],
            prompt=request.num_prompt_tokens,  # type: ignore[union-attr]
        )
        return result

    def update_state_after_alloc(self, *args: Any, **kwargs: Any) -> Any:
        request = kwargs.get("request", args[0] if args else None)
        tokens = kwargs.get("num_external_tokens", args[2] if len(args) > 2 else None)
        if tokens:
            self._epd_journal.write("kv-take", req=request.request_id, tokens=tokens)  # type: ignore[union-attr]
        return super().update_state_after_alloc(*args, **kwargs)  # type: ignore[misc]

    def build_connector_meta(self, *args: Any, **kwargs: Any) -> Any:
        # A decode server has no EC connector, so what it encodes is seen here.
        output = kwargs.get("scheduler_output", args[0] if args else None)
        for request in output.scheduled_new_reqs:  # type: ignore[union-attr]
            self._epd_journal.write(
                "kv-new",
                req=request.req_id,
                computed=request.num_computed_tokens,
                prompt=len(request.prompt_token_ids or ()),
                items=_items(request.mm_features),
            )
        encode = {req: list(indices) for req, indices in output.scheduled_encoder_inputs.items()}  # type: ignore[union-attr]
        if encode:
            self._epd_journal.write("kv-encode", encode=encode)
        return super().build_connector_meta(*args, **kwargs)  # type: ignore[misc]

    def start_load_kv(self, *args: Any, **kwargs: Any) -> Any:
        result = super().start_load_kv(*args, **kwargs)  # type: ignore[misc]
        # vLLM's file connector says in its metadata what it has just injected; others report by get_finished.
        metadata = self._connector_metadata  # type: ignore[attr-defined]
        for entry in getattr(metadata, "requests", None) or ():
            if getattr(entry, "is_store", None) is False:
                self._epd_journal.write("kv-injected", tokens=len(entry.slot_mapping))
        return result


_made: dict[str, type] = {}


def __getattr__(name: str) -> type:
    """Make, once, the recording class that `name` asks for: `Recording:<module>:<Class>` or `RecordingKV:…`."""
    if name in _made:
        return _made[name]
    if name.startswith(KV_PREFIX):
        module, _, connector = name.removeprefix(KV_PREFIX).partition(":")
        mixin: type = _KVRecorder
        wrapped = getattr(importlib.import_module(module), connector) if module else _registered_kv(connector)
    elif name.startswith(EC_PREFIX):
        module, _, connector = name.removeprefix(EC_PREFIX).partition(":")
        mixin = _ECRecorder
        wrapped = getattr(importlib.import_module(module), connector) if module else _registered_ec(connector)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(f"Recording{wrapped.__name__}", (mixin, wrapped), {"__module__": __name__})
    _made[name] = made
    return made


def _registered_ec(connector: str) -> Any:
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    if connector not in ECConnectorFactory._registry:
        known = ", ".join(sorted(ECConnectorFactory._registry))
        raise AttributeError(
            f"vLLM has no EC connector {connector!r}; it has {known}; others need ec_connector_module_path"
        )
    return ECConnectorFactory._registry[connector]()


def _registered_kv(connector: str) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class_by_name(connector)
