"""The connector's own tests kill what they see and nothing else, and each mutant meets only those that run it."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: its own classes are driven", allow_module_level=True)
pytest.importorskip("mutmut")

from epd_conformance.engine.hosted import Host
from epd_conformance.errors import StackError, UsageError
from epd_conformance.power import own, reference
from epd_conformance.power.mutants import Mutant, mutants_of
from epd_conformance.power.trial import Fate, Target

pytestmark = pytest.mark.needs_vllm

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TARGET = Target(
    "mutable_store:MutableSubject",
    frozenset(),
    {"mutable": ()},
    [str(HERE), str(HERE.parent / "engine")],
    tests=[HERE / "mutable_tests.py"],
    root=ROOT,
)
ID = "tests/power/mutable_tests.py::"


@pytest.fixture(scope="module")
def trial(host: Host) -> own.OwnTests:
    made = own.OwnTests(TARGET)
    assert made.begin(host) == "4 tests pass"
    return made


def changed(before: str, after: str) -> Mutant:
    """`mutable` with a change that perhaps no operator makes."""
    source = (HERE / "mutable.py").read_text(encoding="utf-8")
    one = next(one for one in mutants_of("mutable", source) if one.before == before)
    return replace(one, after=after, source=source.replace(before, after))


def met(host: Host, trial: own.OwnTests, folder: Path, before: str, after: str) -> Fate:
    fate = trial.meet(host, changed(before, after), folder.name, folder)
    assert fate.against == "tests"
    return fate


def test_a_test_that_sees_the_change_kills(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    mutant = replace(changed("time.sleep(0)", ""), function="is_there", lines=range(9, 10))
    source = mutant.source.replace("return found", "return True").replace("    \n", "    pass\n")
    fate = trial.meet(host, replace(mutant, source=source), "m", tmp_path)
    assert (fate.outcome, fate.step, fate.tried) == ("killed", f"{ID}test_that_sees_a_change[False]", fate.tried)
    assert fate.tried <= 2, "only the tests that run the statement"
    assert fate.text == "assert True is False (line 13)"


def test_a_test_that_sees_nothing_does_not(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    fate = met(host, trial, tmp_path, 'return "unseen"', 'return "XXunseenXX"')
    assert (fate.outcome, fate.tried) == ("survived", 1)


def test_what_runs_in_a_forked_process_only_is_met(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    fate = met(host, trial, tmp_path, "time.sleep(0)", "raise OSError")
    assert (fate.outcome, fate.step) == ("killed", f"{ID}test_in_a_forked_process")


def test_what_no_test_runs_is_not_carried_out(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    assert met(host, trial, tmp_path, "return 1", "return 2").outcome == "not reached"


def test_a_test_that_hangs_is_counted_apart(
    host: Host, trial: own.OwnTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own, "STEP_LIMIT_S", 3.0)
    fate = met(host, trial, tmp_path, "time.sleep(0)", "time.sleep(100)")
    assert (fate.outcome, fate.step) == ("timed out", f"{ID}test_in_a_forked_process")


def test_tests_that_cannot_be_collected_kill(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    fate = met(host, trial, tmp_path, 'return "unseen"', 'return "unseen"\n\n\ndel is_there')
    assert (fate.outcome, fate.step) == ("killed", ID.removesuffix("::"))


def test_a_process_that_dies_is_a_kill(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    fate = met(host, trial, tmp_path, 'return "unseen"', "import os; os._exit(3)")
    assert (fate.outcome, fate.step, fate.text) == ("killed", f"{ID}test_that_sees_none", "the process status 3")


def test_what_cannot_be_imported_is_counted_apart(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    fate = met(host, trial, tmp_path, 'return "unseen"', "pass\nimport nothing_is_called_so")
    assert (fate.outcome, fate.text) == ("broken", "ModuleNotFoundError: No module named 'nothing_is_called_so'")


def test_a_mutant_that_is_not_in_place_is_noticed(host: Host, trial: own.OwnTests, tmp_path: Path) -> None:
    """Otherwise each would survive, as the connector that nobody changed."""
    with pytest.raises(StackError, match="was not what the tests imported"):
        met(host, trial, tmp_path, 'return "unseen"', "return ''\n__epd_mutant__ = ''")


def test_tests_that_fail_anyway_teach_nothing(host: Host, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    bad = tmp_path / "bad_tests.py"
    bad.write_text("def test_bad():\n    assert 1 == 2\n")
    with pytest.raises(UsageError, match=r"as it is fails bad_tests.py::test_bad.*assert 1 == 2 \(line 2\)"):
        own.OwnTests(replace(TARGET, tests=[bad], root=tmp_path)).begin(host)


def test_without_a_checkout_there_are_none(host: Host) -> None:
    with pytest.raises(UsageError, match="use a checkout of the repository, or `--against layer`"):
        own.OwnTests(replace(TARGET, tests=[])).begin(host)


def test_the_reference_connectors_tests_are_found() -> None:
    names = {path.name for path in reference.target().tests}
    assert {"test_pins.py", "test_verified_store.py"} < names
