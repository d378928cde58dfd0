"""Subjects in TOML files: the same answers as the Python form, and every mistake is named."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from epd_conformance.errors import UsageError
from epd_conformance.faults.store import Deleted
from epd_conformance.features import Feature
from epd_conformance.subject import BUILT_IN, Implementation, LaunchOptions, StackInfo, load
from epd_conformance.subject_toml import ConnectorTable, SubjectFile, read

EXAMPLES = Path(__file__).parents[2] / "examples" / "subjects"
SMALL = """
[implementation]
organization = "Vendor"
project = "connector"
version = "1.2.3"
[connector]
ec_connector = "X"
"""


def stack(topology: str = "e-pd", **more: Any) -> StackInfo:
    servers = {
        "e-pd": ("encode", "prefill_decode"),
        "e-p-d": ("encode", "prefill", "decode"),
        "aggregated": ("aggregated",),
    }
    names = servers[topology]
    return StackInfo(
        topology=topology,
        sizes=dict.fromkeys(names, 1),
        model="/a/model",
        environment_class="cpu-v1",
        store=Path("/a/store"),
        ports={f"{name}-0": 5000 + index for index, name in enumerate(names)},
        **more,
    )


def a_probe(info: StackInfo) -> Any:
    return BUILT_IN["reference"]().probe(info)


def no_probe(info: StackInfo) -> Any:
    return object()


def a_fault(info: StackInfo) -> Any:
    return Deleted()


def written(folder: Path, text: str) -> Path:
    path = folder / "subject.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_example_is_the_built_in_subject() -> None:
    found, built_in = load(str(EXAMPLES / "vllm-example.toml")), BUILT_IN["vllm-example"]()
    assert found.implementation == built_in.implementation
    assert found.features == built_in.features
    for topology in ("e-pd", "e-p-d", "aggregated"):
        info = stack(topology)
        for role in ("ec_producer", "ec_consumer", "ec_both"):
            assert found.connector_config(role, info) == built_in.connector_config(role, info)
            assert found.launch(role, info) == built_in.launch(role, info)
        assert type(found.probe(info)) is type(built_in.probe(info))
        assert found.faults(info) == built_in.faults(info)


def test_the_example_has_every_key() -> None:
    data = tomllib.loads((EXAMPLES / "every-key.toml").read_text(encoding="utf-8"))
    assert set(data) == set(SubjectFile.model_fields)
    assert set(data["connector"]) == set(ConnectorTable.model_fields)


def test_placeholders_and_roles_are_filled_in() -> None:
    found = load(str(EXAMPLES / "every-key.toml"))
    assert found.implementation == Implementation(
        "Example", "my-connector", "1.2.0", "https://example.org/my-connector", "connector@example.org"
    )
    assert found.features == {Feature.KV_DISAGGREGATION, Feature.STORE_PROBE}
    producer = found.connector_config("ec_producer", stack())
    assert producer["ec_port"] == 5001
    assert producer["engine_id"] == "e-pd-ec_producer"
    assert producer["ec_connector_extra_config"] == {
        "path": "/a/store/objects", "model": "/a/model", "consumer": "tcp://127.0.0.1:5001", "class": "cpu-v1",
        "writes": True,
    }  # fmt: skip
    consumer = found.connector_config("ec_consumer", stack("e-p-d"))
    assert consumer["ec_port"] == 5001  # the prefill server's
    assert "writes" not in consumer["ec_connector_extra_config"]
    assert found.launch("ec_producer", stack()) == LaunchOptions(("--enable-mm-embeds",), {"MY_CONNECTOR_LOG": "info"})
    assert found.launch("ec_consumer", stack()) == LaunchOptions(
        ("--enable-mm-embeds", "--disable-log-stats"),
        {"MY_CONNECTOR_LOG": "info", "MY_CONNECTOR_ROLE": "ec_consumer"},
    )


def test_text_that_only_looks_like_a_placeholder_stays(tmp_path: Path) -> None:
    text = SMALL + '[launch]\narguments = [\'{"a": {"store": 1}}\', "{}", "n={size:encode}"]\n'
    assert list(read(written(tmp_path, text)).launch("ec_producer", stack()).arguments) == [
        '{"a": {"store": 1}}', "{}", "n=1",
    ]  # fmt: skip


def test_an_aggregated_server_is_producer_and_consumer(tmp_path: Path) -> None:
    text = SMALL + 'ec_port = "{port:ec_producer-0}"\nec_ip = "{port:ec_both-0}"\n'
    config = read(written(tmp_path, text)).connector_config("ec_both", stack("aggregated"))
    assert config == {"ec_connector": "X", "ec_port": 5000, "ec_ip": 5000}


def test_probe_and_faults_are_made_for_the_stack(tmp_path: Path) -> None:
    top = f'probe = "{__name__}:a_probe"\nfaults = ["{__name__}:a_fault"]\n'
    found = read(written(tmp_path, top + SMALL))
    assert type(found.probe(stack())).__name__ == "VerifiedStoreProbe"
    assert list(found.faults(stack())) == ["deleted"]
    assert read(written(tmp_path, SMALL)).probe(stack()) is None
    wrong = read(written(tmp_path, f'probe = "{__name__}:no_probe"\n' + SMALL))
    with pytest.raises(UsageError, match=r"`probe`.*no_probe gives no epd_conformance\.StoreProbe"):
        wrong.probe(stack())
    missing = read(written(tmp_path, f'probe = "{__name__}:nobody"\n' + SMALL))
    with pytest.raises(UsageError, match=r"subject\.toml: `probe`.*has no 'nobody'"):
        missing.probe(stack())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (SMALL.replace("organization", "organisation"), "unknown key `implementation.organisation`: did you mean `organization`"),
        ("feature = []\n" + SMALL, "unknown key `feature`: did you mean `features`"),
        (SMALL + "shared_path = 1\n", "unknown key `connector.shared_path`: known are ec_connector"),
        (SMALL + 'ec_role = "ec_both"\n', "`connector.ec_role` is filled in"),
        (SMALL + "[role.producer]\n", "unknown key `role.producer`: did you mean `ec_producer`"),
        (SMALL + "[role.ec_both.connecter]\n", "unknown key `role.ec_both.connecter`: did you mean `connector`"),
        (SMALL + "[launch]\nargs = []\n", "unknown key `launch.args`: did you mean `arguments`"),
        (SMALL + '[launch]\narguments = "--a"\n', "`launch.arguments` is '--a' and should be a valid list"),
        (SMALL + "[launch]\narguments = [1]\n", "`launch.arguments.0` is 1 and should be a valid string"),
        (SMALL + "[launch.environment]\nA = 1\n", "`launch.environment.A` is 1 and should be a valid string"),
        (SMALL + "ec_port = 1.5\n", "`connector.ec_port` is 1.5 and should be a valid integer"),
        (SMALL.replace('"1.2.3"', "1.2"), "`implementation.version` is 1.2 and should be a valid string"),
        (SMALL.replace('version = "1.2.3"\n', ""), "`implementation.version` is missing"),
        (SMALL.replace('ec_connector = "X"\n', ""), "names no `ec_connector`"),
        ('features = ["store_prob"]\n' + SMALL, "names 'store_prob', which is none: did you mean `store_probe`"),
        (SMALL + 'engine_id = "{stor}"\n', "`connector.engine_id` holds {stor}, which is no placeholder: did you mean `store`"),
        (SMALL + 'engine_id = "{port}"\n', "holds {port}, which is no placeholder: did you mean `port:…`"),
        (SMALL + "[connector.ec_connector_extra_config]\nsince = 2020-01-01\n", "extra_config.since` is a date"),
        ("[connector\n", "is not TOML"),
    ],
)  # fmt: skip
def test_every_mistake_is_named_in_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load(str(path))
    message = str(caught.value)
    assert str(path) in message
    assert words in message
    assert "\n" not in message


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nobody\.toml cannot be read \(No such file"):
        load(str(tmp_path / "nobody.toml"))


def test_a_port_that_a_topology_lacks_is_named_with_those_it_has(tmp_path: Path) -> None:
    found = read(written(tmp_path, SMALL + 'ec_port = "{port:prefill-0}"\n'))
    assert found.connector_config("ec_consumer", stack("e-p-d"))["ec_port"] == 5001
    with pytest.raises(
        UsageError, match=r"\{port:prefill-0\} is not there in e-pd, which has encode-0, prefill_decode-0"
    ):
        found.connector_config("ec_consumer", stack())
