"""The cells with a fault on real servers: vLLM's example connector gets what it deserves, and a probe that lies gets no pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_negative_controls import cell, run, verdict

FAULTS = [("EPD-ERR-001", "deleted"), ("EPD-INTEG-001", "truncated"), ("EPD-INTEG-002", "replaced"),
          ("EPD-INTEG-003", "one-row")]  # fmt: skip
# What the connector does when the object goes, or another takes its place, after it has said yes.
WINDOWS = [cell("EPD-RACE-001", "e-pd", "looked-up-deleted"), cell("EPD-RACE-002", "e-pd", "allocated-deleted"),
           cell("EPD-RACE-013", "e-pd", "allocated-replaced")]  # fmt: skip
DAMAGED = [cell(requirement, "e-pd", name) for requirement, name in FAULTS]
UUIDS = [cell("EPD-SEC-001", "e-pd", name) for name in ("parent", "absolute", "root")]

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]


def left() -> list[Path]:
    return list(Path("/tmp").glob("epd-conformance-outside-*"))


def test_the_example_connector_believes_whatever_it_finds(tmp_path: Path) -> None:
    before = left()
    out = tmp_path / "o"
    result = run(out, "e-pd", [*DAMAGED, *WINDOWS, *UUIDS], subject="vllm-example")
    deleted, truncated, replaced, row = DAMAGED
    looked_up, allocated, exchanged = WINDOWS
    assert {name: verdict(result, name) for name in (*DAMAGED, *WINDOWS, *UUIDS)} == {
        deleted: ("pass", ""),
        truncated: ("fail", "server-died"),
        replaced: ("fail", "digest-differs"),
        row: ("fail", "digest-differs"),
        looked_up: ("fail", "server-died"),
        allocated: ("fail", "server-died"),
        exchanged: ("fail", "digest-differs"),
        **dict.fromkeys(UUIDS, ("fail", "wrote-outside")),
    }
    # The requirements are the connector's own, and nobody else is to blame.
    assert {result["cells"][name]["blame"] for name in (*DAMAGED, *UUIDS)} == {None}
    assert "safetensors" in result["cells"][truncated]["message"]
    assert "Encoder cache miss" in result["cells"][looked_up]["message"]
    assert "FileNotFoundError" in result["cells"][allocated]["message"]
    for name in (replaced, row, exchanged):
        assert "wrong token ids, without a word" in result["cells"][name]["message"]
    assert {name: record["verdict"] for name, record in result["cells"].items() if record["verdict"] == "error"} == {}
    assert [(fault["kind"], fault["injected"], fault["verified"], fault["metByVictim"])
            for fault in result["report"]["faults"]] == [
        ("deleted", 3, 3, 3), ("one-row", 1, 1, 1), ("replaced", 2, 2, 2), ("truncated", 1, 1, 1)
    ]  # fmt: skip
    assert result["report"]["outcome"] == "nonconformant"
    assert result["exit"] == 1
    assert set(left()) <= set(before)
    done = subprocess.run(
        [sys.executable, "-m", "epd_conformance.cli", "verify", str(out)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout


def test_a_probe_that_lies_and_luck_give_no_pass(tmp_path: Path) -> None:
    """One run, one lie a cell: see planted/subjects.py."""
    result = run(tmp_path / "o", "e-pd", DAMAGED, subject="planted.subjects:Lying")
    nowhere, elsewhere, deleting, flipped = DAMAGED
    assert verdict(result, nowhere) == ("error", "fault-not-proven")
    assert verdict(result, elsewhere) == ("inconclusive", "fault-not-met")
    assert verdict(result, deleting) == ("inconclusive", "twin: local-encode")
    assert verdict(result, flipped) == ("fail", "digest-differs")
    assert "the right token ids, by luck" in result["cells"][flipped]["message"]
    assert {fault["kind"]: fault["metByVictim"] for fault in result["report"]["faults"]} == {
        "deleted": 0,
        "one-row": 1,
        "replaced": 0,
        "truncated": 0,
    }
