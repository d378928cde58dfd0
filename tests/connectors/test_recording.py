"""The recording connectors: they look, write and pass on; nothing that they do reaches the engine.

Needs vLLM: what is wrapped are subclasses of its base classes and its own connectors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_or_skip import import_vllm_or_skip

import_vllm_or_skip()

import torch  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole  # noqa: E402
from vllm.distributed.ec_transfer.ec_connector.example_connector import (  # noqa: E402
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)
from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector  # noqa: E402

from epd_conformance.connectors import recording  # noqa: E402
from epd_conformance.connectors.journal import DIRECTORY, SERVER, Journal  # noqa: E402
from epd_conformance.connectors.names import MODULE, ec_name, kv_name  # noqa: E402
from epd_conformance.connectors.recording import describe  # noqa: E402

pytestmark = pytest.mark.needs_vllm

EXAMPLE = "vllm.distributed.ec_transfer.ec_connector.example_connector"


# -- connectors that are wrapped ---------------------------------------------------------------------------------------


class Sentinel(Exception):
    """An exception that only a wrapped connector raises."""


class Plain(ECConnectorBase):
    """Notes how it is called, and returns or raises what it was told to."""

    metrics = "inherited"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.act: Callable[[], None] = lambda: None

    def _called(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((name, args, kwargs))
        self.act()
        if self.error is not None:
            raise self.error
        return self.result

    def start_load_caches(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("start_load_caches", *args, **kwargs)

    def save_caches(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("save_caches", *args, **kwargs)

    def has_cache_item(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("has_cache_item", *args, **kwargs)

    def update_state_after_alloc(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("update_state_after_alloc", *args, **kwargs)

    def build_connector_meta(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("build_connector_meta", *args, **kwargs)

    def ensure_cache_available(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("ensure_cache_available", *args, **kwargs)

    def take_unavailable_requests(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("take_unavailable_requests", *args, **kwargs)

    def request_finished(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("request_finished", *args, **kwargs)

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        return self._called("shutdown", *args, **kwargs)

    @classmethod
    def build_prom_metrics(cls, *args: Any, **kwargs: Any) -> Any:
        return (cls, args, kwargs)


class Strange(Plain):
    """Signatures of another release: fewer and other arguments, all with names of their own."""

    def has_cache_item(self, item: Any) -> Any:
        return self._called("has_cache_item", item)

    def save_caches(self, cache: Any, name: str, *, flag: bool) -> Any:
        return self._called("save_caches", cache, name, flag=flag)


class Unfinished(ECConnectorBase):
    """A vendor forgot a method that vLLM demands."""

    def start_load_caches(self, *args: Any, **kwargs: Any) -> None: ...

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, *args: Any) -> None: ...

    def build_connector_meta(self, *args: Any) -> Any: ...


class Old:
    """The base class of an older vLLM, without the optional hooks of this one, and not an ABC."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        self.is_producer = True

    def has_cache_item(self, identifier: str) -> bool:
        return True


class Refusing(Plain):
    """Raises when it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise Sentinel("bad configuration")


class KVPlain(KVConnectorBase_V1):
    """A KV connector that finds everything."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        self.error: BaseException | None = None
        self._connector_metadata: Any = None

    def _answer(self, value: Any) -> Any:
        if self.error:
            raise self.error
        return value

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return self._answer((64, False))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        return self._answer(None)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return self._answer(scheduler_output)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> Any:
        return self._answer(forward_context)

    def wait_for_layer_load(self, *args: Any) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


not_a_class = 5


# -- what the engine hands over ----------------------------------------------------------------------------------------


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv(DIRECTORY, str(tmp_path))
    monkeypatch.setenv(SERVER, "prefill-0")
    return Journal(tmp_path)


def config(role: str = "ec_producer") -> SimpleNamespace:
    transfer = SimpleNamespace(
        ec_connector="Recording:module:Plain",
        ec_role=role,
        engine_id="e",
        is_ec_producer=role == "ec_producer",
        is_ec_consumer=role == "ec_consumer",
        get_from_extra_config=lambda name, default: default,
    )
    return SimpleNamespace(
        ec_transfer_config=transfer,
        kv_transfer_config=SimpleNamespace(kv_role="kv_consumer", engine_id="e"),
        cache_config=SimpleNamespace(num_gpu_blocks=7, block_size=32),
    )


#: The processed fields of an item whose media are not there.
DATA = {"grid": SimpleNamespace(data=object()), "pixels": SimpleNamespace(data=None)}


def feature(key: str, offset: int = 3) -> SimpleNamespace:
    place = SimpleNamespace(offset=offset, length=12, get_num_embeds=lambda: 12)
    return SimpleNamespace(identifier=key, modality="image", mm_position=place, data=DATA)


def request(name: str = "r", *keys: str) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=name, req_id=name, mm_features=[feature(key) for key in keys], num_prompt_tokens=40,
        prompt_token_ids=list(range(40)), num_computed_tokens=0,
    )  # fmt: skip


def output(*new: Any, encode: dict[str, list[int]] | None = None, free: list[str] | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        scheduled_new_reqs=list(new), scheduled_encoder_inputs=encode or {}, free_encoder_mm_hashes=free or []
    )


def recorded(name: str) -> Any:
    return getattr(recording, ec_name(name, __name__))


def made(cls: type = Plain, role: str = "ec_producer", side: Any = ECConnectorRole.SCHEDULER) -> Any:
    return recorded(cls.__name__)(config(role), side)


def lines(journal: Journal, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in journal.read() if not kinds or event["ev"] in kinds]


# -- the class that is made ----------------------------------------------------------------------------------------------


class TestClass:
    def test_it_is_a_subclass_under_another_name_made_once(self, journal: Journal) -> None:
        cls = recorded("Plain")
        assert issubclass(cls, Plain)
        assert cls.__name__ != "Plain"
        assert cls is recorded("Plain")
        assert isinstance(made(), ECConnectorBase)

    def test_classmethods_and_attributes_are_inherited(self) -> None:
        cls = recorded("Plain")
        assert cls.build_prom_metrics(1, x=2) == (cls, (1,), {"x": 2})
        assert cls.metrics == "inherited"
        assert cls.build_ec_connector_stats(None) is None

    def test_vllm_finds_it_by_module_and_name(self) -> None:
        """The name is not in vLLM's registry, whose names win over the module path."""
        for module, name, wrapped in (
            (__name__, "Plain", Plain),
            (None, "ECExampleConnector", ECExampleConnector),
            (EXAMPLE, "ECExampleConnector", ECExampleConnector),
        ):
            asked = ec_name(name, module)
            assert asked not in ECConnectorFactory._registry
            transfer = SimpleNamespace(ec_connector=asked, ec_connector_module_path=MODULE)
            assert issubclass(ECConnectorFactory.get_connector_class(transfer), wrapped)

    def test_kv_connectors_are_found_alike(self) -> None:
        assert issubclass(getattr(recording, kv_name("ExampleConnector", None)), ExampleConnector)
        assert issubclass(getattr(recording, kv_name("KVPlain", __name__)), KVPlain)

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("NoSuchThing", "no attribute 'NoSuchThing'"),
            ("Recording:", "no attribute"),
            ("Recording:only", "no attribute"),
            ("Recording:module:", "no attribute"),
            ("Recording::NoSuchConnector", "no EC connector 'NoSuchConnector'.*ECExampleConnector"),
            ("RecordingKV::NoSuchConnector", "no KV connector 'NoSuchConnector'.*ExampleConnector"),
            (f"Recording:{__name__}:NoSuchClass", "NoSuchClass"),
            (f"Recording:{__name__}:not_a_class", "no class 'not_a_class'.*int"),
        ],
    )
    def test_an_unknown_name_is_an_attribute_error_that_says_so(self, name: str, words: str) -> None:
        with pytest.raises(AttributeError, match=words):
            getattr(recording, name)

    def test_a_module_that_does_not_import_is_named(self) -> None:
        with pytest.raises(ModuleNotFoundError, match="no_such_module"):
            getattr(recording, ec_name("X", "no_such_module"))

    def test_what_the_wrapped_class_lacks_the_wrapper_lacks(self, journal: Journal) -> None:
        connector = made(Old)
        assert connector.has_cache_item("k") is True
        assert not hasattr(connector, "take_unavailable_requests")
        assert not hasattr(connector, "ensure_cache_available")

    def test_an_unfinished_connector_stays_unfinished(self, journal: Journal) -> None:
        """With the recorder it must not become one that vLLM accepts."""
        for cls in (Unfinished, recorded("Unfinished")):
            with pytest.raises(TypeError, match="save_caches"):
                cls(config(), ECConnectorRole.WORKER)

    def test_it_introduces_itself(self, journal: Journal) -> None:
        made(side=ECConnectorRole.WORKER)
        (line,) = lines(journal)
        assert line.items() >= {
            "ev": "init", "side": "worker", "server": "prefill-0", "ec_role": "ec_producer", "blocks": 7,
            "connector": f"{__name__}.Plain", "block_size": 32, "asked": "Recording:module:Plain",
        }.items()  # fmt: skip

    @pytest.mark.parametrize("by_name", [False, True])
    def test_it_is_made_in_both_call_forms(self, journal: Journal, by_name: bool) -> None:
        asked = {"vllm_config": config(), "role": ECConnectorRole.SCHEDULER}
        connector = recorded("Plain")(**asked) if by_name else recorded("Plain")(*asked.values())
        assert connector.role is ECConnectorRole.SCHEDULER
        assert lines(journal)[0]["side"] == "scheduler"

    def test_an_exception_of_its_constructor_is_written_down_and_goes_on(self, journal: Journal) -> None:
        with pytest.raises(Sentinel, match="bad configuration"):
            made(Refusing)
        (line,) = lines(journal)
        assert (line["ev"], line["hook"]) == ("raise", "__init__")
        assert "bad configuration" in line["error"]

    def test_a_strange_configuration_does_not_keep_it_from_being_made(self, journal: Journal) -> None:
        odd = SimpleNamespace(ec_transfer_config=config().ec_transfer_config)
        recorded("Plain")(odd, ECConnectorRole.SCHEDULER)
        assert [line["ev"] for line in lines(journal)] == ["lost"]


# -- passing on ------------------------------------------------------------------------------------------------------------

# Hook, arguments, and their names at the engine's call.
CALLS: list[tuple[str, Callable[[], dict[str, Any]]]] = [
    ("ensure_cache_available", lambda: {"request": request("r", "k"), "num_computed_tokens": 0}),
    ("has_cache_item", lambda: {"identifier": "k"}),
    ("update_state_after_alloc", lambda: {"request": request("r", "k"), "index": 0}),
    ("build_connector_meta", lambda: {"scheduler_output": output(request("r", "k"), encode={"r": [0]}, free=["x"])}),
    ("take_unavailable_requests", dict),
    ("request_finished", lambda: {"request": request("r", "k")}),
    ("start_load_caches", lambda: {"encoder_cache": {"k": torch.zeros(2, 3)}, "more": object()}),
    ("save_caches", lambda: {"encoder_cache": {"k": torch.zeros(2, 3)}, "mm_hash": "k"}),
    ("shutdown", dict),
]
# Two arguments that vLLM passes by name only.
BY_NAME_ONLY = {"more"}


@pytest.mark.parametrize(("hook", "arguments"), CALLS, ids=[hook for hook, _ in CALLS])
class TestPassingOn:
    @pytest.mark.parametrize("by_name", [False, True])
    def test_arguments_and_results_are_the_very_same(
        self, journal: Journal, hook: str, arguments: Callable[[], dict[str, Any]], by_name: bool
    ) -> None:
        connector = made()
        asked = arguments()
        args = () if by_name else tuple(v for k, v in asked.items() if k not in BY_NAME_ONLY)
        kwargs = asked if by_name else {k: v for k, v in asked.items() if k in BY_NAME_ONLY}
        connector.result = (False, object()) if hook == "request_finished" else {"r"}
        assert getattr(connector, hook)(*args, **kwargs) is connector.result
        (called, got_args, got_kwargs) = connector.calls[0]
        assert called == hook
        assert [id(a) for a in got_args] == [id(a) for a in args]
        assert {k: id(v) for k, v in got_kwargs.items()} == {k: id(v) for k, v in kwargs.items()}
        assert lines(journal, "lost", "raise") == []

    def test_an_exception_is_the_very_same_and_written_down(
        self, journal: Journal, hook: str, arguments: Callable[[], dict[str, Any]]
    ) -> None:
        connector = made()
        for error in (Sentinel("x"), KeyboardInterrupt()):
            connector.error = error
            with pytest.raises(type(error)) as caught:
                getattr(connector, hook)(**arguments())
            assert caught.value is error
            assert caught.value.__cause__ is None
            assert caught.value.__context__ is None
        assert [line["hook"] for line in lines(journal, "raise")] == [hook, hook]

    def test_what_the_recorder_does_not_understand_never_reaches_the_engine(
        self, journal: Journal, hook: str, arguments: Callable[[], dict[str, Any]]
    ) -> None:
        """Other arguments than this release knows: passed on, and the journal says that something was not seen."""
        connector = made()
        connector.result = "fine"
        for args in ((object(), object()), ()):
            assert getattr(connector, hook)(*args) == "fine"
            assert connector.calls[-1] == (hook, args, {})
        if hook not in ("shutdown", "take_unavailable_requests"):
            assert lines(journal, "lost")

    def test_without_a_journal_the_engine_sees_no_difference(
        self, journal: Journal, hook: str, arguments: Callable[[], dict[str, Any]]
    ) -> None:
        connector = made()
        os.close(connector._epd_journal._fd)
        connector._epd_journal._fd = os.open("/dev/full", os.O_WRONLY)
        connector.result = (True, None)
        assert getattr(connector, hook)(**arguments()) is connector.result
        connector.error = Sentinel("x")
        with pytest.raises(Sentinel):
            getattr(connector, hook)(**arguments())


def test_other_signatures_are_served(journal: Journal) -> None:
    connector = made(Strange)
    connector.result = True
    assert connector.has_cache_item("k") is True
    cache = {"k": torch.ones(1, 2)}
    assert connector.save_caches(cache, "k", flag=True) is True
    assert connector.calls[-1][1][0] is cache
    assert [line["ev"] for line in lines(journal)] == ["init", "lookup", "save"]


# -- what is written -------------------------------------------------------------------------------------------------------


class TestScheduler:
    def test_a_request_is_seen_once_with_its_items_in_order(self, journal: Journal) -> None:
        connector = made(role="ec_consumer")
        connector.result = True
        asked = request("r", "b", "a")
        for _ in range(2):
            connector.ensure_cache_available(asked, 0)
        connector.build_connector_meta(output(asked))
        (line,) = lines(journal, "request")
        assert [item["id"] for item in line["items"]] == ["b", "a"]
        assert line["items"][0].items() >= {"offset": 3, "length": 12, "embeds": 12, "data": ["grid"]}.items()
        assert (line["req"], line["prompt"]) == ("r", 40)

    def test_a_request_that_was_never_asked_about_is_seen_when_it_is_scheduled(self, journal: Journal) -> None:
        made().build_connector_meta(output(request("r", "k")))
        assert len(lines(journal, "request")) == 1

    def test_a_step_says_what_is_encoded_allocated_and_freed(self, journal: Journal) -> None:
        connector = made(role="ec_consumer")
        connector.result = True
        asked = request("r", "a", "b")
        connector.ensure_cache_available(asked, 0)
        connector.has_cache_item("a")
        connector.update_state_after_alloc(asked, 0)
        connector.update_state_after_alloc(asked, 1)
        connector.build_connector_meta(output(asked, encode={"r": [1]}, free=["old"]))
        (step,) = lines(journal, "step")
        assert step["new"] == [{"req": "r", "computed": 0, "prompt": 40}]
        assert step["encode"] == {"r": ["b"]}
        assert step["free"] == ["old"]
        assert step["allocated"] == [
            {"req": "r", "id": "a", "external": True},
            {"req": "r", "id": "b", "external": False},
        ]
        connector.build_connector_meta(output(encode={"r": [0]}))
        later = lines(journal, "step")[1]
        assert (later["new"], later["encode"], later["allocated"]) == ([], {"r": ["a"]}, [])

    def test_an_idle_step_writes_nothing(self, journal: Journal) -> None:
        made().build_connector_meta(output())
        assert [line["ev"] for line in lines(journal)] == ["init"]

    def test_an_encode_of_a_request_that_was_never_seen_is_no_silence(self, journal: Journal) -> None:
        connector = made()
        connector.result = "meta"
        assert connector.build_connector_meta(output(encode={"stranger": [0]})) == "meta"
        (lost,) = lines(journal, "lost")
        assert lost["hook"] == "build_connector_meta"

    def test_a_deferral_is_written_once_until_it_is_over(self, journal: Journal) -> None:
        connector = made()
        for ready in (False, False, True, False, False):
            connector.result = ready
            connector.ensure_cache_available(request("r", "k"), 0)
        connector.result = False
        connector.ensure_cache_available(request("s", "k"), 0)
        assert [line["req"] for line in lines(journal, "defer")] == ["r", "r", "s"]

    def test_deferrals_lookups_and_ends_are_written(self, journal: Journal) -> None:
        connector = made()
        connector.result = False
        connector.ensure_cache_available(request("r", "k"), 0)
        connector.has_cache_item("k")
        connector.result = {"b", "a"}
        connector.take_unavailable_requests()
        connector.result = (True, None)
        connector.request_finished(request("r", "k"))
        found = lines(journal, "defer", "lookup", "unavailable", "finished")
        assert [line["ev"] for line in found] == ["defer", "lookup", "unavailable", "finished"]
        assert found[1].items() >= {"req": "r", "id": "k", "found": False}.items()
        assert found[2]["reqs"] == ["a", "b"]
        assert found[3]["delayed"] is True


class TestWorker:
    def test_what_a_load_put_in_is_written_and_nothing_else(self, journal: Journal) -> None:
        connector = made(role="ec_consumer", side=ECConnectorRole.WORKER)
        cache = {"old": torch.zeros(1, 2), "replaced": torch.zeros(1, 2)}
        fresh = torch.arange(6.0).reshape(3, 2)

        def load() -> None:
            cache["new"] = fresh
            cache["replaced"] = torch.ones(1, 2)

        connector.act = load
        connector.start_load_caches(cache)
        loads = {line["id"]: line for line in lines(journal, "load")}
        assert set(loads) == {"new", "replaced"}
        assert loads["new"].items() >= {"rows": 3, "width": 2, "dtype": "float32", "bytes": 24}.items()
        assert loads["new"]["digest"] == describe(fresh)["digest"]
        assert cache["new"] is fresh

    def test_a_tensor_at_the_address_of_its_predecessor_is_a_load(self, journal: Journal) -> None:
        connector = made(role="ec_consumer", side=ECConnectorRole.WORKER)
        cache = {"k": torch.zeros(1, 2)}

        def replace_in_place() -> None:
            for _ in range(50):  # until Python gives the freed address out again
                address = id(cache.pop("k"))
                cache["k"] = torch.ones(1, 2)
                if id(cache["k"]) == address:
                    return

        connector.act = replace_in_place
        connector.start_load_caches(cache)
        assert len(lines(journal, "load")) == 1

    def test_a_load_that_raises_is_no_load(self, journal: Journal) -> None:
        connector = made(role="ec_consumer", side=ECConnectorRole.WORKER)
        connector.error = Sentinel("x")
        with pytest.raises(Sentinel):
            connector.start_load_caches({})
        assert [line["ev"] for line in lines(journal)] == ["init", "raise"]

    @pytest.mark.parametrize(("role", "event"), [("ec_producer", "save"), ("ec_consumer", "encoded")])
    def test_only_a_producers_save_is_a_save(self, journal: Journal, role: str, event: str) -> None:
        connector = made(role=role, side=ECConnectorRole.WORKER)
        connector.save_caches({"k": torch.ones(2, 3)}, "k")
        assert [line["ev"] for line in lines(journal)] == ["init", event]

    def test_a_save_that_raises_is_no_save(self, journal: Journal) -> None:
        connector = made(side=ECConnectorRole.WORKER)
        connector.error = Sentinel("x")
        with pytest.raises(Sentinel):
            connector.save_caches({"k": torch.ones(2, 3)}, "k")
        assert lines(journal, "save") == []

    def test_the_digest_is_of_what_was_handed_over(self, journal: Journal) -> None:
        """A connector that changes the tensor while it saves it is seen by the load."""
        connector = made(side=ECConnectorRole.WORKER)
        cache = {"k": torch.ones(2, 3)}
        wanted = describe(cache["k"])["digest"]
        connector.act = lambda: cache["k"].zero_()
        connector.save_caches(cache, "k")
        assert lines(journal, "save")[0]["digest"] == wanted

    def test_an_unknown_key_is_the_wrapped_connectors_business(self, journal: Journal) -> None:
        connector = made(side=ECConnectorRole.WORKER)
        connector.result = "fine"
        assert connector.save_caches({}, "k") == "fine"
        assert [line["ev"] for line in lines(journal)] == ["init", "lost"]


class TestDescribe:
    def test_the_same_numbers_have_one_digest_whatever_their_memory(self) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        for same in (base.t().contiguous().t(), base.clone().requires_grad_(), torch.arange(24.0)[:12].reshape(3, 4)):
            assert describe(same) == describe(base)
        strided = torch.zeros(3, 8)
        strided[:, ::2] = base
        assert not strided[:, ::2].is_contiguous()
        assert describe(strided[:, ::2]) == describe(base)

    def test_one_element_one_bit_or_another_form_is_another(self) -> None:
        base = torch.arange(12.0).reshape(3, 4)
        changed = base.clone()
        changed[2, 3] += 1e-6
        negative_zero = base.clone()
        negative_zero[0, 0] = -0.0
        digests = {describe(t)["digest"] for t in (base, changed, negative_zero, base.t(), base.to(torch.bfloat16))}
        assert len(digests) == 5
        assert describe(base)["digest"] == describe(base.reshape(4, 3))["digest"]
        assert describe(base)["shape"] != describe(base.reshape(4, 3))["shape"]

    @pytest.mark.parametrize(
        ("tensor", "rows", "width", "shape", "size"),
        [
            (torch.ones(3, 4, dtype=torch.bfloat16), 3, 4, [3, 4], 24),
            (torch.tensor(1.5), 0, 0, [], 4),
            (torch.zeros(0, 4), 0, 4, [0, 4], 0),
            (torch.zeros(5), 5, 0, [5], 20),
            (torch.zeros(2, 3, 4, dtype=torch.float16), 2, 3, [2, 3, 4], 48),
            (torch.tensor([True, False]), 2, 0, [2], 2),
        ],
        ids=["bfloat16", "0-d", "empty", "1-d", "3-d", "bool"],
    )
    def test_every_form_has_one(self, tensor: Any, rows: int, width: int, shape: list[int], size: int) -> None:
        found = describe(tensor)
        assert (found["rows"], found["width"], found["shape"], found["bytes"]) == (rows, width, shape, size)
        assert found["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert len(found["digest"]) == 64


# -- KV --------------------------------------------------------------------------------------------------------------------


def kv() -> Any:
    return getattr(recording, kv_name("KVPlain", __name__))(config(), SimpleNamespace(name="SCHEDULER"), None)


class TestKV:
    def test_what_is_taken_for_a_request_is_written(self, journal: Journal) -> None:
        connector = kv()
        asked = request("r", "k")
        assert connector.get_num_new_matched_tokens(asked, 0) == (64, False)
        connector.update_state_after_alloc(asked, "blocks", 64)
        connector.update_state_after_alloc(asked, "blocks", num_external_tokens=0)
        scheduled = output(asked, encode={"r": [0]})
        assert connector.build_connector_meta(scheduled) is scheduled
        entries = [
            SimpleNamespace(is_store=False, slot_mapping=torch.zeros(64)),
            SimpleNamespace(is_store=True, slot_mapping=torch.zeros(32)),
        ]
        connector._connector_metadata = SimpleNamespace(requests=entries)
        assert connector.start_load_kv("context", more=1) == "context"
        found = lines(journal)
        assert [line["ev"] for line in found] == ["init", "kv-match", "kv-take", "kv-new", "kv-encode", "kv-injected"]
        assert {line["side"] for line in found} == {"kv-scheduler"}
        assert [found[index]["tokens"] for index in (1, 2, 5)] == [64, 64, 64]
        assert found[3]["items"][0]["id"] == "k"
        assert found[4]["encode"] == {"r": [0]}
        assert found[0].items() >= {"connector": f"{__name__}.KVPlain", "block_size": 32}.items()

    def test_exceptions_go_on_and_are_written_down(self, journal: Journal) -> None:
        connector = kv()
        connector.error = error = Sentinel("x")
        asked = request("r", "k")
        for call in (
            lambda: connector.get_num_new_matched_tokens(asked, 0),
            lambda: connector.update_state_after_alloc(asked, None, 1),
            lambda: connector.build_connector_meta(output()),
            lambda: connector.start_load_kv(None),
        ):
            with pytest.raises(Sentinel) as caught:
                call()
            assert caught.value is error
        assert len(lines(journal, "raise")) == 4

    def test_what_it_does_not_understand_never_reaches_the_engine(self, journal: Journal) -> None:
        connector = kv()
        assert connector.get_num_new_matched_tokens(None, 0) == (64, False)
        assert connector.build_connector_meta("odd") == "odd"
        connector._connector_metadata = SimpleNamespace(requests=[SimpleNamespace(is_store=False)])
        assert connector.start_load_kv("context") == "context"
        assert len(lines(journal, "lost")) == 3


def test_vllms_own_connector_saves_and_loads_through_the_recorder(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a fake: the example connector writes a file, and what is loaded from it has the digest of what was saved."""
    # Only this would need a real model, and only where requests carry no media.
    monkeypatch.setattr(f"{EXAMPLE}.PlaceholderMetadataResolver", lambda model_config: None)

    def connector(role: str) -> Any:
        asked = config(role)
        asked.model_config = None
        asked.ec_transfer_config.get_from_extra_config = lambda name, default: str(tmp_path / "store")
        return getattr(recording, ec_name("ECExampleConnector", None))(asked, ECConnectorRole.WORKER)

    tensor = torch.arange(24.0).reshape(6, 4)
    producer, consumer = connector("ec_producer"), connector("ec_consumer")
    producer.save_caches({"k": tensor}, "k")
    metadata = ECExampleConnectorMetadata()
    metadata.add_mm_data(MMMeta.make_meta("k", 6))
    consumer.bind_connector_metadata(metadata)
    cache: dict[str, Any] = {}
    consumer.start_load_caches(encoder_cache=cache)
    assert torch.equal(cache["k"], tensor)
    (save,), (load,) = lines(journal, "save"), lines(journal, "load")
    assert save["digest"] == load["digest"] == describe(tensor)["digest"]
    assert lines(journal, "lost") == []
