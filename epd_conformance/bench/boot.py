"""`bench boot`: how long until the aggregated server and the three of `e-p-d` are ready, forked and plain, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from epd_conformance.bench.result import Measurement
from epd_conformance.run import Options, model_use
from epd_conformance.subject import ReferenceSubject
from epd_conformance.topology.launcher import Boot
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import Site, StackSpec

# A plain start of four servers takes more than a minute, so the pair is measured a few times only.
ROUNDS = 2


def specs() -> list[StackSpec]:
    """The aggregated baseline and an `e-p-d` stack with the reference connector: four servers and a proxy."""
    shape = Shape(prefix_caching=False)
    return [
        StackSpec("aggregated", Topology.parse("aggregated"), shape),
        StackSpec("e-p-d", Topology.parse("e-p-d"), shape, subject=ReferenceSubject()),
    ]


def once(folder: Path, how: Boot, say: Callable[[str], None]) -> tuple[float, float]:
    """Seconds from nothing to four ready servers, and seconds to boot them once more from the parent that is warm."""
    began = time.monotonic()
    with Site(folder, model_use(Options(subject="reference")), boot=how, say=say) as site:
        stacks = site.boot(*specs())
        first = time.monotonic() - began
        if how is Boot.PLAIN:
            return first, first
        for stack in stacks:
            site.stop(stack)
        began = time.monotonic()
        site.boot(*specs())
        return first, time.monotonic() - began


def measure(folder: Path, say: Callable[[str], None]) -> list[Measurement]:
    """Alternate forked and plain starts."""
    forked: list[float] = []
    again: list[float] = []
    plain: list[float] = []
    for round_ in range(ROUNDS):
        cold, warm = once(folder / f"forked-{round_}", Boot.FORK, say)
        forked.append(cold)
        again.append(warm)
        plain.append(once(folder / f"plain-{round_}", Boot.PLAIN, say)[0])
    return [
        Measurement.of("four servers, warm-up included", forked, "s", baseline=plain, goal="<= 25 s", limit=25.0),
        Measurement.of("four servers, parent warm already", again, "s", baseline=plain),
        Measurement.of("four servers, plain", plain, "s"),
    ]
