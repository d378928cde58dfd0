"""A plan alone does not say which layer it was found in; the evidence of a cell does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_conformance.engine import replaying
from epd_conformance.engine.evidence import CELL_SCHEMA
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.errors import UsageError

PLAN = Plan((ServerSpec("ec_consumer", cache=8),), (ItemSpec("a", 0),), ())


def test_a_plan_alone_is_of_the_layer_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(PLAN.to_text())
    assert replaying.read(path) == replaying.Recorded(PLAN, "contract")
    assert replaying.read(path, "scheduler") == replaying.Recorded(PLAN, "scheduler")
    for profile in ("e-pd", "proxy"):
        with pytest.raises(UsageError, match=f"no profile '{profile}' carries out a plan .* use contract or scheduler"):
            replaying.read(path, profile)


def test_evidence_says_its_layer_itself(tmp_path: Path) -> None:
    path = tmp_path / "cell.json"
    shrunk = {"schema": "epd-conformance/engine-evidence/v1", "name": "shrunk", "plan": PLAN.to_json(), "hidden": 8}
    shrunk |= {"events": [], "twins": {}, "death": None}
    cell = {"schema": CELL_SCHEMA, "cell": "EPD-LIFE-019[scheduler/tiny/plans]", "layer": "scheduler", "shrunk": shrunk}
    path.write_text(json.dumps(cell))
    found = replaying.read(path)
    assert found is not None
    assert found.layer == "scheduler"
    with pytest.raises(UsageError, match="says itself which profile"):
        replaying.read(path, "contract")
