"""The judges of the cells that ask a proxy on real servers more than right answers. Pure.

Each looks at its own requirement only, and at what neither connector nor engine has a hand in, as far as that can be: at
statuses, the ids of prompts, the lengths of what servers got. What a server alone can do is asked of one that stands alone (the
baseline's), which gets the same request directly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from epd_conformance.oracle import exchanges
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.exchanges import DIRECT, PROXY, Exchange
from epd_conformance.oracle.noise import MARGIN_FACTOR
from epd_conformance.oracle.rungs import (
    LOGPROB_SLACK,
    bad_status,
    comparable,
    first_of,
    inconclusive,
    no_power,
    other,
    passed,
)
from epd_conformance.verdict import Owner, Verdict

# How soon after a client has left its work has to end: the number in the requirement. The slack is for the look at the servers'
# metrics, on a machine that is busy.
LEFT_S = 5.0
LEFT_SLACK_S = 5.0

# A request's own id, where the client gave none, is in the body as vLLM makes it.
_BODY_PREFIX = "chatcmpl-"

Event = Mapping[str, Any]


def _fail(reason: str, rung: str, expected: str, observed: str, *causes: str) -> Judgement:
    return Judgement(Verdict.FAIL, reason=reason, rung=rung, expected=expected, observed=observed[:2000], causes=causes)


def _incomplete(expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.ERROR, reason="incomplete-evidence", expected=expected, observed=observed)


def _shown(one: Exchange) -> str:
    return f"status {one.status}: {one.error or one.body[:600]!r}"


def _pairs(cell: CellEvidence, directly: int) -> list[tuple[Exchange, list[Exchange]]] | Judgement:
    """For each request what the proxy answered, and so many direct answers."""
    found = exchanges.read(cell.facts)
    pairs = []
    for request in cell.plan.requests:
        mine = [one for one in found if one.label == request.label]
        ours = [one for one in mine if one.to == PROXY]
        theirs = [one for one in mine if one.to == DIRECT]
        if len(ours) != 1 or len(theirs) != directly:
            return _incomplete(
                f"one answer through the proxy and {directly} direct ones to {request.label!r}",
                f"{len(ours)} and {len(theirs)}",
            )
        pairs.append((ours[0], theirs))
    return pairs or _incomplete("at least one request", "none")


def _windows(cell: CellEvidence) -> list[list[Event]]:
    """The journal lines of each request of the plan; they are sent one after the other."""
    return [cell.events(index)[1] for index in range(len(cell.plan.requests))]


def _requests(events: list[Event], servers: frozenset[str]) -> list[Event]:
    return [event for event in events if event["ev"] in ("request", "kv-new") and event["server"] in servers]


# -- answers -----------------------------------------------------------------------------------------------------------


def as_direct(cell: CellEvidence) -> Judgement:
    """Every request is answered as the server that is asked directly answers it, whichever options it has."""
    pairs = _pairs(cell, 2)
    if isinstance(pairs, Judgement):
        return pairs
    return first_of(*(_unlike(cell, *pair) for pair in pairs)) or passed(
        "the answers of a server that is asked directly", f"{len(pairs)} answers, all alike"
    )


def _unlike(cell: CellEvidence, ours: Exchange, theirs: list[Exchange]) -> Judgement | None:
    slack = MARGIN_FACTOR * cell.floor + LOGPROB_SLACK
    try:
        wanted, again = (exchanges.said(one) for one in theirs)
    except ValueError as problem:
        return inconclusive(
            "not-exercised",
            f"a server that is asked directly answers {ours.label!r}",
            f"{problem}; {_shown(theirs[0])}",
        )
    if (unsure := _difference(again, wanted, slack)) is not None:
        return inconclusive("noise", f"the server answers {ours.label!r} alike when it is asked again", unsure)
    expected = f"request {ours.label!r}: the answer of a server that is asked directly"
    if ours.status != 200:
        return _fail("answer-differs", "answer", expected, _shown(ours))
    try:
        given = exchanges.said(ours)
    except ValueError as problem:
        return _fail("answer-differs", "answer", expected, f"{problem}: {ours.body[:600]!r}")
    if (unlike := _difference(given, wanted, slack)) is None:
        return None
    found = _fail(
        "answer-differs",
        "answer",
        expected,
        unlike,
        "an option did not reach the decode server, or its effect the client",
    )
    # Only of wrong bytes a connector could be the cause.
    return replace(found, blame=other(cell, Owner.CONNECTOR)) if _wrong_bytes(cell) else found


def _difference(ours: dict[str, Any], theirs: dict[str, Any], slack: float) -> str | None:
    if ours["usage"] is None or theirs["usage"] is None:
        # Of a stream only those get it who ask for it.
        ours, theirs = ({**one, "usage": None} for one in (ours, theirs))
    return exchanges.difference(ours, theirs, slack)


def _wrong_bytes(cell: CellEvidence) -> bool:
    saved: dict[str, set[str]] = {}
    for event in (*cell.before, *cell.during):
        if event["ev"] == "save":
            saved.setdefault(event["id"], set()).add(event["digest"])
    return any(
        event["ev"] == "load" and event["id"] in saved and event["digest"] not in saved[event["id"]]
        for event in cell.during
    )


def refused(cell: CellEvidence) -> Judgement:
    """What a server refuses reaches the client with the server's status and reason."""
    return _refusals(cell, _refusal_lost)


def not_begun(cell: CellEvidence) -> Judgement:
    """A stream that a server refuses has not begun: the client gets an error for a status."""
    return _refusals(cell, _begun)


def _refusals(cell: CellEvidence, wrong: Any) -> Judgement:
    pairs = _pairs(cell, 1)
    if isinstance(pairs, Judgement):
        return pairs
    for ours, (theirs,) in pairs:
        if not 400 <= theirs.status < 500 or not theirs.reason:
            return inconclusive(
                "not-exercised", f"a server that is asked directly refuses {ours.label!r} with a reason", _shown(theirs)
            )
    found = first_of(*(wrong(ours, theirs) for ours, (theirs,) in pairs))
    return found or passed(
        "the server's status and reason", ", ".join(f"{one.label}: {one.status}" for one, _ in pairs)
    )


def _refusal_lost(ours: Exchange, theirs: Exchange) -> Judgement | None:
    # As it stands in JSON: the reason may hold quotes.
    if ours.status == theirs.status and json.dumps(theirs.reason)[1:-1] in ours.body:
        return None
    expected = f"request {ours.label!r}: status {theirs.status} and {theirs.reason!r}"
    return _fail("refusal-lost", "status", expected, _shown(ours))


def _begun(ours: Exchange, theirs: Exchange) -> Judgement | None:
    if ours.status >= 400 and not ours.streams:
        return None
    expected = f"request {ours.label!r}: an error for a status, since the server refuses it with {theirs.status}"
    return _fail("begun-too-early", "status", expected, _shown(ours))


def passed_on(cell: CellEvidence) -> Judgement:
    """The routes that only a server can answer say what it says: the models it has, the tokens of a text."""
    found = exchanges.read(cell.facts)
    by = {(one.label, one.to): one for one in found}
    for label, said in (("models", _models), ("tokenize", _tokens)):
        ours, theirs = by.get((label, PROXY)), by.get((label, DIRECT))
        if ours is None or theirs is None:
            return _incomplete(f"an answer to {label!r} from both", f"{sorted(by)}")
        if theirs.status != 200 or said(theirs) is None:
            return inconclusive("not-exercised", f"a server that is asked directly answers {label!r}", _shown(theirs))
        if ours.status != 200 or said(ours) != said(theirs):
            return _fail("not-passed-on", "status", f"{label}: {said(theirs)}"[:600], _shown(ours))
    return passed("the decode server's own answers", "both alike")


def _models(one: Exchange) -> Any:
    body = one.whole
    entries = body.get("data") if isinstance(body, dict) else None
    if not isinstance(entries, list):
        return None
    return [(entry.get("id"), entry.get("max_model_len")) for entry in entries if isinstance(entry, dict)]


def _tokens(one: Exchange) -> Any:
    body = one.whole
    return (body.get("count"), body.get("tokens")) if isinstance(body, dict) and body.get("tokens") else None


# -- prompts -----------------------------------------------------------------------------------------------------------


def _prompt_differs(cell: CellEvidence, index: int) -> Judgement | None:
    """Whether the consumer answered to another prompt than the client's. Items of other sizes, or words, make another one."""
    request, answer = cell.plan.requests[index], cell.answers[index]
    base = cell.baseline[request.digest()]["aggregated"]
    if answer.prompt_ids == base.prompt_ids:
        return None
    place = next(
        (place for place, pair in enumerate(zip(answer.prompt_ids, base.prompt_ids, strict=False)) if len({*pair}) > 1),
        min(len(answer.prompt_ids), len(base.prompt_ids)),
    )
    return _fail(
        "prompt-differs",
        "tokens",
        f"request {request.label!r}: the prompt that an aggregated server makes of it, {len(base.prompt_ids)} tokens",
        f"{len(answer.prompt_ids)} tokens, another one at {place}",
        "items in another order or at another place, or the prompt of another request",
    )


def _answered(cell: CellEvidence) -> Iterator[Judgement | None]:
    for index in range(len(cell.plan.requests)):
        yield bad_status(cell, index) or comparable(cell, index)


def order(cell: CellEvidence) -> Judgement:
    """Items keep their order and their places: the prompt is that of the client's request, to the token."""
    found = first_of(
        *_answered(cell), *(_prompt_differs(cell, index) for index in range(len(cell.plan.requests))), no_power(cell)
    )
    for request, contrast in zip(cell.plan.requests, cell.plan.contrasts, strict=False):
        arms = [cell.baseline[one.digest()]["aggregated"] for one in (request, contrast)] if found is None else []
        if arms and arms[0].prompt_ids == arms[1].prompt_ids:
            found = inconclusive("no power", "items in another order make another prompt", "they make the same")
    return found or passed("the prompt of the client's request", "the same, to the token")


def prompt_tokens(cell: CellEvidence) -> Judgement:
    """Every consuming server counts as many prompt tokens as the aggregated server does."""
    found = first_of(*_answered(cell))
    if found is not None:
        return found
    roles = [servers for servers in (cell.roles.consumers, cell.roles.decode) if servers]
    for request, events in zip(cell.plan.requests, _windows(cell), strict=True):
        wanted = len(cell.baseline[request.digest()]["aggregated"].prompt_ids)
        for servers in roles:
            seen = _requests(events, servers)
            if not seen:
                return inconclusive(
                    "not-journalled",
                    "a journal of every consuming server shows the request",
                    f"none of {sorted(servers)} does",
                )
            for event in seen:
                if event["prompt"] != wanted:
                    return _fail(
                        "media-lost",
                        "counters",
                        f"request {request.label!r}: {wanted} prompt tokens on every server",
                        f"{event['server']} counts {event['prompt']}",
                        "a leg has lost its media, or was given other text",
                    )
    return passed("the prompt tokens of the aggregated server", "as many on every consuming server")


def kept_apart(cell: CellEvidence) -> Judgement:
    """Requests that run at the same time are each answered to their own prompt.

    Words that are drawn make every prompt another. Of ids that are neither a request's own nor another's this requirement says
    nothing: `EPD-LOAD-002` does.
    """
    count = range(len(cell.plan.requests))
    found = first_of(*_answered(cell), *(_mixed_up(cell, index) for index in count))
    alone = [answer.label for answer in cell.answers if not any(_overlap(answer, one) for one in cell.answers)]
    if found is None and alone:
        found = inconclusive("not-exercised", "requests that run at the same time", f"{alone} ran alone")
    for index in count if found is None else ():
        own = cell.baseline[cell.plan.requests[index].digest()]["aggregated"]
        if cell.answers[index].ids != own.ids:
            found = found or inconclusive(
                "other-ids",
                f"request {own.label!r}: the ids that it gets alone",
                "the right prompt, and ids that are nobody's",
            )
    return found or passed("each its own answer", f"{len(cell.answers)} answers at once")


def _overlap(one: Answer, another: Answer) -> bool:
    return (
        one is not another
        and one.started < another.started + another.seconds
        and another.started < one.started + one.seconds
    )


def _mixed_up(cell: CellEvidence, index: int) -> Judgement | None:
    request, answer = cell.plan.requests[index], cell.answers[index]
    if (found := _prompt_differs(cell, index)) is not None:
        return found
    if answer.ids == cell.baseline[request.digest()]["aggregated"].ids:
        return None
    for another in cell.plan.requests:
        if another is not request and cell.baseline[another.digest()]["aggregated"].ids == answer.ids:
            return _fail(
                "mixed-up", "tokens", f"request {request.label!r}: its own answer", f"the answer to {another.label!r}"
            )
    return None


# -- legs --------------------------------------------------------------------------------------------------------------


def media_only(cell: CellEvidence) -> Judgement:
    """What encode servers get does not grow with a request's text. The images of the plan are of one size."""
    found = first_of(*(bad_status(cell, index) for index in range(len(cell.plan.requests))))
    if found is not None:
        return found
    primers: list[int] = []
    consumed: list[int] = []
    for request, events in zip(cell.plan.requests, _windows(cell), strict=True):
        encode, consumers = (_requests(events, servers) for servers in (cell.roles.encode, cell.roles.consumers))
        if not encode or not consumers:
            return inconclusive(
                "not-journalled",
                "journals of an encode server and of a consumer show the request",
                f"not {request.label!r}",
            )
        primers.append(max(event["prompt"] for event in encode))
        consumed.append(consumers[0]["prompt"])
    if len({*consumed}) < len(consumed):
        return inconclusive("no power", "requests whose texts have different lengths", f"prompts of {consumed} tokens")
    if len({*primers}) > 1:
        return _fail(
            "text-in-primer",
            "counters",
            "primers of one length, whatever text a request has",
            f"primers of {primers} tokens, for prompts of {consumed}",
        )
    return passed("primers without the text", f"{primers[0]} tokens each, for prompts of {consumed}")


def encoding_options(cell: CellEvidence) -> Judgement:
    """The client's name for an item is its key on every server, and another salt finds nothing in the prefix cache.

    The same prompt three times: twice with one salt, then with another.
    """
    if len(cell.plan.requests) != 3:
        return _incomplete("the same request three times", f"{len(cell.plan.requests)} requests")
    found = first_of(*(bad_status(cell, index) for index in range(3)))
    if found is not None:
        return found
    computed: list[int] = []
    for request, events in zip(cell.plan.requests, _windows(cell), strict=True):
        for servers in (cell.roles.encode, cell.roles.consumers):
            seen = _requests(events, servers)
            if not seen:
                return inconclusive(
                    "not-journalled", "journals of both stages show each request", f"none of {sorted(servers)}"
                )
            for event in seen:
                keys = [item["id"] for item in event["items"]]
                # An adapter's name may stand before it.
                if not all(str(key).endswith(str(name)) for key, name in zip(keys, request.uuids, strict=False)):
                    return _fail(
                        "option-lost",
                        "counters",
                        f"request {request.label!r}: items {request.uuids} on every server",
                        f"{event['server']} has {keys}",
                        "the uuid was left out on the way",
                    )
        steps = [
            new["computed"]
            for event in events
            if event["ev"] == "step" and event["server"] in cell.roles.consumers
            for new in event["new"]
        ]
        computed.append(steps[0] if steps else 0)
    if computed[2]:
        return _fail(
            "option-lost",
            "counters",
            "under another cache_salt nothing is found in the prefix cache",
            f"{computed[2]} tokens were found",
            "the salt was left out on the way",
        )
    if not computed[1]:
        return inconclusive("not-exercised", "under the same salt the prefix cache has the prompt", "it had nothing")
    return passed(
        "uuid and salt on every server", f"key {cell.plan.requests[0].uuids[0]}, prefix hits of {computed} tokens"
    )


def one_token(cell: CellEvidence) -> Judgement:
    """A prefill server generates exactly one token for each request. `facts`: `generated`, counters before and after."""
    pairs = _pairs(cell, 0)
    if isinstance(pairs, Judgement):
        return pairs
    counts = cell.facts.get("generated") or []
    if len(counts) != len(pairs):
        return _incomplete("a count for each request", f"{len(counts)} for {len(pairs)}")
    for (ours, _), servers in zip(pairs, counts, strict=True):
        if ours.status != 200:
            return _fail("request-failed", "status", f"request {ours.label!r} is answered", _shown(ours))
        if not servers or any(count is None for pair in servers.values() for count in pair):
            return inconclusive("not-counted", "prefill servers count their tokens in /metrics", f"{servers}")
        made = sum(after - before for before, after in servers.values())
        if made == 0:
            return inconclusive("not-exercised", f"a prefill server gets {ours.label!r}", "none has generated a token")
        if made != 1:
            return _fail(
                "prefill-decodes", "counters", f"request {ours.label!r}: one token on prefill", f"{made:g} tokens"
            )
    return passed("one token on prefill", f"one for each of {len(pairs)} requests")


def one_id(cell: CellEvidence) -> Judgement:
    """Every server knows each request by the id that its client knows it by."""
    pairs = _pairs(cell, 0)
    if isinstance(pairs, Judgement):
        return pairs
    given: list[str] = []
    for ours, _ in pairs:
        if ours.status != 200:
            return _fail("request-failed", "status", f"request {ours.label!r} is answered", _shown(ours))
        body = ours.whole
        own = str(body.get("id") or "").removeprefix(_BODY_PREFIX) if isinstance(body, dict) else ""
        name = ours.headers.get("x-request-id") or ours.request_id or own
        if not name:
            return _fail("id-lost", "counters", f"request {ours.label!r} has an id", "its answer has none")
        given.append(name)
    roles = [servers for servers in (cell.roles.encode, cell.roles.consumers, cell.roles.decode) if servers]
    legs = [event for servers in roles for event in _requests(list(cell.during), servers)]
    for servers in roles:
        if len({event["req"] for event in legs if event["server"] in servers}) < len(pairs):
            return inconclusive(
                "not-journalled", "a leg of each request in every stage", f"too few on {sorted(servers)}"
            )
    for event in legs:
        if not any(name in event["req"] for name in given):
            return _fail(
                "id-lost", "counters", f"legs with one of {given}", f"{event['server']} knows one as {event['req']}"
            )
    for name, (ours, _) in zip(given, pairs, strict=True):
        for servers in roles:
            if not any(name in event["req"] for event in legs if event["server"] in servers):
                return _fail("id-lost", "counters", f"request {ours.label!r}: {name} on {sorted(servers)}", "not there")
    return passed("one id on all legs", f"{len(legs)} legs, all joined")


def work_ends(cell: CellEvidence) -> Judgement:
    """When a client leaves, no server works for it any more within five seconds. `facts`: `left`, see live/proxied.py."""
    records = list(cell.facts.get("left") or ())
    for request, record in zip(cell.plan.requests, records, strict=False):
        label = request.label
        if None in record["generated"] or None in record["running"].values():
            return inconclusive("not-counted", "servers tell in /metrics what they work on", f"{record}"[:600])
        if not record["working"] or (request.stream and record["status"] != 200):
            return inconclusive(
                "not-exercised", f"a server works on {label!r} when its client leaves", f"{record}"[:600]
            )
        made, asked = sum(record["generated"]), request.max_tokens * int(request.options.get("n") or 1)
        # Within the slack, too, where it has gone on to its end: that a server tells late what it works on does not explain it.
        if record["idle_s"] is None or (record["idle_s"] > LEFT_S and made >= asked):
            return _fail(
                "works-for-nobody",
                "residue",
                f"request {label!r}: no server works on it {LEFT_S:g} s after its client has left",
                f"running {record['running']}, after {made:g} of {asked} tokens",
                "the proxy does not notice that the client has left, or does not close its connection to the server",
            )
        if made >= asked:
            return inconclusive(
                "not-exercised", f"{label!r} is long enough to be cut short", f"all {asked} tokens were made"
            )
    if not records or [record["label"] for record in records] != [request.label for request in cell.plan.requests]:
        return _incomplete("a record for each request", f"{[record['label'] for record in records]}")
    return passed(f"the work ends within {LEFT_S:g} s", ", ".join(f"{record['idle_s']:.1f} s" for record in records))
