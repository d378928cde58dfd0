"""Mutants whose fate is known meet it, and a mutant that was not put in place is noticed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: its own classes are driven", allow_module_level=True)
pytest.importorskip("mutmut")

from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.hosted import Host
from epd_conformance.errors import StackError, UsageError
from epd_conformance.power import trial
from epd_conformance.power.mutants import Mutant, mutants_of

pytestmark = pytest.mark.needs_vllm

HERE = Path(__file__).parent
PATHS = [str(HERE), str(HERE.parent / "engine")]
TARGET = trial.Target("mutable_store:MutableSubject", frozenset(), {"mutable": (), "mutable_store": ()}, PATHS)
STEPS = [trial.Step(name, TARGET.subject, corpus(frozenset())[name]) for name in ("miss", "transfer-v1")]


@pytest.fixture(scope="module")
def base(host: Host) -> trial.Baseline:
    return trial.baseline(host, TARGET, STEPS)


def changed(before: str, after: str) -> Mutant:
    """`mutable` with a change that no operator makes."""
    source = (HERE / "mutable.py").read_text(encoding="utf-8")
    one = next(one for one in mutants_of("mutable", source) if one.before == before)
    made: dict[str, Any] = {"after": after, "source": source.replace(before, after)}
    return Mutant(**{**vars(one), **made})


def named(after: str) -> Mutant:
    found = mutants_of("mutable", (HERE / "mutable.py").read_text(encoding="utf-8"))
    return next(one for one in found if one.after == after)


def met(host: Host, base: trial.Baseline, mutant: Mutant, folder: Path) -> trial.Fate:
    return trial.fate(host, TARGET, mutant, f"{folder.name}", base.reaching(mutant), folder)


def test_a_change_that_breaks_a_requirement_is_killed(host: Host, base: trial.Baseline, tmp_path: Path) -> None:
    fate = met(host, base, changed("time.sleep(0)", "raise OSError"), tmp_path)
    assert (fate.outcome, fate.step, fate.tried) == ("killed", "miss", 1)
    assert fate.requirements == ("EPD-KEY-001",)


def test_a_change_that_nobody_sees_survives_all_steps(host: Host, base: trial.Baseline, tmp_path: Path) -> None:
    fate = met(host, base, named('return "XXunseenXX"'), tmp_path)
    assert (fate.outcome, fate.tried) == ("survived", 2)


def test_a_change_that_hangs_is_counted_apart(
    host: Host, base: trial.Baseline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "STEP_LIMIT_S", 0.5)
    fate = met(host, base, changed("time.sleep(0)", "time.sleep(100)"), tmp_path)
    assert (fate.outcome, fate.step) == ("timed out", "miss")
    assert "has_cache_item" in fate.text


def test_a_change_that_cannot_be_imported_is_counted_apart(host: Host, base: trial.Baseline, tmp_path: Path) -> None:
    fate = met(host, base, changed("time.sleep(0)", "pass\nimport nothing_is_called_so"), tmp_path)
    assert (fate.outcome, fate.text) == ("broken", "ModuleNotFoundError: No module named 'nothing_is_called_so'")


def test_what_no_step_runs_is_not_carried_out(host: Host, base: trial.Baseline, tmp_path: Path) -> None:
    fate = met(host, base, named("return 2"), tmp_path)
    assert (fate.outcome, fate.tried) == ("not reached", 0)


def test_a_mutant_that_is_not_in_place_is_noticed(host: Host, base: trial.Baseline, tmp_path: Path) -> None:
    """Otherwise each would survive, as the connector that nobody changed."""
    mutant = changed("time.sleep(0)", "time.sleep(1)")
    absent = Mutant(**{**vars(mutant), "source": f"{mutant.source}\n__epd_mutant__ = ''\n"})
    with pytest.raises(StackError, match="was not what the connector imported"):
        met(host, base, absent, tmp_path)


def test_a_connector_that_fails_as_it_is_teaches_nothing(host: Host) -> None:
    broken = trial.Target("planted_engine:Noop_", frozenset(), {"planted_engine": ()}, PATHS)
    steps = [replace(step, subject=broken.subject) for step in STEPS]
    with pytest.raises(UsageError, match="as it is fails transfer-v1"):
        trial.baseline(host, broken, steps)
