"""The raw baseline of one topology, as evidence: every answer of every arm, so that the noise floor can be computed again.

A cell keeps only the first answers to its own requests. What makes them a baseline (asked several times, always the same ids,
a margin above the noise) stands here, in `baseline/<topology>.json` of the run's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from epd_conformance.oracle import noise
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.noise import NoiseFloor
from epd_conformance.plans.plan import Request
from epd_conformance.report import schema

SCHEMA = "epd-conformance/baseline/v1"
FOLDER = "baseline"


@dataclass(frozen=True)
class BaselineAnswers:
    """What the matched baselines of one topology answered.

    `offered`: the requests that stand for admission, in order, their labels being their names in the report. `arms`: by arm
    (`aggregated`, `p-d`), then by request digest, the answer of each repetition; the contrasts are among them, asked once.
    `unproven`: digests whose baseline did not take the path that makes it one, with the reason.
    """

    topology: str
    offered: tuple[Request, ...]
    arms: Mapping[str, Mapping[str, Sequence[Answer]]]
    unproven: Mapping[str, str] = field(default_factory=dict)

    def first(self, digest: str) -> dict[str, Answer]:
        """The first answer of every arm to a request."""
        return {arm: answers[digest][0] for arm, answers in self.arms.items() if answers.get(digest)}

    def floor(self) -> NoiseFloor:
        """Admit or reject each of the offered requests."""
        digests = [request.digest() for request in self.offered]
        arms: list[Mapping[str, Sequence[Answer]]] = [
            {digest: answers.get(digest, ()) for digest in digests} for answers in self.arms.values()
        ]
        return noise.measure(arms, {digest: why for digest, why in self.unproven.items() if digest in set(digests)})

    def line(self, model: str) -> schema.NoiseFloor:
        """The floor as it stands in results and report, prompts by name."""
        return floor_line(self.topology, model, self.floor(), self.offered)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "topology": self.topology,
            "offered": [request.to_json() for request in self.offered],
            "arms": {
                arm: {digest: [answer.to_json() for answer in runs] for digest, runs in answers.items()}
                for arm, answers in self.arms.items()
            },
            "unproven": dict(self.unproven),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> BaselineAnswers:
        """Raises ValueError for another schema; KeyError and TypeError for a file that is damaged."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a baseline of schema {SCHEMA}: {data.get('schema')!r}")
        return cls(
            topology=data["topology"],
            offered=tuple(Request.from_json(request) for request in data["offered"]),
            arms={
                arm: {digest: tuple(Answer.from_json(answer) for answer in runs) for digest, runs in answers.items()}
                for arm, answers in data["arms"].items()
            },
            unproven=dict(data["unproven"]),
        )


def floor_line(topology: str, model: str, floor: NoiseFloor, offered: Sequence[Request]) -> schema.NoiseFloor:
    """A noise floor as results and report hold it: prompts by name, in the order in which they were offered."""
    named = [(request.digest(), request.label) for request in offered]
    return schema.NoiseFloor(
        baseline=topology,
        model=model,
        runs=floor.repetitions,
        max_logprob_delta=floor.floor,
        min_margin=floor.least_margin,
        admitted=tuple(name for digest, name in named if digest in floor.admitted),
        rejected=tuple(
            schema.RejectedPrompt(prompt=name, reason=floor.rejected[digest])
            for digest, name in named
            if digest not in floor.admitted
        ),
    )


def write(folder: Path, baseline: BaselineAnswers) -> Path:
    """Write `baseline/<topology>.json` under the run's folder; returns the path."""
    path = folder / FOLDER / f"{baseline.topology}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(baseline.to_json(), separators=(",", ":")), encoding="utf-8")
    return path
