"""The judges: every one passes over a story that went well, and says no, with the right reason, to every way of spoiling it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_evidence import (
    NOTICED,
    edited,
    good_answer,
    inserted,
    key_of,
    passing,
    tampered,
    with_answer,
    with_base,
    with_events,
    without,
)
from made_proxied import EXCHANGED
from spoilt_faults import SPOILT as SPOILT_FAULTS
from spoilt_keys import SPOILT as SPOILT_KEYS
from spoilt_proxied import SPOILT as SPOILT_PROXIED
from spoilt_scripts import ALLOWED as ALLOWED_SCRIPTS
from spoilt_scripts import SPOILT as SPOILT_SCRIPTS
from spoilt_windows import SPOILT as SPOILT_WINDOWS

from epd_conformance.oracle import judges
from epd_conformance.oracle.answers import NO_IDS
from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.judges import JUDGES, judge
from epd_conformance.plans.plan import Plan
from epd_conformance.verdict import Owner, Verdict

Spoil = Callable[[CellEvidence], CellEvidence]

TOPOLOGIES = {
    "both": ("aggregated",),
    "kv-taken": ("e-p-d",),
    "one-token": ("e-p-d",),
    # Prefix caches are off where there is a KV connector.
    "encoding-options": ("e-pd",),
}
STORIES = [(name, topology) for name in JUDGES for topology in TOPOLOGIES.get(name, ("e-pd", "e-p-d"))]


def key(cell: CellEvidence, index: int = 0) -> str:
    return key_of(cell.plan.requests[0].images[index])


def contrast(cell: CellEvidence) -> str:
    return cell.plan.contrasts[0].digest()


def first_load(cell: CellEvidence) -> dict[str, str]:
    return {"ev": "load", "id": key(cell)}


def consumer(cell: CellEvidence) -> str:
    (server,) = cell.roles.consumers
    return server


def seen_by_consumer(cell: CellEvidence) -> dict[str, str]:
    return {"ev": "request", "server": consumer(cell)}


def moved_answer(cell: CellEvidence, index: int = -1) -> CellEvidence:
    return with_answer(cell, index, ids=good_answer(cell.plan.contrasts[0]).ids)


def dead(status: int, name: str = "e-pd.encode-0") -> Spoil:
    return lambda cell: replace(cell, deaths=({"name": name, "status": status, "text": "Traceback"},))


def swapped_by_the_proxy(cell: CellEvidence) -> CellEvidence:
    """The consumer gets the items in the other order than the client gave them, and answers accordingly."""

    def swap(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["server"] == consumer(cell) and event["ev"] == "request":
                first, second = event["items"]
                first["id"], second["id"] = second["id"], first["id"]

    return moved_answer(with_events(cell, swap))


def prefix_hit(cell: CellEvidence) -> CellEvidence:
    """The consumer's prefix cache covers the items of the last request, and nothing is loaded."""

    def hit(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        last = [event for event in events if event["ev"] == "step" and event["server"] == consumer(cell)][-1]
        last["new"][0]["computed"] = 288
        return [event for event in events if not (event["ev"] in ("load", "encoded") and event["t"] > last["t"])]

    return with_events(cell, hit)


def encoded_locally(cell: CellEvidence) -> CellEvidence:
    """The connector is off: the consumer encodes what it should have loaded."""

    def encode(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["ev"] == "step" and event["server"] == consumer(cell):
                event["encode"] = {event["new"][0]["req"]: [key(cell)]}
        return [event for event in events if event["ev"] not in ("load", "save")]

    return with_events(cell, encode)


def lost_lines(cell: CellEvidence) -> CellEvidence:
    line = {"ev": "lost", "t": 1e9, "server": consumer(cell), "side": "worker", "error": "No space left on device"}
    return replace(cell, during=(*cell.during, line))


def not_one_contrast(cell: CellEvidence) -> CellEvidence:
    return replace(cell, plan=replace(cell.plan, contrasts=()))


def contrast_alike(cell: CellEvidence) -> CellEvidence:
    return with_base(cell, cell.plan.contrasts[0], ids=good_answer(cell.plan.requests[0]).ids)


def contrast_failed(cell: CellEvidence) -> CellEvidence:
    return with_base(cell, cell.plan.contrasts[0], status=500, ids=())


def contrast_never_asked(cell: CellEvidence) -> CellEvidence:
    return replace(cell, baseline={**cell.baseline, contrast(cell): {}})


def empty_everywhere(cell: CellEvidence) -> CellEvidence:
    spoilt = cell
    for request in cell.plan.compared:
        for arm in cell.baseline[request.digest()]:
            spoilt = with_base(spoilt, request, arm, ids=(), logprobs=(), margins=())
    for index in range(len(cell.answers)):
        spoilt = with_answer(spoilt, index, ids=(), logprobs=())
    return spoilt


def no_baseline(arm: str) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        digest = cell.plan.requests[0].digest()
        arms = {name: answer for name, answer in cell.baseline[digest].items() if name != arm}
        return replace(cell, baseline={**cell.baseline, digest: arms})

    return spoil


def with_facts(**facts: object) -> Spoil:
    return lambda cell: replace(cell, facts={**cell.facts, **facts})


def drop_items(cell: CellEvidence) -> CellEvidence:
    """The proxy forgot the items: the consumer sees a text, and the prompt is another."""
    return edited(cell, {"items": []}, **seen_by_consumer(cell))


def body(index: int, change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        value = json.loads(cell.answers[index].body or "")
        change(value["error"])
        return with_answer(cell, index, body=json.dumps(value))

    return spoil


def nan_logprob(cell: CellEvidence) -> CellEvidence:
    values = list(cell.answers[0].logprobs)
    values[3] = float("nan")
    return with_answer(cell, 0, logprobs=tuple(values))


def logprob_off(nats: float) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        values = cell.answers[0].logprobs
        return with_answer(cell, 0, logprobs=(*values[:-1], values[-1] + nats))

    return spoil


def primed_with(**edit: object) -> Spoil:
    return lambda cell: edited(cell, edit, ev="request", server="encode-0")


def prime_item_0_for_1(cell: CellEvidence) -> CellEvidence:
    """Both primers carry item 0: their numbers look right, item 1 was never primed."""

    def change(events: list[dict[str, Any]]) -> None:
        primers = [event for event in events if event["ev"] == "request" and event["server"] == "encode-0"]
        primers[1]["items"] = primers[0]["items"]

    return with_events(cell, change)


def primer_still_running(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"t": cell.during[-1]["t"] + 1}, ev="finished", server="encode-0")


def primer_begins_late(cell: CellEvidence) -> CellEvidence:
    late = cell.during[-1]["t"] + 1
    return edited(edited(cell, {"t": late}, ev="request", server="encode-0"), {"t": late}, ev="finished")


def second_loads(cell: CellEvidence) -> CellEvidence:
    load = next(event for event in cell.during if event["ev"] == "load")
    return inserted(cell, {"ev": "step", "server": consumer(cell)}, {**load, "t": cell.answers[1].started + 0.09})


def second_loads_after_eviction(cell: CellEvidence) -> CellEvidence:
    freed = inserted(
        cell,
        {"ev": "load"},
        {"ev": "step", "server": consumer(cell), "new": [], "encode": {}, "allocated": [], "free": [key(cell)]},
    )
    return second_loads(freed)


def second_on_another_server(cell: CellEvidence) -> CellEvidence:
    """Two consumers, and the second request went to the other, which rightly loads."""

    def move(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["server"] == consumer(cell) and event["t"] > cell.answers[1].started:
                event["server"] = "prefill-1"

    moved = with_events(second_loads(cell), move)
    return replace(moved, roles=replace(cell.roles, consumers=cell.roles.consumers | {"prefill-1"}))


def freed_in_between(cell: CellEvidence) -> CellEvidence:
    """The consumer let an item go, and the journal shows no load for its second use."""
    return inserted(
        cell,
        {"ev": "load"},
        {"ev": "step", "server": consumer(cell), "new": [], "encode": {}, "allocated": [], "free": [key(cell)]},
    )


def invented(cell: CellEvidence) -> CellEvidence:
    encoded = next(event for event in cell.during if event["ev"] == "encoded")

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["ev"] == "step":
                event["encode"] = {}
        return [event for event in events if event["ev"] != "encoded"]

    return inserted(
        with_events(cell, change), {"ev": "step", "server": consumer(cell)}, {**encoded, "ev": "load", "side": "worker"}
    )


def saved_before(cell: CellEvidence) -> CellEvidence:
    encoded = next(event for event in cell.during if event["ev"] == "encoded")
    save = {**encoded, "ev": "save", "server": "encode-0", "t": encoded["t"] - 0.01}
    return replace(cell, during=(save, *cell.during))


def not_encoded(cell: CellEvidence) -> CellEvidence:
    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["ev"] == "step":
                event["encode"] = {}
        return [event for event in events if event["ev"] != "encoded"]

    return with_events(cell, change)


def kv_line(**edit: object) -> Spoil:
    return lambda cell: edited(cell, edit, ev="kv-new", server="decode-0")


def short_prompt(cell: CellEvidence) -> CellEvidence:
    return kv_line(prompt=20)(cell)


def decode_encodes(cell: CellEvidence) -> CellEvidence:
    return inserted(cell, {"ev": "kv-new"}, {"ev": "kv-encode", "server": "decode-0", "encode": {"r": [0]}})


def item_behind_blocks(cell: CellEvidence) -> CellEvidence:
    def change(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["ev"] == "kv-new" and event["server"] == "decode-0":
                event["items"][-1]["offset"] = 287

    return with_events(cell, change)


def second_save(cell: CellEvidence) -> CellEvidence:
    save = next(event for event in cell.during if event["ev"] == "save")
    return inserted(cell, {"ev": "save"}, {**save, "t": save["t"] + 0.0002})


def held_instead(cell: CellEvidence) -> CellEvidence:
    """Everything that the cell loads was loaded in an earlier one already."""
    loads = [{**event, "t": event["t"] - 500} for event in cell.during if event["ev"] == "load"]
    saves = [{**event, "t": event["t"] - 600} for event in cell.during if event["ev"] == "save"]
    return without(replace(cell, before=(*cell.before, *saves, *loads)), ev="load")


def held_after_the_reset(cell: CellEvidence) -> CellEvidence:
    """The second request uses what was loaded before the reset, so the store gave nothing again."""
    moment = cell.answers[1].started - 0.001

    def move(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["ev"] == "load":
                event["t"] = moment

    return with_events(cell, move)


def reset_failed(cell: CellEvidence) -> CellEvidence:
    return replace(cell, facts={"reset_status": 404})


def touched(cell: CellEvidence) -> CellEvidence:
    """The encode server sees the text, under an id of the proxy's own."""
    line = {"ev": "request", "server": "encode-0", "req": "chatcmpl-another-00000000", "items": [], "prompt": 9}
    return inserted(cell, {"ev": "request"}, line)


def wrong_form(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"dtype": "bfloat16"}, **first_load(cell))


ALL_EXACT = (
    "equality",
    "text-only",
    "warm",
    "miss",
    "both",
    "recomputed",
    "contained",
    "fails-alone",
    "scripted",
    "order",
)

# (judge, topology, what is spoilt, verdict, reason, rung, whom it points at besides the owner)
NEGATIVE: list[tuple[str, str, Spoil, Verdict, str, str | None, Owner | None]] = [
    # deaths
    ("equality", "e-pd", dead(1), Verdict.FAIL, "server-died", "liveness", None),
    ("equality", "e-pd", dead(-9), Verdict.ERROR, "killed-from-outside", "liveness", None),
    ("equality", "e-pd", dead(-15), Verdict.ERROR, "killed-from-outside", "liveness", None),
    ("equality", "e-pd", dead(-11), Verdict.FAIL, "server-died", "liveness", None),
    ("equality", "e-pd", dead(1, "e-pd.proxy"), Verdict.FAIL, "server-died", "liveness", Owner.PROXY),
    # incomplete evidence
    ("equality", "e-pd", lambda c: replace(c, answers=()), Verdict.ERROR, "incomplete-evidence", None, None),
    ("equality", "e-pd", lambda c: with_answer(c, label="x"), Verdict.ERROR, "incomplete-evidence", None, None),
    ("warm", "e-pd", lambda c: replace(c, answers=c.answers[:1]), Verdict.ERROR, "incomplete-evidence", None, None),
    (
        "equality",
        "e-pd",
        lambda c: replace(c, plan=Plan(()), answers=()),
        Verdict.ERROR,
        "incomplete-evidence",
        None,
        None,
    ),
    ("stage-error", "e-pd", lambda c: replace(c, answers=()), Verdict.ERROR, "incomplete-evidence", None, None),
    # lost journal lines
    ("equality", "e-pd", lost_lines, Verdict.INCONCLUSIVE, "journal-lost", None, None),
    ("constructed", "e-pd", lost_lines, Verdict.INCONCLUSIVE, "journal-lost", None, None),
    ("warm", "e-pd", lambda c: lost_lines(second_loads(c)), Verdict.INCONCLUSIVE, "journal-lost", None, None),
    ("equality", "e-pd", lambda c: lost_lines(moved_answer(c)), Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
    # status and form of answers
    ("equality", "e-pd", lambda c: with_answer(c, status=500), Verdict.FAIL, "request-failed", "status", None),
    ("equality", "e-pd", lambda c: with_answer(c, error=NO_IDS, ids=()), Verdict.ERROR, "no-ids", None, None),
    (
        "equality",
        "e-pd",
        lambda c: with_answer(c, error="the stream ended without [DONE]"),
        Verdict.FAIL,
        "request-failed",
        "status",
        None,
    ),
    ("equality", "e-pd", lambda c: with_answer(c, ids=(), logprobs=()), Verdict.FAIL, "request-failed", "status", None),
    ("transported", "e-pd", lambda c: with_answer(c, ids=()), Verdict.FAIL, "request-failed", "status", None),
    (
        "equality",
        "e-pd",
        lambda c: with_base(with_answer(c, status=400), c.plan.requests[0], status=400),
        Verdict.INCONCLUSIVE,
        "not-admitted",
        None,
        None,
    ),
    # noise and baselines
    ("equality", "e-pd", lambda c: replace(c, floor_enough=False), Verdict.INCONCLUSIVE, "noise", None, None),
    ("equality", "e-pd", lambda c: replace(c, admitted=frozenset()), Verdict.INCONCLUSIVE, "not-admitted", None, None),
    ("equality", "e-pd", no_baseline("aggregated"), Verdict.ERROR, "no-baseline", None, None),
    ("equality", "e-p-d", no_baseline("p-d"), Verdict.ERROR, "no-baseline", None, None),
    ("equality", "e-p-d", no_baseline("aggregated"), Verdict.ERROR, "no-baseline", None, None),
    # tokens
    ("equality", "e-pd", moved_answer, Verdict.FAIL, "tokens-differ", "tokens", Owner.ENGINE),
    ("equality", "e-pd", swapped_by_the_proxy, Verdict.FAIL, "tokens-differ", "tokens", Owner.PROXY),
    (
        "equality",
        "e-pd",
        lambda c: with_answer(c, prompt_ids=(9,)),
        Verdict.FAIL,
        "tokens-differ",
        "tokens",
        Owner.PROXY,
    ),
    (
        "both",
        "aggregated",
        lambda c: with_answer(c, prompt_ids=(9,)),
        Verdict.FAIL,
        "tokens-differ",
        "tokens",
        Owner.ENGINE,
    ),
    (
        "equality",
        "e-pd",
        lambda c: moved_answer(encoded_locally(c)),
        Verdict.FAIL,
        "tokens-differ",
        "tokens",
        None,
    ),
    ("equality", "e-pd", nan_logprob, Verdict.FAIL, "logprobs-differ", "logprobs", Owner.ENGINE),
    ("equality", "e-pd", logprob_off(1e-3), Verdict.FAIL, "logprobs-differ", "logprobs", Owner.ENGINE),
    ("equality", "e-pd", lambda c: with_answer(c, logprobs=()), Verdict.ERROR, "no-logprobs", None, None),
    # digest
    (
        "equality",
        "e-pd",
        lambda c: edited(c, {"digest": "0"}, **first_load(c)),
        Verdict.FAIL,
        "digest-differs",
        "digest",
        None,
    ),
    (
        "equality",
        "e-pd",
        lambda c: moved_answer(edited(c, {"digest": "0"}, **first_load(c))),
        Verdict.FAIL,
        "digest-differs",
        "digest",
        None,
    ),
    ("transported", "e-pd", wrong_form, Verdict.FAIL, "form-differs", "digest", None),
    # transport
    ("equality", "e-pd", encoded_locally, Verdict.INCONCLUSIVE, "local-encode", None, None),
    ("equality", "e-pd", prefix_hit, Verdict.INCONCLUSIVE, "prefix-hit", None, None),
    ("equality", "e-pd", lambda c: without(c, **first_load(c)), Verdict.INCONCLUSIVE, "not-loaded", None, None),
    ("equality", "e-pd", lambda c: without(c, ev="save", id=key(c)), Verdict.INCONCLUSIVE, "not-saved", None, None),
    (
        "equality",
        "e-pd",
        lambda c: without(c, **seen_by_consumer(c)),
        Verdict.INCONCLUSIVE,
        "not-journalled",
        None,
        None,
    ),
    (
        "equality",
        "e-pd",
        lambda c: without(c, ev="step", server=consumer(c)),
        Verdict.INCONCLUSIVE,
        "not-journalled",
        None,
        None,
    ),
    ("equality", "e-pd", drop_items, Verdict.INCONCLUSIVE, "item-missing", None, None),
    ("transported", "e-pd", drop_items, Verdict.INCONCLUSIVE, "item-missing", None, None),
    ("transported", "e-pd", held_instead, Verdict.INCONCLUSIVE, "not-loaded", None, None),
    # KV
    ("equality", "e-p-d", lambda c: without(c, ev="kv-take"), Verdict.INCONCLUSIVE, "kv-recompute", None, None),
    ("equality", "e-p-d", lambda c: without(c, ev="kv-injected"), Verdict.INCONCLUSIVE, "kv-recompute", None, None),
    ("equality", "e-p-d", decode_encodes, Verdict.INCONCLUSIVE, "decode-encode", None, None),
    ("equality", "e-p-d", item_behind_blocks, Verdict.INCONCLUSIVE, "item-outside-blocks", None, None),
    ("equality", "e-p-d", short_prompt, Verdict.INCONCLUSIVE, "no-whole-block", None, None),
    (
        "equality",
        "e-p-d",
        lambda c: without(c, ev="kv-new", server="decode-0"),
        Verdict.INCONCLUSIVE,
        "not-journalled",
        None,
        None,
    ),
    ("text-only", "e-p-d", lambda c: without(c, ev="kv-take"), Verdict.INCONCLUSIVE, "kv-recompute", None, None),
    ("miss", "e-p-d", lambda c: without(c, ev="kv-take"), Verdict.INCONCLUSIVE, "kv-recompute", None, None),
    ("warm", "e-p-d", lambda c: without(c, ev="kv-take"), Verdict.INCONCLUSIVE, "kv-recompute", None, None),
    ("kv-taken", "e-p-d", lambda c: without(c, ev="kv-take"), Verdict.FAIL, "kv-recompute", "counters", None),
    ("kv-taken", "e-p-d", decode_encodes, Verdict.FAIL, "decode-encode", "counters", None),
    ("kv-taken", "e-p-d", short_prompt, Verdict.INCONCLUSIVE, "no-whole-block", "counters", None),
    ("kv-taken", "e-p-d", item_behind_blocks, Verdict.INCONCLUSIVE, "item-outside-blocks", "counters", None),
    (
        "kv-taken",
        "e-p-d",
        lambda c: replace(c, roles=replace(c.roles, decode=frozenset())),
        Verdict.ERROR,
        "no-decode-server",
        None,
        None,
    ),
    # text only
    (
        "text-only",
        "e-pd",
        lambda c: replace(passing("equality"), judge="text-only"),
        Verdict.ERROR,
        "not-text",
        None,
        None,
    ),
    # warm
    ("warm", "e-pd", second_loads, Verdict.FAIL, "not-warm", "counters", None),
    ("warm", "e-pd", second_loads_after_eviction, Verdict.INCONCLUSIVE, "evicted", None, None),
    ("warm", "e-pd", second_on_another_server, Verdict.INCONCLUSIVE, "other-server", None, None),
    ("warm", "e-pd", freed_in_between, Verdict.INCONCLUSIVE, "not-loaded", None, None),
    ("warm", "e-pd", prefix_hit, Verdict.INCONCLUSIVE, "prefix-hit", None, None),
    # miss
    ("miss", "e-pd", invented, Verdict.FAIL, "invented", "counters", None),
    ("miss", "e-pd", saved_before, Verdict.ERROR, "not-a-miss", None, None),
    ("miss", "e-pd", not_encoded, Verdict.INCONCLUSIVE, "not-encoded", None, None),
    ("miss", "e-pd", lambda c: prefix_hit(not_encoded(c)), Verdict.INCONCLUSIVE, "prefix-hit", None, None),
    ("miss", "e-pd", drop_items, Verdict.INCONCLUSIVE, "not-journalled", None, None),
    ("miss", "e-pd", moved_answer, Verdict.FAIL, "tokens-differ", "tokens", None),
    # twice
    ("twice", "e-pd", second_save, Verdict.FAIL, "not-once", "counters", None),
    ("twice", "e-pd", held_instead, Verdict.FAIL, "not-once", "counters", None),
    # untouched
    ("untouched", "e-pd", touched, Verdict.FAIL, "encoder-touched", "counters", None),
    (
        "untouched",
        "e-pd",
        lambda c: without(c, "before", server="encode-0", side="scheduler"),
        Verdict.INCONCLUSIVE,
        "not-journalled",
        None,
        None,
    ),
    ("untouched", "e-pd", lambda c: without(c, ev="request"), Verdict.INCONCLUSIVE, "not-journalled", None, None),
    # primed once
    (
        "primed-once",
        "e-pd",
        lambda c: without(c, ev="request", server="encode-0"),
        Verdict.FAIL,
        "not-primed-once",
        "counters",
        None,
    ),
    ("primed-once", "e-pd", primed_with(items=[]), Verdict.FAIL, "not-primed-once", "counters", None),
    ("primed-once", "e-pd", prime_item_0_for_1, Verdict.FAIL, "not-primed-once", "counters", None),
    ("primed-once", "e-pd", primer_still_running, Verdict.FAIL, "primed-late", "counters", None),
    ("primed-once", "e-pd", primer_begins_late, Verdict.FAIL, "primed-late", "counters", None),
    (
        "primed-once",
        "e-pd",
        lambda c: without(c, **seen_by_consumer(c)),
        Verdict.INCONCLUSIVE,
        "not-journalled",
        None,
        None,
    ),
    # stage error
    ("stage-error", "e-pd", lambda c: with_answer(c, status=200), Verdict.FAIL, "unclear-error", "status", None),
    ("stage-error", "e-pd", lambda c: with_answer(c, body="oops"), Verdict.FAIL, "unclear-error", "status", None),
    ("stage-error", "e-pd", lambda c: with_answer(c, body='"error"'), Verdict.FAIL, "unclear-error", "status", None),
    ("stage-error", "e-pd", body(1, lambda e: e.pop("request_id")), Verdict.FAIL, "unclear-error", "status", None),
    ("stage-error", "e-pd", body(0, lambda e: e.update(stage="?")), Verdict.FAIL, "unclear-error", "status", None),
    # constructed
    (
        "constructed",
        "e-pd",
        lambda c: without(c, "before", server="encode-0", side="worker"),
        Verdict.FAIL,
        "not-constructed",
        "counters",
        None,
    ),
    ("constructed", "e-pd", with_facts(servers=[]), Verdict.INCONCLUSIVE, "no-server", None, None),
    # encode only
    ("encode-only", "e-pd", with_facts(status=500), Verdict.FAIL, "request-failed", "status", None),
    ("encode-only", "e-pd", with_facts(blocks={"encode-0": 4096}), Verdict.FAIL, "kv-cache-on-encode", "counters", None),
    ("encode-only", "e-pd", with_facts(completion_tokens=1), Verdict.FAIL, "token-on-encode", "counters", None),
    ("encode-only", "e-pd", with_facts(blocks={}), Verdict.INCONCLUSIVE, "not-journalled", None, None),
    ("encode-only", "e-pd", with_facts(completion_tokens=None), Verdict.INCONCLUSIVE, "not-journalled", None, None),
    # both
    ("both", "aggregated", reset_failed, Verdict.ERROR, "not-reset", None, None),
    (
        "both",
        "aggregated",
        lambda c: without(c, ev="save"),
        Verdict.INCONCLUSIVE,
        "not-saved",
        None,
        None,
    ),
    ("both", "aggregated", held_after_the_reset, Verdict.INCONCLUSIVE, "not-loaded", None, None),
    ("both", "aggregated", lambda c: without(c, ev="load"), Verdict.INCONCLUSIVE, "not-loaded", None, None),
    *[(name, "", lambda c: with_answer(c, status=500), Verdict.FAIL, "request-failed", "status", None)
      for name in JUDGES
      if name not in ("stage-error", "constructed", "encode-only", "recomputed", "contained", "fails-alone", "confined",
                      "in-window", "scripted", "ended", "text-ended", "named", *EXCHANGED)],
    *[(name, "", contrast_alike, Verdict.INCONCLUSIVE, "no power", None, None) for name in ALL_EXACT],
    *[(name, "", contrast_failed, Verdict.ERROR, "no-contrast", None, None) for name in ALL_EXACT],
    *[(name, "", contrast_never_asked, Verdict.ERROR, "no-contrast", None, None) for name in ALL_EXACT],
    *[(name, "", not_one_contrast, Verdict.ERROR, "no-contrast", None, None) for name in ALL_EXACT],
    *SPOILT_FAULTS,
    *SPOILT_SCRIPTS,
    *SPOILT_PROXIED,
    *SPOILT_WINDOWS,
    *SPOILT_KEYS,
]  # fmt: skip


def name_of(value: object) -> str | None:
    return getattr(value, "__name__", None) if callable(value) else None


@pytest.mark.parametrize(("name", "topology"), STORIES)
@pytest.mark.parametrize("images", [1, 2, 3])
def test_a_story_that_goes_well_passes(name: str, topology: str, images: int) -> None:
    found = judge(passing(name, topology, images=images))
    assert (found.verdict, found.reason, found.observed[:0]) == (Verdict.PASS, "", "")
    assert found.blame is None
    assert found.rung is None


@pytest.mark.parametrize(("name", "topology", "spoil", "verdict", "reason", "rung", "blame"), NEGATIVE, ids=name_of)
def test_a_spoilt_story_is_named(
    name: str, topology: str, spoil: Spoil, verdict: Verdict, reason: str, rung: str | None, blame: Owner | None
) -> None:
    found = judge(spoil(passing(name, topology)))
    assert (found.verdict, found.reason, found.rung, found.blame) == (verdict, reason, rung, blame), found.observed
    # A person must be able to see from the text alone what was there.
    assert found.observed


@pytest.mark.parametrize("topology", ["e-pd", "e-p-d"])
@pytest.mark.parametrize("change", ALLOWED_SCRIPTS)
def test_a_request_with_a_damaged_item_may_be_answered_or_fail(topology: str, change: Spoil) -> None:
    found = judge(change(passing("scripted", topology)))
    assert (found.verdict, found.observed) == (Verdict.PASS, "so it was")


def test_every_reason_has_a_control() -> None:
    folder = Path(judges.__file__).parent
    names = [path.name for path in folder.glob("*judges.py")] + ["rungs.py", "transport.py"]
    source = "".join((folder / name).read_text(encoding="utf-8") for name in names)
    words = set(re.findall(r'(?:reason=|inconclusive\(\s*|_fail\(\s*)"([a-z -]+)"', source))
    words |= set(re.findall(r'"([a-z]+(?:-[a-z]+)+): ', source))
    shown = {reason for *_, reason, _, _ in NEGATIVE}
    # Conditional expressions and a detail of the transport's own tests.
    words |= {"killed-from-outside", "server-died", "invented", "not-encoded", "prefix-hit", "kv-recompute"}
    assert words - shown == {"several-consumers"}
    documented = (Path(judges.__file__).parents[2] / "docs" / "fair-comparison.md").read_text(encoding="utf-8")
    assert {word for word in words if f"`{word}`" not in documented} == set()


def test_every_judge_has_stories() -> None:
    assert set(NOTICED) == set(JUDGES) == {name for name, _ in STORIES} == {name for name, *_ in NEGATIVE}
    with pytest.raises(KeyError):
        judge(replace(passing("equality"), judge="nobody"))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_single_tampering_leaves_a_pass(data: st.DataObject) -> None:
    name, topology = data.draw(st.sampled_from([pair for pair in STORIES if NOTICED[pair[0]]]))
    prompt = data.draw(st.integers(100, 400).filter(lambda length: (length - 1) % 32 != 0))
    cell = passing(name, topology, images=data.draw(st.integers(1, 3)), prompt=prompt)
    assert judge(cell).verdict is Verdict.PASS
    what, changed = data.draw(st.sampled_from(list(tampered(cell))), label="tampering")
    assert judge(changed).verdict is not Verdict.PASS, what


@pytest.mark.parametrize(("name", "topology"), STORIES)
def test_every_tampering_is_noticed_once_over(name: str, topology: str) -> None:
    survived = [what for what, cell in tampered(passing(name, topology)) if judge(cell).verdict is Verdict.PASS]
    assert survived == []


@pytest.mark.parametrize(("name", "topology"), STORIES)
def test_evidence_survives_json(name: str, topology: str) -> None:
    for cell in (passing(name, topology), dead(1)(passing(name, topology))):
        back = CellEvidence.from_json(json.loads(json.dumps(cell.to_json())))
        assert judge(back) == judge(cell)
        assert json.dumps(back.to_json()) == json.dumps(cell.to_json())
    with pytest.raises(ValueError, match="not a cell"):
        CellEvidence.from_json({**passing(name, topology).to_json(), "schema": "other"})


def test_spoilt_evidence_survives_json() -> None:
    for name, topology, spoil, *_ in NEGATIVE:
        cell = spoil(passing(name, topology))
        assert judge(CellEvidence.from_json(json.loads(json.dumps(cell.to_json())))) == judge(cell)


def test_empty_answers_on_both_sides_never_pass() -> None:
    for name in ALL_EXACT:
        assert judge(empty_everywhere(passing(name))).verdict is not Verdict.PASS


def test_a_difference_within_the_noise_floor_passes() -> None:
    cell = replace(logprob_off(1e-3)(passing("equality")), floor=1e-3)
    assert judge(cell).verdict is Verdict.PASS
    assert judge(replace(cell, floor=1e-4)).reason == "logprobs-differ"


def test_counts_of_a_pass_are_those_of_the_journal() -> None:
    evidence = judge(passing("equality", "e-p-d", images=3)).evidence
    assert (evidence.saves, evidence.loads, evidence.local_encodes, evidence.digests_equal) == (3, 3, 0, True)
    assert (evidence.kv_tokens, evidence.kv_tokens_expected, evidence.decode_encodes) == (288, 288, 0)
    assert judge(passing("equality", "e-pd")).evidence.kv_tokens is None


class TestBlame:
    def test_wrong_bytes_point_at_the_connector_whoever_owns_the_requirement(self) -> None:
        for owner, blame in (("connector", None), ("engine", Owner.CONNECTOR), ("proxy", Owner.CONNECTOR)):
            cell = passing("equality", owner=owner)
            assert judge(edited(cell, {"digest": "0"}, **first_load(cell))).blame is blame

    def test_a_partly_proven_request_accuses_no_engine(self) -> None:
        """One item was loaded rightly, the other one's way is unknown: equal digests are not shown."""
        cell = passing("equality")
        unknown = moved_answer(without(cell, **first_load(cell)))
        assert judge(unknown).evidence.digests_equal is None
        assert judge(unknown).blame is None

    def test_a_load_that_nobody_saved_compares_no_digest(self) -> None:
        cell = moved_answer(without(passing("equality"), ev="save"))
        found = judge(cell)
        assert found.reason == "tokens-differ"
        assert found.evidence.digests_equal is None

    def test_the_ids_of_the_contrast_are_recognised(self) -> None:
        assert any("mixed up" in cause for cause in judge(moved_answer(passing("equality"))).causes)
        other = with_answer(passing("equality"), ids=tuple(range(12)))
        assert not any("mixed up" in cause for cause in judge(other).causes)

    def test_a_death_in_a_hook_of_the_connector_is_its_own(self) -> None:
        raised = {"ev": "raise", "server": "encode-0", "side": "worker", "hook": "save_caches", "error": "x"}
        for owner in ("engine", "proxy"):
            cell = dead(1)(passing("equality", owner=owner))
            assert judge(cell).blame is (Owner.ENGINE if owner == "proxy" else None)
            assert judge(inserted(cell, {}, raised)).blame is Owner.CONNECTOR
            # Another server's exception, or one of the KV connector, is not the EC connector's.
            assert judge(inserted(cell, {}, {**raised, "server": "x"})).blame is not Owner.CONNECTOR
            assert judge(inserted(cell, {}, {**raised, "side": "kv-worker"})).blame is not Owner.CONNECTOR

    def test_one_kill_from_outside_explains_the_other_deaths(self) -> None:
        own, outside = {"name": "a.b", "status": 1}, {"name": "a.c", "status": -9}
        for deaths in ((own, outside), (outside, own)):
            found = judge(replace(passing("equality"), deaths=deaths))
            assert (found.verdict, found.blame) == (Verdict.ERROR, None)
            assert found.observed.startswith("a.c")


def test_a_verdict_is_nothing_but_its_evidence() -> None:
    """Judging changes nothing and depends on nothing else: twice the same."""
    cell = passing("equality", "e-p-d")
    frozen = json.dumps(cell.to_json())
    first: Judgement = judge(cell)
    assert judge(cell) == first
    assert json.dumps(cell.to_json()) == frozen
