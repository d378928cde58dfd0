"""Proof of transport and of KV: what counts as proof, and each way in which something only looks like it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_evidence import edited, inserted, key_of, passing, without

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.transport import KVTransfer, Roles, Transport, in_force, kv_expected, kv_servable, leg_of

CONSUMER = "prefill_decode-0"


def proof(cell: CellEvidence, index: int = 0) -> Transport:
    return cell.transport(index)


def kv(cell: CellEvidence) -> KVTransfer:
    found = cell.kv(0)
    assert found is not None
    return found


def reason(found: Transport | KVTransfer) -> str:
    return (found.problem or "").partition(":")[0]


def key(cell: CellEvidence, index: int = 0) -> str:
    return key_of(cell.plan.requests[0].images[index])


def event(cell: CellEvidence, **fields: Any) -> dict[str, Any]:
    return dict(next(e for e in cell.during if all(e.get(name) == value for name, value in fields.items())))


# -- whose request it is -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "leg"),
    [
        ("chatcmpl-abc-e0-12345678", "e0"),
        ("chatcmpl-abc-e12-12345678", "e12"),
        ("chatcmpl-abc-p-12345678", "p"),
        ("chatcmpl-abc-d-12345678", "d"),
        ("chatcmpl-abc-d", "d"),
        ("chatcmpl-abc-12345678", ""),
        ("chatcmpl-abc", ""),
        # One direct request in four hundred gets a random part like this one.
        ("chatcmpl-abc-e1234567", ""),
        ("chatcmpl-abcd-d-12345678", None),
        ("chatcmpl-ab-d-12345678", None),
        ("chatcmpl-abc-x-12345678", None),
        ("chatcmpl-abc-def-d-12345678", None),
        ("chatcmpl-abc-d-12345678-12345678", None),
        ("cmpl-abc-d-12345678", None),
        ("xchatcmpl-abc-d-12345678", None),
        ("chatcmpl-abc-D-12345678", None),
    ],
)
def test_leg_of(request_id: str, leg: str | None) -> None:
    assert leg_of(request_id, "abc") == leg


@given(
    rid=st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True),
    leg=st.sampled_from(["", "-p", "-d", "-e0", "-e17"]),
    random=st.from_regex(r"[0-9a-f]{8}", fullmatch=True),
)
def test_a_leg_is_found_behind_any_client_id(rid: str, leg: str, random: str) -> None:
    assert leg_of(f"chatcmpl-{rid}{leg}-{random}", rid) == leg[1:]
    assert leg_of(f"chatcmpl-{rid}y{leg}-{random}", rid) is None
    assert leg_of(f"chatcmpl-{rid}{leg}-{random}", "y" + rid) is None


def test_a_direct_request_with_an_unlucky_random_part_is_proven() -> None:
    text = json.dumps(passing("both").to_json())
    unlucky = CellEvidence.from_json(json.loads(text.replace('-00abcdef"', '-e7654321"')))
    assert any(event.get("req", "").endswith("-e7654321") for event in unlucky.during)
    assert proof(unlucky, 1).problem is None


# -- loads and saves that do not count ---------------------------------------------------------------------------------


def test_what_goes_well_is_proven() -> None:
    found = proof(passing("equality", images=3))
    assert found.problem is None
    assert (found.saves, found.loads, found.local_encodes, found.digests_equal) == (3, 3, 0, True)
    assert [item.how for item in found.items] == ["loaded"] * 3
    assert found.order_kept is True
    assert found.primed_late is False
    assert found.server == CONSUMER


def test_a_load_on_another_server_is_no_load() -> None:
    cell = passing("equality")
    moved = edited(cell, {"server": "prefill_decode-1"}, ev="load", id=key(cell))
    moved = replace(moved, roles=replace(cell.roles, consumers=cell.roles.consumers | {"prefill_decode-1"}))
    assert reason(proof(moved)) == "not-loaded"
    assert proof(moved).digests_equal is None


def test_a_save_by_a_consumer_or_a_stranger_is_no_save() -> None:
    cell = passing("equality")
    for server in (CONSUMER, "encode-7"):
        assert reason(proof(edited(cell, {"server": server}, ev="save", id=key(cell)))) == "not-saved"


def test_a_save_after_the_load_cannot_be_its_source() -> None:
    cell = passing("equality", images=1)
    late = edited(cell, {"t": cell.during[-1]["t"] + 1}, ev="save")
    late = replace(late, during=tuple(sorted(late.during, key=lambda e: e["t"])))
    # The step that decided to encode is gone too: a save begins with it.
    late = without(late, ev="step", server="encode-0")
    assert reason(proof(late)) == "not-saved"


def test_a_save_that_had_begun_may_be_the_source_of_a_load() -> None:
    """The line of a save is written after the call; a consumer may load in between."""
    cell = passing("equality", images=1)
    load = event(cell, ev="load")
    late = edited(cell, {"t": load["t"] + 0.0001}, ev="save")
    assert proof(replace(late, during=tuple(sorted(late.during, key=lambda e: e["t"])))).problem is None


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ({"ev": "step", "server": CONSUMER, "new": [], "allocated": [], "free": []}, "the consumer"),
        ({"ev": "step", "server": "prefill-9", "new": [], "allocated": [], "free": []}, "another consumer"),
        ({"ev": "encoded", "server": CONSUMER, "side": "worker"}, "the consumer's worker"),
    ],
    ids=str,
)
def test_an_encode_after_the_encode_stage_counts_whoever_did_it(line: dict[str, Any], where: str) -> None:
    cell = passing("equality")
    wanted = {"encode": {"another request": [key(cell)]}, "id": key(cell)}
    assert reason(proof(inserted(cell, {"ev": "load"}, {**line, **wanted}))) == "local-encode", where
    # The same line about another key says nothing about this request.
    other = {"encode": {"another request": ["other"]}, "id": "other"}
    assert proof(inserted(cell, {"ev": "load"}, {**line, **other})).problem is None


def test_encode_and_encoded_are_one_encode() -> None:
    found = proof(passing("miss", images=2))
    assert found.local_encodes == 2


def test_an_encode_by_the_encode_stage_is_what_it_is_for() -> None:
    cell = passing("equality")
    assert any(e["ev"] == "step" and e["encode"] for e in cell.during)
    assert proof(cell).local_encodes == 0


def test_a_prefix_hit_wins_over_a_load() -> None:
    """If the KV of the item was there already, the load was for nothing."""
    cell = passing("equality", images=2)
    step = event(cell, ev="step", server=CONSUMER)
    for computed, problem in ((0, ""), (40, ""), (41, "prefix-hit"), (55, "prefix-hit")):
        new = [{**step["new"][0], "computed": computed}]
        assert reason(proof(edited(cell, {"new": new}, ev="step", server=CONSUMER))) == problem, computed


def test_without_the_step_that_scheduled_it_nothing_is_known() -> None:
    cell = passing("equality")
    assert reason(proof(without(cell, ev="step", server=CONSUMER))) == "not-journalled"
    # A step of another request, or of another server, does not replace it.
    step = event(cell, ev="step", server=CONSUMER)
    other = [{**step["new"][0], "req": "chatcmpl-other-d-00000000"}]
    assert reason(proof(edited(cell, {"new": other}, ev="step", server=CONSUMER))) == "not-journalled"
    assert reason(proof(edited(cell, {"server": "x"}, ev="step", server=CONSUMER))) == "not-journalled"


def test_two_consumers_of_one_request_prove_nothing() -> None:
    cell = passing("equality")
    seen = event(cell, ev="request", server=CONSUMER)
    twice = inserted(cell, {"ev": "request"}, {**seen, "server": "prefill_decode-1"})
    twice = replace(twice, roles=replace(cell.roles, consumers=cell.roles.consumers | {"prefill_decode-1"}))
    assert reason(proof(twice)) == "several-consumers"


# -- digests -----------------------------------------------------------------------------------------------------------


def test_one_wrong_load_of_several_is_enough() -> None:
    cell = passing("equality", images=1)
    load = event(cell, ev="load")
    for again in ({**load, "digest": "0"}, load):
        spoilt = edited(cell, {"digest": "0"}, ev="load") if again is load else cell
        found = proof(inserted(spoilt, {"ev": "load"}, {**again, "t": load["t"] + 0.0002}))
        assert found.digests_equal is False
        assert found.items[0].digest == "0"
    assert proof(inserted(cell, {"ev": "load"}, {**load, "t": load["t"] + 0.0002})).digests_equal is True


def test_wrong_bytes_are_seen_also_where_they_were_not_used() -> None:
    """A local encode, or the prefix cache, does not hide that the connector gave wrong bytes."""
    cell = edited(passing("equality", images=1), {"digest": "0"}, ev="load")
    encoded = inserted(cell, {"ev": "load"}, {"ev": "encoded", "server": CONSUMER, "id": key(cell)})
    assert proof(encoded).items[0].digest_wrong
    step = event(cell, ev="step", server=CONSUMER)
    hit = edited(cell, {"new": [{**step["new"][0], "computed": 288}]}, ev="step", server=CONSUMER)
    assert proof(hit).items[0].digest_wrong


def save(digest: str, began: float, ended: float, server: str = "encode-0") -> dict[str, Any]:
    return {"ev": "save", "server": server, "id": "k", "digest": digest, "t": ended, "seconds": ended - began}


def load(asked: float, ended: float) -> dict[str, Any]:
    return {"ev": "load", "server": CONSUMER, "id": "k", "digest": "", "t": ended, "seconds": ended - asked}


class TestWhichSaveIsInForce:
    def test_one_save(self) -> None:
        assert in_force([save("a", 1, 2)], load(3, 4), []) == ("a",)

    def test_a_later_save_replaces_an_earlier_one(self) -> None:
        assert in_force([save("a", 1, 2), save("b", 3, 4)], load(5, 6), []) == ("b",)
        assert in_force([save("b", 3, 4), save("a", 1, 2)], load(5, 6), []) == ("b",)

    def test_saves_at_the_same_time_are_both_right(self) -> None:
        assert set(in_force([save("a", 1, 3), save("b", 2, 4)], load(5, 6), [])) == {"a", "b"}

    def test_a_save_during_the_load_may_or_may_not_be_seen(self) -> None:
        assert set(in_force([save("a", 1, 2), save("b", 4, 6)], load(5, 7), [])) == {"a", "b"}

    def test_a_save_after_the_load_is_not_its_source(self) -> None:
        assert in_force([save("a", 1, 2), save("b", 8, 9)], load(5, 6), []) == ("a",)
        assert in_force([save("b", 8, 9)], load(5, 6), []) == ()

    def test_equal_bytes_replace_nothing(self) -> None:
        assert set(in_force([save("a", 1, 2), save("a", 3, 4)], load(5, 6), [])) == {"a"}
        assert set(in_force([save("a", 1, 2), save("b", 3, 4), save("a", 5, 6)], load(7, 8), [])) == {"a"}

    def test_two_producers_that_both_found_the_key_free_are_concurrent(self) -> None:
        """The second one's call came after the first one's end, but it had decided to encode before."""
        saves = [save("a", 1, 2, "encode-0"), save("b", 3, 4, "encode-1")]
        decided = {"ev": "step", "server": "encode-1", "t": 1.5, "encode": {"r": ["k"]}}
        assert set(in_force(saves, load(5, 6), [decided])) == {"a", "b"}
        assert in_force(saves, load(5, 6), [{**decided, "t": 2.5}]) == ("b",)
        assert in_force(saves, load(5, 6), [{**decided, "server": "encode-2"}]) == ("b",)
        assert in_force(saves, load(5, 6), [{**decided, "encode": {"r": ["other"]}}]) == ("b",)

    def test_a_connector_may_fetch_from_when_the_consumer_saw_the_request(self) -> None:
        saves = [save("a", 1, 2), save("b", 3, 4)]
        seen = {"ev": "request", "server": CONSUMER, "t": 3.5, "items": [{"id": "k"}]}
        assert set(in_force(saves, load(5, 6), [seen])) == {"a", "b"}
        assert in_force(saves, load(5, 6), [{**seen, "server": "encode-0"}]) == ("b",)
        assert in_force(saves, load(5, 6), [{**seen, "items": [{"id": "other"}]}]) == ("b",)

    @given(
        st.lists(
            st.tuples(st.sampled_from("abc"), st.floats(0, 10), st.floats(0, 2)),
            min_size=1,
            max_size=5,
        ),
        st.floats(0, 10),
    )
    def test_the_last_save_to_end_before_the_load_is_always_in_force(
        self, drawn: list[tuple[str, float, float]], asked: float
    ) -> None:
        saves = [save(digest, began, began + took) for digest, began, took in drawn]
        ended = [event for event in saves if event["t"] < asked]
        found = in_force(saves, load(asked, asked + 1), [])
        if ended:
            assert max(ended, key=lambda event: event["t"])["digest"] in found


def test_the_older_bytes_of_a_key_are_stale() -> None:
    cell = passing("equality", images=1)
    old = {**event(cell, ev="save"), "digest": "old", "t": 10.0}
    poisoned = replace(cell, before=(*cell.before, old))
    assert proof(poisoned).problem is None
    assert proof(poisoned).items[0].digest_wrong is False
    stale = edited(poisoned, {"digest": "old"}, ev="load")
    assert proof(stale).items[0].digest_wrong
    # Without the newer save they are what the producer saved.
    assert proof(without(stale, ev="save")).digests_equal is True


# -- held items --------------------------------------------------------------------------------------------------------


def warm(change: Callable[[CellEvidence], CellEvidence] = lambda cell: cell) -> Transport:
    return proof(change(passing("warm")), 1)


def behind_the_loads(**line: Any) -> Callable[[CellEvidence], CellEvidence]:
    return lambda cell: inserted(cell, {"ev": "load"}, {"server": CONSUMER, **line})


def free(cell: CellEvidence, server: str = CONSUMER, **fields: Any) -> dict[str, Any]:
    line = {"ev": "step", "server": server, "new": [], "encode": {}, "allocated": [], "free": [key(cell)]}
    return {**line, **fields}


def test_a_held_item_is_proven_by_its_load() -> None:
    assert [item.how for item in warm().items] == ["held", "held"]
    assert warm().problem is None
    assert warm().digests_equal is True
    assert warm().loads == 0


def test_held_from_wrong_bytes_is_wrong() -> None:
    assert warm(lambda cell: edited(cell, {"digest": "0"}, ev="load")).items[0].digest_wrong


def test_held_and_then_freed_is_not_held() -> None:
    assert reason(warm(lambda cell: inserted(cell, {"ev": "load"}, free(cell)))) == "not-loaded"
    # Another server's eviction is not this one's.
    assert warm(lambda cell: inserted(cell, {"ev": "load"}, free(cell, "prefill-9"))).problem is None


def test_freed_in_the_step_that_schedules_the_request_is_not_held() -> None:
    cell = passing("warm")
    step = [e for e in cell.during if e["ev"] == "step" and e["server"] == CONSUMER][-1]
    freed = edited(cell, {"free": [key(cell)]}, ev="step", server=CONSUMER, t=step["t"])
    assert reason(proof(freed, 1)) == "not-loaded"


def test_freed_after_its_use_was_held() -> None:
    cell = passing("warm")
    assert proof(inserted(cell, {"ev": "finished", "server": CONSUMER}, free(cell)), 1).problem is None


def test_held_and_then_encoded_is_not_held() -> None:
    encoded = behind_the_loads(ev="encoded", id=key(passing("warm")))
    assert reason(warm(encoded)) == "not-loaded"
    step = {**free(passing("warm")), "free": [], "encode": {"r": [key(passing("warm"))]}}
    assert reason(warm(behind_the_loads(**step))) == "not-loaded"


@pytest.mark.parametrize("side", ["scheduler", "worker"])
def test_a_restart_ends_what_was_held(side: str) -> None:
    assert reason(warm(behind_the_loads(ev="init", side=side))) == "not-loaded"
    assert warm(behind_the_loads(ev="init", side=side, server="encode-0")).problem is None


def test_a_load_of_an_earlier_cell_is_held_until_a_restart() -> None:
    cell = passing("equality", images=1)
    old_save = {**event(cell, ev="save"), "t": 1000.5}
    old_load = {**event(cell, ev="load"), "t": 1000.6}
    restart = {**cell.before[-1], "server": CONSUMER, "ev": "init", "t": 1000.7}
    held = without(replace(cell, before=(*cell.before, old_save, old_load)), ev="load")
    assert [item.how for item in proof(held).items] == ["held"]
    assert proof(held).problem is None
    assert reason(proof(replace(held, before=(*held.before, restart)))) == "not-loaded"


# -- primers -----------------------------------------------------------------------------------------------------------


def test_order_is_that_of_the_primed_places() -> None:
    cell = passing("equality", images=2)
    assert proof(cell).order_kept is True
    second = event(cell, ev="request", server="encode-0")
    # One primer alone says as much as it can.
    assert proof(without(cell, ev="request", req=second["req"])).order_kept is True
    swapped = edited(cell, {"items": [{**second["items"][0], "id": key(cell, 1)}]}, ev="request", req=second["req"])
    assert proof(swapped).order_kept is False
    assert proof(without(cell, ev="request", server="encode-0")).order_kept is None


def test_a_primed_place_that_the_request_does_not_have_is_no_kept_order() -> None:
    cell = passing("equality", images=1)
    seen = event(cell, ev="request", server="encode-0")
    extra = {**seen, "req": seen["req"].replace("-e0-", "-e1-")}
    assert proof(inserted(cell, {"ev": "finished", "server": "encode-0"}, extra)).order_kept is False


# -- KV ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "block", "expected", "servable"),
    [(300, 32, 288, True), (289, 32, 288, False), (288, 32, 256, True), (33, 32, 32, False), (32, 32, 0, True)],
)
def test_what_can_be_handed_over(prompt: int, block: int, expected: int, servable: bool) -> None:
    assert kv_expected("ExampleConnector", prompt, block) == expected
    assert kv_servable(prompt, block) is servable


@given(st.integers(1, 5000), st.sampled_from([8, 16, 32, 64]))
def test_what_can_be_handed_over_leaves_a_token(prompt: int, block: int) -> None:
    expected = kv_expected("", prompt, block)
    assert expected % block == 0
    assert prompt - block <= expected < prompt


def kv_cell(change: Callable[[CellEvidence], CellEvidence] = lambda cell: cell) -> KVTransfer:
    return kv(change(passing("equality", "e-p-d")))


def test_kv_that_was_counted_on_and_put_in_is_proven() -> None:
    assert kv_cell() == KVTransfer(288, 288, 0, None)


def test_kv_that_was_only_counted_on_or_only_put_in_is_not() -> None:
    for line in ("kv-take", "kv-injected"):
        assert reason(kv_cell(lambda cell, line=line: without(cell, ev=line))) == "kv-recompute"  # type: ignore[misc]
        short = kv_cell(lambda cell, line=line: edited(cell, {"tokens": 256}, ev=line))  # type: ignore[misc]
        assert (short.tokens, short.expected, reason(short)) == (256, 288, "kv-recompute")


def test_two_halves_are_not_a_whole() -> None:
    """A request that was preempted takes its KV again; half of it twice is half of it."""
    cell = edited(passing("equality", "e-p-d"), {"tokens": 144}, ev="kv-take")
    take = event(cell, ev="kv-take")
    assert kv(inserted(cell, {"ev": "kv-take"}, take)).tokens == 144
    assert kv(inserted(cell, {"ev": "kv-take"}, {**take, "tokens": 288})).problem is None


def test_kv_of_another_request_or_server_does_not_count() -> None:
    assert reason(kv_cell(lambda cell: edited(cell, {"req": "chatcmpl-x-d-0"}, ev="kv-take"))) == "kv-recompute"
    assert reason(kv_cell(lambda cell: edited(cell, {"server": "decode-1"}, ev="kv-take"))) == "kv-recompute"
    assert reason(kv_cell(lambda cell: edited(cell, {"server": "decode-1"}, ev="kv-injected"))) == "kv-recompute"
    assert reason(kv_cell(lambda cell: edited(cell, {"server": "decode-1"}, ev="kv-new"))) == "not-journalled"


def test_another_connector_need_not_report_injection() -> None:
    def nixl(cell: CellEvidence) -> CellEvidence:
        changed = edited(cell, {"connector": "x.NixlConnector"}, "before", server="decode-0", side="kv-scheduler")
        return without(changed, ev="kv-injected")

    assert kv_cell(nixl).problem is None
    assert reason(kv_cell(lambda cell: without(nixl(cell), ev="kv-take"))) == "kv-recompute"


def test_without_knowing_the_connector_nothing_is_expected() -> None:
    found = kv_cell(lambda cell: without(cell, "before", server="decode-0", side="kv-scheduler"))
    assert reason(found) == "not-journalled"


def test_an_encode_on_any_decode_server_counts() -> None:
    line = {"ev": "kv-encode", "server": "decode-0", "encode": {"another": [0, 1]}}
    found = kv_cell(lambda cell: inserted(cell, {"ev": "kv-new"}, line))
    assert (found.decode_encodes, reason(found)) == (2, "decode-encode")
    prefill = kv_cell(lambda cell: inserted(cell, {"ev": "kv-new"}, {**line, "server": "prefill-0"}))
    assert prefill.problem is None


def test_two_decode_servers_of_one_request_prove_nothing() -> None:
    def twice(cell: CellEvidence) -> CellEvidence:
        both = inserted(cell, {"ev": "kv-new"}, {**event(cell, ev="kv-new"), "server": "decode-1"})
        return replace(both, roles=replace(cell.roles, decode=cell.roles.decode | {"decode-1"}))

    assert reason(kv_cell(twice)) == "several-consumers"


def test_a_topology_without_decode_has_no_kv_to_prove() -> None:
    assert passing("equality", "e-pd").kv(0) is None


def test_roles_survive_json() -> None:
    roles = Roles(frozenset({"a", "b"}), frozenset({"c"}), frozenset({"d"}), frozenset())
    assert Roles.from_json(roles.to_json()) == roles


def test_a_cells_requests_have_their_own_windows() -> None:
    """What the second request caused is no proof for the first."""
    cell = passing("warm")
    before, during = cell.events(1)
    assert before[: len(cell.before)] == list(cell.before)
    assert {e["ev"] for e in before[len(cell.before) :]} >= {"save", "load"}
    assert all(e["t"] >= cell.answers[1].started for e in during)
    assert [*before[len(cell.before) :], *during] == list(cell.during)
