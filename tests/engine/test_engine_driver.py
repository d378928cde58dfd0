"""The driver: the same calls as vLLM's own scheduler makes, also from processes of their own; and the host that runs it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.evidence import PlanEvidence
from epd_conformance.engine.hosted import Carried, Host
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature

pytestmark = pytest.mark.needs_vllm


def test_the_core_calls_every_hook_as_vllms_scheduler_does(host: Host) -> None:
    assert host.call("engine_probes:first_difference", {"examples": 60}, limit_s=120) == ""


def test_a_core_that_calls_one_hook_more_is_told_apart(host: Host) -> None:
    difference = host.call("engine_probes:first_difference", {"examples": 1, "fault": "free-first"}, limit_s=120)
    assert "update_state_after_free" in difference
    # The child's core is broken now; a new child gets a whole one.
    host.recycle()


def test_objects_in_processes_of_their_own_do_the_same(host: Host) -> None:
    assert host.call("engine_probes:together_and_apart") == [True, True]


def test_requests_have_the_items_that_were_asked_for(host: Host) -> None:
    shape = host.call("engine_probes:request_shape")
    assert shape == {
        "tokens": 2 + 6 + 2 + 2 + 2 + 1 + 2,
        "positions": [[2, 6, 4], [10, 2, 2], [14, 1, 1]],
        "media": [True, False, False],
        "data": [["image_grid_thw", "pixel_values"], ["image_embeds", "image_grid_thw"], None],
    }


def test_configurations_say_what_the_plan_says(host: Host) -> None:
    facts = host.call("engine_probes:config_facts")
    assert facts == {
        "v2": [False, True, False],
        "encode_only": [True, False, False],
        "ahead": [False, True, False],
        "dtype": ["torch.float32", "torch.bfloat16", "torch.float32"],
        "encoder_decoder": [False, False, True],
        "shared": False,
        "engine": "e",
    }


def test_a_plan_shows_the_same_every_time(host: Host) -> None:
    plan = corpus(frozenset({Feature.STORE_PROBE}))["truncated-before"]
    first, again = (host.carry(plan, keep="it") for _ in range(2))
    assert first.findings == again.findings
    assert len(first.findings) == 1
    assert first.evidence is not None
    assert again.evidence is not None
    assert [event[1][0] for event in first.evidence.events] == [event[1][0] for event in again.evidence.events]
    # Whoever has the evidence comes to the same findings.
    assert PlanEvidence.from_json(json.loads(json.dumps(first.evidence.to_json()))).findings == first.findings


def test_a_configuration_that_vllm_refuses_is_the_callers_mistake(host: Host) -> None:
    with pytest.raises(UsageError, match="no subject is called"):
        host.carry(corpus(frozenset())["miss"], subject="nobody")


def test_a_child_that_dies_takes_nothing_with_it(host: Host) -> None:
    before = host.children
    dead = host.carry(corpus(frozenset())["transfer-v1"], subject="planted_engine:Crashes_")
    assert isinstance(dead, Carried)
    assert "SIGSEGV" in dead.findings[0].observed
    assert "planted_engine.py" in dead.output
    assert host.carry(corpus(frozenset())["transfer-v1"]).findings == []
    assert host.children == before + 1


def test_nothing_is_left_when_the_host_ends(tmp_path: Path) -> None:
    plan = Plan((ServerSpec("ec_producer"), ServerSpec("ec_consumer")), (ItemSpec("a", 0),), ({"op": "transfer"},))
    try:
        with Host("planted_engine:PlainStore_", paths=[str(Path(__file__).parent)], log=tmp_path / "log") as own:
            assert own.carry(plan).findings == []
            child, folder = own._child, own._folder
            assert child is not None
            parent = own._process.pid
    except UsageError as error:
        pytest.skip(str(error))
    end = time.monotonic() + 5
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in (child.pid, parent)):
        time.sleep(0.02)
    assert not Path(f"/proc/{child.pid}").exists()
    assert not Path(f"/proc/{parent}").exists()
    assert not folder.exists()
    assert os.getpid() != parent
