"""What a cell left behind, as its drill-down shows it: token strips, thumbnails, a timeline and the plan. Pure.

There are three kinds of cells: over real servers, of an engine layer without servers, and of a proxy before fake servers. All of
their strings are a subject's or a server's: nothing here trusts them, and the template escapes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from epd_conformance.engine import evidence as engine
from epd_conformance.errors import UsageError
from epd_conformance.oracle import cell as live
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.transport import leg_of
from epd_conformance.proxycheck import evidence as proxy
from epd_conformance.report.html import tokens
from epd_conformance.report.html.pictures import Picture, pictures
from epd_conformance.report.html.timeline import Mark, Span, Timeline, spaced
from epd_conformance.report.html.tokens import Strip
from epd_conformance.report.redact import redact

# Marks of one cell: a cell of many requests would fill the page by itself, and its failure is near the ends.
MOST_MARKS = 120
# Hexadecimal digits of keys and digests that are shown: enough to see that two differ.
SHORT = 8
# Characters of an error, a status or a plan's step.
TEXT = 300

# Events of an engine plan -> how a timeline shows them; all others say how the engine works inside and are left out.
_ENGINE_KINDS = {
    "lookup": "lookup",
    "promised": "lookup",
    "deferred": "lookup",
    "loaded": "load",
    "missing": "trouble",
    "lost": "trouble",
    "encoded": "encode",
    "unencodable": "trouble",
    "saved": "save",
    "named": "trouble",
    "evicted": "evict",
    "store": "trouble",
    "damaged": "fault",
    "raised": "trouble",
    "returned": "trouble",
    "broke": "trouble",
    "stuck": "trouble",
    "gone": "boot",
    "booted": "boot",
    "arrived": "request",
    "finished": "request",
}


@dataclass(frozen=True)
class Shown:
    """The parts of a drill-down that come from the evidence. `plan`: what was done, one step a line. `cell`: of a live one."""

    strips: tuple[Strip, ...] = ()
    pictures: tuple[Picture, ...] = ()
    timeline: Timeline | None = None
    plan: tuple[str, ...] = ()
    cell: CellEvidence | None = None
    note: str = ""


def shown(data: Mapping[str, Any]) -> Shown:
    """What the evidence of any cell shows; evidence that is none of this version's gives a note in its place."""
    try:
        schema = data.get("schema")
        if schema == live.SCHEMA:
            # Plans of the first published runs have neither.
            plan = {"metadata_only": False, "steps": [], **data["plan"]}
            return _live(CellEvidence.from_json({**data, "plan": plan}))
        if schema == engine.CELL_SCHEMA:
            return _engine(data)
        if schema == proxy.SCHEMA:
            return _proxy(data)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, UsageError) as error:
        return Shown(note=f"this version cannot read the evidence ({type(error).__name__}); its file has it all")
    return Shown(note=f"this version cannot read evidence of schema {schema!r}; its file has it all")


# -- over real servers -------------------------------------------------------------------------------------------------------------


def _live(cell: CellEvidence) -> Shown:
    strips = [
        strip
        for request, answer in zip(cell.plan.requests, cell.answers, strict=False)
        for strip in tokens.strips(request.label, answer, cell.baseline.get(request.digest(), {}))
    ]
    named = [
        (f"{request.label}, image {number}" if len(request.images) > 1 else request.label, spec)
        for request in cell.plan.requests
        for number, spec in enumerate(request.images, start=1)
    ]
    plan = [" ".join(step.values()) for step in cell.plan.steps]
    return Shown(tuple(strips), pictures(named), _live_timeline(cell), tuple(plan), cell)


def _live_timeline(cell: CellEvidence) -> Timeline | None:
    times = [answer.started for answer in cell.answers if answer.started] + [event["t"] for event in cell.during]
    if not times:
        return None
    begin = min(times)
    marks = [
        Mark(event["server"], event["t"] - begin, *found) for event in cell.during if (found := _journal(cell, event))
    ]
    left_out = max(0, len(marks) - MOST_MARKS)
    marks = marks[:MOST_MARKS]
    last = max(times) - begin
    spans = []
    for answer in cell.answers:
        end = answer.started - begin + answer.seconds
        last = max(last, end)
        kind = "answer" if answer.status == 200 and not answer.error else "refused"
        wrong = f": {redact(answer.error)}"[:TEXT] if answer.error else ""
        text = f"request {answer.label}: status {answer.status}{wrong}"
        spans.append(Span("client", answer.started - begin, end, kind, text, answer.label))
    spans += _faults(cell, begin, last)
    servers = sorted(
        cell.roles.encode | cell.roles.consumers | cell.roles.decode | cell.roles.both | {mark.lane for mark in marks},
        key=_lane_order,
    )
    return Timeline(("client", *servers), tuple(marks), spaced(spans, last), left_out=left_out)


def _lane_order(server: str) -> tuple[int, str]:
    """In the order in which a request meets them."""
    stages = ("encode", "prefill", "decode")
    return next((place for place, stage in enumerate(stages) if server.startswith(stage)), len(stages)), server


def _journal(cell: CellEvidence, event: Mapping[str, Any]) -> tuple[str, str] | None:
    """Kind and text of a journal line; None for one that says nothing about an item's way."""
    name = event["ev"]
    key = str(event.get("id", ""))[:SHORT]
    if name == "lookup":
        return (
            ("lookup", f"looked up {key}: found") if event["found"] else ("lookup-miss", f"looked up {key}: not found")
        )
    if name in ("save", "load"):
        return name, f"{name} {key}: {event['rows']} rows, digest {str(event['digest'])[:SHORT]}"
    if name == "encoded":
        return "encode", f"encoded {key} itself, digest {str(event['digest'])[:SHORT]}"
    if name == "raise":
        return "trouble", redact(f"{event['hook']} raised {event['error']}")[:TEXT]
    if name == "lost":
        return "trouble", f"journal lines were lost: {event.get('error', '')}"[:TEXT]
    if name == "init":
        return "boot", f"connector made ({event['side']})"
    if name == "kv-take":
        return "kv", f"took {event['tokens']} tokens of KV"
    if name == "request":
        labels = {
            leg: answer.label for answer in cell.answers if (leg := leg_of(event["req"], answer.request_id)) is not None
        }
        return "request", f"got request {next(iter(labels.values()), '')} with {len(event['items'])} items"
    return None


def _faults(cell: CellEvidence, begin: float, last: float) -> Iterable[Span]:
    fault = cell.facts.get("fault")
    if isinstance(fault, Mapping) and fault.get("injected_at"):
        receipt = fault["receipt"]
        sizes = f"{receipt['before']['bytes']} → {receipt['after']['bytes']} bytes"
        text = f"fault {receipt['kind']} on {str(receipt['key'])[:SHORT]}: {sizes}"
        yield Span("", fault["injected_at"] - begin, (fault["healed_at"] or begin + last) - begin, "fault", text)
    for step, record in zip(cell.plan.steps, cell.facts.get("steps") or (), strict=False):
        if step["do"] != "send" and record.get("at"):
            problem = redact(str(record.get("problem") or ""))
            text = " ".join(step.values()) + ("" if record["done"] else f": not done, {problem}")
            kind = "fault" if step["do"] in ("damage", "store", "restart") else "step"
            yield Span("", max(0.0, record["at"] - begin), max(0.0, record["ended"] - begin), kind, text[:TEXT])


# -- an engine layer ---------------------------------------------------------------------------------------------------------------


def _engine(data: Mapping[str, Any]) -> Shown:
    shrunk = data["shrunk"]
    if shrunk is None:
        check = data.get("check")
        return Shown(note=f"judged by the check {check}" if check else "judged by all plans of the run's pool")
    plan = shrunk["plan"]
    steps = [f"server {number}: {_brief(server)}" for number, server in enumerate(plan["servers"])]
    steps += [f"item {number}: {_brief(item)}" for number, item in enumerate(plan["items"])]
    steps += [f"operation {number}: {_brief(operation)}" for number, operation in enumerate(plan["operations"])]
    marks = []
    for place, (server, event) in enumerate(shrunk["events"]):
        name, *values = event
        if name == "operation":
            marks.append(Mark("harness", float(place), "step", f"operation {values[0]}"))
        elif name == "fault":
            # Of the store; an empty one: it is mended.
            text = f"the store is {values[0]}" if values[0] else "the store is mended"
            marks.append(Mark("harness", float(place), "fault" if values[0] else "step", text))
        elif name in _ENGINE_KINDS:
            kind = "lookup-miss" if name == "lookup" and values[-1] is False else _ENGINE_KINDS[name]
            words = ", ".join(_brief(value) for value in values)
            marks.append(Mark(server or "harness", float(place), kind, f"{name} {words}"[:TEXT].strip()))
    if (death := shrunk["death"]) is not None:
        how = f"hung for {death['limit_s']:.0f} s" if death["hung"] else f"ended with status {death['status']}"
        marks.append(
            Mark("harness", float(len(shrunk["events"])), "trouble", f"the process {how} at {death['at']}"[:TEXT])
        )
    left_out = max(0, len(marks) - MOST_MARKS)
    marks = marks[-MOST_MARKS:]
    lanes = tuple(dict.fromkeys(["harness", *sorted(mark.lane for mark in marks)]))
    timeline = Timeline(lanes, tuple(marks), ordered=True, left_out=left_out)
    return Shown(timeline=timeline, plan=tuple(step[:TEXT] for step in steps))


def _brief(value: Any) -> str:
    """A value of a plan or an event on one line, digests cut short."""
    if isinstance(value, str):
        return value[:SHORT] if len(value) >= 32 and all(letter in "0123456789abcdef" for letter in value) else value
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_brief(inner)}" for name, inner in value.items())
    if isinstance(value, list):
        return f"[{', '.join(_brief(inner) for inner in value)}]"
    return json.dumps(value)


# -- a proxy before fake servers ---------------------------------------------------------------------------------------------------


def _proxy(data: Mapping[str, Any]) -> Shown:
    spans = []
    last = max([0.0, *(got["ended"] for got in data["got"]), *(seen["ended"] or 0.0 for seen in data["seen"])])
    for got in data["got"]:
        kind = "answer" if got["end"] == "whole" and (got["status"] or 0) < 400 else "refused"
        text = f"client {got['label']}: status {got['status']}, {got['end']}"
        spans.append(Span("client", got["at"], got["ended"], kind, text[:TEXT], got["label"]))
    for seen in data["seen"]:
        kind = "refused" if seen["status"] is None or seen["status"] >= 400 or seen["abandoned"] else "leg"
        left = ", left by the proxy" if seen["abandoned"] else ""
        text = f"{seen['method']} {seen['path']} ({seen['request_id']}): status {seen['status']}{left}"
        end = last if seen["ended"] is None else seen["ended"]
        spans.append(Span(seen["server"], seen["at"], end, kind, text[:TEXT]))
    left_out = max(0, len(spans) - MOST_MARKS)
    spans = spans[:MOST_MARKS]
    lanes = ("client", *sorted({*data["servers"], *(span.lane for span in spans)} - {"client"}, key=_lane_order))
    plan = []
    for act in data["plan"]["acts"]:
        does = {name: act[name] for name in ("holding", "status", "wait_s", "end") if act[name] != ""}
        plan.append(f"fakes of the {act['role']} stage: {_brief(does)}")
    timeline = Timeline(lanes, (), spaced(spans, last), left_out=left_out) if spans else None
    return Shown(timeline=timeline, plan=tuple(step[:TEXT] for step in plan))
