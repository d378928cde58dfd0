"""The judges of the layer `proxy`: what the fakes saw and what the clients got, against one requirement. Pure.

A judge looks at its own requirement only, as far as that can be: a proxy with one defect then fails one requirement, and its
failure says what to mend.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from epd_conformance.oracle.cell import Judgement
from epd_conformance.proxycheck import made
from epd_conformance.proxycheck.evidence import Got, ProxyEvidence, Seen
from epd_conformance.proxycheck.plan import CHAT, Send, mark
from epd_conformance.verdict import Verdict

# Time beyond a limit in which an end still counts as in time: the limit is the proxy's, the clock a busy machine's.
LIMIT_SLACK_S = 3.0

# How soon after a client has left its work has to end: the number in the requirement.
LEFT_S = 5.0

# Fields in which a prefill request may differ from the client's: limits of the output, choices, streaming, what only adds to
# the answer, and the connectors' own.
PREFILL_OWN = frozenset(
    {
        "max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "use_beam_search", "stream", "stream_options",
        "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "echo", "kv_transfer_params", "ec_transfer_params",
    }
)  # fmt: skip

# Fields in which a decode request may differ.
DECODE_OWN = frozenset({"kv_transfer_params", "ec_transfer_params"})

# What an encode server must get besides the item itself: it changes the encoding, its key, or the model that encodes.
ENCODING = ("model", "mm_processor_kwargs", "media_io_kwargs")
# What a consuming server must get besides.
CONSUMING = (*ENCODING, "cache_salt", "priority", "chat_template_kwargs")

_SHOWN = 300


def _pass(expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.PASS, expected=expected, observed=observed)


def _fail(reason: str, rung: str, expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.FAIL, reason=reason, rung=rung, expected=expected, observed=observed)


def _not_exercised(expected: str, observed: str) -> Judgement:
    return Judgement(Verdict.INCONCLUSIVE, reason="not-exercised", expected=expected, observed=observed)


def _first(reason: str, rung: str, expected: str, complaints: Iterator[str], good: str) -> Judgement:
    """A failure with the first complaints, a pass where there is none."""
    found = list(complaints)
    return _fail(reason, rung, expected, "; ".join(found[:3])) if found else _pass(expected, good)


def _where(lacking: Iterator[str], expected: str, judgement: Judgement) -> Judgement:
    """A judgement that passes only where nothing is lacking: what was never exercised is not shown by its having had no fault."""
    if judgement.verdict is Verdict.PASS and (found := list(lacking)):
        return _not_exercised(expected, "; ".join(found[:3]))
    return judgement


def _unreached(cell: ProxyEvidence, *roles: str, status: int | None = None) -> Iterator[str]:
    """Requests without a leg in one of the roles, where a status is given without one that was answered so."""
    for send in cell.plan.sends:
        for role in roles:
            if not any(status is None or leg.status == status for leg in cell.legs(send.label, role)):
                yield f"{send.label}: no {role} server {'got it' if status is None else f'answered {status}'}"


def _from_nowhere(cell: ProxyEvidence) -> Iterator[str]:
    """Requests that were answered with 200, and no decode server answered them so."""
    for send, got in cell.pairs:
        if got.status == 200 and not any(leg.status == 200 for leg in cell.legs(send.label, "decode")):
            yield f"{send.label}: no decode server answered it"


_ANSWERED = "each answer comes from a decode server"


def _shown(got: Got) -> str:
    status = "no answer" if got.status is None else f"status {got.status}"
    return f"{status} ({got.end}): {got.body[:_SHOWN]!r}"


def _wrong(cell: ProxyEvidence, send: Send, got: Got) -> str | None:
    """What is wrong with an answer, None where it is the right one."""
    if got.status != 200 or got.end != "whole":
        return f"{send.label}: {_shown(got)}"
    wanted = made.right(send.body, send.path, cell.contents(send.label), send.streams)
    said = made.said(got.body, send.streams)
    if said != wanted:
        return f"{send.label}: the answer says {str(said or got.body)[:_SHOWN]}, and should say {str(wanted)[:_SHOWN]}"
    return None


def _wrong_ones(cell: ProxyEvidence) -> Iterator[str]:
    for send, got in cell.pairs:
        if (wrong := _wrong(cell, send, got)) is not None:
            yield wrong


def _served(cell: ProxyEvidence) -> list[tuple[Send, Got]]:
    """The requests, without those through an API that the proxy does not serve: nobody has to serve them all."""
    return [(send, got) for send, got in cell.pairs if send.path == CHAT or got.status not in (404, 405)]


def right(cell: ProxyEvidence) -> Judgement:
    """Every request is answered as a server answers that is asked directly."""
    expected = "the answer that the decode server gives to the client's own request"
    found = _first("wrong-answer", "answer", expected, _wrong_ones(cell), f"{len(cell.got)} right answers")
    return _where(_from_nowhere(cell), _ANSWERED, found)


def untouched(cell: ProxyEvidence) -> Judgement:
    """No encode server gets a request."""

    def complaints() -> Iterator[str]:
        for seen in cell.seen:
            if seen.role == "encode" and seen.method == "POST":
                yield f"{seen.server} got {str(seen.body)[:_SHOWN]}"
        for send, got in _served(cell):
            if got.status != 200:
                yield f"{send.label}: {_shown(got)}"

    found = _first("encode-touched", "legs", "no request at an encode server, and an answer", complaints(), "none")
    return _where(_from_nowhere(cell), _ANSWERED, found)


# -- encode ----------------------------------------------------------------------------------------------------------------------


def _media(body: Any) -> list[tuple[str, str]]:
    """Kind and payload of the media of a request; nothing for what is no chat request."""
    try:
        return [(item.kind, item.payload) for item in made.items(body) if not item.reference]
    except made.Refused:
        return []


def _not_once(cell: ProxyEvidence) -> Iterator[str]:
    # Over all requests together: an item that several of them hold is primed for each.
    wanted = Counter(item for send in cell.plan.sends for item in _media(send.body))
    primed = Counter(
        item for leg in cell.calls if leg.role == "encode" and leg.status == 200 for item in _media(leg.body)
    )
    if primed != wanted:
        counts = ", ".join(f"{primed[item]} of {count}" for item, count in wanted.items())
        strange = primed.keys() - wanted.keys()
        yield f"of {len(wanted)} items primers came: {counts}" + (f"; {len(strange)} of no item" if strange else "")


def primed_once(cell: ProxyEvidence) -> Judgement:
    """Each item is primed exactly once, before any consumer gets the request."""

    def complaints() -> Iterator[str]:
        yield from _not_once(cell)
        for send in cell.plan.sends:
            ends = [leg.ended for leg in cell.legs(send.label, "encode")]
            begins = [leg.at for leg in cell.legs(send.label, "prefill", "decode")]
            if begins and any(end is None or end > min(begins) for end in ends):
                yield f"{send.label}: a consumer got it at {min(begins)} s, and its primers ended at {ends}"
            elif not begins:
                yield f"{send.label}: no consumer got it"

    return _first("not-primed-once", "legs", "one primer an item, all before prefill", complaints(), "once each")


def primed_and_right(cell: ProxyEvidence) -> Judgement:
    """Each request is answered rightly, and its items are primed exactly once."""

    def complaints() -> Iterator[str]:
        yield from _wrong_ones(cell)
        yield from _not_once(cell)

    found = _first("lost-request", "legs", "an answer, and one primer an item", complaints(), "both")
    return _where(_from_nowhere(cell), _ANSWERED, found)


def media_only(cell: ProxyEvidence) -> Judgement:
    """What encode servers get holds none of a request's text."""
    primers = [seen for seen in cell.calls if seen.role == "encode"]
    expected = "primers without any text of the request"
    if not primers:
        return _not_exercised("a primer", "no encode server got a request")

    def complaints() -> Iterator[str]:
        for seen in primers:
            for send in cell.plan.sends:
                if mark(send.label) in str(seen.body):
                    yield f"{seen.server} got {str(seen.body)[:_SHOWN]}"

    return _first("text-in-primer", "legs", expected, complaints(), f"{len(primers)} primers")


def half_primed(cell: ProxyEvidence) -> Judgement:
    """A request with an item that cannot be primed goes no further, and the client gets that item's error."""
    act = cell.plan.acts[0]

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            for leg in cell.legs(send.label, "prefill", "decode"):
                yield f"{send.label}: {leg.server} got it"
            if got.status != act.status or act.reason not in got.body:
                yield f"{send.label}: {_shown(got)}"

    expected = f"no consumer gets it; status {act.status} and {act.reason!r}"
    found = _first("half-primed", "legs", expected, complaints(), "the item's error")
    return _where(_unreached(cell, "encode", status=act.status), "an item that cannot be primed", found)


def side_by_side(cell: ProxyEvidence) -> Judgement:
    """Primers of one request overlap."""

    def complaints() -> Iterator[str]:
        for send in cell.plan.sends:
            legs = sorted(cell.legs(send.label, "encode"), key=lambda leg: leg.at)
            if not any(later.at < (leg.ended or 0.0) for leg, later in pairwise(legs)):
                spans = ", ".join(f"{leg.at}-{leg.ended}" for leg in legs)
                yield f"{send.label}: primers at {spans or 'no time'} s"

    return _first("one-after-the-other", "times", "two primers at the same time", complaints(), "they overlap")


def in_turn(cell: ProxyEvidence) -> Judgement:
    """Every encode server gets some of the requests."""
    used = {seen.server for seen in cell.calls if seen.role == "encode"}
    idle = sorted(name for name in cell.servers if name.startswith("encode-") and name not in used)
    return _first("idle-server", "legs", "every encode server is used", iter(idle), f"{len(used)} are used")


def another_server(cell: ProxyEvidence) -> Judgement:
    """Each request is answered rightly while an encode server is down that got requests before."""
    down = sorted({name for step in cell.plan.steps for name in step.down})
    used = {leg.server for leg in cell.calls}
    lacking = (f"{name} got no request while it was up" for name in down if name not in used)
    return _where(lacking, f"the proxy uses {', '.join(down)} while it is up", right(cell))


# -- what a leg holds ------------------------------------------------------------------------------------------------------------


def _prompt(body: Any, path: str, cell: ProxyEvidence, label: str) -> Any:
    try:
        return made.prompt(body, path, cell.contents(label))
    except made.Refused as refused:
        return f"no prompt: {refused}"


def _changed(theirs: Any, ours: Mapping[str, Any], allowed: frozenset[str]) -> list[str]:
    """Fields, other than messages, in which a leg's body differs from the client's."""
    if not isinstance(theirs, dict):
        return ["everything"]
    names = {*theirs, *ours} - allowed - {"messages"}
    return sorted(name for name in names if theirs.get(name) != ours.get(name))


def prefill_fields(cell: ProxyEvidence) -> Judgement:
    """A prefill request is the client's, apart from what is prefill's own."""

    def complaints() -> Iterator[str]:
        for send, _ in _served(cell):
            legs = cell.legs(send.label, "prefill")
            if not legs:
                yield f"{send.label}: no prefill server got it"
            for leg in legs:
                if _prompt(leg.body, send.path, cell, send.label) != _prompt(send.body, send.path, cell, send.label):
                    yield f"{send.label}: its prompt is another"
                if changed := _changed(leg.body, send.body, PREFILL_OWN):
                    yield f"{send.label}: {', '.join(changed)} changed on the way"

    return _first("prefill-changed", "legs", "the client's prompt and options", complaints(), "unchanged")


def one_token(cell: ProxyEvidence) -> Judgement:
    """A prefill server is asked for exactly one token of one choice, and for no stream."""

    def complaints() -> Iterator[str]:
        for send, _ in _served(cell):
            legs = cell.legs(send.label, "prefill")
            if not legs:
                yield f"{send.label}: no prefill server got it"
            for leg in legs:
                body = leg.body
                asked = {
                    "limit": (made.limit(body, leg.path), (1,)),
                    "n": (body.get("n"), (None, 1)),
                    "best_of": (body.get("best_of"), (None, 1)),
                    "min_tokens": (body.get("min_tokens"), (None, 0, 1)),
                    "stream": (body.get("stream"), (None, False)),
                }
                for name, (value, good) in asked.items():
                    if value not in good:
                        yield f"{send.label}: {leg.server} was asked with {name} {value}"

    return _first("prefill-decodes", "legs", "one token of one choice, no stream", complaints(), "one token each")


def _parts(body: Any) -> list[Mapping[str, Any]]:
    try:
        return [item.part for item in made.items(body)]
    except made.Refused:
        return []


def _kept(part: Mapping[str, Any], leg: Seen) -> bool:
    """Whether a leg has a client's part with all that stands in it, or a reference with the same uuid."""
    for theirs in _parts(leg.body):
        if all(theirs.get(name) == value for name, value in part.items()):
            return True
        if part.get("uuid") and theirs.get("uuid") == part["uuid"] and any(kind in theirs for kind in made.REFERENCES):
            return True
    return False


def encoding_options(cell: ProxyEvidence) -> Judgement:
    """What changes an encoding, its key or its model reaches every stage as the client wrote it."""

    def complaints() -> Iterator[str]:
        for send in cell.plan.sends:
            primers, consumers = cell.legs(send.label, "encode"), cell.legs(send.label, "prefill", "decode")
            if not primers or not consumers:
                yield f"{send.label}: {len(primers)} primers and {len(consumers)} consumers"
            for legs, names in ((primers, ENCODING), (consumers, CONSUMING)):
                for leg in legs:
                    for name in names:
                        if leg.body.get(name) != send.body.get(name):
                            yield f"{send.label}: {leg.server} got {name} {leg.body.get(name)!r}"
            for part in _parts(send.body):
                if primers and not any(_kept(part, leg) for leg in primers):
                    yield f"{send.label}: no encode server got {str(part)[:_SHOWN]} as it is"
                for leg in consumers:
                    if not _kept(part, leg):
                        yield f"{send.label}: {leg.server} did not get {str(part)[:_SHOWN]} as it is"

    return _first("option-lost", "legs", "the client's own fields on every leg", complaints(), "all there")


def answer_options(cell: ProxyEvidence) -> Judgement:
    """The decode server gets every option of the client's, and the client what was answered."""

    def complaints() -> Iterator[str]:
        for send, got in _served(cell):
            for leg in cell.legs(send.label, "decode"):
                if changed := _changed(leg.body, send.body, DECODE_OWN):
                    yield f"{send.label}: decode got another {', '.join(changed)}"
            if (wrong := _wrong(cell, send, got)) is not None:
                yield wrong

    found = _first("option-lost", "answer", "the answer to the client's own options", complaints(), "all right")
    return _where(_from_nowhere(cell), _ANSWERED, found)


def prompt_tokens(cell: ProxyEvidence) -> Judgement:
    """Each consuming server counts the prompt tokens of the client's request."""

    def complaints() -> Iterator[str]:
        for send in cell.plan.sends:
            wanted = made.prompt_tokens(send.body, send.path)
            for leg in cell.legs(send.label, "prefill", "decode"):
                try:
                    found = made.prompt_tokens(leg.body, leg.path)
                except made.Refused as refused:
                    yield f"{send.label}: {leg.server} refuses it: {refused}"
                    continue
                if found != wanted:
                    yield f"{send.label}: {leg.server} counts {found} prompt tokens, and it has {wanted}"
            if not cell.legs(send.label, "decode"):
                yield f"{send.label}: decode did not get it"

    return _first("media-lost", "legs", "as many prompt tokens as the client's request has", complaints(), "equal")


def order(cell: ProxyEvidence) -> Judgement:
    """Each consuming server gets the items in the order and at the places that the client gave them."""

    def places(body: Any, label: str) -> list[Any]:
        found: list[Any] = []
        for message in body.get("messages") or ():
            for place, part in enumerate(message["content"] if isinstance(message.get("content"), list) else ()):
                for item in made.items({"messages": [{"role": "user", "content": [part]}]}):
                    found.append((message.get("role"), place, item.content(cell.contents(label))))
        return found

    def complaints() -> Iterator[str]:
        for send in cell.plan.sends:
            wanted = places(send.body, send.label)
            for leg in cell.legs(send.label, "prefill", "decode"):
                # A leg that lacks items altogether is another requirement's affair.
                found = places(leg.body, send.label)
                if len(found) == len(wanted) and found != wanted:
                    yield f"{send.label}: {leg.server} got the items as {found}, and the client sent {wanted}"

    def lacking() -> Iterator[str]:
        for send in cell.plan.sends:
            count = len(places(send.body, send.label))
            for role in cell.consumers:
                if not any(len(places(leg.body, send.label)) == count for leg in cell.legs(send.label, role)):
                    yield f"{send.label}: no {role} server got all items"

    found = _first("order", "legs", "the client's order", complaints(), "kept")
    return _where(lacking(), "consuming servers get all items", found)


def handed_over(cell: ProxyEvidence) -> Judgement:
    """The decode request carries what prefill returned for this very request."""

    def complaints() -> Iterator[str]:
        for send in cell.plan.sends:
            told = [(leg.told or {}).get("kv_transfer_params") for leg in cell.legs(send.label, "prefill")]
            taken = [leg.body.get("kv_transfer_params") for leg in cell.legs(send.label, "decode")]
            if not told or told[-1] is None:
                yield f"{send.label}: prefill was not asked to keep the blocks"
            elif not taken or taken[-1] != told[-1]:
                yield f"{send.label}: prefill returned {told[-1]}, and decode got {taken[-1] if taken else 'nothing'}"

    return _first("kv-lost", "legs", "decode gets what prefill returned", complaints(), "handed over")


def reported(cell: ProxyEvidence) -> Judgement:
    """The server that loads gets what the encode servers said about the items of this very request."""

    def told_of(send: Send) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for leg in cell.legs(send.label, "encode"):
            found |= (leg.told or {}).get("ec_transfer_params") or {}
        return found

    def complaints() -> Iterator[str]:
        for send in cell.plan.sends:
            told = told_of(send)
            for leg in cell.legs(send.label, cell.consumer):
                taken = leg.body.get("ec_transfer_params") or {}
                missing = [
                    key for key, value in told.items() if (taken.get(key) or {}).get("peer_host") != value["peer_host"]
                ]
                others = {key for one in cell.calls for key in (one.told or {}).get("ec_transfer_params") or {}} - set(
                    told
                )
                if missing or others & set(taken):
                    yield f"{send.label}: encode told {sorted(told)}, and {leg.server} got {sorted(taken)}"

    def lacking() -> Iterator[str]:
        yield from _unreached(cell, cell.consumer)
        for send in cell.plan.sends:
            if _media(send.body) and not told_of(send):
                yield f"{send.label}: no encode server said anything about it"

    found = _first("ec-lost", "legs", "what encode returned, for the server that loads", complaints(), "handed over")
    return _where(lacking(), "encode says something, and a server loads", found)


def _body_id(got: Got) -> str:
    """The id in an answer's body; empty where there is none."""
    try:
        return str(json.loads(got.body)["id"])
    except (ValueError, KeyError, TypeError):
        return ""


def one_id(cell: ProxyEvidence) -> Judgement:
    """Every leg carries the id that the client gets."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            given = got.headers.get("x-request-id") or got.request_id or _body_id(got)
            if not given:
                yield f"{send.label}: the answer has no id"
                continue
            for leg in cell.legs(send.label):
                if given not in leg.request_id:
                    yield f"{send.label}: the client knows it as {given}, {leg.server} as {leg.request_id or 'nothing'}"

    found = _first("id-lost", "legs", "one id on all legs", complaints(), "joined")
    return _where(_unreached(cell, "encode", *cell.consumers), "a leg in each stage", found)


# -- failures --------------------------------------------------------------------------------------------------------------------


def _is_stream(got: Got) -> bool:
    return "event-stream" in got.headers.get("content-type", "")


def one_error(cell: ProxyEvidence) -> Judgement:
    """A failing stage is one JSON error that names stage, upstream status and request id, also where a stream was asked for."""
    act = next(iter(cell.plan.acts), None)
    down = [name for step in cell.plan.steps for name in step.down]
    stage = act.role if act is not None else down[0].partition("-")[0]
    status = act.status if act is not None and act.end == "whole" else None

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            given = got.headers.get("x-request-id", got.request_id)
            wanted = [stage, given, *([str(status)] if status is not None else [])]
            try:
                whole = isinstance(json.loads(got.body), dict)
            except ValueError:
                whole = False
            if not (got.status or 0) >= 400 or got.end != "whole" or not whole or _is_stream(got):
                yield f"{send.label}: {_shown(got)}"
            elif missing := [word for word in wanted if word.lower() not in got.body.lower()]:
                yield f"{send.label}: the error does not name {', '.join(missing)}: {got.body[:_SHOWN]!r}"

    expected = f"one JSON error that names {stage}, {'its status and ' if status is not None else ''}the request id"
    found = _first("unclear-error", "status", expected, complaints(), "one clear error")
    # Of a stage that takes no connection nothing can be seen.
    lacking = _unreached(cell, act.role, status=act.status) if act is not None else iter(())
    return _where(lacking, f"{stage} fails", found)


def refusal(cell: ProxyEvidence) -> Judgement:
    """A server's refusal reaches the client with its status and its reason."""
    act = cell.plan.acts[0]

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            if got.status != act.status or act.reason not in got.body:
                yield f"{send.label}: {_shown(got)}"

    found = _first("refusal-lost", "status", f"status {act.status} and {act.reason!r}", complaints(), "both there")
    return _where(_unreached(cell, act.role, status=act.status), f"{act.role} refuses", found)


def after_acceptance(cell: ProxyEvidence) -> Judgement:
    """The answer's head comes after the decode server's, and is no 200 where that refused."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            legs = cell.legs(send.label, "decode")
            if not legs:
                yield f"{send.label}: decode did not get it"
            elif legs[-1].status != 200 and got.status == 200:
                yield f"{send.label}: decode refused with {legs[-1].status}, and the client had status 200"
            elif got.head is None or got.head < (legs[-1].head or 0.0):
                yield f"{send.label}: the answer began at {got.head} s, and decode accepted at {legs[-1].head} s"

    return _first("begun-too-early", "times", "decode answers first", complaints(), "it did")


def _ends_as_error(got: Got) -> bool:
    """Whether the client was told: by a status, or by the last event of a stream, which then has no mark of the end."""
    if (got.status or 0) >= 400:
        return True
    lines = made.data_lines(got.body)
    if not lines or "[DONE]" in lines:
        return False
    try:
        last = json.loads(lines[-1])
    except ValueError:
        return False
    return isinstance(last, dict) and bool(last.get("error"))


def broken_stream(cell: ProxyEvidence) -> Judgement:
    """A stream that breaks ends with an error event and without the mark of a complete answer."""
    bad = (f"{send.label}: {_shown(got)}" for send, got in cell.pairs if not _ends_as_error(got))
    found = _first("broken-in-silence", "stream", "an error event at the end, and no [DONE]", bad, "told")
    return _where(_unreached(cell, "decode", status=200), "the decode server begins a stream", found)


def in_time(cell: ProxyEvidence) -> Judgement:
    """A request to a silent stage ends with an error within the proxy's limit."""
    longest = cell.limit_s + LIMIT_SLACK_S

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            if got.end == "timeout" or got.ended - got.at > longest:
                yield f"{send.label}: nothing after {got.ended - got.at:.1f} s"
            elif not _ends_as_error(got):
                yield f"{send.label}: {_shown(got)}"

    act = cell.plan.acts[0]
    found = _first("hangs", "times", f"an error within {cell.limit_s:g} s", complaints(), "in time")
    # A stage that falls silent has begun to answer before.
    lacking = _unreached(cell, act.role, status=200 if act.end == "silent" else None)
    return _where(lacking, f"{act.role} gets the request and is silent", found)


def no_second_try(cell: ProxyEvidence) -> Judgement:
    """No stage gets a request again of whose answer the client has a part."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            if not made.data_lines(got.body):
                continue
            counts = Counter(leg.role for leg in cell.legs(send.label, "prefill", "decode"))
            for role, count in counts.items():
                if count > 1:
                    yield f"{send.label}: {role} got it {count} times, and the client had begun to read"

    if not any(made.data_lines(got.body) for got in cell.got):
        return _not_exercised("the client gets a part of the answer", "it got none")
    found = _first("tried-again", "legs", "one try", complaints(), "one")
    return _where(_unreached(cell, "decode"), _ANSWERED, found)


def work_ends(cell: ProxyEvidence) -> Judgement:
    """When a client leaves, its work ends in every stage."""
    expected = f"the work ends within {LEFT_S:g} s"
    for send, got in cell.pairs:
        if not got.waited or got.end != "left":
            return _not_exercised(f"{send.label} runs in the {send.leaves} stage", _shown(got))

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            for leg in cell.legs(send.label):
                if leg.ended is None or leg.ended - got.ended > LEFT_S:
                    since = "still runs" if leg.ended is None else f"ended {leg.ended - got.ended:.1f} s later"
                    yield f"{send.label}: the client left at {got.ended} s, and the work on {leg.server} {since}"

    def lacking() -> Iterator[str]:
        for send in cell.plan.sends:
            if not cell.legs(send.label, send.leaves):
                yield f"{send.label}: no {send.leaves} server got it"

    found = _first("works-for-nobody", "times", expected, complaints(), "it ended")
    return _where(lacking(), "work in the stage in which the client leaves", found)


def adapter(cell: ProxyEvidence) -> Judgement:
    """A request for an adapter that encode does not know is answered rightly, or with an error that names adapter and stage."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            told = (got.status or 0) >= 400 and send.body["model"] in got.body and "encode" in got.body.lower()
            if not told and (wrong := _wrong(cell, send, got)) is not None:
                yield wrong

    expected = "the right answer, or an error that names the adapter and the encode stage"

    def lacking() -> Iterator[str]:
        yield from _from_nowhere(cell)
        if not any(seen.role == "encode" for seen in cell.seen):
            yield "no encode server was asked"

    found = _first("adapter-unclear", "status", expected, complaints(), "either")
    return _where(lacking(), "encode is asked for the adapter", found)


def malformed(cell: ProxyEvidence) -> Judgement:
    """What is malformed gets a 4xx answer, and what is not is served."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            if send.label.startswith("good"):
                if (wrong := _wrong(cell, send, got)) is not None:
                    yield wrong
            elif not 400 <= (got.status or 0) < 500:
                yield f"{send.label}: {_shown(got)}"

    found = _first("own-5xx", "status", "4xx, and the next request is served", complaints(), "4xx each")
    return _where(_from_nowhere(cell), _ANSWERED, found)


def private(cell: ProxyEvidence) -> Judgement:
    """A URL that leads to an address that is not public is refused, and reaches no server."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            for leg in cell.legs(send.label):
                yield f"{send.label}: {leg.server} got it"
            if not 400 <= (got.status or 0) < 500:
                yield f"{send.label}: {_shown(got)}"

    return _first("reaches-inside", "status", "4xx, and no server gets it", complaints(), "refused")


# -- references ------------------------------------------------------------------------------------------------------------------


def changed_content(cell: ProxyEvidence) -> Judgement:
    """Each request is answered about the content of its time."""
    if any(400 <= (got.status or 0) < 500 for got in cell.got):
        return _not_exercised("the proxy lets a client name the URL", _shown(cell.got[0]))
    return right(cell)


def _references(leg: Seen) -> bool:
    return any(kind in part for part in _parts(leg.body) for kind in made.REFERENCES)


def way_back(cell: ProxyEvidence) -> Judgement:
    """A request whose references lead nowhere is answered rightly or with an error, and the next one is served."""
    if not any(_references(leg) for leg in cell.calls):
        return _not_exercised("the proxy sends references instead of media", "it sends the media")

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            for leg in cell.legs(send.label, "prefill", "decode"):
                wanted = _prompt(send.body, send.path, cell, send.label)
                if leg.status == 200 and _prompt(leg.body, send.path, cell, send.label) != wanted:
                    yield f"{send.label}: {leg.server} took another prompt"
            told = _ends_as_error(got) and not send.label.startswith("good")
            if not told and (wrong := _wrong(cell, send, got)) is not None:
                yield wrong

    found = _first("no-way-back", "answer", "the right answer, or an error", complaints(), "either")
    return _where(_from_nowhere(cell), _ANSWERED, found)


def not_mixed(cell: ProxyEvidence) -> Judgement:
    """Each request is answered rightly, by a proxy that sends references where it has one for each item."""
    lacking = iter(() if any(_references(leg) for leg in cell.calls) else ("it sends the media",))
    return _where(lacking, "the proxy sends references instead of media", right(cell))


# -- other routes ----------------------------------------------------------------------------------------------------------------


def every_api(cell: ProxyEvidence) -> Judgement:
    """Media through any API are primed, refused, or answered with a header that says that the encode stage was left out."""

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            names = [name for name in got.headers if "bypass" in name]
            text = json.dumps(send.body)
            media = [word for word in text.split('"') if word.startswith("data:image")]
            primed = [seen for seen in cell.calls if seen.role == "encode" and any(m in str(seen.body) for m in media)]
            if (got.status or 500) >= 500:
                yield f"{send.label}: {_shown(got)}"
            elif got.status == 200 and not primed and not names:
                yield f"{send.label}: {send.path} was answered, its media were not primed, and no header says so"

    return _first("passed-by", "legs", "primed, refused, or marked as bypassed", complaints(), "one of the three")


def health(cell: ProxyEvidence) -> Judgement:
    """The proxy's /health is 200 while all roles are well, and 503 with the name of one that is not."""

    def complaints() -> Iterator[str]:
        for step in cell.plan.steps:
            for send in step.sends:
                got = cell.answer(send.label)
                if got.status != (503 if step.ill else 200) or any(role not in got.body for role in step.ill):
                    yield f"{send.label}: {_shown(got)}"

    return _first("health", "status", "200, or 503 and the role", complaints(), "as the servers are")


def as_decode(cell: ProxyEvidence) -> Judgement:
    """Other routes are answered as the decode server answers them."""
    wanted: dict[str, Callable[[Send], Any]] = {
        "/v1/models": lambda _: made.MODELS,
        "/tokenize": lambda send: made.tokenized(send.body),
    }

    def complaints() -> Iterator[str]:
        for send, got in cell.pairs:
            try:
                said = json.loads(got.body)
            except ValueError:
                said = None
            if got.status != 200 or said != wanted[send.path](send):
                yield f"{send.label}: {_shown(got)}"

    # A list of models may have been asked for before the cell began.
    lacking = (
        f"{send.label}: no decode server got it"
        for send in cell.plan.sends
        if send.method == "POST" and not any(seen.role == "decode" and seen.path == send.path for seen in cell.seen)
    )
    found = _first("not-passed-on", "status", "the decode server's own answer", complaints(), "passed on")
    return _where(lacking, "the decode server is asked", found)


JUDGES: Mapping[str, Callable[[ProxyEvidence], Judgement]] = {
    "right": right,
    "untouched": untouched,
    "primed-once": primed_once,
    "primed-and-right": primed_and_right,
    "media-only": media_only,
    "half-primed": half_primed,
    "side-by-side": side_by_side,
    "in-turn": in_turn,
    "another-server": another_server,
    "prefill-fields": prefill_fields,
    "one-token": one_token,
    "encoding-options": encoding_options,
    "answer-options": answer_options,
    "prompt-tokens": prompt_tokens,
    "order": order,
    "handed-over": handed_over,
    "reported": reported,
    "one-id": one_id,
    "one-error": one_error,
    "refusal": refusal,
    "after-acceptance": after_acceptance,
    "broken-stream": broken_stream,
    "in-time": in_time,
    "no-second-try": no_second_try,
    "work-ends": work_ends,
    "adapter": adapter,
    "malformed": malformed,
    "private": private,
    "changed-content": changed_content,
    "way-back": way_back,
    "not-mixed": not_mixed,
    "every-api": every_api,
    "health": health,
    "as-decode": as_decode,
}


def judge(evidence: ProxyEvidence) -> Judgement:
    """The verdict that the evidence gives. Raises KeyError for a judge that does not exist."""
    missing: Sequence[str] = [send.label for send in evidence.plan.sends if send.label not in _labels(evidence)]
    if missing:
        raise ValueError(f"the evidence holds no answer to {', '.join(missing)}")
    return JUDGES[evidence.judge](evidence)


def _labels(evidence: ProxyEvidence) -> set[str]:
    return {got.label for got in evidence.got}
