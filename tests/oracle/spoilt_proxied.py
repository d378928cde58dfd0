"""Ways of spoiling the stories of a proxy on real servers, and what their judges must say to each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from made_evidence import digest_of, edited, with_answer, with_base, with_events, without

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.exchanges import DIRECT, PROXY
from epd_conformance.verdict import Owner, Verdict

Spoil = Callable[[CellEvidence], CellEvidence]

FAIL, OPEN, ERROR = Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.ERROR


def got(to: str, index: int = 0, every: bool = False, **changes: Any) -> Spoil:
    """One exchange of the proxy's, or of the server that is asked directly, is otherwise; or `every` one."""

    def spoil(cell: CellEvidence) -> CellEvidence:
        found = [dict(one) for one in cell.facts["exchanges"]]
        mine = [one for one in found if one["to"] == to]
        for one in mine if every else [mine[index]]:
            one |= {name: value(one[name]) if callable(value) else value for name, value in changes.items()}
        return replace(cell, facts={**cell.facts, "exchanges": found})

    return spoil


def body(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def changed(text: str) -> str:
        value = json.loads(text)
        change(value)
        return json.dumps(value)

    return changed


def fact(**facts: Any) -> Spoil:
    return lambda cell: replace(cell, facts={**cell.facts, **facts})


def left(**changes: Any) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        first, *rest = cell.facts["left"]
        return replace(cell, facts={**cell.facts, "left": [{**first, **changes}, *rest]})

    return spoil


def consumed(cell: CellEvidence, **changes: Any) -> CellEvidence:
    (server,) = cell.roles.consumers
    return edited(cell, changes, ev="request", server=server)


def no_consumer(cell: CellEvidence) -> CellEvidence:
    (server,) = cell.roles.consumers
    return without(cell, ev="request", server=server)


def wrong_bytes(cell: CellEvidence) -> CellEvidence:
    """A load of other bytes than were saved, beside an answer that differs."""
    form = {"seq": 0, "t": 1.0, "server": "encode-0", "side": "worker", "id": "k"}
    save = {**form, "ev": "save", "digest": digest_of("right")}
    load = {**form, "ev": "load", "server": "prefill_decode-0", "digest": digest_of("wrong")}
    return replace(one_choice(cell), during=(*cell.during, save, load))


one_choice = got(PROXY, body=body(lambda value: value["choices"].pop()))


def another_id(cell: CellEvidence) -> CellEvidence:
    def change(events: list[dict[str, Any]]) -> None:
        next(one for one in events if one["ev"] == "request" and one["server"] == "encode-0")["req"] = "chatcmpl-x-e0-0"

    return with_events(cell, change)


def twice_one_id(cell: CellEvidence) -> CellEvidence:
    """Every leg of the second request has the id of the first."""
    first, second = (one["request_id"] for one in cell.facts["exchanges"])

    def change(events: list[dict[str, Any]]) -> None:
        for number, event in enumerate(events):
            if second in str(event.get("req", "")):
                event["req"] = event["req"].replace(second, first) + f"{number}"

    return with_events(cell, change)


def mixed_up(cell: CellEvidence) -> CellEvidence:
    other = cell.plan.requests[1].digest()
    return with_answer(cell, 0, ids=cell.baseline[other]["aggregated"].ids)


def same_prompt(cell: CellEvidence) -> CellEvidence:
    """The other order makes the same prompt, though the baseline answers it otherwise."""
    own = cell.baseline[cell.plan.requests[0].digest()]["aggregated"]
    return with_base(cell, cell.plan.contrasts[0], prompt_ids=own.prompt_ids)


def one_after_another(cell: CellEvidence) -> CellEvidence:
    return with_answer(with_answer(cell, 0, seconds=0.1), 1, started=cell.answers[0].started + 1)


def computed(position: int, tokens: int) -> Spoil:
    def spoil(cell: CellEvidence) -> CellEvidence:
        def change(events: list[dict[str, Any]]) -> None:
            mine = [
                one for one in events if one["ev"] == "step" and one["server"] in cell.roles.consumers and one["new"]
            ]
            mine[position]["new"][0]["computed"] = tokens

        return with_events(cell, change)

    return spoil


def longer_primer(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"prompt": 90}, ev="request", server="encode-0")


def one_length(cell: CellEvidence) -> CellEvidence:
    def change(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["ev"] == "request" and event["server"] in cell.roles.consumers:
                event["prompt"] = 300

    return with_events(cell, change)


def shorter_on_decode(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"prompt": 200}, ev="kv-new", server="decode-0")


HEAD = {"content-type": "text/event-stream"}

# As in test_judges.NEGATIVE.
SPOILT: list[tuple[str, str, Spoil, Verdict, str, str | None, Owner | None]] = [
    ("as-direct", "e-pd", one_choice, FAIL, "answer-differs", "answer", None),
    ("as-direct", "e-pd", wrong_bytes, FAIL, "answer-differs", "answer", Owner.CONNECTOR),
    ("as-direct", "e-pd", got(PROXY, status=502, body=""), FAIL, "answer-differs", "answer", None),
    ("as-direct", "e-pd", got(PROXY, body="{}"), FAIL, "answer-differs", "answer", None),
    (
        "as-direct",
        "e-pd",
        got(PROXY, 1, body=lambda b: b.replace("[DONE]", "")),
        FAIL,
        "answer-differs",
        "answer",
        None,
    ),
    (
        "as-direct",
        "e-pd",
        got(PROXY, 1, body=lambda b: b.replace("rd 1", "RD")),
        FAIL,
        "answer-differs",
        "answer",
        None,
    ),
    (
        "as-direct",
        "e-pd",
        got(PROXY, body=lambda b: b.replace("-0.5", "-0.51")),
        FAIL,
        "answer-differs",
        "answer",
        None,
    ),
    ("as-direct", "e-pd", got(PROXY, body=lambda b: b.replace("-0.5", "NaN")), FAIL, "answer-differs", "answer", None),
    ("as-direct", "e-pd", got(PROXY, body=lambda b: b.replace("look", "see")), FAIL, "answer-differs", "answer", None),
    ("as-direct", "e-pd", got(DIRECT, 1, body=lambda b: b.replace("word", "name")), OPEN, "noise", None, None),
    ("as-direct", "e-pd", got(DIRECT, status=400, body="{}"), OPEN, "not-exercised", None, None),
    ("as-direct", "e-pd", fact(exchanges=[]), ERROR, "incomplete-evidence", None, None),
    ("refused", "e-pd", got(PROXY, status=500), FAIL, "refusal-lost", "status", None),
    ("refused", "e-pd", got(PROXY, 1, body='{"error": "no"}'), FAIL, "refusal-lost", "status", None),
    ("refused", "e-pd", got(DIRECT, status=200), OPEN, "not-exercised", None, None),
    ("refused", "e-pd", got(DIRECT, body="no"), OPEN, "not-exercised", None, None),
    ("refused", "e-pd", fact(exchanges=[]), ERROR, "incomplete-evidence", None, None),
    ("not-begun", "e-pd", got(PROXY, status=200, headers=HEAD), FAIL, "begun-too-early", "status", None),
    ("not-begun", "e-pd", got(PROXY, status=200), FAIL, "begun-too-early", "status", None),
    ("not-begun", "e-pd", got(PROXY, status=0), FAIL, "begun-too-early", "status", None),
    ("not-begun", "e-pd", got(DIRECT, status=200), OPEN, "not-exercised", None, None),
    ("passed-on", "e-pd", got(PROXY, status=404), FAIL, "not-passed-on", "status", None),
    ("passed-on", "e-pd", got(PROXY, 1, body='{"count": 3, "tokens": [1]}'), FAIL, "not-passed-on", "status", None),
    ("passed-on", "e-pd", got(DIRECT, 1, status=404), OPEN, "not-exercised", None, None),
    ("passed-on", "e-pd", fact(exchanges=[]), ERROR, "incomplete-evidence", None, None),
    ("order", "e-pd", lambda c: with_answer(c, prompt_ids=(9,)), FAIL, "prompt-differs", "tokens", None),
    ("order", "e-pd", same_prompt, OPEN, "no power", None, None),
    ("prompt-tokens", "e-pd", lambda c: consumed(c, prompt=200), FAIL, "media-lost", "counters", None),
    ("prompt-tokens", "e-p-d", shorter_on_decode, FAIL, "media-lost", "counters", None),
    ("prompt-tokens", "e-pd", no_consumer, OPEN, "not-journalled", None, None),
    ("kept-apart", "e-pd", mixed_up, FAIL, "mixed-up", "tokens", None),
    ("kept-apart", "e-pd", lambda c: with_answer(c, prompt_ids=(9,)), FAIL, "prompt-differs", "tokens", None),
    ("kept-apart", "e-pd", lambda c: with_answer(c, ids=(9,)), OPEN, "other-ids", None, None),
    ("kept-apart", "e-pd", one_after_another, OPEN, "not-exercised", None, None),
    ("media-only", "e-pd", longer_primer, FAIL, "text-in-primer", "counters", None),
    ("media-only", "e-pd", one_length, OPEN, "no power", None, None),
    ("media-only", "e-pd", no_consumer, OPEN, "not-journalled", None, None),
    ("encoding-options", "e-pd", lambda c: consumed(c, items=[{"id": "x"}]), FAIL, "option-lost", "counters", None),
    ("encoding-options", "e-pd", computed(2, 288), FAIL, "option-lost", "counters", None),
    ("encoding-options", "e-pd", computed(1, 0), OPEN, "not-exercised", None, None),
    ("encoding-options", "e-pd", no_consumer, OPEN, "not-journalled", None, None),
    ("one-token", "e-p-d", got(PROXY, status=500), FAIL, "request-failed", "status", None),
    ("one-token", "e-p-d", fact(generated=[{"prefill-0": [1.0, 7.0]}] * 2), FAIL, "prefill-decodes", "counters", None),
    ("one-token", "e-p-d", fact(generated=[{"prefill-0": [1.0, 1.0]}] * 2), OPEN, "not-exercised", None, None),
    ("one-token", "e-p-d", fact(generated=[{"prefill-0": [None, 1.0]}] * 2), OPEN, "not-counted", None, None),
    ("one-token", "e-p-d", fact(generated=[]), ERROR, "incomplete-evidence", None, None),
    ("one-id", "e-pd", got(PROXY, status=500), FAIL, "request-failed", "status", None),
    ("one-id", "e-pd", another_id, FAIL, "id-lost", "counters", None),
    ("one-id", "e-pd", twice_one_id, FAIL, "id-lost", "counters", None),
    ("one-id", "e-p-d", got(PROXY, headers={}, request_id="", body="{}"), FAIL, "id-lost", "counters", None),
    ("one-id", "e-pd", no_consumer, OPEN, "not-journalled", None, None),
    ("work-ends", "e-pd", left(idle_s=None), FAIL, "works-for-nobody", "residue", None),
    ("work-ends", "e-pd", left(working=False), OPEN, "not-exercised", None, None),
    ("work-ends", "e-pd", left(idle_s=7.0, generated=[48000.0]), FAIL, "works-for-nobody", "residue", None),
    ("work-ends", "e-pd", left(idle_s=3.0, generated=[48000.0]), OPEN, "not-exercised", None, None),
    ("work-ends", "e-pd", left(generated=[None]), OPEN, "not-counted", None, None),
    ("work-ends", "e-pd", fact(left=[]), ERROR, "incomplete-evidence", None, None),
]
