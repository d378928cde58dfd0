"""The judge of scripted cells where several requests run at once, a producer is held, or a purge goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


class Race(Story):
    """A story of the steps that the other scripted stories do not have."""

    def __init__(self, topology: str, requests: Sequence[Request], *steps: Any) -> None:
        draw = Draw(1, "others")
        others = [replace_images(one, [draw.image()], f"{one.label}, other") for one in requests]
        super().__init__("scripted", topology, Plan(tuple(requests), tuple(others), steps=tuple(steps)))
        self.records: list[dict[str, Any]] = []
        self.facts["steps"] = self.records

    def did(self, do: str, act: Callable[[], dict[str, Any] | None]) -> None:
        self.now += 0.01
        record: dict[str, Any] = {"do": do, "at": self.now, "done": True, "problem": ""}
        record |= act() or {}
        self.now += 0.01
        self.records.append({**record, "ended": self.now})

    def stopped(self, point: str, kind: str, value: str) -> float:
        at = {"point": point, "id": None, "req": None, kind: value}
        self.write("encode-0", "worker" if kind == "id" else "scheduler", "held", **at)
        self.now += 0.005
        self.write("encode-0", "worker" if kind == "id" else "scheduler", "opened", **at, why="released", seconds=0.005)
        return self.now

    def at_once(self, requests: Sequence[Request]) -> None:
        """All are sent, the first is held at its encode server, and the first that comes to the consumer loads."""
        rids = [digest_of(f"at once {number}")[:32] for number in range(len(requests))]
        started = [self.now + 0.001 * number for number in range(len(requests))]
        self.now += 0.01
        self.stopped("scheduled", "req", rids[0])
        for request, rid in zip(requests, rids, strict=True):
            self.prime(request, rid)
        for request, rid in zip(requests, rids, strict=True):
            self.consume(request, rid, "-p" if self.roles.decode else "-d", True)
            if self.roles.decode:
                self.decode(request, rid)
        self.answers += [
            good_answer(request, rid=rid, started=at, seconds=self.now - at)
            for request, rid, at in zip(requests, rids, started, strict=True)
        ]

    def over(self) -> CellEvidence:
        self._go_on()
        return self.evidence()


def crowd(topology: str = "e-pd", how: str = "crossed", purged: bool = False) -> CellEvidence:
    draw = Draw(0, "crowd")
    asked = draw.request("new", draw.image())
    many = [replace(asked, label=f"new {number}") for number in range(MANY)]
    fresh = draw.request("fresh", draw.image())
    purge = (step("purge", how="begin"), step("purge", how="end")) if purged else ()
    together, last = step("together", count=str(MANY), how=how), step("send", way="proxy", how="loaded")
    steps = (*purge[:1], together, *purge[1:], last)
    race = Race(topology, [*many, fresh], *steps)
    if purged:
        race.did("purge", lambda: None)
    race.did("together", lambda: race.at_once(many))
    if purged:
        when = race.answers[0].started + race.answers[0].seconds / 2
        race.did("purge", lambda: {"removed": [[item_key(asked.images[0], None), when]]})
    race.did("send", lambda: race.send(fresh))
    return race.over()


def primed_often(topology: str = "e-pd") -> CellEvidence:
    draw = Draw(0, "primed often")
    asked, fresh = draw.request("primed", draw.image()), draw.request("fresh", draw.image())
    past, proxy = (step("send", way=way, how="loaded") for way in ("past-encode", "proxy"))
    race = Race(topology, [asked, fresh], step("prime-together", count="2"), past, proxy)

    def primers() -> dict[str, Any]:
        began = race.now
        opened = race.stopped("scheduled", "req", race.next_id())
        for rid in (race.next_id(), digest_of("another primer")[:32]):
            race.prime(asked, rid)
        sent = [{"started": began + number / 1000, "ended": race.now, "status": 200} for number in range(2)]
        return {"opened_at": opened, "primers": sent}

    race.did("prime-together", primers)
    race.did("send", lambda: race.send(asked, direct=not race.roles.decode, past=True))
    race.did("send", lambda: race.send(fresh))
    return race.over()


def read_while_saved(topology: str = "e-pd") -> CellEvidence:
    draw = Draw(0, "read while saved")
    image = replace(draw.image(), uuid="epd-conformance-0")
    reader, later = draw.request("reader", image), draw.request("later", image)
    any_, loaded = (step("send", way="past-encode", how=how) for how in ("any", "loaded"))
    steps = (step("prime-held", point="saving"), any_, step("release"), step("reset", cache="encoder"), loaded)
    race = Race(topology, [reader, later], *steps)
    at = {"point": "saving", "id": image.uuid, "req": None}
    direct = not race.roles.decode
    race.did("prime-held", lambda: race.write("encode-0", "worker", "held", **at))
    race.did("send", lambda: race.send(reader, primed=False, direct=direct, past=True))

    def release() -> None:
        race.write("encode-0", "worker", "opened", **at, why="released", seconds=1.0)
        race.prime(reader, digest_of("primer")[:32])

    race.did("release", release)

    def reset() -> dict[str, Any]:
        race.held.clear()
        race._forget(race.consumer)
        return {"statuses": dict.fromkeys(race.roles.encode | race.roles.consumers | race.roles.decode, 200)}

    race.did("reset", reset)
    race.did("send", lambda: race.send(later, direct=direct, past=True))
    return race.over()


STORIES: dict[str, Callable[[str], CellEvidence]] = {
    "crossed": crowd,
    "once": lambda topology: crowd(topology, "once"),
    "purged": lambda topology: crowd(topology, "survives", purged=True),
    "primed-often": primed_often,
    "read-while-saved": read_while_saved,
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
    ("once", saved_twice, (Verdict.FAIL, "not-once")),
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
    assert judge(spoil(crowd(how="survives", purged=True))).verdict is Verdict.PASS


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
