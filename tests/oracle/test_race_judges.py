"""The judge of scripted cells where several requests run at once, a producer is held, or a purge goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from made_evidence import Story, digest_of, edited, good_answer, item_key, with_answer, with_events, without
from spoilt_faults import died

from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.plan import Draw, Plan, Request, replace_images
from epd_conformance.plans.steps import step
from epd_conformance.verdict import Verdict

TOPOLOGIES = ("e-pd", "e-p-d")
MANY = 4


def told(topology: str, requests: Sequence[Request], *steps: Mapping[str, Any]) -> CellEvidence:
    draw = Draw(1, "others")
    others = [replace_images(one, [draw.image()], f"{one.label}, other") for one in requests]
    story = Story("scripted", topology, Plan(tuple(requests), tuple(others), steps=steps))
    story.scripted()
    return story.evidence()


def crowd(topology: str = "e-pd", how: str = "crossed", purged: bool = False) -> CellEvidence:
    draw = Draw(0, "crowd")
    asked = draw.request("new", draw.image())
    many = [replace(asked, label=f"new {number}") for number in range(MANY)]
    begin, end = ((step("purge", how=how),) if purged else () for how in ("begin", "end"))
    together, last = step("together", count=str(MANY), how=how), step("send", way="proxy", how="loaded")
    return told(topology, [*many, draw.request("fresh", draw.image())], *begin, together, *end, last)


def primed_often(topology: str = "e-pd") -> CellEvidence:
    draw = Draw(0, "primed often")
    past, proxy = (step("send", way=way, how="loaded") for way in ("past-encode", "proxy"))
    requests = [draw.request(label, draw.image()) for label in ("primed", "fresh")]
    return told(topology, requests, step("prime-together", count="2"), past, proxy)


def read_while(point: str, topology: str = "e-pd") -> CellEvidence:
    draw = Draw(0, "read while saved")
    image = replace(draw.image(), uuid="epd-conformance-0")
    any_, loaded = (step("send", way="past-encode", how=how) for how in ("any", "loaded"))
    steps = (step("prime-held", point=point), any_, step("release"), step("reset", cache="encoder"), loaded)
    return told(topology, [draw.request("reader", image), draw.request("later", image)], *steps)


STORIES: dict[str, Callable[[str], CellEvidence]] = {
    "crossed": crowd,
    "once": lambda topology: crowd(topology, "once"),
    "purged": lambda topology: crowd(topology, "contained", purged=True),
    "primed-often": primed_often,
    "read-while-saved": lambda topology: read_while("saving", topology),
    "read-behind-the-save": lambda topology: read_while("saved", topology),
}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", STORIES)
def test_a_race_that_goes_well_passes(name: str, topology: str) -> None:
    found = judge(STORIES[name](topology))
    assert (found.verdict, found.reason, found.observed) == (Verdict.PASS, "", "so it was")


def test_what_requests_share_is_counted_once() -> None:
    evidence = judge(crowd()).evidence
    assert (evidence.saves, evidence.loads, evidence.local_encodes) == (2, 2, 0)


def record(cell: CellEvidence, do: str, **changes: Any) -> CellEvidence:
    """What was written down of the last step that does this is otherwise."""
    steps = [dict(one) for one in cell.facts["steps"]]
    next(one for one in reversed(steps) if one["do"] == do).update(changes)
    return replace(cell, facts={**cell.facts, "steps": steps})


def shown(cell: CellEvidence) -> str:
    """The item that all are after."""
    return item_key(cell.plan.requests[0].images[0], cell.plan.requests[0].uuids[0])


def encoded(cell: CellEvidence) -> CellEvidence:
    """The consumer finds nothing, and encodes the item itself."""

    def change(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["server"] not in cell.roles.consumers:
                continue
            if event.get("id") == shown(cell):
                event |= {"found": False} if event["ev"] == "lookup" else {"ev": "encoded"}
        first = next(e for e in events if e["ev"] == "step" and e["server"] in cell.roles.consumers)
        first["encode"] = {first["new"][0]["req"]: [shown(cell)]}

    return with_events(cell, change)


def saved_twice(cell: CellEvidence) -> CellEvidence:
    save = next(event for event in cell.during if event["ev"] == "save" and event["id"] == shown(cell))
    return replace(cell, during=(*cell.during, {**save, "t": save["t"] + 1e-5}))


def wrong_load(cell: CellEvidence) -> CellEvidence:
    return edited(cell, {"digest": digest_of("damage")}, ev="load", id=shown(cell))


def not_stopped(cell: CellEvidence) -> CellEvidence:
    return without(cell, ev="opened")


def late(cell: CellEvidence) -> CellEvidence:
    """The last was sent when the first was over already."""
    first, last = cell.answers[0], cell.answers[MANY - 1]
    return with_answer(cell, 0, seconds=last.started - first.started - 0.0005)


def let_go_early(cell: CellEvidence) -> CellEvidence:
    """The encode server went on before the last had been sent."""
    return edited(cell, {"t": cell.answers[MANY - 1].started - 1e-5}, ev="opened")


def read_another(cell: CellEvidence) -> CellEvidence:
    """While the producer is held its consumer is asked for something else only."""

    def change(events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["ev"] in ("held", "opened"):
                event["id"] = "another"

    return with_events(cell, change)


def saved_twice_by_one_of_two(cell: CellEvidence) -> CellEvidence:
    roles = replace(cell.roles, encode=cell.roles.encode | {"encode-1"})
    facts = {name: {**cell.facts[name], "encode-1": value} for name, value in (("health", 200), ("busy", 0))}
    return saved_twice(replace(cell, roles=roles, facts={**cell.facts, **facts}))


def refused(index: int, status: int = 500) -> Callable[[CellEvidence], CellEvidence]:
    return lambda cell: with_answer(cell, index, status=status, ids=(), prompt_ids=(), logprobs=())


def other_ids(cell: CellEvidence) -> CellEvidence:
    return with_answer(cell, 1, ids=good_answer(cell.plan.contrasts[1]).ids)


def nobody_read(cell: CellEvidence) -> CellEvidence:
    """The reader came when the writer was gone."""
    opened = next(event for event in cell.during if event["ev"] == "opened")
    held = next(event for event in cell.during if event["ev"] == "held")
    return edited(cell, {"t": held["t"] + 1e-6}, ev="opened", point=opened["point"])


ERROR = (Verdict.ERROR, "step-not-done")
SPOILT: list[tuple[str, Callable[[CellEvidence], CellEvidence], tuple[Verdict, str]]] = [
    ("crossed", encoded, (Verdict.INCONCLUSIVE, "local-encode")),
    ("crossed", wrong_load, (Verdict.FAIL, "digest-differs")),
    ("crossed", other_ids, (Verdict.FAIL, "tokens-differ")),
    ("crossed", refused(2), (Verdict.FAIL, "request-failed")),
    ("crossed", died(1), (Verdict.FAIL, "server-died")),
    ("crossed", not_stopped, ERROR),
    ("crossed", lambda c: edited(c, {"why": "timeout"}, ev="opened"), ERROR),
    ("crossed", late, ERROR),
    ("crossed", let_go_early, ERROR),
    ("once", saved_twice, (Verdict.FAIL, "not-once")),
    ("once", saved_twice_by_one_of_two, (Verdict.FAIL, "not-once")),
    ("once", encoded, (Verdict.INCONCLUSIVE, "local-encode")),
    ("once", late, ERROR),
    ("purged", other_ids, (Verdict.FAIL, "tokens-differ")),
    ("purged", wrong_load, (Verdict.FAIL, "digest-differs")),
    ("purged", refused(1, 0), (Verdict.FAIL, "request-failed")),
    ("purged", refused(MANY), (Verdict.FAIL, "request-failed")),
    ("purged", lambda c: record(c, "purge", removed=[]), ERROR),
    ("purged", lambda c: record(c, "purge", removed=[["other", c.answers[0].started + 0.001]]), ERROR),
    ("purged", lambda c: record(c, "purge", removed=[[shown(c), 1.0]]), ERROR),
    ("purged", lambda c: record(c, "purge", done=False, problem="no probe"), ERROR),
    ("primed-often", wrong_load, (Verdict.FAIL, "digest-differs")),
    ("primed-often", encoded, (Verdict.FAIL, "encoded-again")),
    ("primed-often", lambda c: record(c, "prime-together", opened_at=None), ERROR),
    ("primed-often", lambda c: record(c, "prime-together", primers=c.facts["steps"][0]["primers"][:1]), ERROR),
    ("primed-often", lambda c: record(c, "prime-together", primers=[{"started": 1.0, "ended": 2.0},
                                                                    {"started": 2.5, "ended": 3.0}]), ERROR),
    ("read-while-saved", wrong_load, (Verdict.FAIL, "digest-differs")),
    ("read-while-saved", not_stopped, ERROR),
    ("read-while-saved", lambda c: edited(c, {"why": "closed"}, ev="opened"), ERROR),
    ("read-while-saved", nobody_read, ERROR),
    ("read-while-saved", read_another, ERROR),
    ("read-while-saved", other_ids, (Verdict.FAIL, "tokens-differ")),
]  # fmt: skip


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("name", "spoil", "said"), SPOILT)
def test_a_spoilt_race_is_named(
    name: str, spoil: Callable[[CellEvidence], CellEvidence], said: tuple[Verdict, str], topology: str
) -> None:
    found = judge(spoil(STORIES[name](topology)))
    assert (found.verdict, found.reason) == said, found.observed
    assert found.observed


@pytest.mark.parametrize("spoil", [encoded, refused(1), refused(1, 503)])
def test_under_a_purge_a_request_may_be_encoded_or_refused(spoil: Callable[[CellEvidence], CellEvidence]) -> None:
    assert judge(spoil(crowd(how="contained", purged=True))).verdict is Verdict.PASS


def test_kv_that_was_made_of_the_item_a_moment_ago_is_as_good() -> None:
    """The file KV connector knows nothing of salts: of equal prompts at once, later ones find the KV of the first."""
    cell = crowd("e-p-d")

    def hits(events: list[dict[str, Any]]) -> None:
        steps = [event for event in events if event["ev"] == "step" and event["server"] == "prefill-0"]
        for one in steps[1:MANY]:
            one["new"][0]["computed"] = 288

    assert judge(with_events(cell, hits)).verdict is Verdict.PASS

    def all_hit(events: list[dict[str, Any]]) -> None:
        for one in [event for event in events if event["ev"] == "step" and event["server"] == "prefill-0"][:MANY]:
            one["new"][0]["computed"] = 288

    assert judge(with_events(cell, all_hit)).reason == "prefix-hit"
