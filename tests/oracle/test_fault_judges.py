"""The judges of cells with a fault, where the table of spoilt stories does not reach: what may happen, words, and counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_evidence import passing, with_answer
from spoilt_faults import (
    BAITED,
    DAMAGE,
    FIRST,
    FRESH,
    HOSTILE,
    TWIN,
    VICTIM,
    Spoil,
    both,
    died,
    encodes,
    fails,
    fault,
    given_up,
    loaded_early,
    loads,
    never_came,
    of_the_twin,
    other_ids,
    outside,
    raised,
)

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.fault_judges import fault_record
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.plan import Plan
from epd_conformance.verdict import Owner, Verdict

TOPOLOGIES = ("e-pd", "e-p-d")


def whole(cell: CellEvidence) -> CellEvidence:
    return cell


class TestWhatMayHappen:
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("status", [400, 404, 500, 503])
    @pytest.mark.parametrize("how", [whole, given_up])
    def test_a_victim_may_be_told_that_it_failed(self, topology: str, status: int, how: Spoil) -> None:
        found = judge(fails(VICTIM, status)(how(passing("contained", topology))))
        assert found.verdict is Verdict.PASS, found
        assert f"status {status} for that request" in found.observed

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("name", ["recomputed", "contained"])
    def test_a_request_may_wait_for_its_load(self, name: str, topology: str) -> None:
        """A connector that loads first and lets the request be scheduled then is as good as any."""
        for index in (FIRST, TWIN, FRESH):
            assert judge(loaded_early(index)(passing(name, topology))).verdict is Verdict.PASS

    @pytest.mark.parametrize("topology", TOPOLOGIES)
    def test_a_failed_victim_needs_no_kv(self, topology: str) -> None:
        cell = given_up(passing("contained", topology))
        rid = cell.answers[VICTIM].request_id
        no_decode = tuple(
            event for event in cell.during if event["server"] != "decode-0" or rid not in str(event.get("req"))
        )
        assert judge(replace(cell, during=no_decode)).verdict is Verdict.PASS

    @pytest.mark.parametrize("statuses", [(200, 500), (500, 200), (500, 502), (0, 0)])
    def test_a_hostile_uuid_may_fail(self, statuses: tuple[int, int]) -> None:
        cell = passing("confined")
        for index, status in zip((BAITED, HOSTILE), statuses, strict=True):
            cell = with_answer(cell, index, status=status)
        assert judge(cell).verdict is Verdict.PASS

    def test_a_server_may_refuse_a_hostile_uuid_at_once(self) -> None:
        cell = both(*(never_came(index) for index in (BAITED, HOSTILE)))(passing("confined"))
        without_primer = tuple(event for event in cell.during if cell.answers[HOSTILE].request_id not in str(event))
        cell = replace(cell, during=without_primer)
        assert judge(cell).reason == "not-reached"
        refused = both(*(fails(index, 400) for index in (BAITED, HOSTILE)))(cell)
        assert judge(refused).verdict is Verdict.PASS

    def test_what_was_outside_before_may_stay(self) -> None:
        cell = passing("confined")
        facts = {**cell.facts, "before": {**cell.facts["before"], "stack/new": DAMAGE}}
        assert judge(replace(cell, facts=facts)).reason == "wrote-outside", "it is gone"
        assert judge(outside(new=DAMAGE)(replace(cell, facts=facts))).verdict is Verdict.PASS


class TestWords:
    def test_what_the_client_got_for_a_damaged_object(self) -> None:
        taken = loads(VICTIM, DAMAGE)(passing("contained"))
        assert judge(taken).observed.endswith("status 200 and the right token ids, by luck")
        assert judge(other_ids(VICTIM)(taken)).observed.endswith("status 200 and wrong token ids, without a word")
        assert judge(fails(VICTIM)(taken)).observed.endswith("the client got status 500")
        assert DAMAGE in judge(taken).observed

    def test_the_ids_of_the_object_in_its_place_are_recognised(self) -> None:
        found = judge(other_ids(VICTIM)(passing("contained")))
        assert any("mixed up" in cause for cause in found.causes)

    @pytest.mark.parametrize(
        ("spoil", "words"),
        [
            (fault(rehearsed=False, problem="X: y"), "the twin's object did not go through the probe: X: y"),
            (fault(receipt=None, problem="no probe"), "it was not injected: no probe"),
            (fault(verified=False), "it was injected, and the store does not show it"),
            (fault(healed=False), "the store could not be put back as it was"),
            (of_the_twin, "which no encode server saw as the victim's item"),
        ],
    )
    def test_why_a_fault_is_not_proven(self, spoil: Spoil, words: str) -> None:
        assert words in judge(spoil(passing("recomputed"))).observed

    def test_a_twin_that_fails_is_named(self) -> None:
        for index, label in ((FIRST, "first"), (TWIN, "twin")):
            assert f"request '{label}', without a fault" in judge(encodes(index)(passing("contained"))).expected

    def test_a_death_in_a_hook_points_at_the_connector(self) -> None:
        cell = both(raised, died(1))(replace(passing("contained"), owner=Owner.ENGINE))
        assert judge(cell).blame is Owner.CONNECTOR


class TestCounts:
    @pytest.mark.parametrize("topology", TOPOLOGIES)
    @pytest.mark.parametrize("name", ["recomputed", "contained"])
    def test_all_four_objects_were_saved_and_three_loaded(self, name: str, topology: str) -> None:
        evidence = judge(passing(name, topology)).evidence
        assert (evidence.saves, evidence.loads, evidence.local_encodes, evidence.digests_equal) == (4, 3, 1, True)
        if topology == "e-p-d":
            assert (evidence.kv_tokens, evidence.kv_tokens_expected, evidence.decode_encodes) == (1152, 1152, 0)

    @pytest.mark.parametrize("name", ["recomputed", "contained"])
    @pytest.mark.parametrize(
        ("spoil", "counts"),
        [
            (whole, (1, 1, 1)),
            (loads(VICTIM, DAMAGE), (1, 1, 1)),
            (given_up, (1, 1, 1)),
            (both(given_up, died(1)), (1, 1, 1)),
            (encodes(FRESH), (1, 1, 1)),
            (fault(healed=False), (1, 1, 1)),
            # done, and not met
            (loads(VICTIM), (1, 1, 0)),
            (never_came(VICTIM), (1, 1, 0)),
            (both(loads(VICTIM), fails(VICTIM)), (1, 1, 0)),
            (encodes(TWIN), (1, 1, 0)),
            (encodes(FIRST, TWIN, FRESH), (1, 1, 0)),
            # not provably done
            (fault(verified=False), (1, 0, 0)),
            (fault(rehearsed=False), (1, 0, 0)),
            (of_the_twin, (1, 0, 0)),
            (fault(receipt=None, verified=False), (0, 0, 0)),
            (lambda c: replace(c, answers=c.answers[:VICTIM]), (1, 0, 0)),
            (lambda c: replace(c, facts={}), (0, 0, 0)),
        ],
    )
    def test_injected_verified_met(self, name: str, spoil: Spoil, counts: tuple[int, int, int]) -> None:
        record = fault_record(spoil(passing(name)))
        assert record is not None
        assert record.kind == {"recomputed": "deleted", "contained": "truncated"}[name]
        assert (record.injected, record.verified, record.met_by_victim) == counts

    def test_a_cell_without_a_fault_has_none(self) -> None:
        for name in ("equality", "confined"):
            assert fault_record(passing(name)) is None
        assert fault_record(replace(passing("equality"), plan=Plan(()))) is None
