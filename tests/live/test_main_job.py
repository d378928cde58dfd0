"""The main job, as a person runs it: both boots give the same evidence, the recorder changes nothing, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
MODEL = "tiny-qwen2.5-vl"
SMOKE = [
    f"EPD-ROLE-002[aggregated/{MODEL}/ec-both]",
    *(f"EPD-TOK-002[{topology}/{MODEL}/img1]" for topology in ("e-pd", "e-p-d")),
    *(f"EPD-TOK-003[{topology}/{MODEL}/img2]" for topology in ("e-pd", "e-p-d")),
]
#: The topology with the most: every role but that of both, an EC connector and a KV connector, and both baselines.
LONGEST = [name for name in SMOKE if "[e-p-d/" in name]
#: Enough cells for Ctrl-C to come in the middle of them. The second takes seconds: it starts servers again.
CUT_SHORT = [
    f"EPD-ERR-001[e-pd/{MODEL}/deleted]",
    *(f"EPD-STALE-003[e-pd/{MODEL}/{servers}]" for servers in ("consumer", "encode", "all")),
    f"EPD-TOK-002[e-pd/{MODEL}/img1]",
]

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]


def start(module: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def cells(*names: str) -> list[str]:
    return [word for name in names for word in ("--cell", name)]


def finish(process: subprocess.Popen[str], seconds: float = 500) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def evidence(out: Path) -> dict[str, dict[str, Any]]:
    return {(data := json.loads(path.read_text()))["cell"]: data for path in (out / "cells").glob("*.json")}


def records(out: Path) -> dict[str, dict[str, Any]]:
    report = json.loads((out / "report.json").read_text())
    return {record["id"]: record for requirement in report["requirements"] for record in requirement["cells"]}


def left_of(out: Path) -> list[str]:
    """Living processes whose command line or environment names the run's folder."""
    found = []
    for process in psutil.process_iter():
        try:
            text = " ".join(process.cmdline()) + " ".join(process.environ().values())
            if str(out) in text and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke cells on servers forked from the warmed parent."""
    out = tmp_path_factory.mktemp("forked") / "a run"
    code, stdout, stderr = finish(
        start(
            "epd_conformance.cli",
            "run",
            "--subject",
            "reference",
            "--profile",
            "all",
            "--out",
            str(out),
            *cells(*SMOKE),
        )
    )
    assert code == 3, f"a selection is never conformant, so incomplete was expected\n{stdout}\n{stderr}"
    return out


def test_smoke_cells_pass_over_the_proven_path(forked: Path) -> None:
    for name in SMOKE:
        record = records(forked)[name]
        assert record["verdict"] == "pass", record["message"]
        proof = record["evidence"]
        assert proof["saves"] > 0
        assert proof["loads"] > 0
        assert proof["localEncodes"] == 0
        assert proof["digestsEqual"] is True
        if "e-p-d" in name:
            assert proof["kvTokens"] == proof["kvTokensExpected"] > 0
            assert proof["decodeEncodes"] == 0


def test_whole_profiles_are_conformant(tmp_path: Path) -> None:
    """What `scripts/run` promises, in the mode that accepts no hole: exit code 0, and every equality over its proven path.

    What vLLM itself does not hold stands beside it, as its own: no connector can mend it.
    """
    out = tmp_path / "all"
    arguments = ["--subject", "reference", "--profile", "all", "--mode", "certify", "--out", str(out)]
    code, stdout, stderr = finish(start("epd_conformance.cli", "run", *arguments), 1500)
    assert code == 0, f"{stdout}\n{stderr}"
    report = json.loads((out / "report.json").read_text())
    assert report["complete"] is True
    assert [report[name] for name in ("outcome", "proxyOutcome", "engineOutcome")] == [
        *["conformant"] * 2,
        "nonconformant",
    ]
    failed = {name: record["reason"] for name, record in records(out).items() if record["verdict"] != "pass"}
    assert failed == {f"EPD-ERR-009[{topology}/{MODEL}/not-a-string]": "not-refused" for topology in ("e-pd", "e-p-d")}
    assert report["environment"]["patches"]
    assert report["environment"]["attentionBackend"]
    assert "baseline-p-d-e-p-d/decode" in report["environment"]["flags"]
    judges = {data["cell"]: data["judge"] for data in evidence(out).values()}
    equal = {name: record for name, record in records(out).items() if judges[name] == "equality"}
    assert len(equal) > 20
    for name, record in equal.items():
        proof = record["evidence"]
        assert proof["saves"] > 0, name
        assert proof["loads"] > 0, name
        assert proof["localEncodes"] == 0, name
        if "e-p-d" in name:
            assert proof["kvTokens"] == proof["kvTokensExpected"] > 0, name
            assert proof["decodeEncodes"] == 0, name
    # Whoever has the folder can compute all of it again, and one changed token id shows.
    code, stdout, stderr = finish(start("epd_conformance.cli", "verify", str(out)))
    assert code == 0, f"{stdout}\n{stderr}"
    path = out / "cells" / f"EPD-TOK-002_e-pd_{MODEL}_img1.json"
    data = json.loads(path.read_text())
    data["answers"][0]["ids"][-1] += 1
    path.write_text(json.dumps(data))
    code, stdout, stderr = finish(start("epd_conformance.cli", "verify", str(out)))
    assert code == 1, f"{stdout}\n{stderr}"


def fingerprint(out: Path) -> dict[str, Any]:
    """What must not depend on how servers start: ids of both arms, keys, digests."""
    found = {}
    for name, data in evidence(out).items():
        found[name] = {
            "prompt": [answer["prompt_ids"] for answer in data["answers"]],
            "ids": [answer["ids"] for answer in data["answers"]],
            "logprobs": [answer["logprobs"] for answer in data["answers"]],
            "baseline": {
                digest: {arm: answer["ids"] for arm, answer in arms.items()}
                for digest, arms in data["baseline"].items()
            },
            "saves": sorted((event["id"], event["digest"]) for event in data["during"] if event["ev"] == "save"),
            "loads": sorted((event["id"], event["digest"]) for event in data["during"] if event["ev"] == "load"),
        }
    return found


def test_plain_and_forked_servers_give_the_same(forked: Path, tmp_path: Path) -> None:
    """A fork that changed an answer would make every verdict worthless."""
    out = tmp_path / "plain"
    arguments = ["--subject", "reference", "--profile", "e-p-d", "--boot", "plain", "--out", str(out)]
    code, stdout, stderr = finish(start("epd_conformance.cli", "run", *arguments, *cells(*LONGEST)), 900)
    assert code == 3, f"{stdout}\n{stderr}"
    plain = fingerprint(out)
    assert plain == {name: fingerprint(forked)[name] for name in LONGEST}
    assert all(plain[name]["ids"][0] for name in LONGEST), "empty answers would be equal too"
    patches = json.loads((out / "report.json").read_text())["environment"]["patches"]
    assert "fork-context" not in [patch["name"] for patch in patches]


def test_answers_are_the_same_without_the_recorder(forked: Path, tmp_path: Path) -> None:
    out = tmp_path / "bare"
    arguments = ["--no-recorder", "--", "--subject", "reference", "--profile", "e-p-d", "--out", str(out)]
    code, stdout, stderr = finish(start("planted", *arguments, *cells(*LONGEST)))
    assert code == 3, f"{stdout}\n{stderr}"
    bare, recorded = fingerprint(out), fingerprint(forked)
    for name in LONGEST:
        for part in ("prompt", "ids", "logprobs", "baseline"):
            assert bare[name][part] == recorded[name][part]
        # And without a journal nothing is proven, so nothing passes.
        assert records(out)[name]["verdict"] == "inconclusive"


def test_ctrl_c_leaves_a_report_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "cut short"
    arguments = ["--subject", "reference", "--profile", "e-pd", "--out", str(out)]
    process = start("epd_conformance.cli", "run", *arguments, *cells(*CUT_SHORT))
    results = out / "results.ndjson"
    deadline = time.monotonic() + 400
    while '"kind":"cell"' not in (results.read_text() if results.exists() else ""):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert left_of(out), "the orphan detector must see the running servers"
    os.killpg(process.pid, signal.SIGINT)
    code, stdout, stderr = finish(process, 60)
    assert code == 3, f"{stdout}\n{stderr}"
    report = json.loads((out / "report.json").read_text())
    assert report["interrupted"] is True
    assert report["complete"] is False
    assert report["outcome"] == "incomplete"
    verdicts = {name: record["verdict"] for name, record in records(out).items()}
    assert verdicts[CUT_SHORT[0]] == "pass"
    assert verdicts[CUT_SHORT[-1]] == "could-not-run"
    assert "cut short" in stdout
    assert left_of(out) == []


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """One of them in a folder with spaces, the other without a usable HOME."""
    wanted = cells(f"EPD-TOK-002[e-pd/{MODEL}/img1]", f"EPD-XFER-002[e-pd/{MODEL}/warm]")
    outs = [tmp_path / "with spaces in it", tmp_path / "no-home"]
    common = ["run", "--subject", "reference", "--profile", "e-pd", *wanted, "--out"]
    runs = [
        start("epd_conformance.cli", *common, str(outs[0])),
        start("epd_conformance.cli", *common, str(outs[1]), HOME="/proc/no-home", XDG_CACHE_HOME=""),
    ]
    for process, out in zip(runs, outs, strict=True):
        code, stdout, stderr = finish(process)
        assert code == 3, f"{stdout}\n{stderr}"
        verdicts = [record["verdict"] for record in records(out).values() if record["verdict"] != "could-not-run"]
        assert verdicts == ["pass", "pass"]
        assert left_of(out) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--subject", "reference", "--model", "no-such-model"], "no-such-model"),
        (["--subject", "reference", "--profile", "0e-1pd"], "0e-1pd"),
        (["--subject", "no-such-subject"], "no-such-subject"),
        (["--subject", "no.such.module:Class"], "no.such.module"),
        (
            ["--subject", "planted.subjects:NoSuchModule", "--cell", f"EPD-TOK-002[e-pd/{MODEL}/img1]"],
            "no_such_module_xyz",
        ),
        (["--subject", "reference", "--device", "tpu"], "tpu"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(arguments: list[str], words: str, tmp_path: Path) -> None:
    out = tmp_path / "o"
    code, _, stderr = finish(start("epd_conformance.cli", "run", "--out", str(out), *arguments), 120)
    assert code == 2
    line = next(line for line in stderr.splitlines() if "error" in line.lower() and words in line)
    assert len(line) < 400
    assert left_of(out) == []
    assert not (out / "report.json").exists()


def test_serve_answers_and_ends_with_its_owner(tmp_path: Path) -> None:
    import requests

    process = start("epd_conformance.cli", "serve", "--topology", "e-pd", "--json", "--out", str(tmp_path / "s"))
    assert process.stdout is not None
    line = process.stdout.readline()
    try:
        address = json.loads(line)["url"]
        body = {"model": "epd-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = requests.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        finish(process, 60)
    assert left_of(tmp_path / "s") == []
