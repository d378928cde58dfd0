"""The zoo's table is complete and exact: each broken connector fails what the table says, and nothing else."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import zoo_table
from zoo_table import CHECKED, PAGE, PATHS, RIGHT, asked_of, caught, connectors, features_of, page, read

from epd_conformance import catalogue
from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.hosted import Host
from epd_conformance.engine.pool import Pool
from epd_conformance.errors import UsageError
from epd_conformance.verdict import Verdict

TABLE = read()


@pytest.fixture(scope="module")
def zoo() -> Iterator[Host]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: the zoo's connectors are vLLM connectors")
    try:
        with Host("planted_engine:PlainStore_", paths=PATHS) as host:
            yield host
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.needs_vllm
@pytest.mark.parametrize("name", connectors())
def test_a_connector_fails_what_the_table_says(zoo: Host, name: str) -> None:
    module = connectors()[name]
    assert caught(zoo, name, module, features_of(zoo, name, module)) == TABLE[name]
    zoo.recycle()


@pytest.mark.needs_vllm
def test_a_damage_that_did_not_happen_shows_nothing(zoo: Host) -> None:
    """A subject that only says it breaks its store passes nothing about a broken store."""
    asked = asked_of(features_of(zoo, "SealedStore", "zoo_sealed"))
    plans = {
        name: plan for name, plan in corpus(features_of(zoo, "SealedStore", "zoo_sealed")).items() if "-before" in name
    }
    for subject, verdict in (("IdleProbeSubject", Verdict.INCONCLUSIVE), ("SealedStore_", Verdict.PASS)):
        kept = [zoo.carry(plan, subject=f"zoo_sealed:{subject}", keep=name).evidence for name, plan in plans.items()]
        pool = Pool(0, 0, "", tuple(one for one in kept if one is not None))
        for requirement in ("EPD-INTEG-002", "EPD-INTEG-003", "EPD-INTEG-011"):
            assert pool.judge(requirement, "", asked).verdict is verdict, (subject, requirement)


def test_the_table_has_every_connector() -> None:
    assert list(TABLE) == list(connectors())
    assert set(CHECKED) <= set(TABLE)
    assert all((TABLE[name] == []) is (name in RIGHT) for name in TABLE)
    assert len(TABLE) - len(RIGHT) >= 25


def test_every_requirement_of_the_layer_is_found_broken_in_a_connector() -> None:
    """Otherwise nothing shows that its check can fail."""
    asked = {
        item.id for item in catalogue.load() if "contract" in item.topologies and item.status is catalogue.Status.ACTIVE
    }
    assert asked - {requirement for found in TABLE.values() for requirement in found} == set()


def test_the_page_is_made_from_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(TABLE)
    assert zoo_table.LEFT_OUT.isdisjoint(TABLE)
