"""Every detector must be able to say no: the real suites, run on real servers with one defect planted, give the right verdict.

Each control is one run of the suites in a process of its own; what is asserted is what its report says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
MODEL = "tiny-qwen2.5-vl"

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]


def cell(requirement: str, topology: str, case: str) -> str:
    return f"{requirement}[{topology}/{MODEL}/{case}]"


def run(
    out: Path, topology: str, cells: list[str], *, subject: str = "reference", plant: list[str] | None = None
) -> dict[str, Any]:
    """Run the named cells with a defect; returns the report's cells by id, `exit` and the report itself."""
    command = [sys.executable, "-m", "planted", *(plant or []), "--", "--subject", subject, "--profile", topology]
    command += ["--out", str(out)]
    for name in cells:
        command += ["--cell", name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    path = out / "report.json"
    assert path.exists(), f"no report was made (exit {done.returncode})\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    report = json.loads(path.read_text())
    found = {record["id"]: record for requirement in report["requirements"] for record in requirement["cells"]}
    return {"cells": found, "exit": done.returncode, "report": report}


def tokens_equal(out: Path, record: dict[str, Any]) -> bool:
    """Whether the raw evidence of a cell holds the same ids in both arms."""
    evidence = json.loads((out / record["artifacts"][0]).read_text())
    arms = [base["ids"] for digest in evidence["baseline"].values() for base in digest.values()]
    return all(answer["ids"] in arms and answer["ids"] for answer in evidence["answers"])


def verdict(result: dict[str, Any], name: str) -> tuple[str, str]:
    record = result["cells"][name]
    return record["verdict"], record["reason"]


def test_connector_off_is_inconclusive(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-pd", "img1")
    warm = cell("EPD-XFER-001", "e-pd", "img3")
    faults = [cell("EPD-ERR-001", "e-pd", "deleted"), cell("EPD-INTEG-002", "e-pd", "replaced")]
    result = run(tmp_path / "o", "e-pd", [name, warm, *faults], subject="planted.subjects:Off")
    assert verdict(result, name) == ("inconclusive", "local-encode")
    assert verdict(result, warm) == ("inconclusive", "local-encode")
    assert tokens_equal(tmp_path / "o", result["cells"][name])
    assert result["cells"][name]["evidence"]["localEncodes"] == 1
    for fault in faults:
        assert verdict(result, fault) == ("inconclusive", "twin: local-encode"), "it survives by encoding everything"
    assert [fault["metByVictim"] for fault in result["report"]["faults"]] == [0, 0]
    assert result["exit"] == 3


def test_proxy_that_skips_the_primer_is_inconclusive(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-pd", "img1")
    primed = cell("EPD-PROXY-002", "e-pd", "img3")
    result = run(tmp_path / "o", "e-pd", [name, primed], plant=["--stages", "SkipsPrimer"])
    assert verdict(result, name) == ("inconclusive", "local-encode")
    assert tokens_equal(tmp_path / "o", result["cells"][name])
    assert verdict(result, primed) == ("fail", "not-primed-once")
    assert result["report"]["proxyOutcome"] == "nonconformant"
    assert result["report"]["outcome"] == "incomplete"


def test_emptied_kv_store_is_inconclusive(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-p-d", "img1")
    kv = cell("EPD-KV-001", "e-p-d", "img1")
    store = tmp_path / "o" / "stacks" / "e-p-d" / "kv"
    result = run(tmp_path / "o", "e-p-d", [name, kv], plant=["--stages", "EmptiesKV", "--kv-store", str(store)])
    assert verdict(result, name) == ("inconclusive", "kv-recompute")
    assert tokens_equal(tmp_path / "o", result["cells"][name])
    assert result["cells"][name]["evidence"]["kvTokens"] == 0
    assert result["cells"][name]["evidence"]["kvTokensExpected"] > 0
    assert verdict(result, kv) == ("fail", "kv-recompute")


def test_damaged_kv_fails(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-p-d", "img1")
    store = tmp_path / "o" / "stacks" / "e-p-d" / "kv"
    result = run(tmp_path / "o", "e-p-d", [name], plant=["--stages", "DamagesKV", "--kv-store", str(store)])
    assert verdict(result, name) == ("fail", "tokens-differ")
    assert not tokens_equal(tmp_path / "o", result["cells"][name])
    record = result["cells"][name]
    assert record["rung"] == "tokens"
    assert "first divergence" in record["message"]
    # The embeddings came over rightly, so the connector is not blamed.
    assert record["evidence"]["digestsEqual"] is True
    assert record["blame"] == "engine"


def test_proxy_that_swaps_images_fails(tmp_path: Path) -> None:
    name = cell("EPD-TOK-003", "e-pd", "img2")
    result = run(tmp_path / "o", "e-pd", [name], plant=["--stages", "SwapsImages"])
    assert verdict(result, name) == ("fail", "tokens-differ")
    assert result["cells"][name]["blame"] == "proxy"
    assert result["report"]["proxyOutcome"] == "nonconformant"


def test_another_items_rows_fail_on_the_digest_rung(tmp_path: Path) -> None:
    name = cell("EPD-TOK-003", "e-pd", "img2")
    moved = cell("EPD-XFER-001", "e-pd", "img3")
    result = run(tmp_path / "o", "e-pd", [name, moved], subject="planted.subjects:OtherRows")
    for each in (name, moved):
        assert verdict(result, each) == ("fail", "digest-differs")
        assert result["cells"][each]["rung"] == "digest"
    assert result["report"]["outcome"] == "nonconformant"
    assert result["exit"] == 1


def test_rounded_rows_fail_on_the_digest_rung(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-pd", "img1")
    result = run(tmp_path / "o", "e-pd", [name], subject="planted.subjects:Casting")
    assert verdict(result, name) == ("fail", "digest-differs")


def test_the_same_prompt_twice_is_a_prefix_hit(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-pd", "img1")
    result = run(tmp_path / "o", "e-pd", [name], plant=["--no-salt"])
    assert verdict(result, name) == ("inconclusive", "prefix-hit")
    assert tokens_equal(tmp_path / "o", result["cells"][name])


def test_an_invented_item_fails(tmp_path: Path) -> None:
    name = cell("EPD-XFER-003", "e-pd", "miss")
    result = run(tmp_path / "o", "e-pd", [name], subject="planted.subjects:Inventing")
    assert verdict(result, name) == ("fail", "invented")


def test_a_server_that_dies_fails_names_itself_and_condemns_nobody_else(tmp_path: Path) -> None:
    name = cell("EPD-TOK-002", "e-pd", "img1")
    text = cell("EPD-TOK-001", "e-pd", "text")
    proxy = cell("EPD-PROXY-001", "e-pd", "text")
    warm = cell("EPD-XFER-002", "e-pd", "warm")
    result = run(tmp_path / "o", "e-pd", [name, text, proxy, warm], subject="planted.subjects:Raising")
    for each in (name, warm):
        assert verdict(result, each) == ("fail", "server-died")
        assert "planted: the load fails" in result["cells"][each]["message"]
    assert result["cells"][warm]["blame"] == "connector", "an engine's cell, and a death in the connector"
    # Text loads nothing: whatever died before, these ran on servers that live.
    for each in (text, proxy):
        assert verdict(result, each) == ("pass", "")
    assert result["report"]["outcome"] == "nonconformant"
    assert result["report"]["engineOutcome"] != "nonconformant"
    assert result["report"]["proxyOutcome"] != "nonconformant"
