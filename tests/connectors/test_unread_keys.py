"""Configuration that a connector ignores is reported, and looking for it changes nothing that the connector sees."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from epd_conformance.connectors import recording
from epd_conformance.connectors.journal import DIRECTORY, SERVER, Journal
from epd_conformance.connectors.names import ec_name
from epd_conformance.connectors.observed import ObservedDict
from epd_conformance.observations import ignored_keys, warnings

PLAIN = {"path": "/a/store", "depth": 2, "nested": {"inner": [1]}}


def observed() -> ObservedDict:
    return ObservedDict(dict(PLAIN))


def matched(extra: Any) -> Any:
    match extra:
        case {"depth": depth}:
            return depth


class TestDict:
    @pytest.mark.parametrize(
        "read",
        [
            lambda extra: extra["depth"],
            lambda extra: extra.get("depth"),
            lambda extra: "depth" in extra,
            lambda extra: extra.pop("depth"),
            lambda extra: extra.pop("depth", None),
            lambda extra: extra.setdefault("depth", 1),
            lambda extra: matched(extra),
        ],
    )
    def test_one_key_is_read(self, read: Callable[[Any], Any]) -> None:
        extra = observed()
        assert read(extra) == read(dict(PLAIN))
        assert extra.read == ["depth"]
        assert extra.unread == ["path", "nested"]

    @pytest.mark.parametrize(
        "take",
        [
            dict,
            list,
            lambda extra: {**extra},
            lambda extra: extra | {"more": 1},
            lambda extra: {"more": 1} | extra,
            lambda extra: {} | extra,
            lambda extra: (lambda **options: options)(**extra),
            lambda extra: list(reversed(extra)),
            lambda extra: list(extra.items()),
            lambda extra: list(extra.values()),
            lambda extra: list(extra.keys()),
            lambda extra: extra.copy(),
            copy.copy,
            copy.deepcopy,
            json.dumps,
            lambda extra: pickle.loads(pickle.dumps(extra)),
            lambda extra: extra.popitem(),
            lambda extra: SimpleNamespace(**extra),
        ],
    )
    def test_who_takes_the_whole_reads_all_of_it(self, take: Callable[[Any], Any]) -> None:
        extra = observed()
        assert take(extra) == take(dict(PLAIN))
        assert extra.unread == []

    @pytest.mark.parametrize(
        "look", [repr, str, len, bool, lambda extra: extra == PLAIN, lambda extra: isinstance(extra, dict)]
    )
    def test_looking_at_it_reads_nothing(self, look: Callable[[Any], Any]) -> None:
        """vLLM itself logs its whole configuration."""
        extra = observed()
        assert look(extra) == look(dict(PLAIN))
        assert extra.unread == list(PLAIN)

    @pytest.mark.parametrize("again", [lambda extra: pickle.loads(pickle.dumps(extra)), copy.copy, copy.deepcopy, dict])
    def test_what_leaves_the_process_is_a_plain_dict(self, again: Callable[[Any], Any]) -> None:
        assert type(again(observed())) is dict
        assert again(observed()) == PLAIN

    def test_a_key_that_was_not_given_is_neither_read_nor_unread(self) -> None:
        extra = observed()
        extra["new"] = 1
        assert extra.get("other") is None
        assert (extra.read, extra.unread) == ([], list(PLAIN))


def line(server: str, side: str, ev: str = "init", role: str = "ec_consumer", **fields: Any) -> dict[str, Any]:
    return {"server": server, "side": side, "ev": ev, **({"ec_role": role} if ev == "init" else {}), **fields}


class TestJournal:
    def test_a_key_that_one_side_reads_is_not_ignored(self) -> None:
        """The scheduler's object has no use for what only the worker's needs."""
        events = [
            line("p-0", "scheduler", extra=["a", "b", "c"], read=["a"]),
            line("p-0", "worker", extra=["a", "b", "c"], read=["b"]),
        ]
        assert ignored_keys(events) == {"ec_consumer": ["c"]}
        assert ignored_keys([*events, line("p-1", "worker", extra=["a", "b", "c"], read=["c"])]) == {}

    def test_what_is_read_at_the_first_use_counts(self) -> None:
        events = [line("p-0", "worker", extra=["a"], read=[])]
        assert ignored_keys(events) == {"ec_consumer": ["a"]}
        assert ignored_keys([*events, line("p-0", "worker", "config", read=["a"])]) == {}
        assert ignored_keys([*events, line("p-1", "worker", "config", read=["a"])]) == {"ec_consumer": ["a"]}

    def test_roles_are_told_apart(self) -> None:
        events = [
            line("e-0", "worker", role="ec_producer", extra=["a"], read=["a"]),
            line("p-0", "worker", extra=["a"], read=[]),
        ]
        assert ignored_keys(events) == {"ec_consumer": ["a"]}

    def test_a_kv_connector_is_another_matter(self) -> None:
        assert ignored_keys([line("p-0", "kv-worker", extra=["a"], read=[])]) == {}

    def test_the_warning_names_key_and_role_once(self) -> None:
        events = [line("p-0", "worker", extra=["shared_path"], read=[], hooks=[])]
        (words,) = warnings((), [events, events])
        assert "'shared_path'" in words
        assert "ec_consumer" in words
        assert warnings((), [[line("p-0", "worker", extra=["shared_path"], read=["shared_path"], hooks=[])]]) == []


def _vllm_is_missing() -> bool:
    try:
        from epd_conformance.runtime import repairs

        repairs.install()
        import vllm.distributed.ec_transfer.ec_connector.base  # noqa: F401
    except Exception:
        return True
    return False


class Reader:
    """A connector that reads `path` when it is made and `late` at its first step, and never `ignored`."""

    is_producer = True

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self.extra = vllm_config.ec_transfer_config.ec_connector_extra_config
        assert isinstance(self.extra, dict)
        self.path = self.extra["path"]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self.extra.get("late")


@pytest.mark.needs_vllm
@pytest.mark.skipif(_vllm_is_missing(), reason="vLLM cannot be imported")
class TestRecorder:
    def made(self, folder: Path, monkeypatch: pytest.MonkeyPatch, extra: Any) -> tuple[Any, Journal]:
        monkeypatch.setenv(DIRECTORY, str(folder))
        monkeypatch.setenv(SERVER, "encode-0")
        transfer = SimpleNamespace(
            ec_connector="Recording:m:C", ec_role="ec_producer", engine_id="e", ec_connector_extra_config=extra
        )
        config = SimpleNamespace(ec_transfer_config=transfer, cache_config=SimpleNamespace())
        recorded = getattr(recording, ec_name("Reader", __name__))
        return recorded(config, SimpleNamespace(name="WORKER")), Journal(folder)

    def step(self, connector: Any) -> Any:
        output = SimpleNamespace(scheduled_new_reqs=[], scheduled_encoder_inputs={}, free_encoder_mm_hashes=[])
        return connector.build_connector_meta(output)

    def test_one_of_two_keys_is_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        connector, journal = self.made(tmp_path, monkeypatch, {"path": "/a", "ignored": 1, "late": 2})
        assert connector.path == "/a"
        assert ignored_keys(journal.read()) == {"ec_producer": ["ignored", "late"]}
        assert self.step(connector) == 2
        assert ignored_keys(journal.read()) == {"ec_producer": ["ignored"]}
        self.step(connector)
        assert [event["ev"] for event in journal.read()] == ["init", "config"]

    def test_values_never_reach_the_journal(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made(tmp_path, monkeypatch, {"path": "s3cr3t-path", "password": "hunter2"})
        text = "".join(path.read_text() for path in tmp_path.iterdir())
        assert "password" in text
        assert "hunter2" not in text
        assert "s3cr3t-path" not in text

    def test_a_configuration_of_another_form_is_left_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Own(dict[str, Any]):
            pass

        own = Own(path="/a")
        connector, journal = self.made(tmp_path, monkeypatch, own)
        assert connector.extra is own
        assert [event["ev"] for event in journal.read()] == ["init"]
        assert ignored_keys(journal.read()) == {}

    def test_vllms_own_configuration_takes_it(self) -> None:
        from vllm.config import ECTransferConfig

        config = ECTransferConfig(
            ec_connector="X", ec_role="ec_producer", ec_connector_extra_config={"path": "/a", "other": 1}
        )
        before = config.compute_hash()
        extra = config.ec_connector_extra_config = ObservedDict(config.ec_connector_extra_config)
        assert config.get_from_extra_config("path", None) == "/a"
        assert config.compute_hash() == before
        assert "path" in repr(config)
        assert extra.unread == ["other"]
        assert type(pickle.loads(pickle.dumps(config)).ec_connector_extra_config) is dict
