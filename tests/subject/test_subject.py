"""Subjects: found by name, by entry point or by module; what does not follow the interface is refused in one sentence."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import subject as subjects
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature
from epd_conformance.subject import BUILT_IN, Implementation, LaunchOptions, StackInfo, Subject, load

INFO = StackInfo(
    topology="e-pd",
    sizes={"encode": 1, "prefill_decode": 1},
    model="/a/model",
    environment_class="cpu-v1",
    store=Path("/a/store with space"),
    ports={"encode-0": 1},
)


class Vendor(Subject):
    implementation = Implementation("Vendor", "connector", "1.2.3")
    features = frozenset({Feature.KV_DISAGGREGATION})

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {"ec_connector": "X", "ec_connector_module_path": "vendor.x", "ec_role": role}


an_object = Vendor()
not_a_subject = object()


class NoImplementation(Vendor):
    implementation = None  # type: ignore[assignment]


class NoText(Vendor):
    implementation = Implementation("Vendor", "connector", 1.2)  # type: ignore[arg-type]


class NoSet(Vendor):
    features = 3  # type: ignore[assignment]


class Exits(Vendor):
    def __init__(self) -> None:
        raise SystemExit(0)


class UnknownFeature(Vendor):
    features = frozenset({Feature.LORA, "telepathy"})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_subjects_follow_the_interface(name: str) -> None:
    found = load(name)
    assert found.implementation.version
    assert found.features <= set(Feature)
    for role in ("ec_producer", "ec_consumer", "ec_both"):
        config = found.connector_config(role, INFO)
        assert config["ec_connector"]
        assert str(INFO.store) in str(config["ec_connector_extra_config"])
        # Asked twice, the same is answered: the digest of it stands in the report.
        assert config == found.connector_config(role, INFO)
        assert found.launch(role, INFO) == LaunchOptions()


def test_the_reference_connector_is_where_its_subject_says() -> None:
    config = load("reference").connector_config("ec_producer", INFO)
    path = Path(subjects.__file__).parent / "connectors" / "verified_store.py"
    assert config["ec_connector_module_path"] == "epd_conformance.connectors.verified_store"
    assert f"class {config['ec_connector']}(" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("attribute", ["Vendor", "an_object"])
def test_a_subject_by_module_and_name(attribute: str) -> None:
    found = load(f"{__name__}:{attribute}")
    assert isinstance(found, Vendor)
    assert found.connector_config("ec_both", INFO)["ec_role"] == "ec_both"


def test_a_subject_beside_the_caller_needs_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_the_caller.py").write_text(
        "from epd_conformance.subject import *\n"
        "class Mine(ReferenceSubject):\n    pass\n",
        encoding="utf-8",
    )  # fmt: skip
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert type(load("beside_the_caller:Mine")).__name__ == "Mine"


def test_a_subject_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("vendor", f"{__name__}:Vendor", subjects.ENTRY_POINTS)]
    monkeypatch.setattr(subjects, "entry_points", lambda group: points if group == subjects.ENTRY_POINTS else [])
    assert isinstance(load("vendor"), Vendor)
    with pytest.raises(UsageError, match=r"'nobody'.*reference.*vendor.*vllm-example"):
        load("nobody")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_thing", "known are reference"),
        ("no_such_module_xyz:Class", "'no_such_module_xyz' does not import"),
        (f"{__name__}:NoSuchClass", "has no 'NoSuchClass'"),
        (f"{__name__}:not_a_subject", "is no epd_conformance.Subject"),
        (f"{__name__}:Path", "is no epd_conformance.Subject"),
        (f"{__name__}:NoImplementation", "has no `implementation`"),
        (f"{__name__}:UnknownFeature", "'telepathy', which is no Feature"),
        (f"{__name__}:NoText", "has 1.2 for `implementation.version`"),
        (f"{__name__}:NoSet", "has 3 for `features`"),
        (f"{__name__}:Exits", "cannot be made (SystemExit: 0)"),
    ],
)
def test_what_is_none_is_refused_in_one_sentence(name: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        load(name)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("body", ["raise SystemExit(0)", "1 / 0", "raise ValueError('two\\nlines')"])
def test_a_module_that_does_not_import_is_one_sentence(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exit would end `check-subject` with exit code 0, as if nothing were wrong."""
    (tmp_path / "broken_vendor.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("broken", "broken_vendor:X", subjects.ENTRY_POINTS)]
    monkeypatch.setattr(subjects, "entry_points", lambda group: points)
    for name in ("broken_vendor:X", "broken"):
        with pytest.raises(UsageError, match=r"does not (import|load)") as caught:
            load(name)
        assert "\n" not in str(caught.value)


def test_a_subject_never_learns_what_is_tested() -> None:
    """Neither requirement nor cell nor fault: a connector that knew could behave for the occasion."""
    assert set(StackInfo.__dataclass_fields__) == {
        "topology", "sizes", "model", "environment_class", "store", "ports",
    }  # fmt: skip


def test_only_the_configuration_is_required() -> None:
    assert Subject.__abstractmethods__ == {"connector_config"}
    assert Subject.features == frozenset()
