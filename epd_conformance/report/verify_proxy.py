"""The part of `verify` for cells of a proxy before fake servers: is the evidence that of this cell, and whole? Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from epd_conformance.proxycheck.case import FOREIGN_LIMIT_S, OWN, OWN_LIMIT_S, OWN_MAKER, ProxyCase
from epd_conformance.proxycheck.evidence import ProxyEvidence
from epd_conformance.proxycheck.plan import ARRANGEMENTS, servers_of
from epd_conformance.report.schema import RunStart
from epd_conformance.verdict import Mode

# A clock is read before and after: what came about at one moment may differ by this much.
SLACK_S = 0.05


def is_own(start: RunStart) -> bool:
    """Whether the run says that it asked about our own proxy."""
    maker = start.subject.implementation
    return (maker.organization, maker.project) == OWN_MAKER


def subject_problems(start: RunStart) -> Iterator[str]:
    """What does not fit in what a run says about whose proxy it asked, each in a clause."""
    command = start.run.command
    starts_another = any(_said(command, name) is not None for name in ("--proxy-command", "--proxy-url"))
    if not is_own(start):
        if start.run.mode is Mode.CERTIFY:
            yield "a certificate of somebody else's proxy: nobody here knows which version of it ran"
        if command[1:2] == ("run",) and not starts_another:
            yield f"its subject is {start.subject.name}, and its command asked for our own proxy"
        return
    if (start.subject.name, start.subject.implementation.version) != (OWN, start.suite.version):
        told = f"{start.subject.name} {start.subject.implementation.version}"
        yield f"its subject is {told}, and our own proxy of this suite is {OWN} {start.suite.version}"
    if starts_another:
        yield "its subject is our own proxy, and its command asked for somebody else's"


def _said(command: Sequence[str], option: str) -> str | None:
    """The value of an option in a command line; None where it does not stand there."""
    for word, following in pairwise((*command, "")):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


def _of_another(cell: ProxyEvidence, start: RunStart) -> Iterator[str]:
    """What in the evidence of somebody else's proxy is not what the run says."""
    told: Mapping[str, Any] = cell.proxy
    wanted: dict[str, Any] = {"name": start.subject.name, "limitS": cell.limit_s}
    command = start.run.command
    started, url = _said(command, "--proxy-command"), _said(command, "--proxy-url")
    if started or url:
        wanted |= {"command": started or "", "url": (url or "").rstrip("/")}
        wanted["limitS"] = float(_said(command, "--proxy-limit-s") or FOREIGN_LIMIT_S)
        if cell.limit_s != wanted["limitS"]:
            yield f"its limit is {cell.limit_s:g} s, and the run was asked for {wanted['limitS']:g} s"
    for name, value in wanted.items():
        if told.get(name) != value:
            yield f"the {name} of its proxy is {told.get(name)} in its evidence, and must be {value}"
    if told.get("own"):
        yield "our own proxy was asked in it, and the run is about somebody else's"


def problems(cell: ProxyEvidence, case: ProxyCase, identifier: str, arrangement: str, start: RunStart) -> Iterator[str]:
    """What is wrong with the evidence of a cell, each in a clause."""
    told = {
        "cell": (cell.cell, identifier),
        "judge": (cell.judge, case.judge),
        "arrangement": (cell.arrangement, arrangement),
        "list of servers": (list(cell.servers), servers_of(ARRANGEMENTS[arrangement])),
    }
    for name, (theirs, ours) in told.items():
        if theirs != ours:
            yield f"its {name} is {theirs} in its evidence, and must be {ours}"
    if cell.plan != case.plan:
        yield "its plan is not the one of the suite"
    labels = [send.label for send in case.plan.sends]
    if sorted(got.label for got in cell.got) != sorted(labels):
        yield "it does not hold one answer to each request of its plan"
    strange = sorted({seen.server for seen in cell.seen} - set(cell.servers))
    if strange:
        yield f"{strange[0]} saw a request, and is no server of it"
    if any(got.ended < got.at for got in cell.got) or any(
        seen.ended is not None and seen.ended < seen.at - SLACK_S for seen in cell.seen
    ):
        yield "something in it ended before it began"
    if not is_own(start):
        yield from _of_another(cell, start)
        return
    as_ours = {"own": True, "options": dict(case.options)}
    if cell.proxy != as_ours:
        yield f"the proxy was {dict(cell.proxy)}, and the run asked our own with {dict(case.options)}"
    limit_s = case.options.get("timeout_s", OWN_LIMIT_S)
    if cell.limit_s != limit_s:
        yield f"its limit is {cell.limit_s:g} s, and must be {limit_s:g} s"
