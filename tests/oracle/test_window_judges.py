"""The judge of windows: what may become of a victim in each of them, and that each is where its name says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_evidence import digest_of, edited, passing, with_answer, with_events
from spoilt_faults import VICTIM, Spoil, both, encodes, fails, fault, key, other_ids
from spoilt_windows import moved_line, without_injection

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.fault_judges import AGAIN, fault_record
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.windows import WINDOWS
from epd_conformance.verdict import Verdict

BEFORE, AFTER = ("looked-up", "allocated"), ("loaded", "chunk", "prefilled")


def topology_of(window: str) -> str:
    return "e-p-d" if window == "prefilled" else "e-pd"


def story(window: str) -> CellEvidence:
    return passing("in-window", topology_of(window), window=window)


def test_every_window_is_tried_here() -> None:
    assert {*BEFORE, *AFTER} == set(WINDOWS)


@pytest.mark.parametrize("window", WINDOWS)
def test_loaded_rightly_in_the_window_passes(window: str) -> None:
    found = judge(story(window))
    assert (found.verdict, found.reason) == (Verdict.PASS, ""), found.observed
    assert WINDOWS[window].words in found.expected
    record = fault_record(story(window))
    assert record is not None
    assert (record.injected, record.verified, record.met_by_victim) == (1, 1, 1)


@pytest.mark.parametrize("window", BEFORE)
@pytest.mark.parametrize("spoil", [encodes(VICTIM), fails(VICTIM), both(encodes(VICTIM), fails(VICTIM, 503))])
def test_before_the_load_it_may_be_encoded_or_refused(window: str, spoil: Spoil) -> None:
    assert judge(spoil(story(window))).verdict is Verdict.PASS


@pytest.mark.parametrize("window", AFTER)
def test_after_the_load_it_must_be_answered(window: str) -> None:
    assert judge(fails(VICTIM)(story(window))).reason == "request-failed"


@pytest.mark.parametrize("window", AFTER)
def test_held_before_the_load_is_another_window(window: str) -> None:
    found = judge(moved_line(VICTIM, "load", 0.05)(story(window)))
    assert (found.verdict, found.reason) == (Verdict.ERROR, "barrier")


@pytest.mark.parametrize("window", WINDOWS)
def test_without_the_injection_it_is_an_error(window: str) -> None:
    cell = without_injection(story(window))
    found = judge(cell)
    assert (found.verdict, found.reason) == (Verdict.ERROR, "barrier")
    assert "not done while it was held" in found.observed
    record = fault_record(cell)
    assert record is not None
    assert (record.injected, record.verified, record.met_by_victim) == (0, 0, 0)


@pytest.mark.parametrize("computed", [0, 29, 41, 300])
def test_a_chunk_ends_within_the_item(computed: int) -> None:
    cell = story("chunk")
    found = judge(edited(cell, {"computed": computed}, ev="held", id=key(cell, VICTIM)))
    assert (found.verdict, found.reason) == (Verdict.ERROR, "barrier")
    assert str(computed) in found.observed


def test_decode_begins_after_the_point_between_prefill_and_decode() -> None:
    cell = story("prefilled")
    rid = cell.answers[VICTIM].request_id

    def early(events: list[dict[str, object]]) -> None:
        opened = next(event for event in events if event["ev"] == "opened" and event["req"] == rid)
        next(e for e in events if e["ev"] == "kv-new" and rid in str(e["req"]))["t"] = float(str(opened["t"])) - 0.001

    assert judge(with_events(cell, early)).observed == "the decode server had begun when it was let go"


class TestAgain:
    def test_a_wrong_local_hit_fails(self) -> None:
        found = judge(other_ids(AGAIN)(story("loaded")))
        assert (found.verdict, found.reason) == (Verdict.FAIL, "tokens-differ")

    def test_a_refused_local_hit_fails_where_the_media_are_there(self) -> None:
        assert judge(fails(AGAIN)(story("loaded"))).reason == "request-failed"

    def test_without_media_it_may_be_refused(self) -> None:
        cell = story("loaded")
        short = replace(cell, plan=replace(cell.plan, metadata_only=True))

        def reference(events: list[dict[str, object]]) -> None:
            for event in events:
                if event["ev"] == "request" and event["server"] == "prefill_decode-0":
                    event["items"] = [{**item, "data": ["image_grid_thw"]} for item in event["items"]]  # type: ignore[union-attr, attr-defined]

        short = with_events(short, reference)
        assert judge(short).verdict is Verdict.PASS
        assert judge(fails(AGAIN)(short)).verdict is Verdict.PASS
        assert judge(fails(AGAIN, 0)(short)).verdict is not Verdict.PASS
        assert judge(other_ids(AGAIN)(short)).reason == "tokens-differ"

    def test_loaded_again_is_no_local_hit(self) -> None:
        cell = story("loaded")
        start = cell.answers[AGAIN].started
        load = next(event for event in cell.during if event["ev"] == "load" and event["id"] == key(cell, VICTIM))
        again = {**load, "t": start + 0.09, "digest": load["digest"]}
        found = judge(replace(cell, during=(*cell.during, again)))
        assert (found.verdict, found.reason) == (Verdict.INCONCLUSIVE, "evicted")
        wrong = judge(replace(cell, during=(*cell.during, {**again, "digest": digest_of("other")})))
        assert wrong.reason == "digest-differs"


def test_the_problem_is_told() -> None:
    cell = fault(problem="StackError: nothing can be held")(without_injection(story("allocated")))
    assert judge(cell).observed.endswith("StackError: nothing can be held")
    assert judge(with_answer(cell, VICTIM, status=200)).verdict is Verdict.ERROR
