"""Each requirement of the scheduler layer is found broken in a scheduler that breaks it, and by nothing else in the same plans."""

from __future__ import annotations

import pytest
from planted_scheduler import BROKEN, DEFECTS, MENDED

from epd_conformance import catalogue
from epd_conformance.engine import measured
from epd_conformance.engine.hosted import Host

SHOWN = "scheduler_probes:shown"
BY_PLANS = [requirement for requirement, planted in DEFECTS.items() if planted.plans]


@pytest.mark.needs_vllm
@pytest.mark.parametrize("requirement", BY_PLANS)
def test_a_planted_defect_breaks_its_requirement_alone(host: Host, requirement: str) -> None:
    plans = list(DEFECTS[requirement].plans)
    right = host.call(SHOWN, {"plans": plans})
    assert right["found"] == []
    assert requirement in right["exercised"]
    planted = host.call(SHOWN, {"table": "defects", "requirement": requirement, "plans": plans})
    # Its classes are changed for good; a new child gets whole ones.
    host.recycle()
    assert planted["found"] == [requirement]


@pytest.mark.needs_vllm
@pytest.mark.parametrize("requirement", BROKEN)
def test_what_vllm_breaks_itself_is_found(host: Host, requirement: str) -> None:
    assert host.call(SHOWN, {"plans": list(BROKEN[requirement])})["found"] == [requirement]


@pytest.mark.needs_vllm
@pytest.mark.parametrize("requirement", MENDED)
def test_it_is_not_found_once_it_is_mended(host: Host, requirement: str) -> None:
    plans = list(MENDED[requirement].plans)
    mended = host.call(SHOWN, {"table": "mended", "requirement": requirement, "plans": plans})
    host.recycle()
    assert mended["found"] == []
    assert requirement in mended["exercised"]


@pytest.mark.needs_vllm
def test_a_key_does_not_depend_on_the_connector(host: Host) -> None:
    right = host.call("epd_conformance.engine.directed:identities")
    assert measured.findings("EPD-KEY-015", right) == []
    assert measured.exercised("EPD-KEY-015", right)
    planted = host.call("scheduler_probes:hashed", {"requirement": "EPD-KEY-015"})
    host.recycle()
    assert [finding.kind for finding in measured.findings("EPD-KEY-015", planted)] == ["other hashes"]


def test_every_requirement_of_the_layer_is_found_broken_in_a_scheduler() -> None:
    asked = {item.id for item in catalogue.load() if item.layer is catalogue.Layer.SCHEDULER}
    assert asked == {*DEFECTS, *BROKEN}
