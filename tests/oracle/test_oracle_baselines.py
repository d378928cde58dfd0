"""The raw baseline comes back from disk as it was, and gives the floor that was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_evidence import good_answer

from epd_conformance.oracle import baselines, noise
from epd_conformance.oracle.baselines import BaselineAnswers
from epd_conformance.plans.plan import Draw

DRAW = Draw(0, "baselines")
OFFERED = tuple(DRAW.request(f"prompt {number}", DRAW.image()) for number in range(10))
STEADY = {request.digest(): (good_answer(request),) * 3 for request in OFFERED}
WHOLE = BaselineAnswers("e-pd", OFFERED, {"aggregated": STEADY})


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    path = baselines.write(tmp_path, WHOLE)
    assert path == tmp_path / "baseline" / "e-pd.json"
    assert BaselineAnswers.from_json(json.loads(path.read_text())) == WHOLE


def test_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="not a baseline of schema"):
        BaselineAnswers.from_json({**WHOLE.to_json(), "schema": "epd-conformance/baseline/v0"})


def test_the_floor_is_measured_on_what_was_offered() -> None:
    contrast = DRAW.request("contrast")
    once = replace(WHOLE, arms={"aggregated": {**STEADY, contrast.digest(): (good_answer(contrast),)}})
    assert once.floor() == WHOLE.floor() == noise.measure([STEADY])
    assert once.first(contrast.digest()) == {"aggregated": good_answer(contrast)}
    assert once.first("0" * 64) == {}


def test_the_line_names_prompts_in_order_with_the_reason_for_each_rejection() -> None:
    first, second, *_ = OFFERED
    answers = {**STEADY, second.digest(): (good_answer(second), good_answer(second, ids=(1,) * 12))}
    line = replace(
        WHOLE, arms={"aggregated": answers}, unproven={first.digest(): "no KV", "f" * 64: "nobody offered it"}
    ).line("tiny")
    assert line.admitted == tuple(request.label for request in OFFERED[2:])
    assert [(prompt.prompt, prompt.reason) for prompt in line.rejected] == [
        (first.label, "no KV"),
        (second.label, "the baseline gives different ids when asked again"),
    ]
    assert (line.runs, line.max_logprob_delta, line.model) == (2, 0.0, "tiny")
