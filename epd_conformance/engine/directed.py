"""What no plan can show: processes that race for one object, growth over many requests, models that load nothing, identifiers.

Each function is for `Host.call`: it runs in a child, takes the subject and an empty folder, and returns JSON: what was seen and
counted. What that means is for `measured`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import types
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from epd_conformance.engine import clock, configs
from epd_conformance.engine.content import Content, expected_digest
from epd_conformance.engine.core import StepOrder
from epd_conformance.engine.events import EngineDied, Event, describe
from epd_conformance.engine.exits import exit_text
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.engine.server import Server, die_with_parent
from epd_conformance.engine.sides import Side
from epd_conformance.engine.site import Site
from epd_conformance.engine.worker import Source
from epd_conformance.subject import Subject

#: Rows of the raced object: with the tiny model some 400 KiB, a hundred pages, so that a write of it takes its time.
RACED_ROWS = 768
#: Where an image stands in a prompt of the tiny model, which is a Qwen2.5-VL.
_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def race(subject: Subject, root: Path, *, writers: int, readers: int, seconds: float) -> dict[str, Any]:
    """Producers save one identifier again and again, each with rows of its own, while consumers look it up and load it.

    Returns `saves`, `loads`, `misses`, `bad`: loads of what nobody saved, and what saves and loads raised; and `ended`: how
    processes ended before they could tell, which says nothing about the object that they raced for.
    """
    servers = [ServerSpec("ec_producer", cache=RACED_ROWS, budget=RACED_ROWS)] * writers
    servers += [ServerSpec("ec_consumer", cache=RACED_ROWS, budget=RACED_ROWS)] * readers
    item = ItemSpec("raced", 0, rows=RACED_ROWS)
    site = Site(subject, Plan(tuple(servers), (item,), ()), root / "race", configs.hidden_size())
    contents = [replace(item, seed=seed).content(site.hidden, "float32") for seed in range(max(writers, 2))]
    racing = []
    for index, spec in enumerate(servers):
        # A single writer changes its rows from save to save: a reader must not see a part of either.
        shown = [contents[index]] if index < writers and writers > 1 else contents
        racing.append(Forked(functools.partial(_raced, site, spec, f"{spec.role}-{index}", shown, seconds)))
    told: Counter[str] = Counter()
    bad: list[str] = []
    ended: list[str] = []
    for one in racing:
        result = one.result()
        if "ended" in result:
            ended.append(result["ended"])
            continue
        bad += result.pop("bad")
        told.update(result)
    return {
        "writers": writers,
        "bad": sorted(set(bad)),
        "ended": ended,
        "saves": told["saved"],
        "loads": told["loaded"],
        "misses": told["miss"],
    }


class Forked:
    """A function in a process of its own; its JSON comes back through a pipe, or `ended` alone where it gave none."""

    def __init__(self, function: functools.partial[dict[str, Any]]) -> None:
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                die_with_parent()
                os.write(write, json.dumps(function()).encode())
                status = 0
            finally:
                os._exit(status)
        os.close(write)

    def result(self) -> dict[str, Any]:
        with os.fdopen(self._read, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        if not data:
            return {"ended": f"a process ended with {exit_text(os.waitstatus_to_exitcode(status))}"}
        told: dict[str, Any] = json.loads(data)
        return told


def _raced(site: Site, spec: ServerSpec, name: str, shown: list[Content], seconds: float) -> dict[str, Any]:
    """One racing server: saves, or requests for the one item, until time is up."""
    key = site.keys[0]
    allowed = {expected_digest(content) for content in shown}
    contents = {key: (shown[0], False)}
    source = Source(contents)
    events: list[Event] = []
    told: dict[str, Any] = {"saved": 0, "loaded": 0, "miss": 0, "bad": []}
    turn = 0
    try:
        server = Server(name, spec, site, source, events.append)
        end = clock.real() + seconds
        while clock.real() < end:
            turn += 1
            contents[key] = (shown[turn % len(shown)], False)
            if spec.role == "ec_producer":
                server.workers[0].save_again(server.engine.schedule(StepOrder(0), None, False)[1], key)
            else:
                server.add(f"{name}-{turn}", {"items": [(key, shown[0].rows, 0)]})
                while not server.idle():
                    server.step(StepOrder(4096))
                server.engine.evict()
                server.step(StepOrder(0), force=True)
            for event in events:
                if event[0] == "loaded" and event[3] not in allowed:
                    told["bad"].append(f"a load gave {event[4]} {event[5]} that nobody saved")
                kind = "miss" if event[0] == "lookup" and event[3] is False else event[0]
                if kind in told:
                    told[kind] += 1
            events.clear()
    except EngineDied:
        told["bad"] += [f"{event[1]}.{event[2]}: {event[3]}" for event in events if event[0] == "raised"]
        told["bad"] += [f"{event[0]} {event[1:]}" for event in events if event[0] in ("missing", "lost", "returned")]
    return told


def growth(subject: Subject, root: Path, *, cycles: int) -> dict[str, Any]:
    """Requests about four items come and go, most of them aborted between allocation and release.

    Counted are the objects that the SCHEDULER and the WORKER object hold, and the process's open files: `objects` and `open
    files`, at half time and at the end. Both are empty, and `died` says why, where the connector did not last so long.
    """
    items = tuple(ItemSpec(f"grown-{index}", index) for index in range(4))
    servers = (ServerSpec("ec_producer"), ServerSpec("ec_consumer", cache=8))
    site = Site(subject, Plan(servers, items, ()), root / "growth", configs.hidden_size())
    contents = {key: (item.content(site.hidden, "float32"), False) for key, item in zip(site.keys, items, strict=True)}
    source = Source(contents)
    counts: list[tuple[int, int]] = []
    try:
        producer, consumer = (Server(spec.role, spec, site, source, lambda event: None) for spec in servers)
        producer.add("first", {"items": [(key, 4, 0) for key in site.keys]})
        while not producer.idle():
            producer.step(StepOrder())
        for cycle in range(cycles):
            name = f"cycle-{cycle}"
            keys = [site.keys[(cycle + offset) % 4] for offset in range(2)]
            consumer.add(name, {"items": [(key, 4, 0) for key in keys], "max_tokens": 3})
            consumer.step(StepOrder(4 + cycle % 7, ("", "refuse", "")[cycle % 3]))
            consumer.step(StepOrder(3, ("", "", "preempt")[cycle % 3]))
            if cycle % 4:
                consumer.abort(name)
            while not consumer.idle():
                consumer.step(StepOrder())
            # Otherwise the cache would answer, and the connector hear of no allocation.
            consumer.engine.evict()
            consumer.step(StepOrder(0), force=True)
            if cycle + 1 in (cycles // 2, cycles):
                gc.collect()
                sides = [consumer.engine.side.connector, consumer.workers[0].side.connector]
                counts.append((sum(map(reachable, sides)), len(os.listdir("/proc/self/fd"))))  # noqa: PTH208
    except EngineDied as error:
        return {"cycles": cycles, "objects": [], "open files": [], "died": describe(error)}
    return {"cycles": cycles, "objects": [count[0] for count in counts], "open files": [count[1] for count in counts]}


def reachable(top: Any) -> int:
    """How many objects a connector holds: everything reachable from its attributes, without code, modules and vLLM's own."""
    outside = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
    seen: set[int] = set()
    queue = [value for name, value in vars(top).items() if name != "_vllm_config"]
    while queue:
        value = queue.pop()
        if id(value) in seen or isinstance(value, outside) or type(value).__module__.startswith("vllm.config"):
            continue
        seen.add(id(value))
        if type(value).__module__.startswith("torch"):
            continue
        queue += gc.get_referents(value)
    return len(seen)


def encoder_decoder(subject: Subject, root: Path) -> dict[str, Any]:
    """With an encoder-decoder model: `answer` to the look-up of an item that is `saved`; None where nobody was asked.

    `refused`: what the connector said where it refuses such a model when it is made; `raised`: what the look-up raised.
    """
    items = (ItemSpec("heard", 0),)
    servers = (ServerSpec("ec_producer"), ServerSpec("ec_consumer"))
    site = Site(subject, Plan(servers, items, ()), root / "decoder", configs.hidden_size())
    source = Source({site.keys[0]: (items[0].content(site.hidden, "float32"), False)})
    events: list[Event] = []
    told: dict[str, Any] = {"answer": None, "refused": "", "raised": ""}
    with contextlib.suppress(EngineDied):
        producer = Server("producer", servers[0], site, source, events.append)
        producer.add("first", {"items": [(site.keys[0], 4, 0)]})
        while not producer.idle():
            producer.step(StepOrder())
        make = functools.partial(configs.make, encoder_decoder=True)
        config = make(site.connector_config("ec_consumer"), "ec_consumer")
        told["saved"] = any(event[0] == "saved" for event in events)
        events.clear()
        side = Side("scheduler", lambda: configs.connector(config, "SCHEDULER"), events.append)
        told["answer"] = bool(side.call("has_cache_item", site.keys[0]))
    for _, _, hook, error, _ in (event for event in events if event[0] == "raised" and "saved" in told):
        told["refused" if hook == "__init__" else "raised"] = error
    return {"saved": False, **told}


def identities(subject: Subject, root: Path) -> dict[str, Any]:
    """What two servers make of the same two images that differ in their EC configuration and engine id.

    Returns for each server `configurations` (its EC configuration, as text), `identifiers` of the two images and `hashes`, which
    name what was compiled; all empty where a process `ended` before it could tell, of which the other one says nothing.
    """
    told = [Forked(functools.partial(_identity, subject, root, name)).result() for name in ("one", "other")]
    ended = [one["ended"] for one in told if "ended" in one]
    names = ("configurations", "identifiers", "hashes")
    return {name: ["", ""] if ended else [one[name] for one in told] for name in names} | {"ended": ended}


def _identity(subject: Subject, root: Path, name: str) -> dict[str, Any]:
    """In a process of its own: vLLM's front end leaves threads behind."""
    from PIL import Image
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    site = Site(
        subject, Plan((ServerSpec("ec_consumer"),), (ItemSpec("seen", 0),), ()), root / name, configs.hidden_size()
    )
    config = configs.make(site.connector_config("ec_consumer"), "ec_consumer", engine_id=name)
    front_end = InputProcessor(config)
    images = [Image.new("RGB", (56, 56), colour) for colour in ("red", "blue")]
    prompt = {"prompt": _PLACEHOLDER * len(images), "multi_modal_data": {"image": images}}
    rendered = front_end.renderer.render_cmpl([prompt])[0]
    request = front_end.process_inputs(name, rendered, SamplingParams(max_tokens=1), ("generate",))
    return {
        "configurations": repr(config.ec_transfer_config),
        "identifiers": [feature.identifier for feature in request.mm_features],
        "hashes": config.compute_hash(),
    }
