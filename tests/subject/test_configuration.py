"""What a subject answers is checked, made comparable between stacks, remembered, and shown in the report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import catalogue
from epd_conformance.configuration import CONFIG_KEYS, Configurations, Configured, ask, difference, reserved
from epd_conformance.errors import UsageError
from epd_conformance.report.schema import (
    CellRecord,
    ConfigurationRecord,
    EnvironmentInfo,
    ExpectedRecord,
    ExpectedSet,
    Report,
    RunEnd,
    RunInfo,
    RunStart,
    SubjectInfo,
    SuiteInfo,
    WarningRecord,
    config_digest,
)
from epd_conformance.report.writer import (
    RESULTS_NAME,
    ResultsLog,
    build_report,
    read_report,
    read_results,
    write_report,
)
from epd_conformance.runtime import repairs
from epd_conformance.subject import Implementation, LaunchOptions, StackInfo, Subject

CATALOGUE = catalogue.load()


def stack(number: int = 1) -> StackInfo:
    return StackInfo(
        topology="e-pd",
        sizes={"encode": 1, "prefill_decode": 1},
        model="/models/tiny",
        environment_class="cpu-v1",
        store=Path(f"/runs/{number}/stacks/e-pd/store"),
        ports={"encode-0": 40000 + number, "prefill_decode-0": 50000 + number},
    )


class Vendor(Subject):
    """Answers with whatever stands in `extra` and `options`, which may change between two questions."""

    implementation = Implementation("Vendor", "connector", "1")

    def __init__(self, **extra: Any) -> None:
        self.extra = extra
        self.options: Any = LaunchOptions()
        self.config: Any = None
        self.asked: list[str] = []

    def connector_config(self, role: str, stack: StackInfo) -> Any:
        self.asked.append(role)
        if self.config is not None:
            return self.config
        extra = {"path": f"{stack.store}/objects", "peer": f"tcp://h:{stack.ports['encode-0']}", **self.extra}
        return {"ec_connector": "X", "ec_port": stack.ports["encode-0"], "ec_connector_extra_config": extra}

    def launch(self, role: str, stack: StackInfo) -> Any:
        return self.options


def answer(subject: Subject, number: int = 1, role: str = "ec_producer") -> Configured:
    return ask(subject, role, stack(number), "e-pd")


# -- what is machine-specific ------------------------------------------------------------------------------------------


def test_paths_and_ports_are_put_back_to_placeholders() -> None:
    subject = Vendor(beside="/runs/1/stacks/e-pd/tmp", model="/models/tiny/config.json", other=400011, text="v40001")
    subject.options = LaunchOptions(["--peer=127.0.0.1:50001"], {"STORE": "/runs/1/stacks/e-pd/store"})
    assert answer(subject).normal == {
        "config": {
            "ec_connector": "X",
            "ec_role": "ec_producer",
            "ec_port": "{port:encode-0}",
            "ec_connector_extra_config": {
                "path": "{store}/objects",
                "peer": "tcp://h:{port:encode-0}",
                "beside": "{stack}/tmp",
                "model": "{model}/config.json",
                "other": 400011,
                "text": "v40001",
            },
        },
        "arguments": ["--peer=127.0.0.1:{port:prefill_decode-0}"],
        "environment": {"STORE": "{store}"},
    }


def test_the_servers_get_the_values_themselves() -> None:
    assert answer(Vendor()).config["ec_connector_extra_config"]["path"] == "/runs/1/stacks/e-pd/store/objects"


def test_two_stacks_of_the_same_axes_are_alike() -> None:
    assert difference(answer(Vendor(), 1), answer(Vendor(), 2)) is None


def test_a_value_that_happens_to_be_a_port_once_is_no_difference() -> None:
    """40001 is the first stack's port and a timeout of both."""
    first, second = answer(Vendor(timeout_ms=40001), 1), answer(Vendor(timeout_ms=40001), 2)
    assert first.normal != second.normal
    assert difference(first, second) is None


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [
        ({"depth": 1}, {"depth": 2}, "config.ec_connector_extra_config.depth"),
        ({"depth": 1}, {"depth": True}, "config.ec_connector_extra_config.depth"),
        ({"depth": 1}, {}, "config.ec_connector_extra_config.depth"),
        ({}, {"depth": 1}, "config.ec_connector_extra_config.depth"),
        ({"peers": ["a", "b"]}, {"peers": ["a", "c"]}, "config.ec_connector_extra_config.peers[1]"),
        ({"peers": ["a"]}, {"peers": ["a", "b"]}, "config.ec_connector_extra_config.peers"),
        (
            {"path": "/runs/1/stacks/e-pd/store"},
            {"path": "/runs/1/stacks/e-pd/store"},
            "config.ec_connector_extra_config.path",
        ),
        ({"path": "/elsewhere/1"}, {"path": "/elsewhere/2"}, "config.ec_connector_extra_config.path"),
    ],
)
def test_a_difference_is_named_by_its_place(one: dict[str, Any], other: dict[str, Any], place: str) -> None:
    assert difference(answer(Vendor(**one), 1), answer(Vendor(**other), 2)) == place


def test_arguments_and_environment_are_compared_too() -> None:
    one, other = Vendor(), Vendor()
    other.options = LaunchOptions(["--a"])
    assert difference(answer(one), answer(other)) == "arguments"
    other.options = LaunchOptions((), {"A": "1"})
    assert difference(answer(one), answer(other)) == "environment.A"


# -- asked again ---------------------------------------------------------------------------------------------------------


def test_certify_refuses_a_second_answer_and_says_where_without_its_value() -> None:
    configurations, subject = Configurations(strict=True), Vendor(api_key="first-secret")
    configurations.ask(subject, "ec_producer", stack(1), "e-pd")
    configurations.ask(subject, "ec_producer", stack(2), "e-pd")
    subject.extra["api_key"] = "second-secret"
    with pytest.raises(UsageError, match=r"Vendor.*ec_producer in e-pd.*ec_connector_extra_config\.api_key") as caught:
        configurations.ask(subject, "ec_producer", stack(3), "e-pd")
    assert "secret" not in str(caught.value)


def test_develop_says_it_and_goes_on() -> None:
    told: list[str] = []
    configurations, subject = Configurations(warn=told.append), Vendor(depth=1)
    configurations.ask(subject, "ec_producer", stack(1), "e-pd")
    assert told == []
    subject.extra["depth"] = 2
    assert (
        configurations.ask(subject, "ec_producer", stack(2), "e-pd").config["ec_connector_extra_config"]["depth"] == 2
    )
    assert len(told) == 1
    # What stands in the report is what the first stack got.
    assert [one.normal["config"]["ec_connector_extra_config"]["depth"] for one in configurations] == [1]


def test_other_axes_may_have_other_answers() -> None:
    configurations, subject = Configurations(strict=True), Vendor(depth=1)
    for number, (role, topology) in enumerate(
        [("ec_producer", "e-pd"), ("ec_consumer", "e-pd"), ("ec_producer", "2e-1pd")]
    ):
        subject.extra["depth"] = number
        configurations.ask(subject, role, stack(), topology)
    assert [(one.topology, one.role) for one in configurations] == [
        ("e-pd", "ec_producer"), ("e-pd", "ec_consumer"), ("2e-1pd", "ec_producer"),
    ]  # fmt: skip
    assert subject.asked == ["ec_producer", "ec_consumer", "ec_producer"]


def test_what_the_harness_sets_is_not_overridden_in_certify() -> None:
    subject, told = Vendor(), list[str]()
    subject.options = LaunchOptions(["--dtype", "bfloat16"])
    with pytest.raises(UsageError, match="--dtype overrides --dtype"):
        Configurations(strict=True).ask(subject, "ec_consumer", stack(), "e-pd")
    Configurations(warn=told.append).ask(subject, "ec_consumer", stack(), "e-pd")
    assert len(told) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "overrides"),
    [
        (["--port", "1"], {}, 1),
        (["--port=1", "--max_model_len", "9"], {}, 2),
        (["--ec-transfer-config.ec_role", "x"], {}, 1),
        (["--max-num-batched", "9"], {}, 1),
        (["--por", "1", "--dty", "x", "--see=1", "--hos", "x", "--ec-t", "{}"], {}, 5),
        ([], {"EPD_JOURNAL": "/tmp", "PYTHONPATH": "x"}, 2),
        (["--enable-mm-embeds", "--disable-log-stats", "--", "model", "--models"], {"MY_PORT": "1"}, 0),
    ],
)
def test_reserved_options_in_every_spelling(
    arguments: list[str], environment: Mapping[str, str], overrides: int
) -> None:
    assert len(reserved(LaunchOptions(arguments, environment))) == overrides


# -- what cannot be given to a server ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "names no `ec_connector`"),
        ({"ec_connector": 5}, "names no `ec_connector`"),
        ([], "returned a list"),
        ({"ec_connector": "X", "ec_connector_extra_config": {"path": Path("/a")}}, "no JSON"),
        ({"ec_connector": "X", "ec_buffer_size": float("nan")}, "no JSON"),
    ],
)
def test_a_configuration_that_is_none(config: Any, words: str) -> None:
    subject = Vendor()
    subject.config = config
    with pytest.raises(UsageError, match=words):
        answer(subject)


@pytest.mark.parametrize(
    "options",
    [
        None,
        ["--a"],
        LaunchOptions("--a"),
        LaunchOptions([1]),  # type: ignore[list-item]
        LaunchOptions((), {"A": 1}),  # type: ignore[dict-item]
        LaunchOptions((), {"A=B": "1"}),
        LaunchOptions((), ["A"]),  # type: ignore[arg-type]
    ],
)
def test_launch_options_that_are_none(options: Any) -> None:
    subject = Vendor()
    subject.options = options
    with pytest.raises(UsageError, match=r"launch\('ec_producer', …\) returned"):
        answer(subject)


def test_a_subject_that_raises_is_named() -> None:
    class Raising(Vendor):
        def launch(self, role: str, stack: StackInfo) -> Any:
            raise KeyError("nobody")

    with pytest.raises(UsageError, match=r"launch\('ec_producer', …\) raised KeyError"):
        answer(Raising())


def test_a_subject_cannot_change_its_answer_afterwards() -> None:
    subject = Vendor()
    subject.config = {"ec_connector": "X", "ec_connector_extra_config": {"a": [1]}}
    given = answer(subject)
    subject.config["ec_connector_extra_config"]["a"].append(2)
    assert given.config["ec_connector_extra_config"] == {"a": [1]}


@pytest.mark.needs_vllm
@pytest.mark.needs_vllm
def test_the_keys_are_those_of_vllm() -> None:
    pytest.importorskip("vllm")
    # vLLM's CPU build may stand beside a torchvision that does not import.
    repairs.install()
    from vllm.config import ECTransferConfig

    assert set(CONFIG_KEYS) == {item.name for item in dataclasses.fields(ECTransferConfig) if item.init}


# -- in the report -------------------------------------------------------------------------------------------------------


def record(role: str = "ec_producer", topology: str = "e-pd", **extra: Any) -> ConfigurationRecord:
    return ConfigurationRecord(
        topology=topology, role=role, config={"ec_connector": "X", "ec_connector_extra_config": extra}
    )


def report(folder: Path, *records: ConfigurationRecord | WarningRecord, mode: str = "certify") -> Report:
    with ResultsLog(folder / RESULTS_NAME) as log:
        log.append(
            RunStart(
                suite=SuiteInfo(version="0", catalogue=CATALOGUE.digest()),
                run=RunInfo(
                    id="r",
                    mode=mode,
                    profile="e-pd",
                    level="full",
                    seed=0,
                    command=(),
                    started=datetime(2026, 1, 1, tzinfo=UTC),
                ),
                subject=SubjectInfo(name="vendor"),
                environment_class="cpu-v1",
            )
        )
        log.append(EnvironmentInfo())
        axes = {
            "id": "EPD-TOK-002[e-pd/m/c]",
            "requirement": "EPD-TOK-002",
            "topology": "e-pd",
            "model": "m",
            "case": "c",
        }
        log.append(ExpectedSet(cells=(ExpectedRecord(**axes),)))
        log.append(CellRecord(**axes, verdict="pass"))
        for one in records:
            log.append(one)
        log.append(RunEnd(finished=datetime(2026, 1, 2, tzinfo=UTC)))
    return write_report(folder, build_report(read_results(folder / RESULTS_NAME), CATALOGUE))


def test_configurations_and_their_digest_stand_in_the_report(tmp_path: Path) -> None:
    made = report(tmp_path, record("ec_producer", depth=1), record("ec_consumer", depth=1))
    assert [one.role for one in made.subject.configurations] == ["ec_consumer", "ec_producer"]
    # As a reader of the file computes it.
    raw = json.loads((tmp_path / "report.json").read_text())["subject"]
    again = [ConfigurationRecord.model_validate(one) for one in raw["configurations"]]
    assert raw["configDigest"] == config_digest(again) != ""
    assert read_report(tmp_path).subject == made.subject


def test_the_digest_follows_every_configuration_and_no_order() -> None:
    one, two = record("ec_producer", depth=1), record("ec_consumer", depth=1)
    assert config_digest([one, two]) == config_digest([two, one])
    assert config_digest([]) == ""
    others = [[one], [one, record("ec_consumer", depth=2)], [one, two.model_copy(update={"arguments": ("--a",)})]]
    others += [
        [one, two.model_copy(update={"environment": {"A": "1"}})],
        [one, two.model_copy(update={"topology": "e-p-d"})],
    ]
    assert len({config_digest(each) for each in [[one, two], *others]}) == 1 + len(others)


def test_a_secret_is_neither_shown_nor_in_the_digest(tmp_path: Path) -> None:
    made = report(tmp_path, record(password="hunter2", depth=1))
    assert "hunter2" not in (tmp_path / "report.json").read_text() + (tmp_path / RESULTS_NAME).read_text()
    assert made.subject.config_digest == config_digest([record(password="another", depth=1)])
    assert made.subject.config_digest != config_digest([record(password="hunter2", depth=2)])


def test_workers_that_asked_the_same_are_one(tmp_path: Path) -> None:
    made = report(tmp_path, record(depth=1), record(depth=1))
    assert len(made.subject.configurations) == 1
    assert made.warnings == ()
    assert made.outcome == "conformant"


def test_workers_that_got_two_answers_make_a_certificate_incomplete(tmp_path: Path) -> None:
    made = report(tmp_path, record(depth=1), record(depth=2))
    assert made.outcome == "incomplete"
    assert "2 configurations for ec_producer in e-pd" in made.warnings[0]


def test_a_warning_reaches_the_report_once(tmp_path: Path) -> None:
    made = report(tmp_path, WarningRecord(text="told"), WarningRecord(text="told"))
    assert made.warnings == ("told",)
    assert made.outcome == "conformant"
