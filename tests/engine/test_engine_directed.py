"""Races, growth and encoder-decoder models: found where planted, and nothing found in a right connector."""

from __future__ import annotations

from typing import Any

import pytest

from epd_conformance.engine import measured
from epd_conformance.engine.hosted import Host
from epd_conformance.errors import StackError

pytestmark = pytest.mark.needs_vllm

RACE = "epd_conformance.engine.directed:race"
GROWTH = "epd_conformance.engine.directed:growth"
SLOW = "epd_conformance.engine.slow_store:slow_store"
DECODER = "epd_conformance.engine.directed:encoder_decoder"


def kinds(requirement: str, result: dict[str, Any]) -> set[str]:
    return {finding.kind for finding in measured.findings(requirement, result)}


@pytest.mark.parametrize(("writers", "requirement"), [(1, "EPD-RACE-008"), (2, "EPD-RACE-006")])
def test_readers_see_whole_objects(host: Host, writers: int, requirement: str) -> None:
    arguments = {"writers": writers, "readers": 1, "seconds": 0.5}
    torn = host.call(RACE, {**arguments, "seconds": 1.5}, subject="planted_engine:WritesInPlace_")
    assert kinds(requirement, torn) == {"torn or lost"}
    for subject in ("planted_engine:PlainStore_", "reference"):
        whole = host.call(RACE, arguments, subject=subject)
        assert kinds(requirement, whole) == set()
        assert measured.exercised(requirement, whole)


def test_what_waits_for_a_release_grows(host: Host) -> None:
    requests = host.call(GROWTH, {"cycles": 80}, subject="planted_engine:KeepsRequests_")
    assert "objects grow" in kinds("EPD-LIFE-001", requests)
    files = host.call(GROWTH, {"cycles": 80}, subject="planted_engine:KeepsFiles_")
    assert "open files grow" in kinds("EPD-LIFE-001", files)
    for subject in ("planted_engine:PlainStore_", "reference"):
        quiet = host.call(GROWTH, {"cycles": 80}, subject=subject)
        assert kinds("EPD-LIFE-001", quiet) == set()
        assert measured.exercised("EPD-LIFE-001", quiet)


def test_an_encoder_decoder_model_is_promised_nothing(host: Host) -> None:
    promised = host.call(DECODER, subject="planted_engine:IgnoresTheModel_")
    assert kinds("EPD-ROLE-008", promised) == {"promised to a model that loads nothing"}
    reference = host.call(DECODER, subject="reference")
    assert kinds("EPD-ROLE-008", reference) == set()
    assert measured.exercised("EPD-ROLE-008", reference)


def test_a_slow_store_is_slow_and_who_waits_for_it_in_threads_stalls_no_step(host: Host) -> None:
    aside = host.call(SLOW, {"seconds": 0.5}, subject="planted_engine:Aside_")
    if not aside["held"]:
        pytest.skip("the kernel does not let operations be held up")
    assert kinds("EPD-LOAD-008", aside) == set()
    assert measured.exercised("EPD-LOAD-008", aside)
    assert measured.also_exercised("EPD-LOAD-008", aside) == {"EPD-LIFE-006", "EPD-LIFE-007"}
    # A long save must leave the look-up a slow store.
    for subject in ("planted_engine:PlainStore_", "planted_engine:LongSave_"):
        within = host.call(SLOW, {"seconds": 0.5}, subject=subject)
        assert kinds("EPD-LOAD-008", within) == {"a step waits for the store"}
        assert {hook for hook, seconds in within["slowest"].items() if seconds >= 0.5} == {"has_cache_item"}


def test_a_connector_that_refuses_the_model_promises_it_nothing(host: Host) -> None:
    refused = host.call(DECODER, subject="planted_broken:RefusesTheModelSubject")
    assert "no encoder-decoder models" in refused["refused"]
    assert kinds("EPD-ROLE-008", refused) == set()
    assert measured.exercised("EPD-ROLE-008", refused)
    assert kinds("EPD-ROLE-008", {**refused, "refused": "", "raised": "no"}) == {"has_cache_item raised"}


def test_a_racing_process_that_ends_shows_nothing_torn(host: Host) -> None:
    arguments = {"writers": 1, "readers": 1, "seconds": 0.5}
    ended = host.call(RACE, arguments, subject="planted_engine:Exits_")
    assert set(ended["ended"]) == {"a process ended with status 7"}
    assert kinds("EPD-RACE-008", ended) == set()
    assert not measured.exercised("EPD-RACE-008", {**ended, "saves": 9, "loads": 9})
    # What a save raises is the connector's own.
    raised = host.call(RACE, arguments, subject="planted_engine:ExitsPolitely_")
    assert kinds("EPD-RACE-008", raised) == {"torn or lost"}


def test_of_identities_that_only_one_server_told_nothing_follows(host: Host) -> None:
    told = host.call("epd_conformance.engine.directed:identities", subject="planted_broken:OneServerOnly", limit_s=60)
    assert len(told["ended"]) == 1
    assert kinds("EPD-KEY-015", told) == set()
    assert not measured.exercised("EPD-KEY-015", told)


def test_what_breaks_in_the_harness_is_not_the_connectors(host: Host) -> None:
    with pytest.raises(StackError, match=r"(?s)raised while a plan or check .*TypeError"):
        host.call(GROWTH, {"cycles": "many"})
    with pytest.raises(StackError, match=r"killed from outside with signal 9 \(SIGKILL\)"):
        host.call("planted_broken:killed")
    # Negative control: what ends the process in a hook is the connector's.
    dead = host.call(GROWTH, {"cycles": 4}, subject="planted_engine:Exits_")
    assert [finding.requirement for finding in dead.findings] == ["EPD-KEY-001"]
