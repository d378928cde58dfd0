"""Plans as data: written down and read back, checked, made smaller; and the corpus that is made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from epd_conformance.catalogue import load as load_catalogue
from epd_conformance.engine.content import Content, expected_digest, rows_of
from epd_conformance.engine.corpus import EXERCISES, corpus
from epd_conformance.engine.findings import DAMAGE_REQUIREMENT, HOOK_REQUIREMENT, Finding
from epd_conformance.engine.hunt import Catch, hunt, shrink_catch
from epd_conformance.engine.plan import DAMAGES, STORE_FAULTS, ItemSpec, Plan, ServerSpec
from epd_conformance.engine.strategies import plans, themes_for
from epd_conformance.errors import UsageError
from epd_conformance.features import Feature

ALL = frozenset(Feature)
PLAIN = Plan(
    (ServerSpec("ec_producer"), ServerSpec("ec_consumer")), (ItemSpec("a", 0), ItemSpec("b", 1)), ({"op": "run"},)
)


@settings(max_examples=40, deadline=None, database=None)
@given(plans(ALL, "everything"))
def test_a_drawn_plan_comes_back_equal_from_its_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_every_plan_of_the_corpus_comes_back_equal_from_its_json() -> None:
    for plan in corpus(ALL).values():
        assert Plan.from_json(plan.to_json()) == plan


def test_the_corpus_has_every_damage_and_every_fault_and_nothing_that_was_not_declared() -> None:
    names = set(corpus(ALL))
    assert {f"{how}-before" for how in DAMAGES} | {f"store-{fault}" for fault in STORE_FAULTS} <= names
    few = corpus(frozenset())
    assert not any(name.startswith((*DAMAGES, "reference", "both", "two-")) for name in few)
    assert all(operation.get("media", "all") == "all" for plan in few.values() for operation in plan.operations)
    assert any(plan.apart for plan in few.values())
    assert not any(plan.apart for plan in corpus(ALL, apart=False).values())


def test_every_requirement_that_is_exercised_is_one_and_has_a_plan() -> None:
    known = {requirement.id for requirement in load_catalogue()}
    names = list(corpus(ALL))
    for requirement, beginnings in EXERCISES.items():
        assert requirement in known
        for beginning in beginnings:
            assert any(name.startswith(beginning) for name in names), (requirement, beginning)
    # Every name that a finding can have is exercised by something, or is what a dead process, a constructor or an import shows.
    possible = {*HOOK_REQUIREMENT.values(), *DAMAGE_REQUIREMENT.values()}
    assert possible - set(EXERCISES) == {"EPD-INIT-001", "EPD-INIT-002", "EPD-LIFE-001"}


def test_themes_follow_the_features() -> None:
    assert "damage" in themes_for(ALL)
    assert "references" in themes_for(ALL)
    assert not {"damage", "window", "references"} & set(themes_for(frozenset()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operations": ({"op": "fly"},)}, "no operation is called 'fly'"),
        ({"operations": ({"op": "run", "speed": 1},)}, "has no field 'speed'"),
        ({"operations": ({"op": "damage", "how": "kicked"},)}, "no damage is called 'kicked'"),
        ({"operations": ({"op": "store", "fault": "sad"},)}, "no fault of the store is called 'sad'"),
        ({"operations": ({"op": "step", "kv": "x"},)}, "a step cannot be done as"),
        ({"operations": ({"op": "step", "during": {"at": "noon", "how": "deleted"}},)}, "a step cannot be done as"),
        ({"servers": ()}, "needs at least one server"),
        ({"servers": (ServerSpec("ec_none"),)}, "no such server"),
        ({"servers": (ServerSpec("ec_both", cache=1),)}, "larger than the encoder cache"),
        ({"dtype": "int8"}, "no dtype 'int8'"),
        ({"items": (ItemSpec("/", 0),)}, "leads out of the plan's folder"),
        ({"items": (ItemSpec("/etc/x", 0),)}, "leads out of the plan's folder"),
        ({"items": (ItemSpec("../../../x", 0),)}, "leads out of the plan's folder"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(PLAIN, **change)  # type: ignore[arg-type]


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="schema"):
        Plan.from_json({"schema": "x"})
    with pytest.raises(UsageError, match="cannot be read"):
        Plan.from_json({**PLAIN.to_json(), "servers": [{"name": "x"}]})


def test_contents_are_finite_and_all_different() -> None:
    import numpy as np

    for dtype, kind in (("float32", "<f4"), ("float16", "<f2")):
        assert np.isfinite(np.frombuffer(rows_of(Content(1, 4, 8, dtype)), kind)).all()
    assert len(rows_of(Content(1, 4, 8, "bfloat16"))) == 64
    contents = [Content(seed, rows, 8) for seed in range(20) for rows in (1, 4)]
    assert len({expected_digest(content) for content in contents}) == len(contents)


def finds_two_damages(plan: Plan) -> tuple[list[Finding], int]:
    """A run that shows something where an item is damaged after a transfer, whatever else is in the plan."""
    names = [operation["op"] for operation in plan.operations]
    shown = "transfer" in names and "damage" in names[names.index("transfer") :]
    return ([Finding("EPD-XFER-001", "planted", "", "")] if shown else []), len(names)


def test_a_catch_is_shrunk_to_what_shows_it() -> None:
    noise = [{"op": "request", "items": [0, 1]}, {"op": "step", "times": 3}, {"op": "evict"}, {"op": "reset"}]
    operations = [*noise, {"op": "transfer", "items": [1, 0]}, *noise, {"op": "damage", "item": 1}, *noise]
    catch = Catch(finds_two_damages(PLAIN.with_operations(operations))[0][0], PLAIN.with_operations(operations))
    shrink_catch(catch, finds_two_damages)
    assert [operation["op"] for operation in catch.plan.operations] == ["transfer", "damage"]
    assert len(catch.plan.servers) == 1
    assert catch.runs < 100


def test_a_hunt_is_the_same_for_the_same_seed_and_stops_when_told() -> None:
    strategies = {theme: plans(ALL, theme) for theme in ("damage", "plain")}
    first = hunt(finds_two_damages, strategies, examples=40, random_seed=3, shrink=False)
    again = hunt(finds_two_damages, strategies, examples=40, random_seed=3, shrink=False)
    assert first.catches
    assert first.steps == again.steps
    assert first.catches == again.catches
    stopped = hunt(finds_two_damages, strategies, examples=40, random_seed=3, stop=lambda so_far: bool(so_far.catches))
    assert stopped.examples < first.examples
