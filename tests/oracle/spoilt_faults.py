"""Ways of spoiling the stories of cells with a fault, and what their judges must say to each."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from made_evidence import digest_of, edited, good_answer, inserted, item_key, with_answer, with_events, without

from epd_conformance.oracle.answers import NO_IDS
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.fault_judges import FIRST, FRESH, TWIN, VICTIM
from epd_conformance.verdict import Owner, Verdict

Spoil = Callable[[CellEvidence], CellEvidence]
PLAIN, BAITED, HOSTILE = range(3)


def key(cell: CellEvidence, index: int) -> str:
    request = cell.plan.requests[index]
    return item_key(request.images[0], request.uuids[0])


def of(cell: CellEvidence, index: int) -> Callable[[dict[str, Any]], bool]:
    """Whether a line of the consumer is about one of the cell's requests."""
    rid, mine, (consumer,) = cell.answers[index].request_id, key(cell, index), cell.roles.consumers

    def about(event: dict[str, Any]) -> bool:
        requests = [event.get("req"), *(new["req"] for new in event.get("new") or ())]
        return event["server"] == consumer and (event.get("id") == mine or any(rid in str(req) for req in requests))

    return about


def loads(index: int, digest: str = "") -> Spoil:
    """The consumer finds and loads the request's item: the bytes that were saved, or those of `digest`."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        about = of(cell, index)

        def change(events: list[dict[str, Any]]) -> None:
            for event in filter(about, events):
                if event["ev"] == "lookup":
                    event["found"] = True
                elif event["ev"] == "step":
                    event["encode"] = {}
                elif event["ev"] == "encoded":
                    event |= {"ev": "load", **({"digest": digest} if digest else {})}

        return with_events(cell, change)

    return spoil


def encodes(*indices: int) -> Spoil:
    """The consumer does not find the items of these requests and encodes them itself."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        def change(events: list[dict[str, Any]]) -> None:
            for index in indices:
                for event in filter(of(cell, index), events):
                    if event["ev"] == "lookup":
                        event["found"] = False
                    elif event["ev"] == "step":
                        event["encode"] = {event["new"][0]["req"]: [key(cell, index)]}
                    elif event["ev"] == "load":
                        event["ev"] = "encoded"

        return with_events(cell, change)

    return spoil


def never_came(index: int) -> Spoil:
    """The consumer never saw a request."""
    return lambda cell: with_events(cell, lambda events: [event for event in events if not of(cell, index)(event)])


def given_up(cell: CellEvidence) -> CellEvidence:
    """The victim's item is neither loaded nor encoded: its request was held back and then failed."""

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        about = of(cell, VICTIM)
        return [event for event in events if not (about(event) and event["ev"] in ("step", "encoded"))]

    return fails(VICTIM)(with_events(cell, change))


def loaded_early(index: int) -> Spoil:
    """The consumer held the request back until its item was loaded, and scheduled it then."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        def change(events: list[dict[str, Any]]) -> None:
            step, load = (
                next(e for e in events if of(cell, index)(e) and e["ev"] == kind) for kind in ("step", "load")
            )
            step["t"], load["t"] = load["t"], step["t"]

        return with_events(cell, change)

    return spoil


def appeared(cell: CellEvidence) -> CellEvidence:
    """The victim's item was neither loaded nor encoded, and its request is answered: nobody knows from what."""

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in filter(of(cell, VICTIM), events):
            if event["ev"] == "step":
                event["encode"] = {}
        return [event for event in events if not (of(cell, VICTIM)(event) and event["ev"] == "encoded")]

    return with_events(cell, change)


def under_another_key(cell: CellEvidence) -> CellEvidence:
    """Consumer and encode server do not agree on the victim's key: it never looked for the damaged object."""

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts = [json.dumps(event) for event in events]
        return [
            json.loads(text.replace(key(cell, VICTIM), "other") if of(cell, VICTIM)(event) else text)
            for text, event in zip(texts, events, strict=True)
        ]

    return with_events(cell, change)


def fails(index: int, status: int = 500, **changes: Any) -> Spoil:
    return lambda cell: with_answer(cell, index, status=status, ids=(), prompt_ids=(), logprobs=(), **changes)


def other_ids(index: int) -> Spoil:
    return lambda cell: with_answer(cell, index, ids=good_answer(cell.plan.contrasts[index]).ids)


def fault(**changes: Any) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        return replace(cell, facts={**cell.facts, "fault": {**cell.facts["fault"], **changes}})

    return spoil


def receipt(**changes: Any) -> Spoil:
    return lambda cell: fault(receipt={**cell.facts["fault"]["receipt"], **changes})(cell)


def undamaged(cell: CellEvidence) -> CellEvidence:
    return receipt(after=cell.facts["fault"]["receipt"]["before"])(cell)


def moved(name: str, seconds: float) -> Spoil:
    return lambda cell: fault(**{name: cell.facts["fault"][name] + seconds})(cell)


def of_the_twin(cell: CellEvidence) -> CellEvidence:
    return receipt(key=key(cell, TWIN))(cell)


def says(name: str, server: str, value: int | None) -> Spoil:
    """A server says something else about itself afterwards; None where it says nothing."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        said = {**cell.facts[name], server: value}
        return replace(cell, facts={**cell.facts, name: {key: val for key, val in said.items() if val is not None}})

    return spoil


def both(*spoils: Spoil) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        for one in spoils:
            cell = one(cell)
        return cell

    return spoil


def not_admitted(index: int) -> Spoil:
    return lambda cell: replace(cell, admitted=cell.admitted - {cell.plan.requests[index].digest()})


def unprimed(cell: CellEvidence) -> CellEvidence:
    """The proxy has stopped to prime: no encode server saw the fresh item."""

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rid, mine = cell.answers[FRESH].request_id, key(cell, FRESH)
        return [
            event
            for event in events
            if event["server"] != "encode-0" or (rid not in str(event) and event.get("id") != mine)
        ]

    return with_events(encodes(FRESH)(cell), change)


def without_kv(index: int) -> Spoil:
    return lambda cell: without(cell, ev="kv-take", req=f"chatcmpl-{cell.answers[index].request_id}-d-00fedcba")


def lost(cell: CellEvidence) -> CellEvidence:
    (consumer,) = cell.roles.consumers
    return replace(
        cell, during=(*cell.during, {"ev": "lost", "t": 1e9, "server": consumer, "side": "worker", "error": "full"})
    )


def died(status: int, name: str = "e-pd.prefill_decode-0") -> Spoil:
    return lambda cell: replace(cell, deaths=({"name": name, "status": status, "text": "Traceback"},))


def raised(cell: CellEvidence) -> CellEvidence:
    (consumer,) = cell.roles.consumers
    return inserted(cell, {}, {"ev": "raise", "server": consumer, "side": "worker", "hook": "x", "error": "x"})


def outside(**paths: str | None) -> Spoil:
    """What lies outside afterwards; None for what is gone."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        after = copy.deepcopy(dict(cell.facts["after"]))
        for name, content in paths.items():
            name = f"stack/{name}"
            if content is None:
                del after[name]
            else:
                after[name] = content
        return replace(cell, facts={**cell.facts, "after": after})

    return spoil


def bait_found(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"found": True}, ev="lookup", id=key(cell, BAITED))


def bait_loaded(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"ev": "load"}, ev="encoded", id=key(cell, BAITED))


def media_came(index: int) -> Spoil:
    """A request reached the consumer with its media."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        def change(events: list[dict[str, Any]]) -> None:
            for event in filter(of(cell, index), events):
                for item in event.get("items", ()):
                    item["data"] = ["image_grid_thw", "pixel_values"]

        return with_events(cell, change)

    return spoil


def answered(*, right: bool) -> Spoil:
    """The victim was answered, with the baseline's ids or others; nobody knows from what."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        asked, shown = cell.plan.requests[VICTIM], (cell.plan.requests if right else cell.plan.contrasts)[VICTIM]
        good = replace(good_answer(asked), ids=good_answer(shown).ids)
        changes = {"status": 200, "error": None, "prompt_ids": good.prompt_ids, "logprobs": good.logprobs}
        return with_answer(cell, VICTIM, ids=good.ids, **changes)

    return spoil


DAMAGE = digest_of("damage")
E_PD, E_P_D = ("e-pd", "prefill_decode-0"), ("e-p-d", "prefill-0")

# As in test_judges.NEGATIVE: judge, topology, what is spoilt, verdict, reason, rung, whom it points at besides the owner.
SPOILT: list[tuple[str, str, Spoil, Verdict, str, str | None, Owner | None]] = [
    row
    for judge in ("recomputed", "contained")
    for topology, consumer in (E_PD, E_P_D)
    for row in (
        # what the victim's consumer took, and what its client got
        (judge, topology, loads(VICTIM, DAMAGE), Verdict.FAIL, "digest-differs", "digest", None),
        (judge, topology, both(loads(VICTIM, DAMAGE), other_ids(VICTIM)), Verdict.FAIL, "digest-differs", "digest", None),
        (judge, topology, both(loads(VICTIM, DAMAGE), fails(VICTIM)), Verdict.FAIL, "digest-differs", "digest", None),
        (judge, topology, both(loads(VICTIM, DAMAGE), fault(receipt=None)), Verdict.FAIL, "digest-differs", "digest", None),
        (judge, topology, other_ids(VICTIM), Verdict.FAIL, "tokens-differ", "tokens", None),
        (judge, topology, both(loads(VICTIM), other_ids(VICTIM)), Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
        (judge, topology, fails(VICTIM, 0, error="no end within 120 s"), Verdict.FAIL, "request-failed", "status", None),
        (judge, topology, fails(VICTIM, 200, error="cannot be read"), Verdict.FAIL, "request-failed", "status", None),
        (judge, topology, fails(VICTIM, 200, error=NO_IDS), Verdict.ERROR, "no-ids", None, None),
        (judge, topology, not_admitted(VICTIM), Verdict.INCONCLUSIVE, "not-admitted", None, None),
        # the servers afterwards
        (judge, topology, says("health", consumer, 503), Verdict.FAIL, "not-healthy", "liveness", None),
        (judge, topology, says("health", "encode-0", None), Verdict.FAIL, "not-healthy", "liveness", None),
        (judge, topology, says("busy", consumer, 1), Verdict.FAIL, "request-left", "residue", None),
        (judge, topology, says("busy", "encode-0", None), Verdict.INCONCLUSIVE, "not-counted", None, None),
        (judge, topology, both(says("busy", "encode-0", None), fails(FRESH)),
         Verdict.FAIL, "not-recovered", "liveness", None),
        (judge, topology, died(1), Verdict.FAIL, "server-died", "liveness", None),
        (judge, topology, both(died(1), raised), Verdict.FAIL, "server-died", "liveness", None),
        (judge, topology, died(1, "e-pd.proxy"), Verdict.FAIL, "server-died", "liveness", Owner.PROXY),
        (judge, topology, both(died(1), other_ids(VICTIM)), Verdict.FAIL, "server-died", "liveness", None),
        (judge, topology, died(-9), Verdict.ERROR, "killed-from-outside", "liveness", None),
        # a fresh item
        (judge, topology, encodes(FRESH), Verdict.FAIL, "not-recovered", "counters", None),
        (judge, topology, fails(FRESH), Verdict.FAIL, "not-recovered", "liveness", None),
        (judge, topology, other_ids(FRESH), Verdict.FAIL, "not-recovered", "liveness", Owner.ENGINE),
        (judge, topology, lambda c: edited(c, {"digest": DAMAGE}, ev="load", id=key(c, FRESH)),
         Verdict.FAIL, "not-recovered", "liveness", None),
        (judge, topology, unprimed, Verdict.INCONCLUSIVE, "fresh: local-encode", None, None),
        (judge, topology, not_admitted(FRESH), Verdict.INCONCLUSIVE, "fresh: not-admitted", None, None),
        (judge, topology, never_came(FRESH), Verdict.INCONCLUSIVE, "fresh: not-journalled", None, None),
        (judge, topology, both(encodes(FRESH), fault(verified=False)), Verdict.ERROR, "fault-not-proven", None, None),
        # the same without the fault
        (judge, topology, encodes(FIRST, TWIN, FRESH), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (judge, topology, encodes(FIRST), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (judge, topology, encodes(TWIN), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (judge, topology, fails(TWIN), Verdict.INCONCLUSIVE, "twin: request-failed", None, None),
        (judge, topology, other_ids(TWIN), Verdict.INCONCLUSIVE, "twin: tokens-differ", None, None),
        (judge, topology, lambda c: edited(c, {"digest": DAMAGE}, ev="load", id=key(c, TWIN)),
         Verdict.INCONCLUSIVE, "twin: digest-differs", None, None),
        (judge, topology, both(encodes(TWIN), loads(VICTIM, DAMAGE)), Verdict.FAIL, "digest-differs", "digest", None),
        # the fault itself
        (judge, topology, fault(rehearsed=False), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, fault(receipt=None), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, fault(verified=False, problem="OSError: x"), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, fault(healed=False), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, undamaged, Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, receipt(kind="replaced"), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, of_the_twin, Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, moved("injected_at", -0.1), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, moved("injected_at", 0.1), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, moved("healed_at", -0.1), Verdict.ERROR, "fault-not-proven", None, None),
        (judge, topology, lambda c: without(c, ev="save", id=key(c, VICTIM)),
         Verdict.ERROR, "fault-not-proven", None, None),
        # whether it was met
        (judge, topology, loads(VICTIM), Verdict.INCONCLUSIVE, "fault-not-met", None, None),
        (judge, topology, appeared, Verdict.INCONCLUSIVE, "fault-not-met", None, None),
        (judge, topology, under_another_key, Verdict.INCONCLUSIVE, "fault-not-met", None, None),
        # journals
        (judge, topology, lost, Verdict.INCONCLUSIVE, "journal-lost", None, None),
        (judge, topology, both(lost, encodes(FRESH)), Verdict.INCONCLUSIVE, "journal-lost", None, None),
        (judge, topology, both(lost, loads(VICTIM, DAMAGE)), Verdict.FAIL, "digest-differs", "digest", None),
        (judge, topology, lambda c: replace(c, answers=c.answers[:3]), Verdict.ERROR, "incomplete-evidence", None, None),
    )
] + [
    ("recomputed", "e-pd", fails(VICTIM), Verdict.FAIL, "request-failed", "status", None),
    ("recomputed", "e-pd", given_up, Verdict.FAIL, "request-failed", "status", None),
    ("recomputed", "e-pd", never_came(VICTIM), Verdict.INCONCLUSIVE, "fault-not-met", None, None),
    # failed, and not because of the fault
    ("contained", "e-pd", both(never_came(VICTIM), fails(VICTIM)), Verdict.INCONCLUSIVE, "fault-not-met", None, None),
    ("contained", "e-p-d", both(loads(VICTIM), fails(VICTIM)), Verdict.INCONCLUSIVE, "fault-not-met", None, None),
    # answered, and perhaps by a decode server that computed everything itself
    *[(judge, "e-p-d", without_kv(VICTIM), Verdict.INCONCLUSIVE, "kv-recompute", None, None)
      for judge in ("recomputed", "contained")],
    ("contained", "e-p-d", without_kv(TWIN), Verdict.INCONCLUSIVE, "twin: kv-recompute", None, None),
    ("contained", "e-p-d", without_kv(FRESH), Verdict.INCONCLUSIVE, "fresh: kv-recompute", None, None),
] + [
    ("fails-alone", topology, spoil, *rest)
    for topology, consumer in (E_PD, E_P_D)
    for spoil, *rest in (
        # it came with media after all, and was recomputed
        (media_came(VICTIM), Verdict.INCONCLUSIVE, "media-sent", None, None),
        (media_came(TWIN), Verdict.INCONCLUSIVE, "media-sent", None, None),
        (answered(right=True), Verdict.INCONCLUSIVE, "fault-not-met", None, None),
        (answered(right=False), Verdict.FAIL, "tokens-differ", "tokens", None),
        (never_came(VICTIM), Verdict.INCONCLUSIVE, "fault-not-met", None, None),
        (fails(VICTIM, 0, error="no end within 120 s"), Verdict.FAIL, "request-failed", "status", None),
        (encodes(TWIN), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (encodes(FRESH), Verdict.FAIL, "not-recovered", "counters", None),
        (fault(receipt=None), Verdict.ERROR, "fault-not-proven", None, None),
        (died(1), Verdict.FAIL, "server-died", "liveness", None),
        (says("health", consumer, 503), Verdict.FAIL, "not-healthy", "liveness", None),
        (says("busy", consumer, 1), Verdict.FAIL, "request-left", "residue", None),
        (lost, Verdict.INCONCLUSIVE, "journal-lost", None, None),
    )
] + [
    ("confined", topology, spoil, *rest)
    for topology, consumer in (E_PD, E_P_D)
    for spoil, *rest in (
        (outside(new="folder"), Verdict.FAIL, "wrote-outside", "store", None),
        (outside(**{"bait/object": DAMAGE}), Verdict.FAIL, "wrote-outside", "store", None),
        (outside(**{"bait/object": None}), Verdict.FAIL, "wrote-outside", "store", None),
        (both(outside(new="folder"), bait_found), Verdict.FAIL, "wrote-outside", "store", None),
        (both(outside(new="folder"), encodes(PLAIN)), Verdict.FAIL, "wrote-outside", "store", None),
        (bait_found, Verdict.FAIL, "read-outside", "store", None),
        (bait_loaded, Verdict.FAIL, "read-outside", "store", None),
        (both(bait_found, fails(BAITED)), Verdict.FAIL, "read-outside", "store", None),
        (says("health", consumer, 0), Verdict.FAIL, "not-healthy", "liveness", None),
        (says("busy", consumer, 2), Verdict.FAIL, "request-left", "residue", None),
        (says("busy", consumer, None), Verdict.INCONCLUSIVE, "not-counted", None, None),
        (died(1), Verdict.FAIL, "server-died", "liveness", None),
        (encodes(PLAIN), Verdict.INCONCLUSIVE, "twin: local-encode", None, None),
        (fails(PLAIN), Verdict.INCONCLUSIVE, "twin: request-failed", None, None),
        (never_came(BAITED), Verdict.INCONCLUSIVE, "not-reached", None, None),
        (both(never_came(BAITED), fails(BAITED, 502)), Verdict.INCONCLUSIVE, "not-reached", None, None),
        (lost, Verdict.INCONCLUSIVE, "journal-lost", None, None),
    )
]  # fmt: skip
