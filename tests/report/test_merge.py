"""Results of several workers become those of one run, which `verify` accepts, and nothing is lost or made up on the way."""

from __future__ import annotations

import itertools
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from made_run import MadeRun, rewrite

from epd_conformance.errors import UsageError
from epd_conformance.live import suites
from epd_conformance.report.merge import merge, worker_results
from epd_conformance.report.schema import RunEnd
from epd_conformance.report.verify import verify
from epd_conformance.report.writer import RESULTS_NAME, build_report, read_results
from epd_conformance.run import PROFILES
from epd_conformance.verdict import Outcome

SUITE = suites.installed()
HEAD = ("run", "environment", "expected")
END = RunEnd(finished=datetime.fromtimestamp(30_000_000.0, UTC))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "out"
    MadeRun(folder, SUITE, profile="all").write()
    assert verify(folder, SUITE).ok
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, content: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in content))


def topology(line: dict[str, Any]) -> str:
    found: str = line["data"].get("topology") or line["data"].get("baseline", "")
    return found


@pytest.fixture
def split(made: Path, tmp_path: Path) -> Path:
    """The same run as two workers would have left it, one of them with e-pd alone; their lines alternate in time."""
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    whole = lines(folder / RESULTS_NAME)
    head = [line for line in whole if line["kind"] in HEAD]
    body = [line for line in whole if line["kind"] not in (*HEAD, "end")]
    write(folder / RESULTS_NAME, head)
    end = next(line for line in whole if line["kind"] == "end")
    for worker, mine in (("gw0", {"e-pd"}), ("gw1", {"aggregated", "e-p-d", ""})):
        own = [{**line, "time": moment(number)} for number, line in enumerate(body) if topology(line) in mine]
        flags = {
            "flags": {f"{worker}/encode": [worker]},
            "devices": [f"device of {worker}"],
            "attentionBackend": worker,
        }
        environment = {**head[1], "data": {**head[1]["data"], **flags, "details": {"serverEnvironment": {worker: "1"}}}}
        write(worker_results(folder, worker), [*head, environment, *own, end])
    return folder


def moment(number: int) -> str:
    """The workers' lines alternate, and once the machine's clock is set back by a minute."""
    return datetime.fromtimestamp(1_000_000 + number % 20 + number - 60 * (number > 30), UTC).isoformat()


def test_a_merged_run_verifies(split: Path, made: Path) -> None:
    merge(split, END)
    rewrite(split, SUITE)
    found = verify(split, SUITE)
    assert found.problems == ()
    assert found.outcome is Outcome.CONFORMANT
    whole, before = lines(split / RESULTS_NAME), lines(made / RESULTS_NAME)
    assert [line["kind"] for line in whole[:3]] == list(HEAD)
    assert whole[-1]["kind"] == "end"
    assert sorted(json.dumps(line["data"]) for line in whole if line["kind"] == "cell") == sorted(
        json.dumps(line["data"]) for line in before if line["kind"] == "cell"
    )
    assert len(list(itertools.groupby(map(topology, whole[3:-1])))) > len(PROFILES["all"]), (
        "the topologies are interleaved"
    )


def test_a_result_that_a_forger_takes_out_before_the_merge_is_missed(split: Path) -> None:
    path = worker_results(split, "gw0")
    write(path, [line for line in lines(path) if "XFER-001" not in str(line["data"].get("requirement"))])
    merge(split, END)
    rewrite(split, SUITE)
    assert {str(problem.kind) for problem in verify(split, SUITE).problems} >= {"expected", "evidence"}


def test_the_environment_is_that_of_all_servers(split: Path) -> None:
    merge(split, END)
    environment = build_report(read_results(split / RESULTS_NAME), SUITE.catalogue).environment
    assert environment.flags == {"gw0/encode": ("gw0",), "gw1/encode": ("gw1",)}
    assert environment.devices == ("device of gw0", "device of gw1")
    assert environment.attention_backend == "gw0, gw1"
    assert environment.details["serverEnvironment"] == {"gw0": "1", "gw1": "1"}


def test_a_worker_without_an_end_cuts_the_run_short(split: Path) -> None:
    path = worker_results(split, "gw1")
    whole = path.read_text()
    # Its last line torn, as a kill leaves it.
    path.write_text(whole[: whole.rindex('"kind"')])
    merge(split, END)
    report = build_report(read_results(split / RESULTS_NAME), SUITE.catalogue)
    assert report.interrupted
    assert report.outcome is Outcome.INCOMPLETE
    assert "worker gw1 died" in " ".join(report.warnings)


def test_without_an_end_the_run_has_none(split: Path) -> None:
    merge(split)
    report = build_report(read_results(split / RESULTS_NAME), SUITE.catalogue)
    assert report.interrupted
    assert report.summary["executed"] == report.summary["expected"]


def test_the_controllers_file_is_not_needed(split: Path) -> None:
    (split / RESULTS_NAME).unlink()
    merge(split, END)
    rewrite(split, SUITE)
    assert verify(split, SUITE).ok


def test_a_second_merge_changes_nothing(split: Path) -> None:
    merge(split, END)
    first = (split / RESULTS_NAME).read_bytes()
    merge(split, END)
    assert (split / RESULTS_NAME).read_bytes() == first
    merge(split)
    assert (split / RESULTS_NAME).read_bytes() == first


def test_a_run_without_workers_is_left_alone(made: Path) -> None:
    before = (made / RESULTS_NAME).read_bytes()
    merge(made, END)
    assert (made / RESULTS_NAME).read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("expected", {"cells": []}, "worker gw1 has another expected line than"),
        ("run", {"environmentClass": "cuda"}, "worker gw1 has another run line than"),
    ],
)
def test_workers_of_different_runs(split: Path, kind: str, change: dict[str, Any], says: str) -> None:
    path = worker_results(split, "gw1")
    write(
        path, [{**line, "data": {**line["data"], **change}} if line["kind"] == kind else line for line in lines(path)]
    )
    before = (split / RESULTS_NAME).read_bytes()
    with pytest.raises(UsageError, match=says):
        merge(split, END)
    assert (split / RESULTS_NAME).read_bytes() == before
