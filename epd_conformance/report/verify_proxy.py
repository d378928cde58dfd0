"""The part of `verify` for cells of a proxy before fake servers: is the evidence that of this cell, and whole? Pure."""

from __future__ import annotations

from collections.abc import Iterator

from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.evidence import ProxyEvidence
from epd_conformance.proxycheck.plan import ARRANGEMENTS, servers_of

# A clock is read before and after: what came about at one moment may differ by this much.
SLACK_S = 0.05


def problems(cell: ProxyEvidence, case: ProxyCase, identifier: str, arrangement: str) -> Iterator[str]:
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
    options = cell.proxy.get("options")
    if cell.proxy.get("own") and options != dict(case.options):
        yield f"our own proxy ran with {options}, and the case has {dict(case.options)}"
    if cell.proxy.get("own") and cell.limit_s != case.options.get("timeout_s", cell.limit_s):
        yield f"its limit is {cell.limit_s:g} s, and the case has {case.options['timeout_s']:g} s"
