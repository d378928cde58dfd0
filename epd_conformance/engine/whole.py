"""Whether the events of a plan are all that carrying it out leaves: what the harness says of itself must stand among them. Pure.

Events that were dropped could hide a finding, and what is not there looks like a plan that found nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from epd_conformance.engine.plan import Plan

#: A server that could not start, or not be shut down, has left one of these: each is a finding, so that nobody gains by them.
_BROKEN = ("raised", "broke")


def missing(plan: Plan, events: Sequence[Sequence[Any]]) -> Iterator[str]:
    """What is not there of what `machine` notes for every plan, each in a clause; it stops at what hides all the rest."""
    marks = [place for place, (_, event) in enumerate(events) if event[0] == "operation"]
    if [events[place][1][1] for place in marks] != list(range(len(plan.operations) + 1)):
        yield f"it does not go through its {len(plan.operations)} operations in order"
        return
    swept = [place for place, (_, event) in enumerate(events) if event[0] == "swept"]
    if len(swept) != 1 or swept[0] < marks[-1]:
        yield "what lies outside the store was not looked at, once, at the end"
        return
    parts = [events[: marks[0]], events[marks[-1] : swept[0]], events[swept[0] :]]
    start, end, shutdown = ([(server, event[0]) for server, event in part] for part in parts)
    for name, spec in zip(plan.server_names(), plan.servers, strict=True):
        if (name, "booted") not in start and not _broke(name, start):
            yield f"{name} was not booted"
        if (name, "idle") not in end:
            yield f"nobody waited until {name} was idle"
        # Both sides of each server that is there, twice.
        sides = 2 * (spec.ranks + 1)
        if _there(name, events) and shutdown.count((name, "shutdown")) != sides and not _broke(name, shutdown):
            yield f"{name} was not shut down"
        if not _restarted(name, events):
            yield f"{name} ended and was not booted again"


def _broke(name: str, kinds: Sequence[tuple[str, str]]) -> bool:
    return any((name, kind) in kinds for kind in _BROKEN)


def _there(name: str, events: Sequence[Sequence[Any]]) -> bool:
    """Whether a server is there at the end."""
    lives = [event[0] for server, event in events if server == name and event[0] in ("booted", "gone")]
    return lives[-1:] == ["booted"]


def _restarted(name: str, events: Sequence[Sequence[Any]]) -> bool:
    """Whether each end of a server was followed by a new start, or by what broke that."""
    waiting = False
    for kind in (event[0] for server, event in events if server == name):
        if kind == "gone":
            waiting = True
        elif kind == "booted" or kind in _BROKEN:
            waiting = False
    return not waiting
