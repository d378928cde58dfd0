"""Ours passes every case, and each planted defect fails exactly the requirements that the table names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import planted_proxy
import pytest
from planted_proxy import UNSHOWN, VARIANTS, App, refuses_everything

from epd_conformance import catalogue
from epd_conformance.live.suites import collect
from epd_conformance.proxy.app import create_app
from epd_conformance.proxycheck import judges
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.evidence import ProxyEvidence
from epd_conformance.proxycheck.plan import ARRANGEMENTS
from epd_conformance.proxycheck.session import ProxySession
from epd_conformance.run import suites_folder
from epd_conformance.verdict import Verdict

# They wait for seconds: each is carried out for the variants that are about it, and by one case.
SLOW = ("EPD-PROXY-007", "EPD-PROXY-020", "EPD-PROXY-021")

CASES: dict[str, list[ProxyCase]] = {
    requirement: [case for case in cases if isinstance(case, ProxyCase)]
    for requirement, cases in collect(suites_folder() / "proxy").items()
}


@pytest.fixture(autouse=True)
def constants() -> Iterator[None]:
    yield
    planted_proxy.undo()


def carried_out(app: App, out: Path, arrangement: str, slow: tuple[str, ...]) -> list[tuple[str, ProxyEvidence]]:
    """Every case of an arrangement, of slow requirements only the first of those that are wanted."""
    found = []
    with ProxySession(out, app=app) as session:
        for requirement, cases in CASES.items():
            here = [case for case in cases if arrangement in case.arrangements]
            if requirement in SLOW:
                here = here[-1:] if requirement in slow else []
            found += [
                (requirement, session.carry_out(f"{requirement}[{case.name}]", arrangement, case)) for case in here
            ]
    return found


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_ours_passes(tmp_path: Path, arrangement: str) -> None:
    cells = carried_out(create_app, tmp_path, arrangement, SLOW)
    verdicts = {f"{cell.cell}: {(found := judges.judge(cell)).observed}": found.verdict for _, cell in cells}
    assert {what: verdict for what, verdict in verdicts.items() if verdict is not Verdict.PASS} == {}
    unseen = {name for name, cell in cells if judges.judge(replace(cell, seen=())).verdict is Verdict.PASS}
    # Servers that are down, health (which the fakes do not write down), and what must reach no server.
    assert unseen == {"EPD-PROXY-003", "EPD-PROXY-023", "EPD-PROXY-035"}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_who_refuses_everything_passes_what_may_be_refused(tmp_path: Path, arrangement: str) -> None:
    cells = carried_out(refuses_everything, tmp_path, arrangement, SLOW)
    passed = {name for name, cell in cells if judges.judge(cell).verdict is Verdict.PASS}
    assert passed == {"EPD-PROXY-012", "EPD-PROXY-035"}


@pytest.mark.parametrize("name", UNSHOWN)
def test_what_is_not_done_is_not_shown(tmp_path: Path, name: str) -> None:
    app, numbers = UNSHOWN[name]
    with ProxySession(tmp_path, app=app) as session:
        for number in numbers:
            for case in CASES[f"EPD-PROXY-{number}"]:
                found = judges.judge(session.carry_out(f"{number}[{case.name}]", "proxy-e-p-d", case))
                assert (found.verdict, found.reason) == (Verdict.INCONCLUSIVE, "not-exercised"), found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_defect_fails_exactly_its_requirements(tmp_path: Path, name: str) -> None:
    planted = VARIANTS[name]
    wanted = {f"EPD-PROXY-{number}" for number in planted.fails}
    slow = tuple(wanted & set(SLOW))
    failed: dict[str, str] = {}
    for requirement, cell in carried_out(planted.app, tmp_path, "proxy-e-p-d", slow):
        if (found := judges.judge(cell)).verdict is Verdict.FAIL:
            failed.setdefault(requirement, f"{cell.cell}: {found.reason}: {found.observed}")
    assert failed.keys() == wanted, failed


def test_each_requirement_has_a_defect_that_it_finds() -> None:
    asked = {item.id.rpartition("-")[2] for item in catalogue.load() if "proxy" in item.topologies}
    assert asked == {number for planted in VARIANTS.values() for number in planted.fails}
