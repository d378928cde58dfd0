"""One boot of real servers: planted proxies, which the cells of area PROXY must find, a proxy that sends references, and the
producer that publishes again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# The proxies with one defect each that the tests on fake servers have as well.
sys.path.insert(0, str(Path(__file__).parent.parent / "proxy"))

import planted_proxy
from planted.subjects import Forgetful
from planted_proxy import VARIANTS, App, Sends, of, parts_of, without_media

from epd_conformance.live import suites
from epd_conformance.live.case import Case
from epd_conformance.live.session import LiveSession, PlannedCell
from epd_conformance.oracle.cell import CellEvidence, Judgement
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.plan import Draw, Plan, replace_images
from epd_conformance.plans.steps import step
from epd_conformance.proxy.app import create_app
from epd_conformance.proxy.stages import Call, Stages
from epd_conformance.proxy.upstreams import Upstreams
from epd_conformance.proxycheck.under_test import OwnProxy
from epd_conformance.run import Options, model_use
from epd_conformance.topology.spec import Role
from epd_conformance.topology.stack import Site
from epd_conformance.verdict import Owner, Verdict

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]


# -- proxies whose defect needs no prefill server --------------------------------------------------------------------------


class EncodeWithoutUuid(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        for part in parts_of(body) if stage == "encode" else ():
            part.pop("uuid", None)
        return body


class DecodeWithoutSalt(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return {name: value for name, value in body.items() if stage != "decode" or name != "cache_salt"}


class DecodeWithoutMedia(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return without_media(body) if stage == "decode" else body


class OneChoice(Sends):
    def changed(self, stage: str, body: dict[str, Any], call: Call) -> dict[str, Any]:
        return {name: value for name, value in body.items() if stage != "decode" or name != "n"}


class TakesTheOther(Stages):
    """Of two requests with as many items, decode gets the prompt of the second for the first as well."""

    def __init__(self, upstreams: Upstreams) -> None:
        super().__init__(upstreams)
        self.waiting: dict[Any, asyncio.Future[dict[str, Any]]] = {}

    async def encode(self, call: Call, items: Any) -> None:
        await super().encode(call, items)
        kind = len(items)
        if kind in self.waiting:
            self.waiting.pop(kind).set_result(call.body)
        else:
            self.waiting[kind] = asyncio.get_running_loop().create_future()
            call.body = await self.waiting[kind]


#: Cell, proxy, and the reason that it must give.
CONTROLS: list[tuple[str, str, App, str]] = [
    ("001", "text", VARIANTS["primes text"].app, "encoder-touched"),
    ("002", "img3", VARIANTS["primes twice"].app, "not-primed-once"),
    ("003", "encode-404", VARIANTS["hides the stage"].app, "unclear-error"),
    ("004", "refused", VARIANTS["turns 4xx into 500"].app, "refusal-lost"),
    ("005", "refused", VARIANTS["begins at once"].app, "begun-too-early"),
    ("008", "short-long", VARIANTS["text in primers"].app, "text-in-primer"),
    ("013", "uuid-salt", of(EncodeWithoutUuid), "option-lost"),
    ("013", "uuid-salt", of(DecodeWithoutSalt), "option-lost"),
    ("014", "options", of(OneChoice), "answer-differs"),
    ("015", "img3", of(DecodeWithoutMedia), "media-lost"),
    ("024", "named", VARIANTS["one id for nobody"].app, "id-lost"),
    ("029", "models-tokenize", VARIANTS["no tokenize"].app, "not-passed-on"),
    ("033", "three-sizes", VARIANTS["swaps items"].app, "prompt-differs"),
    ("034", "six", of(TakesTheOther), "prompt-differs"),
    # The last one: the server goes on working after it.
    ("021", "decode", VARIANTS["deaf for leaving clients"].app, "works-for-nobody"),
]


# -- publishing again ------------------------------------------------------------------------------------------------------

RESET = step("reset", cache="encoder")
SEND = step("send", way="proxy", how="loaded")


def primed_again(damage: str) -> tuple[Any, ...]:
    """The encode server has encoded the item and holds it; its object is damaged, and it is primed once more."""
    # The consumer must ask for it, so both forget it; the primer by hand then makes the encode server hold it.
    return (RESET, step("prime"), step("damage", kind=damage), SEND)


def again(*steps: Any, fresh: bool = False) -> Case:
    """A request for one image for each step that sends; the same one, or each time a `fresh` one."""

    def build(draw: Draw) -> Plan:
        image = draw.image()
        count = sum(one["do"] == "send" for one in steps)
        requests = tuple(draw.request(f"request {number}", draw.image() if fresh else image) for number in range(count))
        return Plan(requests, tuple(replace_images(one, [draw.image()], "other") for one in requests), steps=steps)

    return Case("again", "scripted", build)


RESTARTED = again(
    SEND,
    step("restart", servers="encode"),
    *primed_again("deleted"),
    *primed_again("deleted"),
    *primed_again("flipped-bit"),
)
# What is primed while there is no store has vanished before the consumer looks for it.
VANISHED = again(
    SEND,
    step("store", how="removed"),
    step("send", way="proxy", how="any"),
    step("store", how="mended"),
    SEND,
    fresh=True,
)
FORGOTTEN = {kind: again(SEND, *primed_again(kind)) for kind in ("deleted", "flipped-bit")}


@dataclass
class Scene:
    """A running e-pd stack behind our proxy."""

    session: LiveSession

    def judged(self, cell: PlannedCell, app: App | None = None) -> Judgement:
        """What a cell gives, behind another proxy than ours."""
        return judge(self.carried_out(cell, app))

    def carried_out(self, cell: PlannedCell, app: App | None, **options: Any) -> CellEvidence:
        stack = self.session.stage("e-pd").stack
        before = stack.base_url
        proxy = None
        try:
            if app is not None:
                urls = {"encode": Role.ENCODE, "decode": Role.PREFILL_DECODE}
                servers = {name: [one.url for one in stack.of(role)] for name, role in urls.items()}
                proxy = OwnProxy(servers, options, app)
                stack.base_url = proxy.url
            return self.session.run(cell)
        finally:
            stack.base_url = before
            planted_proxy.undo()
            if proxy is not None:
                proxy.tell()
                proxy.wait()


def asked(number: str, name: str) -> PlannedCell:
    case = suites.installed().case(f"EPD-PROXY-{number}", name)
    assert case is not None, f"EPD-PROXY-{number} has no case {name}"
    return PlannedCell(f"EPD-PROXY-{number}[e-pd/made/{name}]", "e-pd", Owner.PROXY, case)


PROXY_CELLS = {(number, name): asked(number, name) for number, name, *_ in CONTROLS}
STORE_CELLS = {
    name: PlannedCell(f"EPD-INTEG-014[e-pd/made/{name}]", "e-pd", Owner.CONNECTOR, case)
    for name, case in {"restarted": RESTARTED, "vanished": VANISHED, **FORGOTTEN}.items()
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("controls")
    # The servers, too, must find the planted connector.
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    cells = [*PROXY_CELLS.values(), *STORE_CELLS.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        site = Site(folder, model_use(Options(subject="reference")))
    with site:
        session = LiveSession(site, Forgetful(), folder, seed=0, cells=cells)
        yield Scene(session)
        session.end_stage()


def test_a_lost_object_is_published_again(scene: Scene) -> None:
    """After a restart of the encode server over the kept store, and without one; an object that has gone, and a damaged one."""
    found = scene.judged(STORE_CELLS["restarted"])
    assert (found.verdict, found.reason) == (Verdict.PASS, ""), found.observed


@pytest.mark.parametrize("kind", FORGOTTEN)
def test_a_producer_that_does_not_publish_again_is_found(scene: Scene, kind: str) -> None:
    flag = scene.session.stage("e-pd").stack.store.with_name("forgetful")
    flag.touch()
    try:
        found = scene.judged(STORE_CELLS[kind])
    finally:
        flag.unlink()
    assert (found.verdict, found.reason) == (Verdict.FAIL, "encoded-again"), found.observed


def test_references_have_a_way_back(scene: Scene) -> None:
    """A proxy that sends references sends the media, once, where the consumer does not find the object."""
    evidence = scene.carried_out(STORE_CELLS["vanished"], create_app, metadata_only=True)
    found = judge(evidence)
    assert (found.verdict, found.reason) == (Verdict.PASS, ""), found.observed
    legs = [
        ["pixel_values" in item["data"] for item in event["items"]]
        for event in evidence.during
        if event["ev"] == "request" and event["server"] in evidence.roles.consumers
    ]
    assert legs == [[False], [False], [True], [False]]


def test_a_way_back_without_the_media_is_found(scene: Scene) -> None:
    evidence = scene.carried_out(STORE_CELLS["vanished"], VARIANTS["way back without media"].app, metadata_only=True)
    found = judge(evidence)
    assert (found.verdict, found.reason, found.blame) == (Verdict.FAIL, "tokens-differ", Owner.PROXY), found.observed


@pytest.mark.parametrize(
    ("number", "name", "app", "reason"), CONTROLS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_planted_proxy_is_found(scene: Scene, number: str, name: str, app: App, reason: str) -> None:
    found = scene.judged(PROXY_CELLS[number, name], app)
    assert (found.verdict, found.reason, found.blame) == (Verdict.FAIL, reason, None), found.observed
