"""One engine layer of a run: carries out all plans and checks once, writes them down, and judges cells by what was written."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from epd_conformance.catalogue.selection import parse_cell_id
from epd_conformance.engine import clock, measured
from epd_conformance.engine.case import EngineCell
from epd_conformance.engine.evidence import CELL_SCHEMA, PlanEvidence
from epd_conformance.engine.findings import Finding
from epd_conformance.engine.hosted import LIMIT_S, Carried, Host
from epd_conformance.engine.hunt import Catch, shrink_catch, size
from epd_conformance.engine.layers import plans as plans_of
from epd_conformance.engine.plan import Plan
from epd_conformance.engine.pool import Pool, Told, pool_path
from epd_conformance.errors import StackError
from epd_conformance.features import Feature
from epd_conformance.live.layout import cell_path
from epd_conformance.oracle.cell import Judgement

#: Runs that making one failing plan smaller may take. Plans of the corpus are small already; a connector that is broken all over
#: fails thirty requirements, and nobody should wait minutes for that.
SHRINK_RUNS = 40

#: Seconds between two lines about plans that are carried out.
SPEAKS_EVERY_S = 3.0


@dataclass(frozen=True)
class Judged:
    """A cell's verdict. `evidence`: its file; `shrunk`: the smallest plan that was found to break the requirement."""

    judgement: Judgement
    evidence: Path
    shrunk: Plan | None


class EngineSession:
    """A context manager; nothing starts before the first cell.

    Args:
        subject: as `--subject` takes it.
        asked: the requirements that the run shows in this layer.
    """

    def __init__(
        self,
        subject: str,
        features: frozenset[Feature],
        out: Path,
        *,
        layer: str,
        seed: int,
        examples: int,
        asked: frozenset[str],
        say: Callable[[str], None],
    ) -> None:
        self.subject = subject
        self.features = features
        self.out = out
        self.layer = layer
        self.seed = seed
        self.examples = examples
        self.asked = asked
        self.say = say
        self._host: Host | None = None
        self._pool: Pool | None = None

    def __enter__(self) -> EngineSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.__exit__(None, None, None)

    def judge(self, cell: EngineCell) -> Judged:
        """The verdict of a cell. Raises UsageError for a subject that cannot be used, StackError where the harness breaks."""
        pool = self.pool()
        requirement = parse_cell_id(cell.id)[0]
        judgement = pool.judge(requirement, cell.case.check, self.asked)
        smallest = self._smallest(pool, requirement)
        shrunk = None
        if smallest is not None:
            self.say(f"{requirement}: making the plan {smallest[0].name} smaller")
            catch = Catch(smallest[1], smallest[0].plan)
            # A hook that hangs costs the whole limit each time.
            if smallest[0].death is None or not smallest[0].death.hung:
                shrink_catch(catch, self._found, SHRINK_RUNS)
            shrunk = self._carry(catch.plan, "shrunk")
            if smallest[1].name not in {finding.name for finding in shrunk.findings}:
                # It does not show it every time: what was seen stands as it was seen.
                shrunk = smallest[0]
        path = self.out / cell_path(cell.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        evidence = {
            "schema": CELL_SCHEMA,
            "cell": cell.id,
            "layer": self.layer,
            "check": cell.case.check,
            "pool": pool_path(self.layer),
            "shrunk": shrunk.to_json() if shrunk is not None else None,
        }
        path.write_text(json.dumps(evidence, separators=(",", ":")), encoding="utf-8")
        return Judged(judgement, path, shrunk.plan if shrunk is not None else None)

    def pool(self) -> Pool:
        """What was carried out, as it stands on disk: whoever reads it there judges by the same."""
        if self._pool is None:
            path = self.out / pool_path(self.layer)
            self._fill().write(path)
            self._pool = Pool.read(path)
        return self._pool

    def _fill(self) -> Pool:
        plans = plans_of(self.layer, self.features, self.examples, self.seed)
        asked = len(checks(self.asked))
        self.say(f"{len(plans)} plans and {asked} checks against {self.subject}, seed {self.seed}")
        pool = Pool(self.seed, self.examples, importlib.metadata.version("hypothesis"), layer=self.layer)
        done: list[PlanEvidence] = []
        broken: set[str] = set()
        spoke = clock.real()
        for name, plan in plans.items():
            done.append(self._carry(plan, name))
            pool = replace(pool, plans=tuple(done))
            broken |= {finding.requirement for finding in done[-1].findings}
            if clock.real() - spoke >= SPEAKS_EVERY_S:
                spoke = clock.real()
                self.say(f"plan {len(done)} of {len(plans)}: {len(broken)} requirements found broken so far")
            if done[-1].death is not None and pool.hung():
                break
        left = tuple(plans)[len(done) :]
        told = [] if left else [self._check(name) for name in checks(self.asked)]
        return replace(pool, checks=tuple(told), left=left)

    def _check(self, name: str) -> Told:
        check = measured.CHECKS[name]
        self.say(f"check {name}, for {check.requirement}")
        answer = self.host.call(check.path, check.arguments, bare=check.bare, limit_s=LIMIT_S)
        return Told(name, death=answer.death) if isinstance(answer, Carried) else Told(name, answer)

    def _carry(self, plan: Plan, name: str) -> PlanEvidence:
        evidence = self.host.carry(plan, keep=name, limit_s=LIMIT_S).evidence
        if evidence is None:
            raise StackError(f"the plan {name} left no evidence")
        return evidence

    def _found(self, plan: Plan) -> tuple[list[Finding], int]:
        carried = self.host.carry(plan, limit_s=LIMIT_S)
        return carried.findings, carried.steps

    def _smallest(self, pool: Pool, requirement: str) -> tuple[PlanEvidence, Finding] | None:
        """The smallest plan of the pool that breaks a requirement as the first one does, with what it shows."""
        plans = {one.name: one for one in pool.plans}
        broken = pool.findings(self.asked).get(requirement, [])
        found = [
            (plans[name], finding) for name, finding in broken if name in plans and finding.name == broken[0][1].name
        ]
        return min(found, key=lambda pair: size(pair[0].plan), default=None)

    @property
    def host(self) -> Host:
        """The host; its process is started when it is first asked for."""
        if self._host is None:
            self.say("importing vLLM in a process of its own")
            log = self.out / "logs" / f"{self.layer}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            # A host that cannot be entered has closed itself.
            self._host = Host(self.subject, core=self.layer, log=log).__enter__()
        return self._host


def checks(asked: frozenset[str]) -> list[str]:
    """The directed checks of a run that asks for these requirements."""
    return [name for name, check in measured.CHECKS.items() if check.requirement in asked]
