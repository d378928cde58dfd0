"""`bench cell`: what a live cell costs that breaks nothing, on a stack that is kept, against starting plain servers for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

from epd_conformance.bench.boot import once
from epd_conformance.bench.result import Measurement
from epd_conformance.live.case import Case
from epd_conformance.live.session import LiveSession, PlannedCell
from epd_conformance.oracle import judges
from epd_conformance.plans.plan import Draw, Plan, replace_images
from epd_conformance.run import Options, model_use
from epd_conformance.subject import ReferenceSubject
from epd_conformance.topology.launcher import Boot
from epd_conformance.topology.stack import Site
from epd_conformance.verdict import Owner, Verdict

CELLS = 20


def one(draw: Draw) -> Plan:
    request = draw.request("one image", draw.image())
    return Plan((request,), (replace_images(request, [draw.image()], "other"),))


def measure(folder: Path, say: Callable[[str], None]) -> list[Measurement]:
    """Twenty one-image cells each in `e-pd` and `e-p-d`; the plain start of four servers is the baseline of both."""
    cells = {
        topology: [
            PlannedCell(f"bench-{number}[{topology}]", topology, Owner.CONNECTOR, Case(str(number), "equality", one))
            for number in range(CELLS)
        ]
        for topology in ("e-pd", "e-p-d")
    }
    everything = [cell for group in cells.values() for cell in group]
    seconds: dict[str, list[float]] = {}
    with Site(folder / "site", model_use(Options(subject="reference")), say=say) as site:
        session = LiveSession(site, ReferenceSubject(), folder, seed=0, cells=everything, say=say)
        for topology, group in cells.items():
            session.stage(topology)
            for cell in group:
                began = time.monotonic()
                judgement = judges.judge(session.run(cell))
                took = time.monotonic() - began
                if judgement.verdict is Verdict.PASS:
                    seconds.setdefault(topology, []).append(took)
                else:
                    say(f"{cell.id}: {judgement.verdict} {judgement.reason}: left out, its time says nothing")
    plain = once(folder / "plain", Boot.PLAIN, say)[0]
    say(f"a plain start of four servers took {plain:.1f} s")
    return [
        Measurement.of(f"one-image cell in {topology}", values, "s", baseline=[plain], goal="<= 0.5 s", limit=0.5)
        for topology, values in seconds.items()
    ] + [Measurement.of("cells a minute", [60 / statistics.median(seconds["e-pd"])], "1/min")]
