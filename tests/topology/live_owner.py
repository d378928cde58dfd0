"""An owner of real servers, to kill: `python -m live_owner FOLDER`.

Boots `e-pd` with the reference connector, prints what it has (one JSON line), then does what it is told by lines on stdin:
`more` boots an aggregated stack beside it and prints that.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from epd_conformance import subject
from epd_conformance.models import zoo
from epd_conformance.topology import guard
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import ModelUse, Site, Stack, StackSpec


def tell(site: Site, stack: Stack, began: float) -> None:
    """One line about a stack: where it is, which processes it has, what they have mapped."""
    pids = sorted({pid for process in stack.processes() for pid in site.launcher.tree(process)})
    told = {
        "seconds": time.monotonic() - began,
        "url": stack.base_url,
        "servers": {server.name: server.url for server in stack.servers},
        "ports": [int(url.rsplit(":", 1)[1]) for url in [stack.base_url, *(one.url for one in stack.servers)]],
        "pids": pids,
        "blocks": sorted(Path(path).name for path in guard.shared_memory(pids)),
        "scratch": str(site.launcher.scratch),
        "guard": site.launcher.guard_pid,
        "warmed": site.launcher.zygote_pid,
        "sides": sorted({f"{one['server']} {one['side']}" for one in stack.journal.read() if one["ev"] == "init"}),
    }
    print(json.dumps(told), flush=True)


def tiny() -> ModelUse:
    """The zoo's tiny model, from the user's cache."""
    model = zoo.resolve("tiny-qwen2.5-vl", zoo.default_cache())
    return ModelUse(model.name, model.path_or_id, "float32", {"image": 4}, digest=model.digest)


def main() -> None:
    began = time.monotonic()
    with Site(Path(sys.argv[1]), tiny(), say=lambda line: print(line, file=sys.stderr)) as site:
        (stack,) = site.boot(StackSpec("e-pd", Topology.parse("e-pd"), Shape(), subject=subject.load("reference")))
        tell(site, stack, began)
        for line in sys.stdin:
            assert line == "more\n"
            began = time.monotonic()
            (stack,) = site.boot(StackSpec("more", Topology.parse("aggregated"), Shape()))
            tell(site, stack, began)


if __name__ == "__main__":
    main()
