"""What a run writes down of its subject, what it refuses, and what it warns of."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_conformance import run as runs
from epd_conformance.configuration import Configurations
from epd_conformance.connectors.journal import Journal
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.observations import DEFERS
from epd_conformance.report.writer import ResultsLog, read_results
from epd_conformance.run import Options, Run
from epd_conformance.subject import ReferenceSubject, StackInfo, Subject
from epd_conformance.topology.spec import Role, Shape, Topology
from epd_conformance.topology.stack import Site, StackSpec


class Plain(ReferenceSubject):
    """Promises nothing that the made journals below do not show."""

    features = ReferenceSubject.features - {Feature.STATS, Feature.ASYNC_TRANSFER}


class Promising(Plain):
    features = Plain.features | {Feature.STATS}


class NoProbe(Plain):
    def probe(self, stack: StackInfo) -> Any:
        return None


class Hiding(Plain):
    features = Plain.features - {Feature.STORE_PROBE}


def info(folder: Path, topology: Topology) -> StackInfo:
    return StackInfo(
        topology=topology.kind,
        sizes={str(role): count for role, count in topology.counts},
        model="/a/model",
        environment_class="cpu-v1",
        store=folder / "store",
        ports={name: 4000 + number for number, (name, _) in enumerate(topology.servers())},
    )


class Booted:
    """A run of which one stack was booted, as far as its subject is concerned."""

    def __init__(self, folder: Path, subject: Subject, topology: str = "e-pd") -> None:
        self.run = Run(Options(subject="reference"))
        self.run.subject = subject
        self.run.out = folder
        self.run.log = ResultsLog(folder / "results.ndjson")
        parsed = Topology.parse(topology)
        self.journal = folder / "stacks" / parsed.name / "journal"
        self.journal.mkdir(parents=True)
        self.write(ev="init", hooks=[DEFERS], extra=["root", "typo"], read=["root"])
        spec = StackSpec(parsed.name, parsed, Shape(), subject=subject)
        stack = SimpleNamespace(spec=spec, info=info(folder, parsed), journal=Journal(self.journal))
        site = SimpleNamespace(configurations=self.run._configurations)
        self.configured = Site._configure(site, spec, stack.info)  # type: ignore[arg-type]
        self.site: Any = SimpleNamespace(stacks=[stack])

    def write(self, **fields: Any) -> None:
        line = {"seq": 0, "t": 1.0, "server": "encode-0", "side": "worker", "ec_role": "ec_producer", **fields}
        with (self.journal / "encode-0.worker.1.ndjson").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def lines(self, kind: str) -> list[dict[str, Any]]:
        return [line.data for line in read_results(self.run.log.path) if line.kind == kind]


def test_every_role_is_asked_once_and_written_down_once(tmp_path: Path) -> None:
    booted = Booted(tmp_path, Plain(), "2e-1pd")
    assert list(booted.configured) == [Role.ENCODE, Role.PREFILL_DECODE]
    booted.run._learn_subject(booted.site)
    booted.run._learn_subject(booted.site)
    assert [(line["topology"], line["role"]) for line in booted.lines("configuration")] == [
        ("2e-1pd", "ec_producer"), ("2e-1pd", "ec_consumer"),
    ]  # fmt: skip
    assert booted.lines("configuration")[0]["config"]["ec_connector_extra_config"] == {"root": "{store}"}
    assert booted.lines("warning") == []


@pytest.mark.parametrize(
    ("subject", "words"), [(Promising, "feature stats is declared"), (NoProbe, "store_probe is declared")]
)
def test_a_contradicted_feature_ends_the_run(tmp_path: Path, subject: type[Subject], words: str) -> None:
    booted = Booted(tmp_path, subject())
    with pytest.raises(UsageError, match=words):
        booted.run._learn_subject(booted.site)


def test_an_undeclared_feature_that_is_there_warns(tmp_path: Path) -> None:
    booted = Booted(tmp_path, Hiding())
    booted.run._learn_subject(booted.site)
    (warning,) = booted.lines("warning")
    assert warning["text"].startswith("store_probe: probe() gives a StoreProbe")


def test_the_end_of_a_run_says_what_the_journals_show(tmp_path: Path) -> None:
    booted = Booted(tmp_path, Plain())
    booted.write(ev="defer", req="r")
    booted.run.end()
    told = [line["text"] for line in booted.lines("warning")]
    assert len(told) == 2
    assert "'typo' as ec_producer" in told[0]
    assert told[1].startswith("async_transfer: the connector deferred")
    assert [line.kind for line in read_results(booted.run.log.path)][-1] == "end"


def test_a_site_of_its_own_remembers_too(tmp_path: Path) -> None:
    """`serve` has no report, and says it."""
    told: list[str] = []
    site: Any = SimpleNamespace(configurations=Configurations(warn=told.append))
    topology = Topology.parse("aggregated")

    class Counting(ReferenceSubject):
        asked = 0

        def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
            self.asked += 1
            return {**super().connector_config(role, stack), "engine_id": str(self.asked)}

    spec = StackSpec("aggregated", topology, Shape(), subject=Counting())
    for _ in range(2):
        Site._configure(site, spec, info(tmp_path, topology))
    assert len(told) == 1
    assert "config.engine_id" in told[0]


def test_a_baseline_is_asked_nothing(tmp_path: Path) -> None:
    topology = Topology.parse("aggregated")
    site: Any = SimpleNamespace(configurations=Configurations())
    assert Site._configure(site, StackSpec("b", topology, Shape()), info(tmp_path, topology)) == {}


def test_certify_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "_refuse_in_certify", lambda run: None)
    for mode, strict in ((runs.Mode.CERTIFY, True), (runs.Mode.DEVELOP, False)):
        assert Run(Options(subject="reference", mode=mode))._configurations._strict is strict
