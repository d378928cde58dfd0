"""Replay of what a layer without servers carried out: an engine plan, or the smallest failing plan of a cell's evidence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_conformance.engine.evidence import CELL_SCHEMA, PlanEvidence, read_cell
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.hosted import LIMIT_S, Host
from epd_conformance.engine.layers import LAYERS
from epd_conformance.engine.plan import SCHEMA as PLAN_SCHEMA
from epd_conformance.engine.plan import Plan
from epd_conformance.errors import UsageError
from epd_conformance.report import schema, writer


@dataclass(frozen=True)
class Recorded:
    """A plan to carry out: its layer, the cell that it was found for (empty: none), and the subject (empty: not known)."""

    plan: Plan
    layer: str = "contract"
    cell: str = ""
    subject: str = ""


@dataclass(frozen=True)
class Replayed:
    """One repetition."""

    findings: list[Finding]
    steps: int


def read(path: Path, layer: str = "") -> Recorded | None:
    """What a file asks to carry out without servers; None where it is something else. Raises UsageError where it holds no plan.

    `layer`: of a plan that has no cell around it; empty: `contract`.
    """
    if layer and layer not in LAYERS:
        raise UsageError(f"no profile {layer!r} carries out a plan without servers: use {' or '.join(LAYERS)}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever reads other kinds says what is wrong
    if not isinstance(data, dict) or data.get("schema") not in (PLAN_SCHEMA, CELL_SCHEMA):
        return None
    if data["schema"] == PLAN_SCHEMA:
        return Recorded(Plan.from_json(data), layer or Recorded.layer)
    if layer:
        raise UsageError(f"{path} says itself which profile it is of: leave out --profile")
    try:
        shrunk: PlanEvidence | None = read_cell(data)
        cell, layer = str(data["cell"]), str(data["layer"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no cell's evidence ({type(error).__name__}: {error})") from error
    if layer not in LAYERS:
        raise UsageError(f"{path} is of the layer {layer!r}, which carries out no plans")
    if shrunk is None:
        raise UsageError(f"{path} holds no failing plan: the cell passed, or a check without a plan judged it")
    return Recorded(shrunk.plan, layer, cell, _subject(path))


def _subject(path: Path) -> str:
    """The subject of the run that a cell's evidence lies in; empty where there is none."""
    results = path.resolve().parent.parent / writer.RESULTS_NAME
    starts = writer.read_results(results).all(schema.RunStart) if results.is_file() else ()
    return starts[0].subject.name if starts else ""


def replay(recorded: Recorded, subject: str, repeat: int, say: Callable[[str], None]) -> list[Replayed]:
    """Carry the plan out so many times, each in a process of its own. Raises UsageError where nothing can be carried out."""
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: repeat a plan at least once")
    subject = subject or recorded.subject
    if not subject:
        raise UsageError("nothing beside the file says what was tested: add --subject")
    results: list[Replayed] = []
    with Host(subject, core=recorded.layer) as host:
        for number in range(1, repeat + 1):
            carried = host.carry(recorded.plan, limit_s=LIMIT_S)
            results.append(Replayed(carried.findings, carried.steps))
            say(f"{number} of {repeat}: {words(results[-1])}")
            host.recycle()
    return results


def words(one: Replayed) -> str:
    """What a repetition showed, in a few words."""
    found = ", ".join(f"{finding.requirement} {finding.kind}" for finding in one.findings)
    return f"{found or 'nothing that is not allowed'} ({one.steps} steps)"


def failed(recorded: Recorded, results: list[Replayed]) -> bool:
    """Whether a repetition broke the requirement that the plan was found for; without one, whether any broke anything."""
    requirement = recorded.cell.partition("[")[0]
    return any(not requirement or finding.requirement == requirement for one in results for finding in one.findings)


def lines(recorded: Recorded, results: list[Replayed]) -> list[str]:
    """The replay for a person: the plan, what the first repetition found, and how often what came about."""
    found = [recorded.plan.to_text()]
    odd = next((one for one in results if one.findings), None)
    found += [str(finding) for finding in odd.findings] if odd is not None else []
    counts: dict[str, int] = {}
    for one in results:
        counts[words(one)] = counts.get(words(one), 0) + 1
    prefix = f"{recorded.cell}: " if recorded.cell else ""
    return [*found, *(f"{prefix}{count} × {text}" for text, count in counts.items())]


def to_json(recorded: Recorded, results: list[Replayed]) -> dict[str, Any]:
    """The replay for programs."""
    return {
        "cell": recorded.cell,
        "plan": recorded.plan.to_json(),
        "failed": failed(recorded, results),
        "now": [{"findings": [finding.to_json() for finding in one.findings], "steps": one.steps} for one in results],
    }
