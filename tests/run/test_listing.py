"""The verbs that start nothing: list, models, doctor, --version; and that they need neither vLLM nor torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_fakes import Call, start

import epd_conformance
from epd_conformance import catalogue as catalogues
from epd_conformance.catalogue import parse_cell_id
from epd_conformance.features import Feature
from epd_conformance.models import zoo
from epd_conformance.runtime import doctor


def test_version(command: Call) -> None:
    ended = command("--version")
    assert (ended.code, ended.out.strip()) == (0, epd_conformance.__version__)


def test_requirements(command: Call) -> None:
    ended = command("list")
    assert ended.code == 0
    for item in catalogues.load():
        assert item.id in ended.out
    assert "encode" in ended.out


@pytest.mark.parametrize(
    ("words", "keeps"),
    [
        (("--area", "tok"), lambda item: item["id"].startswith("EPD-TOK-")),
        (("--owner", "proxy"), lambda item: item["owner"] == "proxy"),
        (("--topology", "aggregated"), lambda item: "aggregated" in item["topologies"]),
        (("--area", "XFER", "--owner", "engine"), lambda item: "XFER" in item["id"] and item["owner"] == "engine"),
        (("--status", "active"), lambda item: item["status"] == "active"),
        (("--level", "should"), lambda item: item["level"] == "SHOULD"),
        (("--layer", "scheduler"), lambda item: item["layer"] == "scheduler"),
        (("--feature", "lora"), lambda item: "lora" in item["features"]),
        # A topology that a subject must opt into needs the feature too.
        (
            ("--feature", "kv_disaggregation"),
            lambda item: "e-p-d" in item["topologies"] or "kv_disaggregation" in item["features"],
        ),
        (
            ("--level", "MUST", "--status", "planned", "--layer", "live"),
            lambda item: (item["level"], item["status"], item["layer"]) == ("MUST", "planned", "live"),
        ),
    ],
)
def test_some_requirements(command: Call, words: tuple[str, ...], keeps: Any) -> None:
    everything = json.loads(command("list", "--json").out)
    some = json.loads(command("list", "--json", *words).out)
    assert some == [item for item in everything if keeps(item)]
    assert 0 < len(some) < len(everything)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--area", "NONE"), "error: no area 'NONE': use ERR, INIT, "),
        (("--owner", "nobody"), "error: no owner 'nobody': use connector, engine, proxy"),
        (("--topology", "d-p-e"), "error: no topology 'd-p-e': use contract, scheduler, proxy, aggregated, e-pd, "),
        (("--status", "done"), "error: no status 'done': use active, planned"),
        (("--level", "CAN"), "error: no level 'CAN': use MUST, SHOULD, MAY"),
        (("--layer", "unit"), "error: no layer 'unit': use contract, scheduler, proxy, live"),
        (("--feature", "speed"), "error: no feature 'speed': use kv_disaggregation, "),
        (("--area", "PROXY", "--layer", "scheduler"), "error: no requirement matches --area PROXY, --layer scheduler"),
    ],
)
@pytest.mark.parametrize("what", [(), ("--cells",), ("--json",)])
def test_nothing_matches(command: Call, words: tuple[str, ...], says: str, what: tuple[str, ...]) -> None:
    ended = command("list", *words, *what)
    assert ended.code == 2
    assert ended.err.startswith(says)
    assert ended.err.count("\n") == 1
    assert ended.out == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--features", "--cells"), "three lists"),
        (("--not-testable", "--cells"), "three lists"),
        (("--not-testable", "--area", "TOK"), "--area chooses requirements"),
        (("--features", "--level", "MUST"), "--level chooses requirements"),
    ],
)
def test_lists_that_do_not_go_together(command: Call, words: tuple[str, ...], says: str) -> None:
    ended = command("list", *words)
    assert (ended.code, ended.out) == (2, "")
    assert says in ended.err


def test_not_testable(command: Call) -> None:
    items = catalogues.not_testable()
    rows = json.loads(command("list", "--not-testable", "--json").out)
    assert [row["title"] for row in rows] == [item.title for item in items]
    assert set(rows[0]) == {"title", "statement", "reason", "instead", "covers"}
    text = " ".join(command("list", "--not-testable").out.split())
    for item in items:
        assert f"{item.title} {item.statement} why not: {item.reason} instead: {item.instead}" in text
    assert f"{len(items)} that no test" in text


def test_it_can_be_read_at_80_columns(command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = command("list").out.splitlines()
    assert max(map(len, lines)) <= 80
    found = list(catalogues.load())
    heads = [line for line in lines if line and not line.startswith((" ", "EPD-"))]
    areas = sorted({item.area for item in found})
    assert [line.partition(":")[0] for line in heads[:-1]] == areas
    assert heads[-1].startswith(f"{len(found)} requirements (")
    # The sentence follows its id, whole.
    assert found[0].sentence in " ".join(" ".join(lines).split())
    assert lines[lines.index(next(line for line in lines if found[0].id in line)) + 1].startswith("    ")


def test_features(command: Call) -> None:
    rows = json.loads(command("list", "--features", "--json").out)
    assert [row["feature"] for row in rows] == [str(feature) for feature in Feature]
    assert all(row["description"] for row in rows)
    assert "ec_both" in command("list", "--features").out


def test_cells(command: Call) -> None:
    def names(*words: str) -> list[str]:
        return [row["cell"] for row in json.loads(command("list", "--cells", "--json", *words).out)]

    everything = names()
    assert len(everything) == len(set(everything)) > 50
    for name in everything:
        requirement, topology, model, case = parse_cell_id(name)
        assert f"{requirement}[{topology}/{model}/{case}]" == name
        assert model == "tiny-qwen2.5-vl"
    assert {parse_cell_id(name)[1] for name in everything} == {"aggregated", "e-pd", "e-p-d"}
    by_profile = [names("--profile", profile) for profile in ("aggregated", "e-pd", "e-p-d")]
    assert sorted(name for some in by_profile for name in some) == sorted(everything)
    assert names("--topology", "e-pd") == by_profile[1]
    assert names("--topology", "E-PD") == by_profile[1]
    assert names("--area", "kv") == [name for name in everything if name.startswith("EPD-KV-")]
    # Sizes are an axis of their own.
    assert names("--profile", "2e-1pd") == [name.replace("[e-pd/", "[2e-1pd/") for name in by_profile[1]]


def test_cell_ids_are_printed_whole(command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "EPD-XFER-004[e-pd/tiny-qwen2.5-vl/img-twice]" in command("list", "--cells").out


def test_an_unknown_profile(command: Call) -> None:
    ended = command("list", "--cells", "--profile", "nonsense")
    assert ended.code == 2
    assert ended.err.startswith("error: no profile 'nonsense'")


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
from epd_conformance.cli import main
sys.argv = ["epd-conformance", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize(
    "words", [("list",), ("list", "--cells"), ("models", "list"), ("run", "--subject", "reference")]
)
def test_without_vllm_and_torch(words: tuple[str, ...]) -> None:
    process = start(["-c", BLOCKER, *words])
    out, err = process.communicate(timeout=60)
    if words[0] == "run":
        # The control: the blocker bites where vLLM is needed.
        assert process.returncode == 2
        assert "vLLM is not installed" in err
    else:
        assert process.returncode == 0, err
        assert out


def test_models(command: Call, tmp_path: Path) -> None:
    assert "tiny-qwen2.5-vl: " in command("models", "list").out
    rows = json.loads(command("models", "list", "--json").out)
    assert [row["name"] for row in rows] == list(zoo.MODELS)
    made = json.loads(command("models", "build", "tiny-qwen2.5-vl", tmp_path / "model", "--json").out)
    assert made["digest"] == zoo.MODELS["tiny-qwen2.5-vl"].digest == zoo.digest(tmp_path / "model")
    other = command("models", "build", "tiny-qwen2.5-vl", tmp_path / "other", "--seed", "1")
    assert other.code == 0
    assert made["digest"] not in other.out


def test_models_that_cannot_be_built(command: Call, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for name, folder, says in (
        ("tiny", tmp_path / "new", "the zoo holds"),
        ("tiny-qwen2.5-vl", tmp_path, "is not a zoo model"),
    ):
        ended = command("models", "build", name, folder)
        assert ended.code == 2
        assert ended.err.startswith("error: ")
        assert says in ended.err


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("missing", 2)])
def test_doctor(command: Call, monkeypatch: pytest.MonkeyPatch, status: Any, code: int) -> None:
    """A made-up diagnosis: what a real one finds is tested where the checks are."""
    asked: list[str | None] = []

    def diagnose(model: str | None = None) -> doctor.Diagnosis:
        asked.append(model)
        return doctor.Diagnosis((doctor.Check("a thing [x]", status, "found", "mend"),), ())

    monkeypatch.setattr(doctor, "diagnose", diagnose)
    ended = command("doctor", "--json", "--model", "m")
    assert ended.code == code
    data = json.loads(ended.out)
    assert (data["schema"], data["ready"]) == (doctor.SCHEMA, code == 0)
    assert data["checks"][0]["status"] == status
    text = command("doctor")
    assert text.code == code
    assert "a thing [x]" in text.out
    assert asked == ["m", None]


def test_a_defect_is_never_nonconformant(command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's exit code for an exception is 1, which would say something about the connector."""

    def broken(model: str | None = None) -> doctor.Diagnosis:
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "diagnose", broken)
    ended = command("doctor")
    assert ended.code == 2
    assert "RuntimeError: a defect" in ended.err
