"""`check-subject`: what would stop a run is found without a server, and what cannot be decided is never called ok."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import check_subject, cli
from epd_conformance.check_subject import Line, check, exit_code
from epd_conformance.connectors.probes import ExampleStoreProbe
from epd_conformance.faults.store import Deleted
from epd_conformance.features import Feature
from epd_conformance.observations import COUNTS, DEFERS, FeatureFinding, State, features, own_hooks, warnings
from epd_conformance.probe import Rows
from epd_conformance.runtime import connector_child, vllm_info
from epd_conformance.subject import Implementation, LaunchOptions, ReferenceSubject, StackInfo, VllmExampleSubject


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_info, "find", lambda: None)


def found(subject: type, *states: State) -> list[Line]:
    """The lines about a subject of this module in these states (fail and warn unless given)."""
    lines = check(f"{__name__}:{subject.__name__}")
    return [line for line in lines if line.state in (states or (State.FAIL, State.WARN))]


# -- subjects ------------------------------------------------------------------------------------------------------------


class Good(VllmExampleSubject):
    pass


class Branch(Good):
    implementation = Implementation("Vendor", "connector", "main")


class Counting(Good):
    """Depends on how often it is asked."""

    asked = 0

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        self.asked += 1
        return {**super().connector_config(role, stack), "engine_id": f"engine-{self.asked}"}


class Fixed(Good):
    """Gives the first stack's folder to every later one."""

    first: list[Path] = []  # noqa: RUF012

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        self.first.append(stack.store)
        return {**super().connector_config(role, stack), "ec_ip": str(self.first[0])}


class UnknownKey(Good):
    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {**super().connector_config(role, stack), "shared_path": "/a"}


class NoJson(Good):
    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {"ec_connector": "X", "ec_connector_extra_config": {"path": stack.store}}


class Exiting(Good):
    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        sys.exit("no licence")


class Hanging(Good):
    def launch(self, role: str, stack: StackInfo) -> LaunchOptions:
        time.sleep(10)
        return LaunchOptions()


class Overriding(Good):
    def launch(self, role: str, stack: StackInfo) -> LaunchOptions:
        return LaunchOptions(["--served_model_name=mine"]) if role == "ec_consumer" else LaunchOptions()


class NoProbe(Good):
    def probe(self, stack: StackInfo) -> Any:
        return None


class Undeclared(Good):
    features = Good.features - {Feature.STORE_PROBE}


class OneTopology(Good):
    features = frozenset[Feature]()

    def probe(self, stack: StackInfo) -> Any:
        return None


class Misfiled(Good):
    def faults(self, stack: StackInfo) -> Any:
        return {"truncated": Deleted()}


# -- without vLLM --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_vllm")
class TestWithoutVllm:
    @pytest.mark.parametrize("name", ["reference", "vllm-example"])
    def test_nothing_is_wrong_with_the_built_in_subjects(self, name: str) -> None:
        lines = check(name)
        assert [line for line in lines if line.state in (State.FAIL, State.WARN)] == []
        assert exit_code(lines) == 0
        assert any("vLLM is not installed" in line.words and line.state is State.NOT_PROBED for line in lines)
        assert {line.check for line in lines if line.check.startswith("configuration")} == {
            "configuration e-pd/ec_producer", "configuration e-pd/ec_consumer", "configuration e-p-d/ec_producer",
            "configuration e-p-d/ec_consumer", "configuration aggregated/ec_both",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("subject", "check_name", "state", "words"),
        [
            (Branch, "implementation", State.WARN, "the version is 'main'"),
            (Counting, "configuration e-pd/ec_producer", State.FAIL, "a second time, it answers differently (`config.engine_id`)"),
            (Fixed, "configuration e-pd/ec_producer", State.FAIL, "asked anew, for a stack with other paths"),
            (UnknownKey, "configuration e-pd/ec_producer", State.FAIL, "has no `shared_path`"),
            (NoJson, "configuration e-pd/ec_producer", State.FAIL, "no JSON"),
            (Exiting, "configuration e-pd/ec_producer", State.FAIL, "raised SystemExit (no licence)"),
            (Overriding, "configuration e-pd/ec_consumer", State.FAIL, "--served-model-name overrides"),
            (NoProbe, "feature store_probe", State.FAIL, "declared, and probe() gives None"),
            (Undeclared, "feature store_probe", State.WARN, "the feature is not declared"),
            (Misfiled, "faults", State.FAIL, "under 'truncated' that is no Fault of this kind"),
        ],
    )  # fmt: skip
    def test_a_mistake_is_found(self, subject: type, check_name: str, state: State, words: str) -> None:
        lines = found(subject)
        assert [line for line in lines if line.check == check_name and line.state is state and words in line.words], (
            lines
        )
        assert exit_code(lines) == (state is State.FAIL)

    def test_a_hang_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check_subject, "CODE_LIMIT_S", 0.05)
        lines = found(Hanging, State.FAIL)
        assert all("TimeoutError" in line.words for line in lines)
        assert signal.getsignal(signal.SIGALRM) == signal.SIG_DFL

    def test_only_declared_topologies_are_asked(self) -> None:
        checks = [line.check for line in found(OneTopology, State.OK)]
        assert [name for name in checks if name.startswith("configuration")] == [
            "configuration e-pd/ec_producer", "configuration e-pd/ec_consumer",
        ]  # fmt: skip

    def test_the_command_line_prints_one_line_a_check(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def call(*words: str) -> tuple[int, str]:
            monkeypatch.setattr(sys, "argv", ["epd-conformance", "check-subject", *words])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            return int(ended.value.code or 0), capsys.readouterr().out

        code, out = call("vllm-example")
        assert code == 0
        assert out.splitlines()[0] == "ok          implementation: vLLM ECExampleConnector 0.32.0"
        code, out = call(f"{__name__}:NoProbe", "--json")
        assert code == 1
        assert {"check", "state", "words", "mend"} == set(json.loads(out)[0])
        assert call("no-such-subject")[0] == 2


# -- probes --------------------------------------------------------------------------------------------------------------


class _Probe(ExampleStoreProbe):
    pass


class Forgetful(_Probe):
    def delete(self, key: str) -> None: ...


class Adding(_Probe):
    def write(self, key: str, data: bytes) -> None:
        super().write(key, (self.read(key) or b"") + data)


class Listing(_Probe):
    def keys(self) -> list[str]:
        return [check_subject.KEY]


class Mixing(_Probe):
    def file(self, key: str) -> Path:
        return super().file("one")


class Text(_Probe):
    def read(self, key: str) -> bytes | None:
        data = super().read(key)
        return data and data.replace(b"\r\n", b"\n").rstrip(b"\x00")


class TestProbe:
    @pytest.mark.parametrize(
        ("probe", "words"),
        [
            (_Probe, ""),
            (Forgetful, "still gives what was deleted"),
            (Adding, "does not replace"),
            (Listing, "still has a key that was deleted"),
            (Mixing, "of another key"),
        ],
    )
    def test_the_round_trip_tells_good_from_bad(self, probe: type, words: str, tmp_path: Path) -> None:
        problem = check_subject._plain(probe(tmp_path))
        assert words in problem
        assert bool(problem) == bool(words)


# -- features ------------------------------------------------------------------------------------------------------------


def states(declared: set[Feature], **seen: Any) -> dict[Feature, State]:
    return {finding.feature: finding.state for finding in features(declared, **{"hooks": (), "probe": None, **seen})}


class TestFeatures:
    @pytest.mark.parametrize(
        "feature", [Feature.ASYNC_TRANSFER, Feature.STATS, Feature.STORE_PROBE, Feature.FILE_STORE]
    )
    def test_a_declared_feature_is_contradicted_by_proof_only(self, feature: Feature) -> None:
        assert states({feature})[feature] is State.FAIL
        assert states(set())[feature] is not State.FAIL
        if feature in (Feature.ASYNC_TRANSFER, Feature.STATS):
            # The hook is there: that proves nothing.
            assert states({feature}, hooks=(DEFERS, COUNTS))[feature] is State.NOT_PROBED
            assert states({feature}, hooks=None)[feature] is State.NOT_PROBED

    def test_an_undeclared_one_that_is_present_warns(self, tmp_path: Path) -> None:
        probe = ExampleStoreProbe(tmp_path)
        assert states(set(), probe=probe)[Feature.STORE_PROBE] is State.WARN
        assert states({Feature.STORE_PROBE}, probe=probe)[Feature.STORE_PROBE] is State.OK
        assert states(set(), probe=probe)[Feature.FILE_STORE] is State.WARN
        assert states({Feature.FILE_STORE}, probe=probe)[Feature.FILE_STORE] is State.OK
        assert states({Feature.STORE_PROBE}, probe=object())[Feature.STORE_PROBE] is State.FAIL
        assert states(set(), hooks=(COUNTS,))[Feature.STATS] is State.WARN
        assert states(set(), hooks=(DEFERS,))[Feature.ASYNC_TRANSFER] is State.NOT_PROBED
        assert states(set(), hooks=(DEFERS,), deferred=True)[Feature.ASYNC_TRANSFER] is State.WARN
        assert (
            states({Feature.ASYNC_TRANSFER}, hooks=(DEFERS,), deferred=True)[Feature.ASYNC_TRANSFER] is State.NOT_PROBED
        )

    def test_what_only_servers_can_show_is_never_ok(self) -> None:
        decided = {Feature.STORE_PROBE, Feature.FILE_STORE, Feature.ASYNC_TRANSFER, Feature.STATS}
        for declared in (set(), set(Feature)):
            open_ones = {feature: state for feature, state in states(declared).items() if feature not in decided}
            assert set(open_ones.values()) == {State.NOT_PROBED}
            assert set(open_ones) | decided == set(Feature)

    def test_an_inherited_hook_is_not_ones_own(self) -> None:
        class Base:
            def ensure_cache_available(self) -> bool:
                return True

            def get_ec_connector_stats(self) -> None: ...

        class Inherits(Base):
            pass

        class Overrides(Inherits):
            def ensure_cache_available(self) -> bool:
                return False

        class Lacks:
            pass

        assert own_hooks(Inherits, Base) == []
        assert own_hooks(Overrides, Base) == [DEFERS]
        assert own_hooks(Lacks, Base) == []

    def test_a_run_warns_of_a_deferral_that_was_not_declared(self) -> None:
        events = [
            {"server": "p-0", "side": "scheduler", "ev": "init", "ec_role": "ec_consumer", "hooks": [DEFERS]},
            {"server": "p-0", "side": "scheduler", "ev": "defer", "req": "r"},
        ]
        (words,) = warnings((), [events])
        assert words.startswith("async_transfer: the connector deferred requests")
        assert warnings({Feature.ASYNC_TRANSFER}, [events]) == []
        assert warnings((), [events[:1]]) == []

    def test_a_finding_says_what_to_do(self) -> None:
        finding = next(one for one in features({Feature.STATS}, hooks=(), probe=None) if one.feature is Feature.STATS)
        assert isinstance(finding, FeatureFinding)
        assert "take the feature back" in finding.mend


# -- the process that constructs -----------------------------------------------------------------------------------------


def crash() -> None:
    faulthandler.disable()  # pytest's own would fill the screen
    os.kill(os.getpid(), signal.SIGSEGV)


class TestProcess:
    """Everything that vendors' code may do to its process, without vLLM: the tries themselves are replaced."""

    @pytest.fixture
    def outcome(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[dict[str, Any]]]]:
        def call(act: Callable[[], Any], limit_s: float = 5.0) -> list[dict[str, Any]]:
            def tried(tell: connector_child.Tell, wanted: Any) -> None:
                with tell.trying("construction", "constructing"):
                    act()
                tell("construction", "ok", "constructed")

            monkeypatch.setattr(connector_child, "try_role", tried)
            results = tmp_path / "results"
            results.touch()
            request = {"limit_s": limit_s, "tries": [{"role": "ec_producer", "environment": {"EPD_CHECK": "1"}}]}
            connector_child.run(request, str(results))
            return [json.loads(line) for line in results.read_text().splitlines()]

        yield call
        assert "EPD_CHECK" not in os.environ

    @pytest.mark.parametrize(
        ("act", "words"),
        [
            (lambda: 1 / 0, "constructing raised ZeroDivisionError: division by zero"),
            (lambda: sys.exit(3), "constructing raised SystemExit: 3"),
            (lambda: os._exit(3), "the process ended itself with status 3"),
            (crash, "died of signal 11 (SIGSEGV)"),
            (lambda: time.sleep(30), "did not come to an end within 0 s"),
        ],
    )
    def test_what_a_connector_does_to_its_process_is_a_finding(
        self, outcome: Callable[..., list[dict[str, Any]]], act: Callable[[], Any], words: str
    ) -> None:
        told = outcome(act, 0.3)
        failed = [line for line in told if line["state"] == "fail"]
        assert len(failed) == 1
        assert words in failed[0]["words"]

    def test_a_good_one_comes_to_its_end(self, outcome: Callable[..., list[dict[str, Any]]]) -> None:
        told = outcome(lambda: None)
        assert [(line["check"], line["state"]) for line in told] == [("construction", "ok"), ("end", "ok")]

    def test_a_silent_exit_has_no_end(self, outcome: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
        lines = outcome(lambda: os._exit(0))
        assert lines == []
        checks = check_subject._Check("x", Good(), tmp_path)
        checks._said_by_child("ec_producer", lines, broken=False)
        assert [(line.state, line.words) for line in checks.lines] == [
            (State.FAIL, "the process ended itself with status 0")
        ]

    def test_each_try_has_its_environment(self, outcome: Callable[..., list[dict[str, Any]]]) -> None:
        def act() -> None:
            assert os.environ["EPD_CHECK"] == "1"

        assert [line["state"] for line in outcome(act)] == ["ok", "ok"]


class TestSavedObject:
    """`unseal` and `seal`, on an object that the connector made."""

    ROWS = Rows(bytes(range(32)), 2, 4, "float32")

    def lines(self, probe: Any, tmp_path: Path, state: str = "ok") -> tuple[str, list[Line]]:
        import base64

        saved = {"state": state, "words": "it raised", "rows": 2, "width": 4, "dtype": "float32"}
        checks = check_subject._Check("x", Good(), tmp_path)
        return checks._saved(probe, {**saved, "data": base64.b64encode(self.ROWS.data).decode()}), checks.lines

    def stored(self, tmp_path: Path, rows: Rows) -> ExampleStoreProbe:
        probe = ExampleStoreProbe(tmp_path / "store")
        probe.write(check_subject.KEY, probe.seal(rows, b""))
        return probe

    def test_a_right_one_is_ok(self, tmp_path: Path) -> None:
        problem, lines = self.lines(self.stored(tmp_path, self.ROWS), tmp_path)
        assert problem == ""
        assert [line.state for line in lines] == [State.OK]

    def test_other_rows_fail(self, tmp_path: Path) -> None:
        other = Rows(bytes(32), 2, 4, "float32")
        assert "unseal() of an object does not give" in self.lines(self.stored(tmp_path, other), tmp_path)[0]

    def test_a_seal_that_loses_the_rows_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        probe = self.stored(tmp_path, self.ROWS)
        monkeypatch.setattr(probe, "seal", lambda rows, like: like)
        assert "unseal(seal(rows)) is not rows" in self.lines(probe, tmp_path)[0]

    @pytest.mark.parametrize("state", ["ok", "not probed"])
    def test_no_object_is_never_ok(self, state: str, tmp_path: Path) -> None:
        problem, lines = self.lines(ExampleStoreProbe(tmp_path / "empty"), tmp_path, state)
        assert problem == ""
        assert [line.state for line in lines] == [State.NOT_PROBED]


# -- with vLLM -----------------------------------------------------------------------------------------------------------


class Broken(ReferenceSubject):
    """Another connector for each role: one with a key too many, one with a method too few, one that cannot be made."""

    features = ReferenceSubject.features | {Feature.STATS}

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        name = {"ec_producer": "Ignoring", "ec_consumer": "Unfinished", "ec_both": "Refusing"}[role]
        return {
            "ec_connector": name,
            "ec_connector_module_path": "broken_connectors",
            "ec_connector_extra_config": {"root": str(stack.store), "typo": 1},
        }


@pytest.mark.needs_vllm
def test_the_connector_is_constructed_as_a_server_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process with vLLM for all of it: it takes ten seconds."""
    pytest.importorskip("vllm")
    here = str(Path(__file__).parent / "broken")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, os.environ.get("PYTHONPATH", "")]))
    lines = {line.check: line for line in check(f"{__name__}:Broken")}
    assert lines["construction as ec_producer"].state is State.OK
    assert "'typo'" in lines["extra configuration as ec_producer"].words
    assert lines["extra configuration as ec_producer"].state is State.WARN
    assert lines["class as ec_consumer"].state is State.FAIL
    assert "save_caches" in lines["class as ec_consumer"].words
    assert "constructing the WORKER object raised RuntimeError: no device" in lines["construction as ec_both"].words
    assert lines["feature stats"].state is State.FAIL
    assert lines["probe on an object"].state is State.OK
    assert lines["probe"].state is State.OK
