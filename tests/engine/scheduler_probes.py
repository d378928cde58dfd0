"""What tests of the scheduler layer run inside a child of the host, where vLLM is imported: functions of `Host.call`."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
from pathlib import Path
from typing import Any

from planted_scheduler import DEFECTS, MENDED, Planted

from epd_conformance.engine import machine
from epd_conformance.engine.directed import identities
from epd_conformance.engine.evidence import PlanEvidence
from epd_conformance.engine.layers import fixed
from epd_conformance.engine.real_core import scheduler_core
from epd_conformance.features import Feature
from epd_conformance.subject import Subject


def plant(planted: Planted) -> None:
    """Change the class in this process, for good. Raises AssertionError where the source is not as it was."""
    module, _, name = planted.where.partition(":")
    target: Any = getattr(importlib.import_module(module), name)
    source = textwrap.dedent(inspect.getsource(getattr(target, planted.method)))
    for old, new in planted.changes:
        assert source.count(old) == 1, f"{planted.method} has {old!r} {source.count(old)} times"
        source = source.replace(old, new.replace("{0}", old))
    space: dict[str, Any] = {}
    exec(compile(source, f"<{planted.method}, planted>", "exec"), vars(sys.modules[module]), space)
    setattr(target, planted.method, space[planted.method])


def shown(subject: Subject, root: Path, *, table: str = "", requirement: str = "", plans: list[str]) -> dict[str, Any]:
    """Requirements that are `found` broken and that are `exercised` in these plans, with a defect or as vLLM is."""
    if table:
        plant({"defects": DEFECTS, "mended": MENDED}[table][requirement])
    found: set[str] = set()
    exercised: set[str] = set()
    every = fixed("scheduler", frozenset(Feature))
    for name in plans:
        outcome = machine.run(every[name], subject, root / name, make_core=scheduler_core, keep_events=True)
        found |= {finding.requirement for finding in outcome.findings}
        exercised |= PlanEvidence(name, every[name], 0, outcome.events, outcome.twins).exercised
    return {"found": sorted(found), "exercised": sorted(exercised)}


def hashed(subject: Subject, root: Path, *, requirement: str) -> dict[str, Any]:
    """What the directed check tells with a defect."""
    plant(DEFECTS[requirement])
    return identities(subject, root)
