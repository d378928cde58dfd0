"""Scripts of which the baseline is asked the whole: what a request may be answered, given what the aggregated server made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from made_evidence import Story, good_answer, passing, with_answer, with_base
from spoilt_faults import encodes, fails, key
from spoilt_scripts import ALONE, HOSTILE, REFERENCE, REFUSED

from epd_conformance.oracle.answers import TOLD
from epd_conformance.oracle.cell import CellEvidence
from epd_conformance.oracle.judges import judge
from epd_conformance.plans.plan import Draw, Image, Plan, other_images, replace_images
from epd_conformance.plans.steps import send, step
from epd_conformance.verdict import Owner, Verdict

TOPOLOGIES = ("e-pd", "e-p-d")
ONE, OTHER, FRESH = range(3)
ALONE_SECOND, ALONE_FIRST = 1, 4


def reused(how: str, topology: str = "e-pd") -> CellEvidence:
    """One uuid for two images; every server takes the second for the second."""
    draw = Draw(0, how)
    images = [replace(draw.image(), uuid="one") for _ in range(2)]
    one, other = (draw.request(label, image) for label, image in zip(("one", "other"), images, strict=True))
    fresh = draw.request("fresh", draw.image())
    contrast, last = other_images(draw, [one, fresh])
    second, first = (replace_images(other, [Image(image.spec)], f"{image.spec.seed} alone") for image in images[::-1])
    reset = step("reset", cache="encoder")
    steps = (step("reset", cache="mm"), send("loaded"), reset, send(how), send("loaded"))
    story = Story(
        "scripted", topology, Plan((one, other, fresh), (contrast, second, last, contrast, first), steps=steps)
    )
    story.owner = Owner.ENGINE
    story.scripted()
    return story.evidence()


def aggregated(cell: CellEvidence, contrast: int) -> CellEvidence:
    """The baselines answer about another image than the consumer did."""
    other = cell.plan.requests[OTHER]
    for arm in cell.baseline[other.digest()]:
        cell = with_base(cell, other, arm, ids=good_answer(cell.plan.contrasts[contrast]).ids)
    return cell


def answered(cell: CellEvidence, contrast: int) -> CellEvidence:
    return with_answer(cell, OTHER, ids=good_answer(cell.plan.contrasts[contrast]).ids)


def refuses(cell: CellEvidence) -> CellEvidence:
    """The aggregated server fails the second request, so that its prompt is not admitted."""
    other = cell.plan.requests[OTHER]
    for arm in cell.baseline[other.digest()]:
        cell = with_base(cell, other, arm, status=500, ids=(), prompt_ids=())
    return replace(cell, admitted=cell.admitted - {other.digest()})


HOWS = ("as-aggregated", "as-aggregated-or-fails")


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("contrast", [ALONE_FIRST, ALONE_SECOND])
def test_what_the_aggregated_server_says_is_right(how: str, topology: str, contrast: int) -> None:
    """Also where it takes the second image for the first: that is what everybody gets."""
    cell = answered(aggregated(reused(how, topology), contrast), contrast)
    found = judge(cell)
    assert found.verdict is Verdict.PASS, found
    wrong = judge(answered(cell, ALONE_FIRST + ALONE_SECOND - contrast))
    assert (wrong.verdict, wrong.reason, wrong.blame) == (Verdict.FAIL, "tokens-differ", None)
    assert any("alone" in cause for cause in wrong.causes)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_may_fail(topology: str) -> None:
    for how, verdict in zip(HOWS, (Verdict.FAIL, Verdict.PASS), strict=True):
        failed = fails(OTHER)(reused(how, topology))
        assert judge(failed).verdict is verdict, how
        assert judge(refuses(failed)).verdict is Verdict.PASS, "as on the aggregated server"
        answered_all_the_same = judge(refuses(reused(how, topology)))
        assert (answered_all_the_same.verdict, answered_all_the_same.reason) == (Verdict.FAIL, "not-failed")
        # Nobody is told.
        assert judge(fails(OTHER, 0)(reused(how, topology))).reason == "request-failed"


@pytest.mark.parametrize("how", HOWS)
def test_the_first_must_cross_and_the_fresh_one_as_well(how: str) -> None:
    for index in (ONE, FRESH):
        cell = encodes(index)(reused(how))
        assert key(cell, ONE) == key(cell, OTHER)
        assert judge(cell).reason == "encoded-again"


@pytest.mark.parametrize("how", HOWS)
def test_contents_that_are_answered_alike_show_nothing(how: str) -> None:
    cell = reused(how)
    first, second = (cell.plan.contrasts[index] for index in (ALONE_FIRST, ALONE_SECOND))
    assert judge(with_base(cell, first, ids=good_answer(second).ids)).reason == "no power"
    assert judge(with_base(cell, first, status=500)).reason == "no-contrast"
    assert judge(replace(cell, admitted=frozenset())).reason == "not-admitted"


@pytest.mark.parametrize(
    ("index", "change"),
    [
        (HOSTILE, {"status": 400}),
        (HOSTILE, {"status": 500}),
        (REFERENCE, {"status": 503}),
        (REFERENCE, {"status": 200, "streamed": True, "error": f"{TOLD}gone"}),
        (ALONE, {"status": 500}),
        (REFUSED, {"status": 422}),
    ],
)
def test_what_a_script_lets_fail(index: int, change: dict[str, object]) -> None:
    spoil: Callable[[CellEvidence], CellEvidence] = lambda cell: with_answer(cell, index, **change)  # noqa: E731
    assert judge(spoil(passing("scripted"))).verdict is Verdict.PASS
