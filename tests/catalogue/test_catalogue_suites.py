"""Catalogue and suites agree: `active` means that there is a test, `planned` that there is none."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from epd_conformance.catalogue import Catalogue, Status, load
from epd_conformance.engine.case import EngineCase
from epd_conformance.live.case import Case
from epd_conformance.live.suites import collect
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.run import suites_folder

KINDS = {"contract": EngineCase, "scheduler": EngineCase, "proxy": ProxyCase}


def disagreements(catalogue: Catalogue, tested: Collection[str]) -> list[str]:
    """A sentence for each active requirement without a test, and for each test of a planned or unknown one."""
    found = [
        f"{item.id} is active, and no test of a suite carries @requirement({item.id!r}): write one, or make it planned"
        for item in catalogue
        if item.status is Status.ACTIVE and item.id not in tested
    ]
    for name in sorted(tested):
        if name not in catalogue:
            found.append(f"{name} has a test and is not in the catalogue: add it")
        elif catalogue[name].status is Status.PLANNED:
            found.append(f"{name} has a test and is planned, so that its result would not count: make it active")
    return found


def test_active_has_a_test_and_planned_has_none() -> None:
    assert disagreements(load(), collect(suites_folder())) == []


def test_a_requirement_has_a_case_wherever_it_is_asked() -> None:
    """Otherwise the one with servers could go unnoticed where there is one without, and the reverse."""
    cases = collect(suites_folder())
    for item in load():
        if item.status is Status.ACTIVE:
            wanted = {KINDS.get(name, Case) for name in item.topologies}
            assert {type(case) for case in cases[item.id]} == wanted, item.id


def test_each_disagreement_is_found(tmp_path: Path) -> None:
    catalogue = load()
    active = {item.id for item in catalogue if item.status is Status.ACTIVE}
    planned = next(item.id for item in catalogue if item.status is Status.PLANNED)
    assert disagreements(catalogue, active) == []
    assert disagreements(catalogue, active - {"EPD-TOK-001"})[0].startswith("EPD-TOK-001 is active")
    assert disagreements(catalogue, active | {"EPD-TOK-999"}) == [
        "EPD-TOK-999 has a test and is not in the catalogue: add it"
    ]
    (tmp_path / "test_extra.py").write_text(
        "from epd_conformance.live.case import requirement\n\n\n"
        f"@requirement({planned!r})\ndef test_it(cell):\n    cell.check()\n"
    )
    tested = collect(tmp_path)
    assert set(tested) == {planned}
    assert disagreements(catalogue, active | set(tested))[0].startswith(f"{planned} has a test and is planned")
