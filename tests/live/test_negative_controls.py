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


Report = dict[str, Any]


def run(
    out: Path, topology: str, cells: list[str], *, subject: str = "reference", plant: list[str] | None = None
) -> Report:
    """Run the named cells with defects; returns the report's cells by id, `exit`, the report itself and its folder."""
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
    return {"cells": found, "exit": done.returncode, "report": report, "out": out}


def tokens_equal(result: Report, name: str) -> bool:
    """Whether the raw evidence of a cell holds the same ids in both arms."""
    evidence = json.loads((result["out"] / result["cells"][name]["artifacts"][0]).read_text())
    arms = [base["ids"] for digest in evidence["baseline"].values() for base in digest.values()]
    return all(answer["ids"] in arms and answer["ids"] for answer in evidence["answers"])


def verdict(result: Report, name: str) -> tuple[str, str]:
    record = result["cells"][name]
    return record["verdict"], record["reason"]


# -- one boot of each topology; each cell has a defect of its own --------------------------------------------------------

E_PD = {
    cell(*words): defect
    for defect, asked in {
        "": [("EPD-TOK-003", "e-pd", "img3")],
        "Off": [
            ("EPD-TOK-002", "e-pd", "img1"),
            ("EPD-XFER-001", "e-pd", "img1"),
            ("EPD-ERR-001", "e-pd", "deleted"),
            ("EPD-INTEG-002", "e-pd", "replaced"),
        ],
        "SkipsPrimer": [("EPD-TOK-006", "e-pd", "first"), ("EPD-PROXY-002", "e-pd", "img3")],
        "SwapsImages": [("EPD-TOK-003", "e-pd", "img2-reversed")],
        "OtherRows": [("EPD-TOK-003", "e-pd", "img2"), ("EPD-XFER-001", "e-pd", "img3")],
        "Casting": [("EPD-TOK-006", "e-pd", "last")],
        "Unsalted": [("EPD-TOK-009", "e-pd", "img1-stream")],
        "Inventing": [("EPD-XFER-003", "e-pd", "miss")],
    }.items()
    for words in asked
}
E_P_D = {
    cell("EPD-TOK-001", "e-p-d", "text"): "",
    cell("EPD-TOK-002", "e-p-d", "img1"): "EmptiesKV",
    cell("EPD-KV-001", "e-p-d", "img1"): "EmptiesKV",
    cell("EPD-TOK-003", "e-p-d", "img2"): "DamagesKV",
}


def with_defects(out: Path, topology: str, defects: dict[str, str]) -> Report:
    """Run cells with a defect each; none may show in a cell that has none."""
    plant = ["--defects", json.dumps(defects), "--stack", str(out / "stacks" / topology)]
    result = run(out, topology, list(defects), subject="planted.subjects:Defective", plant=plant)
    for name in (name for name, defect in defects.items() if not defect):
        assert verdict(result, name) == ("pass", "")
    return result


@pytest.fixture(scope="module")
def e_pd(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return with_defects(tmp_path_factory.mktemp("defects") / "o", "e-pd", E_PD)


@pytest.fixture(scope="module")
def e_p_d(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return with_defects(tmp_path_factory.mktemp("defects") / "o", "e-p-d", E_P_D)


def of(defects: dict[str, str], name: str) -> list[str]:
    """The cells that have a defect."""
    return [each for each, defect in defects.items() if defect == name]


def test_connector_off_is_inconclusive(e_pd: Report) -> None:
    name, warm, *faults = of(E_PD, "Off")
    assert verdict(e_pd, name) == ("inconclusive", "local-encode")
    assert verdict(e_pd, warm) == ("inconclusive", "local-encode")
    assert tokens_equal(e_pd, name)
    assert e_pd["cells"][name]["evidence"]["localEncodes"] == 1
    for fault in faults:
        assert verdict(e_pd, fault) == ("inconclusive", "twin: local-encode"), "it survives by encoding everything"
    assert [fault["metByVictim"] for fault in e_pd["report"]["faults"]] == [0, 0]


def test_proxy_that_skips_the_primer_is_inconclusive(e_pd: Report) -> None:
    name, primed = of(E_PD, "SkipsPrimer")
    assert verdict(e_pd, name) == ("inconclusive", "local-encode")
    assert tokens_equal(e_pd, name)
    assert verdict(e_pd, primed) == ("fail", "not-primed-once")
    assert e_pd["report"]["proxyOutcome"] == "nonconformant"


def test_emptied_kv_store_is_inconclusive(e_p_d: Report) -> None:
    name, kv = of(E_P_D, "EmptiesKV")
    assert verdict(e_p_d, name) == ("inconclusive", "kv-recompute")
    assert tokens_equal(e_p_d, name)
    assert e_p_d["cells"][name]["evidence"]["kvTokens"] == 0
    assert e_p_d["cells"][name]["evidence"]["kvTokensExpected"] > 0
    assert verdict(e_p_d, kv) == ("fail", "kv-recompute")


def test_damaged_kv_fails(e_p_d: Report) -> None:
    (name,) = of(E_P_D, "DamagesKV")
    assert verdict(e_p_d, name) == ("fail", "tokens-differ")
    assert not tokens_equal(e_p_d, name)
    record = e_p_d["cells"][name]
    assert record["rung"] == "tokens"
    assert "first divergence" in record["message"]
    # The embeddings came over rightly, so the connector is not blamed.
    assert record["evidence"]["digestsEqual"] is True
    assert record["blame"] == "engine"


def test_proxy_that_swaps_images_fails(e_pd: Report) -> None:
    (name,) = of(E_PD, "SwapsImages")
    assert verdict(e_pd, name) == ("fail", "tokens-differ")
    assert e_pd["cells"][name]["blame"] == "proxy"


def test_another_items_rows_fail_on_the_digest_rung(e_pd: Report) -> None:
    for name in of(E_PD, "OtherRows"):
        assert verdict(e_pd, name) == ("fail", "digest-differs")
        assert e_pd["cells"][name]["rung"] == "digest"
    assert e_pd["report"]["outcome"] == "nonconformant"
    assert e_pd["exit"] == 1


def test_rounded_rows_fail_on_the_digest_rung(e_pd: Report) -> None:
    (name,) = of(E_PD, "Casting")
    assert verdict(e_pd, name) == ("fail", "digest-differs")


def test_the_same_prompt_twice_is_a_prefix_hit(e_pd: Report) -> None:
    (name,) = of(E_PD, "Unsalted")
    assert verdict(e_pd, name) == ("inconclusive", "prefix-hit")
    assert tokens_equal(e_pd, name)


def test_an_invented_item_fails(e_pd: Report) -> None:
    (name,) = of(E_PD, "Inventing")
    assert verdict(e_pd, name) == ("fail", "invented")


# -- a boot of its own ---------------------------------------------------------------------------------------------------


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
