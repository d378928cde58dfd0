"""A store that takes a second for each operation: what each hook of a step then takes, and that who waits for it is served.

For `Host.call`, as `directed`; what it tells is judged by `measured`.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from pathlib import Path
from typing import Any

from epd_conformance.engine import clock, configs, sides
from epd_conformance.engine.core import StepOrder
from epd_conformance.engine.directed import Forked
from epd_conformance.engine.events import EngineDied, Event, describe
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.engine.server import Server
from epd_conformance.engine.site import Site
from epd_conformance.engine.slow_folder import SlowFolder
from epd_conformance.engine.worker import Source
from epd_conformance.subject import Subject

#: So many operations' time the store is slow for each of the two sides, as a whole: what takes ten operations for a look-up must
#: not be taken for a hang.
SLOW_FOR = 8
#: A producer that saves, then consumers that look up. A save may take as long as it likes: it must leave the other phase its time.
_SAVING, _LOOKING_UP = 1, 2
#: Steps of a producer after its save, and of a consumer while others wait: at a millisecond each some seconds.
_STEPS = 3000
#: As `machine`: by how much the clock is put forward for who still waits, and how often.
_PATIENCE = (15.0, 20)


def slow_store(subject: Subject, root: Path, *, seconds: float) -> dict[str, Any]:
    """One process saves, another answers a request without items beside one with two, a third has that one alone.

    Returns `held`: operations that were held up while consumers looked up; `slowest`: hook -> seconds that it took at most, loads
    and saves left out; `deferred`: how often the lone request was; `served`: whether it was served or given up; `died`: what a
    server died of.
    """
    site = _site(subject, root / "slow")
    folder = SlowFolder(site.store, seconds, SLOW_FOR * seconds)
    process = Forked(functools.partial(_servers, site, folder, seconds))
    folder.serve()
    told = process.result()
    # What a process says that ended is no result of this check.
    empty = {"slowest": {}, "deferred": 0, "served": False, "died": told.get("ended", "")}
    return {"held": folder.held[_LOOKING_UP], **(empty if "ended" in told else told)}


def _site(subject: Subject, root: Path) -> Site:
    items = tuple(ItemSpec(f"slow-{index}", index) for index in range(3))
    servers = (ServerSpec("ec_producer"), ServerSpec("ec_consumer"), ServerSpec("ec_consumer"))
    return Site(subject, Plan(servers, items, ()), root, configs.hidden_size())


def _servers(site: Site, folder: SlowFolder, seconds: float) -> dict[str, Any]:
    told: dict[str, Any] = {"slowest": {}, "deferred": 0, "served": False, "died": ""}
    if not folder.install():
        return told
    slowest: Counter[str] = Counter()
    _time_hooks(slowest)
    events: list[Event] = []
    contents = {
        key: (item.content(site.hidden, "float32"), False) for key, item in zip(site.keys, site.plan.items, strict=True)
    }
    source = Source(contents)
    try:
        producer, busy, alone = (
            Server(f"server-{index}", spec, site, source, events.append) for index, spec in enumerate(site.plan.servers)
        )
        producer.add("before", {"items": [(key, 4, 0) for key in site.keys[:2]]})
        _until(producer, "before")
        slowest.clear()
        folder.slow(_SAVING)
        producer.add("saves", {"items": [(site.keys[2], 4, 0)]})
        _until(producer, "saves")
        folder.slow(0)
        # A thread that saves is held up in its last operation for so long; the others are quick now.
        time.sleep(seconds)
        folder.slow(_LOOKING_UP)
        busy.add("talks", {"items": [], "max_tokens": 2 * _STEPS})
        asked = {"items": [(key, 4, 0) for key in site.keys[:2]]}
        busy.add("asks", asked)
        _until(busy, "asks")
        told["slowest"] = dict(slowest)
        events.clear()
        alone.add("asks", asked)
        told["served"] = _until(alone, "asks", patient=True)
        told["deferred"] = sum(event[0] == "deferred" for event in events)
        folder.slow(0)
        for server in (producer, busy, alone):
            server.shutdown("worker-first")
    except EngineDied as error:
        told["died"] = next((f"{event[1]}.{event[2]}: {event[3]}" for event in events if event[0] == "raised"), "")
        told["died"] = told["died"] or describe(error)
    return told


def _until(server: Server, request: str, patient: bool = False) -> bool:
    """Steps until a request has ended; whether it has."""
    for _ in range(_STEPS):
        if request not in server.engine.live():
            return True
        server.step(StepOrder())
        time.sleep(0.001)  # as an engine that has nothing to compute (v1/engine/core.py)
    seconds, times = _PATIENCE if patient else (0.0, 0)
    for _ in range(times):
        clock.advance(seconds)
        server.step(StepOrder())
        time.sleep(0.01)
    return request not in server.engine.live()


def _time_hooks(slowest: Counter[str]) -> None:
    """Measure every hook of this process from now on, but those that load or save an item."""
    original = sides.Side._guarded

    def timed(self: sides.Side, hook: str, function: Any, *arguments: Any, **keywords: Any) -> Any:
        began = clock.real()
        try:
            return original(self, hook, function, *arguments, **keywords)
        finally:
            if hook not in ("__init__", "start_worker_services", "start_load_caches", "save_caches", "shutdown"):
                slowest[hook] = max(slowest[hook], clock.real() - began)  # type: ignore[assignment]

    sides.Side._guarded = timed  # type: ignore[method-assign]
