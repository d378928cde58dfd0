"""The installed suite as data: which cases test which requirement, and what a cell of it must look like.

A run gets its cells from pytest; whoever checks a run afterwards needs the same bindings without running anything, and not
from the run's own evidence, which could name an easier judge or plan.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from epd_conformance import catalogue as catalogues
from epd_conformance.catalogue import Catalogue, ExpectedCell
from epd_conformance.catalogue.model import topology_kind
from epd_conformance.engine.case import EngineCase
from epd_conformance.features import Feature
from epd_conformance.live import baseline
from epd_conformance.live.case import MARK, AnyCase, Case, belongs, plan_of
from epd_conformance.live.layout import Layout
from epd_conformance.live.session import relevant
from epd_conformance.models import zoo
from epd_conformance.plans.plan import Plan, Request, lengthen
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.report import schema
from epd_conformance.topology.spec import Topology

C = TypeVar("C", Case, EngineCase, ProxyCase)


@dataclass(frozen=True)
class Suite:
    """Catalogue, cases by requirement, and the digest of the files they come from."""

    catalogue: Catalogue
    cases: Mapping[str, tuple[AnyCase, ...]]
    digest: str

    def case(self, requirement: str, name: str) -> Case | None:
        """The case that a cell of this requirement and name carries out; None where the suite has none."""
        return next((case for case in self._cases(requirement, Case) if case.name == name), None)

    def engine_case(self, requirement: str, name: str) -> EngineCase | None:
        """The same for a cell of a layer without servers."""
        return next((case for case in self._cases(requirement, EngineCase) if case.name == name), None)

    def proxy_case(self, requirement: str, name: str, arrangement: str) -> ProxyCase | None:
        """The same for a cell of the layer `proxy`."""
        found = (case for case in self._cases(requirement, ProxyCase) if arrangement in case.arrangements)
        return next((case for case in found if case.name == name), None)

    def _cases(self, requirement: str, kind: type[C]) -> Iterator[C]:
        return (case for case in self.cases.get(requirement, ()) if isinstance(case, kind))

    def expected(self, start: schema.RunStart, model: str) -> schema.ExpectedSet:
        """The expected set of a run with these options. Raises UsageError, or ValueError for an unknown feature."""
        from epd_conformance.run import Options

        run = start.run
        topologies = Options(start.subject.name, run.profile).topologies()
        selection = self.catalogue.select(
            topologies={topology_kind(topology) for topology in topologies},
            environment=start.environment_class,
            features=[Feature(name) for name in start.subject.features],
            level=run.level,
        )
        collected = [
            ExpectedCell(requirement, topology, model, case.name)
            for requirement, cases in self.cases.items()
            for topology in topologies
            for case in cases
            if belongs(case, topology)
        ]
        return schema.ExpectedSet(
            cells=tuple(schema.ExpectedRecord.of(cell) for cell in selection.expected(collected)),
            not_verified=tuple(
                schema.NotVerifiedRecord(kind=gap.kind, requirement=gap.requirement, detail=gap.detail)
                for gap in selection.not_verified
            ),
        )

    def drawn(self, case: Case, seed: int, cell: str, topology: str, plan: Plan) -> bool:
        """Whether a plan is what the case draws for this seed and cell.

        Where there is a KV connector the session lengthens each request until its prompt has a length that can be served,
        and the contrasts as far as the requests they belong to. Nothing else may differ.
        """
        drawn = plan_of(case, seed, cell)
        if not Topology.parse(topology).has_kv:
            return plan == drawn
        if len(plan.requests) != len(drawn.requests):
            return False
        counts = [_times(*pair) for pair in zip(drawn.requests, plan.requests, strict=True)]
        known = [count for count in counts if count is not None]
        if len(known) != len(counts):
            return False
        contrasts = tuple(lengthen(request, known[i % len(known)]) for i, request in enumerate(drawn.contrasts))
        same = (plan.fault, plan.metadata_only, plan.steps) == (drawn.fault, drawn.metadata_only, drawn.steps)
        return plan.contrasts == contrasts and same

    def floor_requests(self, seed: int, topology: str) -> list[Request]:
        """The prompts that the noise floor of a topology is measured on in every run."""
        return baseline.floor_requests(seed, topology)

    @property
    def repetitions(self) -> int:
        """How often the aggregated baseline answers each prompt."""
        return baseline.REPETITIONS

    def model_digest(self, name: str) -> str | None:
        """The digest of the zoo's model of this name; None where the zoo has none."""
        return spec.digest if (spec := zoo.MODELS.get(name)) is not None else None

    def layout(self, topology: str) -> Layout:
        """Where and by whom the evidence of a topology is written. Raises UsageError for what is no topology."""
        return Layout(Topology.parse(topology))

    def relevant(self, events: Sequence[Mapping[str, Any]], keys: set[str]) -> list[Mapping[str, Any]]:
        """The earlier journal lines that the evidence of a cell with these keys holds."""
        return relevant(events, keys)


def installed() -> Suite:
    """The suite of this installation. Imports its files, so pytest and what they import must be there."""
    from epd_conformance.run import suite_digest, suites_folder

    return Suite(catalogues.load(), collect(suites_folder()), suite_digest())


def collect(folder: Path) -> dict[str, tuple[AnyCase, ...]]:
    """The cases of every test function below a folder that carries the requirement mark."""
    found: dict[str, list[AnyCase]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        for requirement, cases in _marked(path):
            found.setdefault(requirement, []).extend(cases)
    return {requirement: tuple(cases) for requirement, cases in found.items()}


def _marked(path: Path) -> Iterator[tuple[str, tuple[AnyCase, ...]]]:
    # Under a name of its own: pytest may have imported the same file, and another suite may have one of the same name.
    spec = importlib.util.spec_from_file_location(f"_collected_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for value in vars(module).values():
        marks: Any = getattr(value, "pytestmark", ())
        for mark in marks if isinstance(marks, list) else ():
            if mark.name == MARK:
                yield mark.args


def _times(drawn: Request, request: Request) -> int | None:
    """How often a request was lengthened; None if it is another one."""
    return next((count for count in range(baseline.LENGTHENINGS + 1) if lengthen(drawn, count) == request), None)
