"""Real servers that this run did not start, and a cell of it carried out again on others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import subject
from epd_conformance.run import Options, model_use
from epd_conformance.topology.spec import Role, Shape, Topology
from epd_conformance.topology.stack import SERVED_NAME, Site, Stack, StackSpec

HERE = Path(__file__).parent
TEXT, TWO, ONCE, INIT, LOST = CELLS = [
    f"{name}[e-pd/{SERVED_NAME}/{case}]"
    for name, case in (
        ("EPD-TOK-001", "text"),
        ("EPD-TOK-003", "img2"),
        ("EPD-PROXY-002", "img3"),
        ("EPD-INIT-001", "init"),
        ("EPD-ERR-001", "deleted"),
    )
]

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]


def command(*words: object) -> tuple[int, str, str]:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "epd_conformance.cli", *map(str, words)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@dataclass
class Theirs:
    """Servers that something else owns: here a site of this very process, which `run --attach` knows nothing of."""

    stack: Stack
    baseline: Stack
    folder: Path

    def file(self, name: str, *lines: str) -> Path:
        def urls(role: Role) -> str:
            return json.dumps([server.url for server in self.stack.of(role)])

        path = self.folder / name
        path.write_text(
            f'topology = "e-pd"\nmodel = "{SERVED_NAME}"\nenvironment_class = "cpu-v1"\n'
            f'baseline = "{self.baseline.base_url}"\n'
            f"encode = {urls(Role.ENCODE)}\ndecode = {urls(Role.PREFILL_DECODE)}\n" + "\n".join(lines) + "\n"
        )
        return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attach")


@pytest.fixture(scope="module")
def attached_runs(folder: Path) -> Iterator[dict[str, tuple[Path, int, dict[str, Any], str]]]:
    """One run with the servers' journals and one without; the servers end before anything is asserted or replayed."""
    runs = {}
    model = model_use(Options(subject="reference"))
    with Site(folder / "theirs", model) as site:
        stack, baseline = site.boot(
            StackSpec("e-pd", Topology.parse("e-pd"), Shape(), subject=subject.load("reference")),
            StackSpec("other", Topology.parse("aggregated"), Shape()),
        )
        theirs = Theirs(stack, baseline, folder)
        folders = [f'journal = "{stack.folder / "journal"}"', f'store = "{stack.store}"']
        for name, lines in (("with", folders), ("without", [])):
            out = folder / name
            words = ["--attach", theirs.file(f"{name}.toml", *lines), "--subject", "reference", "--out", out]
            code, stdout, stderr = command("run", *words, *[word for cell in CELLS for word in ("--cell", cell)])
            path = out / "report.json"
            assert path.exists(), f"exit {code}\n{stdout}\n{stderr}"
            report = json.loads(path.read_text())
            cells = {cell["id"]: cell for item in report["requirements"] for cell in item["cells"]}
            runs[name] = (out, code, cells, stdout + stderr)
        assert stack.dead() == baseline.dead() == [], "a run ends none of the servers that it was given"
    yield runs


Runs = dict[str, tuple[Path, int, dict[str, Any], str]]


def test_with_journals_the_path_is_proven(attached_runs: Runs) -> None:
    out, code, cells, said = attached_runs["with"]
    assert code == 3, f"a selection is incomplete\n{said}"
    assert {name: cells[name]["verdict"] for name in CELLS} == dict.fromkeys(CELLS, "pass"), said
    assert cells[TWO]["evidence"]["loads"] == 2
    code, stdout, _ = command("verify", out)
    assert code == 0, stdout


def test_without_journals_only_the_answer_counts(attached_runs: Runs) -> None:
    out, _, cells, said = attached_runs["without"]
    found = {name: f"{cells[name]['verdict']} {cells[name]['reason']}".strip() for name in CELLS}
    nothing = "inconclusive not-journalled"
    assert found == {TEXT: "pass", **dict.fromkeys((TWO, ONCE, INIT), nothing), LOST: "could-not-run attached"}, said
    code, stdout, _ = command("verify", out)
    assert code == 0, stdout


@pytest.fixture
def replay(folder: Path, attached_runs: Runs) -> Callable[..., dict[str, Any]]:
    """Replay the cell of two images with two others, on servers of its own."""
    source = next((attached_runs["with"][0] / "cells").glob("EPD-TOK-003*"))
    data = json.loads(source.read_text())
    for position, image in enumerate(
        part["image"]
        for request in (*data["plan"]["requests"], *data["plan"]["contrasts"])
        for message in request["messages"]
        for part in message["parts"]
        if "image" in part
    ):
        # The contrast has the same two in the other order.
        image["seed"] = 1000 + (position if position < 2 else 3 - position)
    path = folder / "edited.json"
    path.write_text(json.dumps(data))

    def call(*words: object) -> dict[str, Any]:
        code, stdout, stderr = command("replay", path, "--json", *words)
        assert stdout, stderr
        found: dict[str, Any] = json.loads(stdout)
        return {"code": code, **found}

    return call


def test_another_image_passes_again_and_again(replay: Callable[..., dict[str, Any]], folder: Path) -> None:
    found = replay("--subject", "reference", "--repeat", 3, "--out", folder / "again")
    assert found["counts"] == {"pass": 3}, found
    assert found["code"] == 0
    for number, one in enumerate(found["now"]):
        during = json.loads(Path(one["evidence"]).read_text())["during"]
        assert sum(event["ev"] == "load" for event in during) == 2, f"repetition {number} went over the whole path"


def test_a_broken_subject_fails_the_same_plan(replay: Callable[..., dict[str, Any]], folder: Path) -> None:
    found = replay("--subject", "planted.subjects:OtherRows", "--out", folder / "broken")
    assert [(one["verdict"], one["reason"]) for one in found["now"]] == [("fail", "digest-differs")]
    assert found["code"] == 1
