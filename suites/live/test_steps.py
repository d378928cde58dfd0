"""Areas ERR, INTEG, STALE: what servers answer after restarts, resets and purges, and while their store is full or gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from epd_conformance.live.case import Case, requirement
from epd_conformance.plans.generated import random_script
from epd_conformance.plans.plan import Draw, Image, Plan, other_images
from epd_conformance.plans.steps import send, step
from epd_conformance.pytest_plugin import CellUnderTest

Step = Mapping[str, str]


def script(*steps: Step, items: str) -> Callable[[Draw], Plan]:
    """A request of one image for each step that sends; `items`: a letter for each, equal ones for equal images."""

    def build(draw: Draw) -> Plan:
        images: dict[str, Image] = {}
        requests = []
        for number, letter in enumerate(items):
            image = images.setdefault(letter, draw.image())
            requests.append(draw.request(f"{number} of item {letter}", image))
        return Plan(tuple(requests), other_images(draw, requests), steps=steps)

    return build


def the_same_prompt(*steps: Step) -> Callable[[Draw], Plan]:
    """The same request twice, with one salt, so that the prefix cache may answer; and a fresh one."""

    def build(draw: Draw) -> Plan:
        request = replace(draw.request("first", draw.image()), salt=f"{draw.number():012x}")
        requests = [request, replace(request, label="again"), draw.request("fresh", draw.image())]
        return Plan(tuple(requests), other_images(draw, requests), steps=steps)

    return build


def restarted(servers: str) -> Case:
    # Past the encode servers, so that nobody saves it once more; whoever still runs must have forgotten it as well.
    steps = (send("loaded"), step("restart", servers=servers), step("reset", cache="encoder"))
    return Case(servers, "scripted", script(*steps, send("loaded", "past-encode"), send("loaded"), items="aab"))


@requirement("EPD-STALE-003", restarted("consumer"), restarted("encode"), restarted("all"))
def test_what_was_saved_outlives_a_restart(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-STALE-005",
    Case(
        "reset",
        "scripted",
        script(
            send("loaded"), step("reset", cache="encoder"), send("loaded", "past-encode"), send("loaded"), items="aab"
        ),
    ),
)
def test_a_reset_leaves_the_store(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-STALE-006",
    Case(
        "purged",
        "scripted",
        script(
            send("loaded"),
            step("store", how="emptied"),
            step("reset", cache="encoder"),
            send("saved"),
            send("saved"),
            items="aab",
        ),
    ),
)
def test_what_was_purged_is_gone(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-STALE-008",
    Case(
        "replaced",
        "scripted",
        the_same_prompt(
            step("prime"),
            step("damage", kind="replaced"),
            send("unjudged", "past-encode"),
            step("heal"),
            step("reset", cache="encoder"),
            step("reset", cache="prefix"),
            send("loaded", "past-encode"),
            send("loaded"),
        ),
    ),
)
def test_wrong_kv_ends_with_its_reset(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-STALE-010",
    Case(
        "reset",
        "scripted",
        script(send("loaded"), step("reset", cache="mm"), send("any"), send("loaded"), send("any"), items="aaba"),
    ),
)
def test_the_processor_cache_may_be_reset(cell: CellUnderTest) -> None:
    cell.check()


@requirement(
    "EPD-ERR-004",
    Case(
        "removed",
        "scripted",
        script(
            send("loaded"),
            step("store", how="removed"),
            send("any"),
            step("store", how="mended"),
            send("loaded"),
            items="abc",
        ),
    ),
)
def test_a_store_may_go_and_come_back(cell: CellUnderTest) -> None:
    cell.check()


# The engine still holds the item on both sides after it was damaged: it is made to forget it, so that the producer is asked.
DAMAGED = Case(
    "primed-again",
    "scripted",
    script(
        send("loaded"),
        step("damage", kind="flipped-bit"),
        step("reset", cache="encoder"),
        send("unjudged", "past-encode"),
        step("reset", cache="encoder"),
        send("loaded"),
        items="aaa",
    ),
)


@requirement("EPD-INTEG-014", DAMAGED)
def test_a_bad_object_is_replaced_by_the_next_primer(cell: CellUnderTest) -> None:
    cell.check()


@requirement("EPD-STALE-011", *(Case(f"drawn-{number}", "scripted", random_script) for number in range(1, 7)))
def test_anything_may_follow_anything(cell: CellUnderTest) -> None:
    cell.check()
