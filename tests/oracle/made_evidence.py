"""Made-up evidence of cells, event by event as the recorders write it: stories that go well, for tests to spoil."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epd_conformance.connectors.barriers import POINTS
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.transport import Roles
from epd_conformance.plans.plan import Draw, Image, Plan, Request, other_images, replace_images, swap_images
from epd_conformance.plans.steps import step
from epd_conformance.plans.windows import WINDOWS
from epd_conformance.verdict import Owner

FILE_KV = "vllm.distributed.kv_transfer.kv_connector.v1.example_connector.ExampleConnector"
CONNECTOR = "epd_conformance.connectors.verified_store.VerifiedStoreConnector"
PROMPT = 300
BLOCK = 32
# As on a real server: words, then items of twelve rows with two marker tokens between them.
FIRST, STRIDE, ROWS = 29, 14, 12


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def key_of(image: Any) -> str:
    return digest_of(json.dumps(image.to_json()))


def item_key(image: Any, uuid: Any) -> str:
    """The engine's identifier of an item: the client's name for it, where there is one."""
    return str(uuid) if uuid is not None else key_of(image)


def good_answer(request: Request, label: str | None = None, rid: str = "0" * 32, **changes: Any) -> Answer:
    """What every server answers to a request: ids that depend on its content only."""
    seed = bytes.fromhex(request.digest())
    answer = Answer(
        label=label or request.label,
        request_id=rid,
        status=200,
        prompt_ids=(1, 2, 3, *seed[:4], 4),
        ids=tuple(seed[:12]),
        logprobs=tuple(-1.0 - index / 8 for index in range(12)),
        margins=tuple(0.25 + index / 16 for index in range(12)),
        finish_reason="length",
    )
    return replace(answer, **changes)


class Story:
    """A stack that serves the requests of one cell, one after the other."""

    def __init__(
        self, judge: str, topology: str, plan: Plan, *, owner: Owner = Owner.CONNECTOR, prompt: int = PROMPT
    ) -> None:
        self.judge, self.topology, self.plan, self.owner, self.prompt = judge, topology, plan, owner, prompt
        self.now = 1000.0
        self.events: list[dict[str, Any]] = []
        self.sequence: dict[tuple[str, str], int] = {}
        self.answers: list[Answer] = []
        self.facts: dict[str, Any] = {}
        self.held: set[str] = set()
        self.encoder_holds: set[str] = set()
        both = topology == "aggregated"
        pd = topology == "e-p-d"
        self.roles = Roles(
            encode=frozenset() if both else frozenset({"encode-0"}),
            consumers=frozenset({"aggregated-0" if both else "prefill-0" if pd else "prefill_decode-0"}),
            decode=frozenset({"decode-0"} if pd else ()),
            both=frozenset({"aggregated-0"} if both else ()),
        )
        (self.consumer,) = self.roles.consumers
        for server in sorted(self.roles.encode | self.roles.consumers):
            for side in ("worker", "scheduler"):
                blocks = None if side == "worker" else 1 if server == "encode-0" else 4096
                self.write(server, side, "init", connector=CONNECTOR, ec_role="", blocks=blocks, block_size=BLOCK)
        for server in ("prefill-0", "decode-0") if pd else ():
            for side in ("kv-worker", "kv-scheduler"):
                self.write(server, side, "init", connector=FILE_KV, kv_role="", block_size=BLOCK)
        self.before = list(self.events)
        self.events.clear()

    def write(self, server: str, side: str, ev: str, **fields: Any) -> None:
        self.now += 0.001
        seq = self.sequence.get((server, side), 0)
        self.sequence[server, side] = seq + 1
        self.events.append({"seq": seq, "t": self.now, "server": server, "side": side, "ev": ev, **fields})

    def items(self, request: Request) -> list[dict[str, Any]]:
        options = request.options.get("mm_processor_kwargs")
        return [
            {
                "id": item_key(image, uuid) if options is None else digest_of(f"{item_key(image, uuid)} {options}"),
                "modality": "image",
                "offset": FIRST + STRIDE * index,
                "length": ROWS,
                "embeds": ROWS,
                "data": ["image_grid_thw", "pixel_values"],
            }
            for index, (image, uuid) in enumerate(zip(request.images, request.uuids, strict=True))
        ]

    def form(self, key: str) -> dict[str, Any]:
        return {
            "id": key,
            "seconds": 0.0005,
            "digest": digest_of("rows of " + key),
            "rows": ROWS,
            "width": 128,
            "shape": [ROWS, 128],
            "dtype": "float32",
            "bytes": ROWS * 512,
        }

    def step(self, server: str, req: str, encode: Sequence[str] = (), prompt: int = PROMPT) -> None:
        self.write(
            server,
            "scheduler",
            "step",
            new=[{"req": req, "computed": 0, "prompt": prompt}],
            encode={req: list(encode)} if encode else {},
            allocated=[],
            free=[],
        )

    def prime(self, request: Request, rid: str) -> None:
        for index, item in enumerate(self.items(request)):
            req = f"chatcmpl-{rid}-e{index}-{index:08x}"
            self.write("encode-0", "scheduler", "request", req=req, items=[{**item, "offset": 7}], prompt=33)
            fresh = item["id"] not in self.encoder_holds
            self.encoder_holds.add(item["id"])
            self.step("encode-0", req, [item["id"]] if fresh else (), 33)
            if fresh:
                self.write("encode-0", "worker", "save", **self.form(item["id"]))
            self.write("encode-0", "scheduler", "finished", req=req, delayed=False)

    def consume(self, request: Request, rid: str, leg: str, primed: bool, held: bool = False) -> None:
        window = WINDOWS[self.plan.window or ""] if held else None
        server, items = self.consumer, self.items(request)
        if self.plan.metadata_only and request.label in ("twin", "victim"):
            items = [{**item, "data": ["image_grid_thw"]} for item in items]
        req = f"chatcmpl-{rid}{leg}-00abcdef"
        self.write(server, "scheduler", "request", req=req, items=items, prompt=self.prompt)
        missing = list(dict.fromkeys(item["id"] for item in items if item["id"] not in self.held))
        for key in missing:
            self.write(server, "scheduler", "lookup", req=req, id=key, found=primed)
        if self.plan.metadata_only and not primed:
            self.write(server, "scheduler", "unavailable", reqs=[req])
            return
        if window is not None and window.loads_later:
            self.hold(request, rid)
        self.step(server, req, () if primed else missing)
        for key in missing:
            event = "load" if primed else "save" if server in self.roles.both else "encoded"
            self.write(server, "worker", event, **self.form(key))
        self.held.update(missing)
        if window is not None and not window.loads_later:
            self.hold(request, rid)
        self.write(server, "scheduler", "finished", req=req, delayed=False)

    def decode(self, request: Request, rid: str) -> None:
        req = f"chatcmpl-{rid}-d-00fedcba"
        tokens = (self.prompt - 1) // BLOCK * BLOCK
        self.write("decode-0", "kv-scheduler", "kv-match", req=req, tokens=tokens, prompt=self.prompt)
        self.write("decode-0", "kv-scheduler", "kv-take", req=req, tokens=tokens)
        self.write(
            "decode-0",
            "kv-scheduler",
            "kv-new",
            req=req,
            computed=tokens,
            prompt=self.prompt,
            items=self.items(request),
        )
        self.write("decode-0", "kv-worker", "kv-injected", tokens=tokens)

    def next_id(self) -> str:
        """The id of the next request."""
        return digest_of(f"{self.judge}/{len(self.answers)}")[:32]

    def send(
        self,
        request: Request,
        *,
        primed: bool = True,
        direct: bool = False,
        by_hand: bool = False,
        lost: bool = False,
        past: bool = False,
        held: bool = False,
    ) -> None:
        """`by_hand`: primed beforehand, and sent past the encode servers. `lost`: what was saved is not there any more. `past`:
        sent past the encode servers, for what was saved by an earlier request."""
        rid = self.next_id()
        if by_hand:
            self.now += 0.1
            self.prime(request, rid)
            direct = not self.roles.decode
        started = self.now = self.now + 0.1
        if primed and not direct and not by_hand and not past:
            self.prime(request, rid)
        leg = "" if direct else "-p" if self.roles.decode else "-d"
        self.consume(request, rid, leg, primed and not lost, held)
        if self.plan.metadata_only and lost:
            self.answers.append(Answer(request.label, rid, 500, error="refused", started=started, seconds=0.01))
            return
        if self.roles.decode:
            self.decode(request, rid)
        self.answers.append(
            good_answer(request, rid=rid, started=started, seconds=self.now - started, streamed=request.stream)
        )

    def hold(self, request: Request, rid: str) -> None:
        """Hold a request in the plan's window, now; the fault may be done while `held_at` to `opened_at`."""
        window = WINDOWS[self.plan.window or ""]
        proxy = POINTS[window.point] == "proxy"
        server, side = ("bypass", "proxy") if proxy else (self.consumer, POINTS[window.point])
        item = self.items(request)[0]
        at = {"point": window.point, "id": None if proxy else item["id"], "req": rid if proxy else None}
        about = {"computed": item["offset"] + 1, "tokens": 99} if window.point == "scheduled" else {}
        self.write(server, side, "held", **at, **about)
        self.now += 0.01
        self.write(server, side, "opened", **at, why="released", seconds=0.01)

    def in_window(self) -> None:
        """Send the requests of a cell with a window, in which the third one's object is damaged; nothing comes of it."""
        first, twin, victim, fresh, *again = self.plan.requests
        window = WINDOWS[self.plan.window or ""]
        self.send(first)
        for request in (twin, victim):
            self.send(request, by_hand=True, held=True)
        item = self.items(victim)[0]
        opened = [event["t"] for event in self.events if event["ev"] == "opened"][-1]
        self.now += 0.01
        whole, after = {"sha256": digest_of("object"), "bytes": 6000}, {"sha256": digest_of("damage"), "bytes": 3000}
        receipt = {"kind": self.plan.fault, "key": item["id"], "at": opened - 0.008, "before": whole, "after": after}
        self.facts["fault"] = {
            "rehearsed": True,
            "receipt": receipt,
            "verified": True,
            "began_at": opened - 0.008,
            "injected_at": opened - 0.004,
            "healed": True,
            "healed_at": self.now,
            "problem": "",
        }
        self.send(fresh)
        if window.again:
            for request in again:
                self.send(request, direct=not self.roles.decode, past=True)
        self._go_on()

    def damaged(self) -> None:
        """Send the four requests of a cell with a fault, which is done to the third one's object."""
        first, twin, victim, fresh = self.plan.requests
        self.send(first)
        self.send(twin, by_hand=True)
        self.send(victim, by_hand=True, lost=True)
        sent = self.answers[-1].started
        kind, (item,) = self.plan.fault, self.items(victim)
        whole = {"sha256": digest_of("object"), "bytes": 6000}
        after = {"sha256": None, "bytes": None} if kind == "deleted" else {"sha256": digest_of("damage"), "bytes": 3000}
        receipt = {"kind": kind, "key": item["id"], "at": sent - 0.06, "before": whole, "after": after}
        self.now += 0.01
        self.facts["fault"] = {
            "rehearsed": True,
            "receipt": receipt,
            "verified": True,
            "injected_at": sent - 0.05,
            "healed": True,
            "healed_at": self.now,
            "problem": "",
        }
        self.send(fresh)
        self._go_on()

    def scripted(self) -> None:
        """Carry out the plan's steps: everything goes well, and what is damaged or gone is encoded by the consumer."""
        records: list[dict[str, Any]] = []
        self.facts["steps"] = records
        servers = sorted(self.roles.encode | self.roles.consumers | self.roles.decode)
        rest, damaged, gone, point = iter(self.plan.requests), "", False, ""
        for one in self.plan.steps:
            self.now += 0.01
            record: dict[str, Any] = {"do": one["do"], "at": self.now, "done": True, "problem": ""}
            match one:
                case {"do": "prime"}:
                    self.prime(self.plan.requests[len(self.answers)], self.next_id())
                case {"do": "damage"}:
                    damaged = item_key(self.plan.requests[len(self.answers)].images[0], None)
                    record["receipt"] = {"kind": one["kind"], "before": {"bytes": 6000}, "after": {"bytes": 3000}}
                    record["receipt"]["key"] = damaged
                case {"do": "heal"}:
                    damaged = ""
                case {"do": "reset"}:
                    record["statuses"] = dict.fromkeys(servers, 200)
                    self.held.clear()
                    self.encoder_holds.clear()
                    # As a server that resets says it to its connector.
                    for server in servers:
                        if server not in self.roles.decode and one["cache"] == "encoder":
                            self._forget(server)
                case {"do": "restart"}:
                    chosen = {"encode": self.roles.encode, "consumer": self.roles.consumers}.get(
                        one["servers"], servers
                    )
                    for server in sorted(chosen):
                        if server in self.roles.decode:
                            self.write(server, "kv-scheduler", "init", connector=FILE_KV, kv_role="", block_size=BLOCK)
                        else:
                            self.write(server, "scheduler", "init", connector=CONNECTOR, blocks=4096, block_size=BLOCK)
                    record["servers"] = sorted(chosen)
                case {"do": "look"}:
                    record["outside"] = {"stack/config": digest_of("config")}
                case {"do": "send", "how": "fails" | "given-up" | "refused"}:
                    self.fail(next(rest), one["way"], 400 if one["how"] == "refused" else 500)
                case {"do": "store"}:
                    gone = one["how"] == "removed"
                    record |= {"removed": 2} if one["how"] == "emptied" else {}
                case {"do": "prime-together"}:
                    request, began = self.plan.requests[len(self.answers)], self.now
                    record["opened_at"] = self.stopped("scheduled", "req", self.next_id())
                    for number in range(int(one["count"])):
                        self.prime(request, digest_of(f"{self.judge} {number}")[:32] if number else self.next_id())
                    sent = {"started": began, "ended": self.now, "status": 200}
                    record["primers"] = [dict(sent) for _ in range(int(one["count"]))]
                case {"do": "prime-held"}:
                    request, point = self.plan.requests[len(self.answers)], one["point"]
                    stopped = {"point": point, "id": self.items(request)[0]["id"], "req": None}
                    writing = (request, self.next_id())
                    if point == "saved":
                        self.prime(*writing)
                    self.write("encode-0", "worker", "held", **stopped)
                case {"do": "release"}:
                    self.write("encode-0", "worker", "opened", **stopped, why="released", seconds=1.0)
                    if point == "saving":
                        self.prime(*writing)
                case {"do": "purge", "how": "end"}:
                    last = self.answers[-1]
                    key = item_key(self.plan.requests[len(self.answers) - 1].images[0], None)
                    record["removed"] = [[key, last.started + last.seconds / 2]]
                case {"do": "together"}:
                    self.at_once([next(rest) for _ in range(int(one["count"]))])
                case {"do": "send"}:
                    request = next(rest)
                    past = one["way"] == "past-encode"
                    direct = past and not self.roles.decode
                    unsaved = {"primed": False} if one["how"] == "any" and point == "saving" else {}
                    keys = [item_key(image, None) for image in request.images]
                    if not past and damaged in keys and damaged not in self.encoder_holds:
                        damaged = ""  # it is encoded and saved once more
                    self.send(request, direct=direct, past=past, lost=gone or damaged in keys, **unsaved)
            record["ended"] = self.now
            records.append(record)
        self._go_on()

    def stopped(self, point: str, kind: str, value: str) -> float:
        """The encode server is held, and let go; when."""
        at = {"point": point, "id": None, "req": None, kind: value}
        self.write("encode-0", "scheduler", "held", **at)
        self.now += 0.005
        self.write("encode-0", "scheduler", "opened", **at, why="released", seconds=0.005)
        return self.now

    def at_once(self, requests: Sequence[Request]) -> None:
        """All are sent, the first is held at its encode server, and the first of an item that comes to the consumer loads."""
        rids = [digest_of(f"{self.judge} at once {number}")[:32] for number in range(len(requests))]
        started = [self.now + 0.001 * number for number in range(len(requests))]
        self.now = started[-1] + 0.001
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

    def fail(self, request: Request, way: str, status: int) -> None:
        """A request that fails alone: a reference after the connector gave it up, whatever else before anybody sees it."""
        rid = self.next_id()
        started = self.now = self.now + 0.1
        if way == "reference":
            # What an encode server says of the item is asked for under no uuid, and by another id.
            spec, (item,) = request.images[0], self.items(request)
            self.prime(replace_images(request, [Image(spec)], "nameless"), digest_of(rid)[:32])
            req = f"chatcmpl-{rid}{'-p' if self.roles.decode else ''}-00abcdef"
            data = {**item, "data": ["image_grid_thw"]}
            self.write(self.consumer, "scheduler", "request", req=req, items=[data], prompt=self.prompt)
            self.write(self.consumer, "scheduler", "unavailable", reqs=[req])
        self.answers.append(Answer(request.label, rid, status, body="{}", started=started, seconds=0.01))

    def asked_alone(self) -> None:
        """An encode server answers each request directly, and says what it has of the items."""
        said = []
        for index, request in enumerate(self.plan.requests):
            rid = digest_of(f"{self.judge}/alone/{index}")[:32]
            items = [{**item, "offset": 7} for item in self.items(request)]
            req = f"chatcmpl-{rid}-00abcdef"
            keys = [item["id"] for item in items]
            if items:
                self.write("encode-0", "scheduler", "request", req=req, items=items, prompt=33)
            self.step("encode-0", req, list(dict.fromkeys(keys)), 33)
            params = {key: {"item_indices": [i for i, other in enumerate(keys) if other == key]} for key in keys}
            said.append(
                {"request_id": rid, "status": 200, "completion_tokens": 0, "content": "", "params": params or None}
            )
        self.facts = {"said": said}

    def _forget(self, server: str) -> None:
        keys = sorted({event["id"] for event in self.events if event["ev"] in ("load", "encoded", "save")})
        self.write(server, "scheduler", "step", new=[], encode={}, allocated=[], free=keys)

    def confined(self) -> None:
        """Send the three requests of a cell with hostile uuids; the store does not know where they lead."""
        plain, baited, hostile = self.plan.requests
        self.send(plain)
        self.send(baited, primed=False, direct=not self.roles.decode)
        self.send(hostile)
        outside = {"stack/bait": "folder", "stack/bait/object": digest_of("bait")}
        self.facts |= {"bait": ["bait/object"], "before": outside, "after": dict(outside)}
        self._go_on()

    def _go_on(self) -> None:
        servers = sorted(self.roles.encode | self.roles.consumers | self.roles.decode)
        self.facts |= {"health": dict.fromkeys(servers, 200), "busy": dict.fromkeys(servers, 0)}

    def evidence(self) -> CellEvidence:
        baseline = {}
        for request in (*self.plan.compared, *self.plan.contrasts):
            arms = ("aggregated", "p-d") if self.roles.decode and request in self.plan.requests else ("aggregated",)
            baseline[request.digest()] = {arm: good_answer(request, "baseline") for arm in arms}
        return CellEvidence(
            cell=f"EPD-TOK-000[{self.topology}/made/{self.judge}]",
            judge=self.judge,
            topology=self.topology,
            owner=self.owner,
            plan=self.plan,
            answers=tuple(self.answers),
            baseline=baseline,
            admitted=frozenset(request.digest() for request in self.plan.compared),
            floor=0.0,
            floor_enough=True,
            roles=self.roles,
            before=tuple(self.before),
            during=tuple(self.events),
            facts=self.facts,
        )


# Saved and loaded; forgotten by everybody, and loaded again past the encode servers; a damaged object that is refused; all
# objects removed, and saved anew; without a store; a hostile uuid, and what must fail.
SCRIPT = (
    step("send", way="proxy", how="loaded"),
    step("restart", servers="all"),
    step("reset", cache="encoder"),
    step("send", way="past-encode", how="loaded"),
    step("prime"),
    step("damage", kind="truncated"),
    step("send", way="past-encode", how="unjudged"),
    step("heal"),
    step("store", how="emptied"),
    step("reset", cache="encoder"),
    step("send", way="proxy", how="saved"),
    step("store", how="removed"),
    step("send", way="proxy", how="any"),
    step("store", how="mended"),
    step("look"),
    step("send", way="proxy", how="contained"),
    step("send", way="reference", how="given-up"),
    step("send", way="uuid-alone", how="fails"),
    step("send", way="past-encode", how="refused"),
    step("look"),
)


def _plan(judge: str, images: int, window: str) -> Plan:
    draw = Draw(0, judge)
    drawn = [draw.image() for _ in range(images)]
    if judge in ("text-only", "untouched"):
        return Plan((draw.request("text"),), (draw.request("other text"),))
    if judge == "twice":
        return Plan((draw.request("twice", drawn[0], drawn[0]),))
    if judge == "constructed":
        return Plan(())
    if judge in ("recomputed", "contained", "fails-alone"):
        four = tuple(draw.request(label, draw.image()) for label in ("first", "twin", "victim", "fresh"))
        others = tuple(replace_images(request, [draw.image()], f"{request.label}, other") for request in four)
        return Plan(four, others, "deleted" if judge == "recomputed" else "truncated", judge == "fails-alone")
    if judge == "in-window":
        drawn = [draw.image() for _ in range(4)]
        five = tuple(
            draw.request(label, drawn[index])
            for label, index in (("first", 0), ("twin", 1), ("victim", 2), ("fresh", 3), ("again", 2))
        )
        asked = five if WINDOWS[window].again else five[:4]
        others = tuple(replace_images(request, [draw.image()], f"{request.label}, other") for request in asked)
        return Plan(asked, others, "truncated", window=window)
    if judge == "scripted":
        same = draw.image()
        shown = [same, same, draw.image(), same, draw.image()]
        shown += [replace(draw.image(), uuid=uuid) for uuid in ("a/../b", "nobody's", "alone", 5)]
        nine = tuple(draw.request(f"request {index}", image) for index, image in enumerate(shown))
        return Plan(nine, other_images(draw, nine), steps=SCRIPT)
    if judge == "distinct":
        return Plan((draw.request("one", draw.image()), draw.request("other", draw.image())))
    if judge == "text-ended":
        return Plan((draw.request("text"), draw.request("image", draw.image())))
    if judge in ("ended", "named"):
        return Plan((draw.request("three", *drawn, draw.image(), drawn[0]),))
    if judge == "confined":
        uuids = {"harmless": "harmless-1", "baited": "../outside-2", "hostile": "../outside-3"}
        return Plan(tuple(draw.request(label, replace(draw.image(), uuid=uuid)) for label, uuid in uuids.items()))
    request = draw.request("images", *drawn)
    if judge == "warm":
        contrast = replace_images(request, [draw.image() for _ in drawn], "other")
        return Plan((request, draw.request("warm", *drawn)), (contrast,))
    if judge in ("both", "stage-error"):
        again = replace(request, label="again", stream=judge == "stage-error")
        return Plan((request, again), (replace_images(request, [draw.image() for _ in drawn], "other"),))
    if judge == "equality" and images > 1:
        return Plan((request,), (swap_images(request, list(reversed(range(images))), "swapped"),))
    return Plan((request,), (replace_images(request, [draw.image() for _ in drawn], "other"),))


def passing(
    judge: str,
    topology: str = "",
    *,
    images: int = 2,
    prompt: int = PROMPT,
    owner: str = "",
    window: str = "allocated",
) -> CellEvidence:
    """Evidence of a cell that went well."""
    import made_proxied  # it tells its stories with what stands here

    topology = topology or {"both": "aggregated", "kv-taken": "e-p-d", "one-token": "e-p-d"}.get(judge, "e-pd")
    if judge in (*made_proxied.EXCHANGED, *made_proxied.ANSWERED):
        plan = made_proxied.plan(judge, images)
        story = Story(judge, topology, plan, owner=Owner(owner or "proxy"), prompt=prompt)
        made_proxied.carry(story, judge)
        return story.evidence()
    story = Story(
        judge, topology, _plan(judge, images, window), owner=Owner(owner) if owner else Owner.CONNECTOR, prompt=prompt
    )
    if judge == "stage-error":
        story.facts = {"stage": "encode", "status": 404}
        for index, request in enumerate(story.plan.requests):
            error = {"stage": "encode", "upstream_status": 404, "request_id": f"r{index}", "message": "no such model"}
            story.answers.append(
                Answer(request.label, f"r{index}", 404, body=json.dumps({"error": error}), streamed=request.stream)
            )
    elif judge == "constructed":
        story.facts = {"servers": sorted(story.roles.encode | story.roles.consumers)}
    elif judge == "encode-only":
        story.facts = {"blocks": {"encode-0": 1}, "status": 200, "completion_tokens": 0}
    elif judge == "both":
        first, second = story.plan.requests
        story.send(first, primed=False, direct=True)
        story.held.clear()
        story.facts = {"reset_status": 200}
        story.send(second, direct=True)
    elif judge == "miss":
        story.send(story.plan.requests[0], primed=False, direct=topology == "e-pd")
    elif judge in ("recomputed", "contained", "fails-alone"):
        story.damaged()
    elif judge == "in-window":
        story.in_window()
    elif judge == "scripted":
        story.scripted()
    elif judge == "confined":
        story.confined()
    elif judge in ("ended", "text-ended", "named"):
        story.asked_alone()
    else:
        for request in story.plan.requests:
            story.send(request)
    return story.evidence()


# -- spoiling ----------------------------------------------------------------------------------------------------------


def with_events(
    cell: CellEvidence, change: Callable[[list[dict[str, Any]]], Any], where: str = "during"
) -> CellEvidence:
    """The evidence after `change` has worked on a copy of its events (and may return new ones)."""
    events = copy.deepcopy([dict(event) for event in getattr(cell, where)])
    changed = change(events)
    # As the journal's reader gives them.
    ordered = tuple(sorted(events if changed is None else changed, key=lambda event: event["t"]))
    return replace(cell, before=ordered) if where == "before" else replace(cell, during=ordered)


def without(cell: CellEvidence, where: str = "during", **fields: Any) -> CellEvidence:
    """The evidence without the events that have all these fields; there must be one."""

    def change(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = [event for event in events if not _has(event, fields)]
        assert len(kept) < len(events), fields
        return kept

    return with_events(cell, change, where)


def edited(cell: CellEvidence, edit: Mapping[str, Any], where: str = "during", **fields: Any) -> CellEvidence:
    """The evidence with `edit` laid over the first event that has all these fields."""

    def change(events: list[dict[str, Any]]) -> None:
        next(event for event in events if _has(event, fields)).update(edit)

    return with_events(cell, change, where)


def inserted(cell: CellEvidence, after: Mapping[str, Any], *new: dict[str, Any], shift: float = 0.0) -> CellEvidence:
    """The evidence with new events right behind the last one that has the fields of `after`."""

    def change(events: list[dict[str, Any]]) -> None:
        position = max(index for index, event in enumerate(events) if _has(event, after))
        moment = events[position]["t"] + 0.0001
        events[position + 1 : position + 1] = [
            {"seq": 0, "t": moment + shift, "server": "x", "side": "scheduler", **event} for event in new
        ]

    return with_events(cell, change)


def with_answer(cell: CellEvidence, index: int = -1, **changes: Any) -> CellEvidence:
    """The evidence with one answer changed."""
    answers = list(cell.answers)
    answers[index] = replace(answers[index], **changes)
    return replace(cell, answers=tuple(answers))


def with_base(cell: CellEvidence, request: Request, arm: str = "aggregated", **changes: Any) -> CellEvidence:
    """The evidence with one baseline answer changed."""
    baseline = {digest: dict(arms) for digest, arms in cell.baseline.items()}
    baseline[request.digest()][arm] = replace(baseline[request.digest()][arm], **changes)
    return replace(cell, baseline=baseline)


def _has(event: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    return all(event.get(name) == value for name, value in fields.items())


# Which kinds of single changes each judge must notice. What is missing here its evidence does not hold, or its requirement
# does not speak of: nobody compares the ids of a cell whose requirement is about digests.
NOTICED: dict[str, tuple[str, ...]] = {
    "equality": ("id", "digest", "removed", "encode", "status", "kv"),
    "text-only": ("id", "status", "kv"),
    "transported": ("digest", "removed", "encode", "status"),
    "warm": ("id", "digest", "removed", "encode", "status", "kv"),
    "miss": ("id", "status", "kv"),
    "twice": ("digest", "removed", "encode", "status"),
    "kv-taken": ("status", "kv"),
    "untouched": ("status",),
    "primed-once": ("status",),
    "stage-error": ("status",),
    "constructed": (),
    "encode-only": (),
    "both": ("id", "digest", "removed", "encode", "status"),
    "recomputed": ("id", "digest", "removed", "encode", "status", "refused", "kv"),
    "fails-alone": ("id", "digest", "removed", "encode", "status", "refused", "kv"),
    "contained": ("id", "digest", "removed", "encode", "status", "refused", "kv"),
    "in-window": ("id", "digest", "removed", "encode", "status", "refused", "kv"),
    "confined": ("digest", "removed", "encode", "status", "refused"),
    "scripted": ("id", "digest", "removed", "encode", "status", "refused", "kv"),
    "kept-apart": ("id", "status"),
    **dict.fromkeys(("order", "prompt-tokens", "media-only", "encoding-options", "distinct"), ("status",)),
    **dict.fromkeys(("as-direct", "refused", "not-begun", "passed-on", "one-token", "one-id", "work-ends"), ()),
    **dict.fromkeys(("ended", "text-ended", "named"), ()),
}
# By judge and request, what of this may be otherwise: nobody loads a victim's object, and it may be refused where that is
# said; what becomes of a hostile uuid is not asked, only where.
MAY: dict[str, dict[str, tuple[str, ...]]] = {
    "recomputed": {"victim": ("digest", "encode")},
    "contained": {"victim": ("digest", "encode", "refused")},
    # Whether the victim is loaded or encoded is its own affair: nobody's line of it is missed, only wrong bytes.
    "in-window": {"victim": ("encode", "refused", "removed")},
    "fails-alone": {"victim": ("digest", "encode", "refused", "id", "kv", "removed")},
    # Nothing is asked of the one with a damaged object, and not where the other one comes from while the store is gone. One with
    # a hostile uuid may fail, the last three must.
    "scripted": {
        "request 2": ("id", "digest", "removed", "encode", "status", "refused", "kv"),
        "request 4": ("digest", "encode", "removed"),
        "request 5": ("encode", "removed", "refused"),
        **dict.fromkeys(
            ("request 6", "request 7", "request 8"), ("id", "digest", "removed", "encode", "refused", "kv")
        ),
    },
    "confined": dict.fromkeys(("baited", "hostile"), ("digest", "removed", "encode", "status", "refused")),
}


def tampered(cell: CellEvidence) -> Iterator[tuple[str, CellEvidence]]:
    """Every single change of the kinds that the cell's judge must notice, named."""

    if not NOTICED[cell.judge]:
        return

    def noticed(kind: str, label: str | None) -> bool:
        return kind in NOTICED[cell.judge] and kind not in MAY.get(cell.judge, {}).get(label or "", ())

    for index, answer in enumerate(cell.answers):
        for status in (0, 429, 500):
            refused = "refused" if status and "refused" in NOTICED[cell.judge] else "status"
            if noticed(refused, answer.label):
                yield f"status of answer {index} is {status}", with_answer(cell, index, status=status, error="made")
        if noticed("id", answer.label):
            for name in ("ids", "prompt_ids"):
                ids = list(getattr(answer, name))
                for place in {0, len(ids) // 2, len(ids) - 1}:
                    wrong = (*ids[:place], ids[place] + 1, *ids[place + 1 :])
                    yield f"{name}[{place}] of answer {index}", with_answer(cell, index, **{name: wrong})
                yield f"last of {name} of answer {index} missing", with_answer(cell, index, **{name: tuple(ids[:-1])})
    keys = {item["id"] for event in cell.during if event["ev"] == "request" for item in event["items"]}
    for position, event in enumerate(cell.during):
        label = _label(cell, event)
        if event["ev"] in ("save", "load") and event["id"] in keys:
            if noticed("digest", label):
                yield f"digest of the {event['ev']} at {position}", _at(cell, position, digest="0" * 64)
            if noticed("removed", label):
                yield f"{event['ev']} at {position} removed", _drop(cell, position)
        if event["ev"] in ("kv-take", "kv-injected") and noticed("kv", label) and event["server"] in cell.roles.decode:
            yield f"{event['ev']} at {position} halved", _at(cell, position, tokens=event["tokens"] // 2)
            yield f"{event['ev']} at {position} removed", _drop(cell, position)
        consumed = event["ev"] == "request" and event["server"] in cell.roles.consumers
        # The first request of `both` is there to be encoded.
        if consumed and noticed("encode", label) and (cell.judge != "both" or event["t"] >= cell.answers[1].started):
            step = {"ev": "step", "new": [], "encode": {"r": [event["items"][-1]["id"]]}, "allocated": [], "free": []}
            yield f"local encode behind {position}", _add(cell, position, {**step, "server": event["server"]})
            yield f"encode on another consumer behind {position}", _add(cell, position, {**step, "server": "prefill-9"})
            yield (
                f"encoded line behind {position}",
                _add(cell, position, {"ev": "encoded", "server": event["server"], "id": event["items"][0]["id"]}),
            )
        if event["ev"] == "kv-new" and noticed("kv", label) and event["server"] in cell.roles.decode:
            line = {"ev": "kv-encode", "server": event["server"], "encode": {event["req"]: [0]}}
            yield f"encode on decode behind {position}", _add(cell, position, line)


def _label(cell: CellEvidence, event: Mapping[str, Any]) -> str | None:
    """The request that a line belongs to, by its id or by its item."""
    # None where the answers are facts.
    for request, answer in zip(cell.plan.requests, cell.answers, strict=False):
        keys = [item_key(*pair) for pair in zip(request.images, request.uuids, strict=True)]
        keys += [key_of(image) for image in request.images]
        if answer.request_id in str(event.get("req", "")) or event.get("id") in keys:
            return request.label
    if event["ev"] == "kv-injected":
        # It names nobody; requests are sent one after the other.
        return [answer.label for answer in cell.answers if answer.started <= event["t"]][-1]
    return None


def _at(cell: CellEvidence, position: int, **changes: Any) -> CellEvidence:
    events = list(cell.during)
    events[position] = {**events[position], **changes}
    return replace(cell, during=tuple(events))


def _drop(cell: CellEvidence, position: int) -> CellEvidence:
    return replace(cell, during=(*cell.during[:position], *cell.during[position + 1 :]))


def _add(cell: CellEvidence, position: int, event: Mapping[str, Any]) -> CellEvidence:
    new = {"seq": 0, "t": cell.during[position]["t"] + 1e-5, "side": "scheduler", **event}
    return replace(cell, during=(*cell.during[: position + 1], new, *cell.during[position + 1 :]))
