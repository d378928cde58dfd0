"""`verify` and what a report says of its subject: a configuration, its digest or a warning that was changed or removed shows."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun, change_json, change_results, rewrite

from epd_conformance.live import suites
from epd_conformance.observations import ignored_words
from epd_conformance.report.verify import Kind, verify
from epd_conformance.report.writer import REPORT_NAME, RESULTS_NAME

SUITE = suites.installed()
# What a recorder of a connector that ignores a key writes at the start.
TOLD = '"asked": "Recording::X", "ec_role": "ec_both", "extra": ["path", "typo"], "read": ["path"], "hooks": []'
WARNING = ignored_words("ec_both", "typo")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An honest run whose connector ignores a key, and that says so."""
    folder = tmp_path_factory.mktemp("subject")
    MadeRun(folder, SUITE, "aggregated").write()
    for path in [*folder.glob("cells/*.json"), *folder.glob("stacks/*/journal/*.ndjson")]:
        path.write_text(re.sub(r'"ec_role":\s*""', TOLD, path.read_text()))
    *lines, end = (folder / RESULTS_NAME).read_text().splitlines()
    time = json.loads(end)["time"]
    records = [
        ("configuration", {"topology": "aggregated", "role": "ec_both", "config": {"ec_connector": "X", "ec_port": 1}}),
        ("warning", {"text": WARNING}),
    ]
    lines += [json.dumps({"kind": kind, "time": time, "data": data}) for kind, data in records]
    (folder / RESULTS_NAME).write_text("\n".join([*lines, end]) + "\n")
    rewrite(folder, SUITE)
    return folder


def no_configuration(folder: Path) -> None:
    change_results(folder, "configuration", lambda data: None)
    rewrite(folder, SUITE)


def another_connector(folder: Path) -> None:
    """The evidence of one connector under the name of another."""

    def change(data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "config": {**data["config"], "ec_connector": "Y"}}

    change_results(folder, "configuration", change)
    rewrite(folder, SUITE)


def another_class(folder: Path) -> None:
    change_results(folder, "environment", lambda data: {**data, "devices": ["cpu (2 cores)"]})
    change_results(folder, "run", lambda data: {**data, "environmentClass": "cuda"})
    rewrite(folder, SUITE)


def another_model_of_that_name(folder: Path) -> None:
    change_results(
        folder, "environment", lambda data: {**data, "models": [{"id": "tiny-qwen2.5-vl", "digest": "0" * 64}]}
    )
    rewrite(folder, SUITE)


def no_warning(folder: Path) -> None:
    change_results(folder, "warning", lambda data: None)
    rewrite(folder, SUITE)


def another_digest(folder: Path) -> None:
    change_json(folder / REPORT_NAME, lambda report: report["subject"].update(configDigest="sha256:" + "0" * 64))


def another_configuration(folder: Path) -> None:
    def change(report: dict[str, Any]) -> None:
        report["subject"]["configurations"][0]["config"]["ec_port"] = 2

    change_json(folder / REPORT_NAME, change)


def another_configuration_in_the_results(folder: Path) -> None:
    change_results(folder, "configuration", lambda data: {**data, "config": {**data["config"], "ec_port": 2}})


def test_an_honest_run_verifies(honest: Path) -> None:
    assert verify(honest, SUITE).lines()[-1].startswith("verified")
    report = json.loads((honest / REPORT_NAME).read_text())
    assert report["warnings"] == [WARNING]
    assert report["subject"]["configDigest"].startswith("sha256:")


@pytest.mark.parametrize(
    ("forge", "kind", "words"),
    [
        (no_configuration, Kind.EVIDENCE, "no configuration of ec_both in aggregated"),
        (another_connector, Kind.JOURNAL, "ran Recording::X, and the results say that Recording::Y was configured"),
        (another_class, Kind.EXPECTED, "a run on cpu (2 cores), and its class is cuda"),
        (another_model_of_that_name, Kind.EXPECTED, "is not the zoo's"),
        (no_warning, Kind.REPORT, "the warning is missing"),
        (another_digest, Kind.REPORT, "`subject.configDigest`"),
        (another_configuration, Kind.REPORT, "`subject.configurations[0].config.ec_port`"),
        (another_configuration_in_the_results, Kind.REPORT, "`subject.configDigest`"),
    ],
)
def test_a_forged_one_does_not(
    honest: Path, tmp_path: Path, forge: Callable[[Path], None], kind: Kind, words: str
) -> None:
    folder = Path(shutil.copytree(honest, tmp_path / "run"))
    forge(folder)
    problems = verify(folder, SUITE).problems
    assert [problem for problem in problems if problem.kind is kind and words in problem.words], problems
