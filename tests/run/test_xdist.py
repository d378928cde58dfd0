"""`-n`: the same results as without it, whatever dies."""

from __future__ import annotations

import itertools
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from parallel_runs import WORKERS, Fakes, order
from run_fakes import SLEEPS, Call, Ended, read, start

from epd_conformance import cli
from epd_conformance.errors import UsageError
from epd_conformance.report import merge
from epd_conformance.topology import claims

pytest.importorskip("xdist")

TOPOLOGIES = ("aggregated", "e-pd", "e-p-d")
TOKEN = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"
SCRIPT = {"EPD-TOK-002[e-pd/": "fail", "EPD-TOK-003[e-p-d/": "inconclusive", "EPD-XFER-002[e-pd/": "harness"}


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fakes, Ended]:
    fakes = Fakes(tmp_path_factory.mktemp("serial") / "out", SCRIPT)
    return fakes, fakes.run("-p", "no:xdist")


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fakes, Ended]:
    fakes = Fakes(tmp_path_factory.mktemp("parallel") / "out", SCRIPT)
    return fakes, fakes.run(*WORKERS)


@pytest.fixture
def fakes(tmp_path: Path) -> Callable[[dict[str, str]], Fakes]:
    return lambda script: Fakes(tmp_path / "out", script)


def test_the_same_results_as_without_workers(serial: tuple[Fakes, Ended], parallel: tuple[Fakes, Ended]) -> None:
    _, wanted = serial
    fakes, ended = parallel
    assert ended.code == wanted.code == 1, ended.err
    assert ended.verdicts == wanted.verdicts
    assert len(set(ended.verdicts.values())) >= 4, "the script decides something"
    assert ended.report is not None
    assert wanted.report is not None
    for name in ("outcome", "engineOutcome", "proxyOutcome", "summary", "notVerified", "complete", "interrupted"):
        assert ended.report[name] == wanted.report[name], name
    assert ended.report["suite"] == wanted.report["suite"]
    assert "reference: nonconformant" in ended.out
    assert f"report: {fakes.out / 'report.json'}" in ended.out
    assert fakes.left() == []


def test_a_topology_stays_with_one_worker_and_in_order(
    serial: tuple[Fakes, Ended], parallel: tuple[Fakes, Ended]
) -> None:
    fakes, _ = parallel
    at = Counter[str]()
    workers = sorted((fakes.out / "workers").glob("*.ndjson"))
    assert len(workers) == 2
    for path, topology in itertools.product(workers, TOPOLOGIES):
        here = order(fakes.lines(f"workers/{path.name}"), topology)
        at[topology] += bool(here)
        assert here in ([], order(serial[0].lines(), topology))
    assert set(at.values()) == {1}
    for topology in TOPOLOGIES:
        assert order(fakes.lines(), topology) == order(serial[0].lines(), topology)


def test_the_results_are_those_of_one_run(parallel: tuple[Fakes, Ended]) -> None:
    fakes, _ = parallel
    kinds = Counter(line["kind"] for line in fakes.lines())
    assert {kinds[kind] for kind in ("run", "environment", "expected", "end")} == {1}
    # The time of a line is when it was written.
    times = [line["time"] for line in fakes.lines() if line["kind"] == "cell"]
    assert times == sorted(times)
    starts = [line["data"] for path in (fakes.out / "workers").glob("*.ndjson") for line in fakes.lines(path)[:1]]
    assert starts == [fakes.lines()[0]["data"]] * 2


def test_on_a_small_machine_one_topology_after_the_other(
    tmp_path: Path, fakes: Callable[[dict[str, str]], Fakes]
) -> None:
    """Workers see the cores that their process may use."""
    run = fakes({})
    small = "import os, runpy, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); sys.argv[0] = 'pytest'; "
    words = [
        "suites",
        "-p",
        "run_fakes",
        "-s",
        "--subject",
        "reference",
        "--profile",
        "all",
        "--out",
        run.out,
        *WORKERS,
    ]
    process = start(["-c", small + "runpy.run_module('pytest', run_name='__main__')", *words])
    _, err = process.communicate(timeout=60)
    topologies = [line["data"]["topology"] for line in run.lines() if line["kind"] == "cell"]
    assert len([name for name, _ in itertools.groupby(topologies)]) == len(TOPOLOGIES), "never interleaved"
    assert "waiting for another topology to end (1 at a time on this machine)" in err


def test_only_the_controller_shows_progress(parallel: tuple[Fakes, Ended]) -> None:
    _, ended = parallel
    assert ended.err.count(f" {TOKEN} ") == 1
    assert "fail: digest" in ended.err
    assert len(ended.err.splitlines()) == len(set(ended.err.splitlines()))


def test_certify(serial: tuple[Fakes, Ended], fakes: Callable[[dict[str, str]], Fakes]) -> None:
    run = fakes({"EPD-TOK-002[e-pd/": "fail"})
    ended = run.run(*WORKERS, "--mode", "certify")
    assert ended.code == 1, ended.err
    assert ended.report is not None
    assert ended.report["run"]["mode"] == "certify"
    assert set(ended.verdicts) == set(serial[1].verdicts)
    assert ended.report["summary"]["could-not-run"] == 0


def test_the_command_line(tmp_path: Path, serial: tuple[Fakes, Ended]) -> None:
    out = tmp_path / "out"
    words = [
        "run",
        "--subject",
        "reference",
        "--profile",
        "all",
        "-n",
        2,
        "--out",
        out,
        "--junitxml",
        out / "junit.xml",
    ]
    process = start(["-m", "run_fakes", *words], SCRIPT)
    text, err = process.communicate(timeout=60)
    ended = Ended(process.returncode, text, err, read(out))
    assert ended.code == 1, err
    assert ended.verdicts == serial[1].verdicts
    assert "reference: nonconformant" in text
    assert ended.report is not None
    assert ended.report["results"] == {"ndjson": "results.ndjson", "junit": "junit.xml", "allure": None}
    assert (out / "junit.xml").is_file()


@pytest.mark.parametrize(("words", "package"), [(("-n", "2"), "pytest-xdist"), (("--alluredir", "a"), "allure-pytest")])
def test_a_package_that_is_missing(
    fake_run: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], package: str
) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    ended = fake_run(None, *words)
    assert ended.code == 2
    assert [f"pip install {package}" in line for line in ended.errors] == [True]


# -- what cannot be run ------------------------------------------------------------------------------------------------


def test_no_worker_starts_for_what_cannot_be_run(fakes: Callable[[dict[str, str]], Fakes]) -> None:
    run = fakes({})
    ended = run.run(*WORKERS, "-k", "nomatch")
    assert ended.code == 4
    assert "no cell matches the selection" in ended.err
    assert "worker" not in ended.out
    assert not run.out.exists()


def test_a_suite_that_does_not_import_ends_the_run(tmp_path: Path) -> None:
    suites = tmp_path / "suites"
    suites.mkdir()
    (suites / "test_broken_too.py").write_text("import no_such_module_at_all\n")
    out = tmp_path / "out"
    process = start(["-m", "pytest", suites, "-p", "run_fakes", "--subject", "reference", "--out", out, *WORKERS])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4
    assert "no_such_module_at_all" in err
    assert not out.exists()


def test_a_machine_that_can_boot_nothing(fakes: Callable[[dict[str, str]], Fakes]) -> None:
    run = fakes({f"stage {topology}": "usage" for topology in TOPOLOGIES})
    ended = run.run(*WORKERS)
    assert ended.code == 2
    assert ended.report is None
    assert ended.errors == ["error: the fake cannot: mend it"]


def test_a_topology_that_cannot_be_booted_keeps_the_others(
    fakes: Callable[[dict[str, str]], Fakes], serial: tuple[Fakes, Ended]
) -> None:
    ended = fakes({**SCRIPT, "stage e-p-d": "usage"}).run(*WORKERS)
    assert ended.code == 1
    for name, words in ended.verdicts.items():
        assert words == ("error usage" if "[e-p-d/" in name else serial[1].verdicts[name])


# -- cut short ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_dies(fakes: Callable[[dict[str, str]], Fakes], serial: tuple[Fakes, Ended]) -> None:
    """What it had recorded stays, the rest of its topology could not run, and the other topologies are not touched."""
    run = fakes({"EPD-TOK-002[e-pd/": "die once"})
    ended = run.run(*WORKERS)
    assert ended.code == 3, ended.err
    assert ended.report is not None
    assert ended.report["interrupted"] is True
    assert "worker gw" in " ".join(ended.report["warnings"])
    cells = order(serial[0].lines(), "e-pd")
    position = cells.index(TOKEN)
    for name in cells[:position]:
        assert ended.verdicts[name] == serial[1].verdicts[name]
    assert {ended.verdicts[name] for name in cells[position:]} == {"could-not-run did not run"}
    others = {name for name in ended.verdicts if "[e-pd/" not in name}
    assert all(not ended.verdicts[name].startswith("could-not-run") for name in others)
    assert run.left() == []


def test_a_worker_that_dies_while_it_boots(fakes: Callable[[dict[str, str]], Fakes]) -> None:
    run = fakes({"stage e-p-d": "die once"})
    ended = run.run(*WORKERS)
    assert ended.code == 3, ended.err
    lost = {name for name, words in ended.verdicts.items() if words.startswith("could-not-run")}
    assert lost == {name for name in ended.verdicts if "[e-p-d/" in name}
    assert run.left() == []


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_run(
    fakes: Callable[[dict[str, str]], Fakes], serial: tuple[Fakes, Ended], name: str
) -> None:
    run = fakes({"EPD-TOK-002[e-pd/": "sleep"})
    process = run.start(*WORKERS)
    assert process.stderr is not None
    seen = next(line for line in process.stderr if SLEEPS in line)
    process.send_signal(getattr(signal, name))
    ended = run.wait(process)
    assert ended.code == 3, seen + ended.err
    assert ended.report is not None
    assert ended.report["interrupted"] is True
    assert {"SIGINT": "interrupted by the user", "SIGTERM": "terminated"}[name] in " ".join(ended.report["warnings"])
    cells = order(serial[0].lines(), "e-pd")
    for before in cells[: cells.index(TOKEN)]:
        assert ended.verdicts[before] == serial[1].verdicts[before]
    assert ended.verdicts[TOKEN] == "could-not-run did not run", "what was cut off is no defect of the harness"
    # Every worker came to its own end.
    for path in (run.out / "workers").glob("*.ndjson"):
        assert run.lines(path)[-1]["kind"] == "end"
    assert run.left() == []


def test_one_interrupted_worker_ends_the_run(fakes: Callable[[dict[str, str]], Fakes]) -> None:
    run = fakes({"EPD-TOK-002[e-pd/": "interrupt"})
    ended = run.run(*WORKERS)
    assert ended.code == 3
    assert ended.report is not None
    assert ended.report["interrupted"] is True
    assert ended.verdicts[TOKEN] == "could-not-run did not run"
    assert run.left() == []


def test_a_controller_that_dies_leaves_enough_for_a_report(
    fakes: Callable[[dict[str, str]], Fakes], serial: tuple[Fakes, Ended]
) -> None:
    run = fakes({"EPD-TOK-002[e-pd/": "sleep"})
    process = run.start(*WORKERS)
    assert process.stderr is not None
    next(line for line in process.stderr if SLEEPS in line)
    process.kill()
    process.communicate(timeout=60)
    # pytest-xdist lets a worker that has lost its controller go on for five seconds before it interrupts it.
    assert run.left(20) == []
    assert read(run.out) is None
    rebuilt = start(["-m", "epd_conformance.report.merge", run.out])
    text, err = rebuilt.communicate(timeout=60)
    assert "reference: incomplete on cpu-v1" in text, err
    ended = Ended(0, text, err, read(run.out))
    assert ended.report is not None
    assert ended.report["interrupted"] is True
    cells = order(serial[0].lines(), "e-pd")
    for before in cells[: cells.index(TOKEN)]:
        assert ended.verdicts[before] == serial[1].verdicts[before]
    assert ended.verdicts[TOKEN] == "could-not-run did not run"


def test_without_a_folder_of_a_run(tmp_path: Path) -> None:
    process = start(["-m", "epd_conformance.report.merge", tmp_path])
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cannot read" in err
    assert "Traceback" not in err


# -- merging -----------------------------------------------------------------------------------------------------------


def test_merging_twice_changes_nothing(parallel: tuple[Fakes, Ended], tmp_path: Path) -> None:
    fakes, _ = parallel
    before = (fakes.out / "results.ndjson").read_bytes()
    merge.merge(fakes.out)
    after = (fakes.out / "results.ndjson").read_bytes()
    assert before == after


def test_a_worker_of_another_run_is_found(parallel: tuple[Fakes, Ended], tmp_path: Path) -> None:
    fakes, _ = parallel
    (tmp_path / "workers").mkdir()
    for path in (fakes.out / "workers").glob("*.ndjson"):
        (tmp_path / "workers" / path.name).write_bytes(path.read_bytes())
    merge.merge(tmp_path)
    expected = path.read_text().replace('"case":"img1"', '"case":"img9"')
    (tmp_path / "workers" / path.name).write_text(expected)
    with pytest.raises(UsageError, match="has another expected line than"):
        merge.merge(tmp_path)


# -- turns -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "cores", "count"), [("cpu", 1, 1), ("cpu", 7, 1), ("cpu", 8, 2), ("cpu", 16, 4), ("cuda", 64, 1)]
)
def test_how_many_topologies_at_once(device: str, cores: int, count: int) -> None:
    assert claims.topologies_at_once(device, cores) == count


def test_a_turn_ends_with_its_process_and_a_waiting_worker_can_be_interrupted(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib\nfrom epd_conformance.topology.claims import Turn\n"
        f"turn = Turn(pathlib.Path({str(tmp_path)!r}), 1)\nturn.take(lambda line: print(line, flush=True))\n"
        "print('mine', flush=True)\nsys.stdin.read()\n"
    )

    def worker() -> tuple[Popen[str], str]:
        process = Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    first, said = worker()
    assert said == "mine"
    second, said = worker()
    assert said.startswith("waiting for another topology to end (1 at a time")
    second.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in second.communicate(timeout=10)[1]
    third, said = worker()
    assert said.startswith("waiting")
    first.kill()
    assert third.stdout is not None
    assert third.stdout.readline().strip() == "mine"
    third.communicate("", timeout=10)
    first.communicate(timeout=10)
