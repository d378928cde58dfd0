"""The pool: everything that a run of an engine layer carried out, and the verdict of each requirement by it. Pure.

Any plan may show that any requirement is broken, so a requirement is judged by all of them; and it holds only where at least one
of them put it to the test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_conformance.engine import measured
from epd_conformance.engine.evidence import Death, PlanEvidence
from epd_conformance.engine.findings import Finding
from epd_conformance.oracle.cell import Judgement
from epd_conformance.report.schema import Evidence
from epd_conformance.verdict import Verdict

SCHEMA = "epd-conformance/engine-pool/v1"

#: A hook that hangs holds up every plan that comes to it for the whole time limit: after so many of them nothing is learned.
HANGS = 3

#: A requirement that is not asked in every run (it needs a feature, or a check of the contract layer) -> the one that is broken
#: where a plan shows it all the same. What needs the feature to be broken, such as a look-up that writes into a store that nobody
#: may look into, is not among them.
_ANYWAY = "EPD-INIT-006"
WITHOUT_FEATURE = {
    "EPD-ERR-001": _ANYWAY,
    "EPD-ERR-003": _ANYWAY,
    "EPD-ERR-004": _ANYWAY,
    "EPD-INIT-002": _ANYWAY,
    "EPD-LIFE-001": _ANYWAY,
    "EPD-LIFE-006": _ANYWAY,
    "EPD-LIFE-007": _ANYWAY,
    "EPD-OBS-002": _ANYWAY,
}


@dataclass(frozen=True)
class Told:
    """What a directed check told, or how its process ended."""

    check: str
    told: Mapping[str, Any] = field(default_factory=dict)
    death: Death | None = None

    @property
    def requirement(self) -> str:
        return measured.CHECKS[self.check].requirement

    @property
    def findings(self) -> list[Finding]:
        """What did not hold. Raises KeyError for what is no result of the check."""
        if self.death is not None:
            found = self.death.finding()
            return [found] if found is not None else []
        return measured.findings(self.requirement, self.told)

    @property
    def exercised(self) -> bool:
        return self.death is None and measured.exercised(self.requirement, self.told)

    @property
    def also_exercised(self) -> frozenset[str]:
        """Requirements beside its own that it put to the test."""
        return measured.also_exercised(self.requirement, self.told) if self.death is None else frozenset()

    def to_json(self) -> dict[str, Any]:
        death = vars(self.death) if self.death is not None else None
        return {"check": self.check, "told": dict(self.told), "death": death}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Told:
        death = Death(**data["death"]) if data["death"] is not None else None
        return cls(data["check"], data["told"], death)


@dataclass(frozen=True)
class Pool:
    """`hypothesis`: the version that drew. `left`: names of plans that were left out since a hook hangs."""

    seed: int
    examples: int
    hypothesis: str
    plans: Sequence[PlanEvidence] = ()
    checks: Sequence[Told] = ()
    left: Sequence[str] = ()
    layer: str = "contract"

    def findings(self, asked: frozenset[str] | set[str]) -> dict[str, list[tuple[str, Finding]]]:
        """Requirement -> (name of the plan or check, finding), in the order of the pool. `asked`: the requirements of the run."""
        found: dict[str, list[tuple[str, Finding]]] = {}
        for name, finding, died in self._all():
            requirement = finding.requirement
            if requirement not in asked:
                # Whatever is asked of it, no server may die.
                requirement = _ANYWAY if died else WITHOUT_FEATURE.get(requirement, requirement)
            found.setdefault(requirement, []).append((name, finding))
        return found

    def _all(self) -> list[tuple[str, Finding, bool]]:
        """Name of the plan or check, finding, and whether it is how the process ended."""
        found = [(one.name, finding, one.death is not None) for one in self.plans for finding in one.findings]
        return found + [(one.check, finding, one.death is not None) for one in self.checks for finding in one.findings]

    def judge(self, requirement: str, check: str, asked: frozenset[str] | set[str]) -> Judgement:
        """The verdict of a requirement. `check`: the directed check that its cell is; empty: all plans are."""
        found = self.findings(asked).get(requirement, [])
        if found:
            name, finding = found[0]
            kinds = list(dict.fromkeys(one.kind for _, one in found))
            further = f"; also: {', '.join(kinds[1:])}" if len(kinds) > 1 else ""
            return Judgement(
                Verdict.FAIL,
                reason=finding.kind,
                rung=self.layer,
                expected=finding.expected,
                observed=f"{finding.observed} ({_place(finding)}plan {name}){further}",
                evidence=Evidence(),
            )
        if check:
            exercised = any(one.exercised for one in self.checks if one.check == check)
        else:
            exercised = any(requirement in one.exercised for one in self.plans)
            exercised = exercised or any(requirement in one.also_exercised for one in self.checks)
        if self.left:
            expected = "every plan is carried out"
            observed = f"{len(self.left)} plans were left out: a hook hangs"
            return Judgement(Verdict.INCONCLUSIVE, reason="not-exercised", expected=expected, observed=observed)
        if not exercised:
            expected = "a plan brings about what the requirement is about"
            observed = "none did: the connector never came to it"
            return Judgement(Verdict.INCONCLUSIVE, reason="not-exercised", expected=expected, observed=observed)
        return Judgement(Verdict.PASS)

    def hung(self) -> bool:
        """Whether a hook hung so often that the other plans may be left out."""
        hooks = [one.death.hook for one in self.plans if one.death is not None and one.death.hung]
        return any(hooks.count(hook) >= HANGS for hook in set(hooks))

    def write(self, path: Path) -> None:
        """One line for the pool, then one for each plan and check."""
        head = {
            "schema": SCHEMA,
            "layer": self.layer,
            "seed": self.seed,
            "examples": self.examples,
            "hypothesis": self.hypothesis,
        }
        lines = [head | {"left": list(self.left)}]
        lines += [{"plan": one.to_json()} for one in self.plans] + [{"check": one.to_json()} for one in self.checks]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Pool:
        """Raises ValueError, KeyError, TypeError or UsageError for what is no pool."""
        head, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if head.get("schema") != SCHEMA:
            raise ValueError(f"not a pool of schema {SCHEMA}: {head.get('schema')!r}")
        return cls(
            head["seed"],
            head["examples"],
            head["hypothesis"],
            tuple(PlanEvidence.from_json(line["plan"]) for line in lines if "plan" in line),
            tuple(Told.from_json(line["check"]) for line in lines if "check" in line),
            tuple(head["left"]),
            head.get("layer", "contract"),
        )


def pool_path(layer: str) -> str:
    """Where the pool of a layer lies, relative to the folder of the run."""
    return f"engine/{layer}.ndjson"


def _place(finding: Finding) -> str:
    return f"{finding.server}, operation {finding.operation}, " if finding.server else ""
