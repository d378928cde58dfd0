"""`bench connector`: what verification costs, the reference connector against vLLM's example connector, same tensors.

Both are vLLM's own classes, called as the engine calls them, in one process, alternating, page cache warm, one thread, no fsync
on either side. Ours always verifies. Loading counts until every byte is in memory that is private to the worker: the example
connector's call alone maps the file and reads nothing, so its time is that of the call and a copy; the bare call is printed
beside it. Ratios are speeds: above 1 is faster than the example.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from epd_conformance.bench.result import Measurement
from epd_conformance.errors import UsageError

WIDTH = 1024
#: Bytes of an object -> how often it is measured. A small image, a large one, a video.
ROUNDS = {256 << 10: 200, 4 << 20: 60, 64 << 20: 12}
GOAL_LOAD = {256 << 10: 1.0, 4 << 20: 1.0, 64 << 20: 0.7}
GOAL_SAVE = 0.8
#: The first rounds touch fresh memory, which a server that has run for a minute does not.
WARM_UP = 3
DECODE_REQUESTS = 32
DECODE_STEPS = 300


@dataclass
class Pair:
    """Both halves of one server's connector."""

    scheduler: Any
    worker: Any


def measure(folder: Path, say: Callable[[str], None]) -> list[Measurement]:
    """Loading, saving, and what a scheduler's step pays."""
    try:
        from epd_conformance.runtime import repairs

        repairs.install()
        import torch
        import vllm.distributed.ec_transfer.ec_connector.example_connector  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"`bench connector` compares with vLLM's example connector, and vLLM is not here: {error}"
        ) from error

    torch.set_num_threads(1)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    results: list[Measurement] = []
    for size, rounds in ROUNDS.items():
        say(f"{_name(size)}: {rounds} rounds")
        results += _one_size(folder, model, size, rounds)
    say("decode steps")
    results += _decode(folder, model)
    return results


def _one_size(folder: Path, model: Path, size: int, rounds: int) -> list[Measurement]:
    import torch

    tensor = torch.rand(size // 4 // WIDTH, WIDTH)
    times: dict[str, list[float]] = {
        name: [] for name in ("save", "example save", "load", "example load", "bare", "step", "example step")
    }
    ours = [_ours(folder / "ours", model, role) for role in ("ec_producer", "ec_consumer")]
    example = [_example(folder / "example", model, role) for role in ("ec_producer", "ec_consumer")]
    for number in range(rounds + WARM_UP):
        key = f"{size}-{number % 4}"
        for name, (producer, _) in (("save", ours), ("example save", example)):
            began = time.perf_counter()
            producer.worker.save_caches(encoder_cache={key: tensor}, mm_hash=key)
            times[name].append(time.perf_counter() - began)
        seconds, step = _load_ours(ours[1], key, tensor, number)
        times["load"].append(seconds)
        times["step"].append(step)
        seconds, bare, step = _load_example(example[1], key, tensor)
        times["example load"].append(seconds)
        times["bare"].append(bare)
        times["example step"].append(step)
    for pair in ours:
        pair.worker.shutdown()
        pair.scheduler.shutdown()
    times = {name: values[WARM_UP:] for name, values in times.items()}
    mib = size / 2**20

    def speed(name: str, mine: str, theirs: str, goal: float) -> Measurement:
        made = Measurement.of(
            f"{name} {_name(size)}",
            [mib / value for value in times[mine]],
            "MiB/s",
            baseline=[mib / value for value in times[theirs]],
            goal=f">= {goal:g}x",
        )
        return replace(made, met=made.ratio is not None and made.ratio >= goal)

    return [
        speed("load, verified", "load", "example load", GOAL_LOAD[size]),
        Measurement.of(f"example's bare load {_name(size)} (maps, reads nothing)", _micro(times["bare"]), "us"),
        speed("save, checksum", "save", "example save", GOAL_SAVE),
        *_step(f"step that finds {_name(size)}", times["step"], times["example step"]),
    ]


def _load_ours(pair: Pair, key: str, tensor: Any, number: int) -> tuple[float, float]:
    """Seconds until the rows are in the worker, and seconds of that in the hooks of the longest scheduler step."""
    request = _request([_feature(key, tensor.shape[0])], f"{key}/{number}")
    cache: dict[str, Any] = {}
    longest = 0.0
    began = time.perf_counter()
    while True:
        step = time.perf_counter()
        ready = pair.scheduler.ensure_cache_available(request, 0)
        if ready:
            assert pair.scheduler.has_cache_item(key)
            pair.scheduler.update_state_after_alloc(request, 0)
        metadata = pair.scheduler.build_connector_meta(_OUTPUT)
        longest = max(longest, time.perf_counter() - step)
        if ready:
            break
        pair.scheduler.take_unavailable_requests()
        time.sleep(0.001)  # as the engine does between steps that schedule nothing (v1/engine/core.py)
    pair.worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
    pair.worker.start_load_caches(cache)
    _touch(cache[key])
    seconds = time.perf_counter() - began
    pair.worker.clear_connector_metadata()
    pair.scheduler.request_finished(request)
    # The next round must find the store, not the engine's cache.
    pair.scheduler.build_connector_meta(SimpleNamespace(free_encoder_mm_hashes=[key]))
    pair.scheduler.take_unavailable_requests()
    return seconds, longest


def _load_example(pair: Pair, key: str, tensor: Any) -> tuple[float, float, float]:
    """Seconds of the load and a copy, of the bare load, and of the hooks of the scheduler's step."""
    request = _request([_feature(key, tensor.shape[0])], key)
    cache: dict[str, Any] = {}
    step = time.perf_counter()
    pair.scheduler.ensure_cache_available(request, 0)
    assert pair.scheduler.has_cache_item(key)
    pair.scheduler.update_state_after_alloc(request, 0)
    metadata = pair.scheduler.build_connector_meta(_OUTPUT)
    step = time.perf_counter() - step
    pair.worker.bind_connector_metadata(pickle.loads(pickle.dumps(metadata)))
    began = time.perf_counter()
    pair.worker.start_load_caches(cache)
    bare = time.perf_counter() - began
    _touch(cache[key].clone())
    return time.perf_counter() - began, bare, step


def _decode(folder: Path, model: Path) -> list[Measurement]:
    """What the hooks add to a step of 32 running requests of two items each that need nothing."""
    times: dict[str, list[float]] = {"ours": [], "example": []}
    requests = [
        _request([_feature("a", 64), _feature("b", 64, offset=64)], str(number)) for number in range(DECODE_REQUESTS)
    ]
    pairs = {
        "ours": _ours(folder / "ours", model, "ec_consumer"),
        "example": _example(folder / "example", model, "ec_consumer"),
    }
    for _ in range(DECODE_STEPS):
        for name, pair in pairs.items():
            began = time.perf_counter()
            for request in requests:
                pair.scheduler.ensure_cache_available(request, 500)
            pair.scheduler.build_connector_meta(_OUTPUT)
            pair.scheduler.take_unavailable_requests()
            times[name].append(time.perf_counter() - began)
    pairs["ours"].scheduler.shutdown()
    return _step(f"decode step, {DECODE_REQUESTS} requests", times["ours"], times["example"])


def _step(name: str, ours: list[float], example: list[float]) -> list[Measurement]:
    """Median and 99th percentile of what the hooks add to a step."""

    def tail(values: list[float]) -> list[float]:
        return [statistics.quantiles(_micro(values), n=100, method="inclusive")[98]]

    return [
        Measurement.of(f"{name}: p50", _micro(ours), "us", baseline=_micro(example)),
        Measurement.of(f"{name}: p99", tail(ours), "us", baseline=tail(example)),
    ]


_OUTPUT = SimpleNamespace(free_encoder_mm_hashes=[])


def _ours(root: Path, model: Path, role: str) -> Pair:
    from epd_conformance.connectors.verified_store import VerifiedStoreConnector

    return _pair(VerifiedStoreConnector, model, role, {"root": str(root)})


def _example(root: Path, model: Path, role: str) -> Pair:
    from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector

    return _pair(ECExampleConnector, model, role, {"shared_storage_path": str(root)})


def _pair(connector: Any, model: Path, role: str, extra: dict[str, Any]) -> Pair:
    import torch
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

    config = SimpleNamespace(
        ec_transfer_config=ECTransferConfig(
            ec_connector=connector.__name__, ec_role=role, ec_connector_extra_config=extra
        ),
        model_config=SimpleNamespace(
            model=str(model),
            revision=None,
            dtype=torch.float32,
            multimodal_config=None,
            is_encoder_decoder=False,
            get_inputs_embeds_size=lambda: WIDTH,
        ),
        max_concurrent_batches=1,
    )
    pair = Pair(
        worker=connector(config, ECConnectorRole.WORKER), scheduler=connector(config, ECConnectorRole.SCHEDULER)
    )
    for half in (pair.worker, pair.scheduler):
        # In place of a lookup of the model's processor, which these requests have none of.
        half._resolver = SimpleNamespace(fields_for=lambda modality: set())
    return pair


def _feature(key: str, rows: int, offset: int = 0) -> Any:
    position = SimpleNamespace(offset=offset, length=rows, get_num_embeds=lambda: rows)
    data = {"pixel_values": SimpleNamespace(data=1)}
    return SimpleNamespace(identifier=key, modality="image", mm_position=position, data=data)


def _request(features: list[Any], name: str) -> Any:
    return SimpleNamespace(
        request_id=name,
        mm_features=features,
        num_preemptions=0,
        get_num_encoder_embeds=lambda index: features[index].mm_position.get_num_embeds(),
    )


def _touch(tensor: Any) -> None:
    """Read one value of every page, so that what was only mapped is there."""
    float(tensor.view(-1)[:: 4096 // tensor.element_size()].sum())


def _micro(values: list[float]) -> list[float]:
    return [1e6 * value for value in values]


def _name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
