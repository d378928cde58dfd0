"""The part of `verify` for layers without servers: was everything carried out that had to be, and nothing else? Pure."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from typing import Any

from epd_conformance.engine import measured
from epd_conformance.engine.evidence import PlanEvidence, read_cell
from epd_conformance.engine.explain import TWINS
from epd_conformance.engine.layers import examples, fixed, plans
from epd_conformance.engine.pool import Pool
from epd_conformance.engine.whole import missing
from epd_conformance.features import Feature
from epd_conformance.report import schema
from epd_conformance.verdict import Mode

#: A run writes no such death down: it ends with the cell in error.
_NOBODYS = "its process is said to have ended in a way that says nothing about the connector"


def problems(pool: Pool, layer: str, start: schema.RunStart, asked: frozenset[str], certifies: bool) -> Iterator[str]:
    """What is wrong with the plans and checks of a run, each in a clause. Raises ValueError for an unknown feature.

    `asked`: the requirements that the run shows in this layer. What plans and checks showed is not looked at here.
    """
    features = frozenset(Feature(name) for name in start.subject.features)
    if pool.layer != layer:
        yield f"is of the layer {pool.layer}, and must be of {layer}"
    if pool.seed != start.run.seed:
        yield f"was drawn from seed {pool.seed}, and the run's is {start.run.seed}"
    if certifies and pool.examples != examples(layer, Mode.CERTIFY):
        yield f"holds {pool.examples} drawn plans: certify draws {examples(layer, Mode.CERTIFY)}"
    ours = importlib.metadata.version("hypothesis")
    if pool.hypothesis == ours:
        wanted = plans(layer, features, pool.examples, pool.seed)
    else:
        yield f"was drawn by Hypothesis {pool.hypothesis}: only the same version (here: {ours}) draws the same plans again"
        wanted = fixed(layer, features)
        wanted |= {one.name: one.plan for one in pool.plans if one.name not in wanted}
    names = [one.name for one in pool.plans]
    if [*names, *pool.left] != list(wanted):
        yield "its plans are not those that the suite has for this subject and seed"
    for one in pool.plans:
        if one.name in wanted and one.plan.to_json() != wanted[one.name].to_json():
            yield f"its plan {one.name} is not the one of the suite"
        for words in _lacks(one):
            yield f"its plan {one.name}: {words}"
    for told in pool.checks:
        if told.death is not None and told.death.finding() is None:
            yield f"its check {told.check}: {_NOBODYS}"
    if pool.left and not pool.hung():
        yield f"{len(pool.left)} plans were left out, and no hook hung so often"
    checks = [] if pool.left else [name for name, check in measured.CHECKS.items() if check.requirement in asked]
    if [one.check for one in pool.checks] != checks:
        yield f"its checks are {', '.join(one.check for one in pool.checks) or 'none'}, and must be {', '.join(checks) or 'none'}"


def shrunk_problems(cell: Mapping[str, Any], requirement: str, asked: frozenset[str]) -> Iterator[str]:
    """What is wrong with the smallest failing plan of a cell's evidence. Raises what `read_cell` does."""
    shrunk = read_cell(cell)
    if shrunk is None:
        return
    yield from (f"its smallest plan: {words}" for words in _lacks(shrunk))
    if requirement not in Pool(0, 0, "", (shrunk,)).findings(asked):
        yield f"its smallest plan does not break {requirement}"


def _lacks(one: PlanEvidence) -> Iterator[str]:
    """What is not there of a plan's events, or of a twin's; with the process they have gone."""
    if one.death is not None:
        if one.death.finding() is None:
            yield _NOBODYS
        return
    yield from missing(one.plan, one.events)
    for requirement, _, make in TWINS:
        twin = make(one.plan) if requirement in one.twins else None
        if twin is not None:
            for words in missing(twin, one.twins[requirement]):
                yield f"without the circumstance of {requirement}, {words}"
