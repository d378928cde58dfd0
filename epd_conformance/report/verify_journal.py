"""Whether the journal lines in the evidence of cells are those of the journals, and all of them.

A cell's evidence copies the lines that were written while it ran. The journal files hold them once more, in the order in which
each server process wrote them. Whoever changes, drops or adds a line in one place only is found here.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from epd_conformance.connectors.journal import Journal, Mark
from epd_conformance.oracle.cell import CellEvidence

Event = Mapping[str, Any]
Relevant = Callable[[Sequence[Event], set[str]], list[Event]]
# A line of these kinds is written because a request is served, so some cell must account for it. A server also writes lines
# when it starts, ends, or lets something go after the answer has left.
WORK = frozenset({"request", "save", "load", "encoded", "kv-new", "kv-take", "kv-injected", "kv-encode"})


def read_files(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The lines of each journal file of a folder, by file name, as written."""
    journal = Journal(folder)
    ends = journal.mark().offsets
    files = {}
    for name, _ in ends:
        # Everything after the ends of the other files is this file.
        lines = journal.read(Mark(tuple(pair for pair in ends if pair[0] != name)))
        if all(event["seq"] >= 0 for event in lines):
            # The numbers say how they were written, also where the clock was set back; only a torn line has none.
            lines.sort(key=lambda event: int(event["seq"]))
        files[name] = lines
    return files


def broken_files(files: Mapping[str, Sequence[Event]]) -> Iterator[tuple[str, str]]:
    """Files whose lines are not numbered from 0 without a gap, or are another server's; file name and complaint."""
    for name, lines in files.items():
        # A torn line has the number −1: the reader made it, and judges let no cell with it pass.
        numbers = [event["seq"] for event in lines if event["seq"] != -1]
        gap = next((index for index, number in enumerate(numbers) if index != number), None)
        foreign = next((event for event in lines if not name.startswith(f"{event['server']}.{event['side']}.")), None)
        if gap is not None:
            yield (
                name,
                f"line {gap} is missing: the lines are numbered {', '.join(map(str, numbers[gap : gap + 3]))} … there",
            )
        if foreign is not None:
            yield name, f"holds a line of {foreign['server']} ({foreign['side']})"


def compare(
    files: Mapping[str, Sequence[Event]],
    cells: Sequence[CellEvidence],
    relevant: Relevant,
    excused: Callable[[Event], bool],
) -> Iterator[tuple[str, str]]:
    """Compare the journal of one stack with the evidence of its cells, in the order in which they ran.

    Yields a cell's id (or `` for the journal itself) and what is wrong. `excused` says of a line of no cell whether a cell
    that left no evidence explains it.
    """
    places: dict[str, deque[tuple[str, int]]] = defaultdict(deque)
    for name, lines in files.items():
        for index, event in enumerate(lines):
            places[_key(event)].append((name, index))
    owners: dict[tuple[str, int], int] = {}
    for number, cell in enumerate(cells):
        lost = []
        for event in cell.during:
            found = places.get(_key(event))
            if found:
                owners[found.popleft()] = number
            else:
                lost.append(event)
        if lost:
            yield cell.cell, f"its evidence has {_count(lost)} that the journal does not have: {_words(lost[0])}"

    for name, lines in files.items():
        latest = -1
        for index in range(len(lines)):
            owner = owners.get((name, index))
            if owner is not None and owner < latest:
                yield cells[owner].cell, f"its lines in {name} stand behind those of a cell that ran later"
                break
            latest = max(latest, owner if owner is not None else -1)

    left_out: dict[int, list[Event]] = defaultdict(list)
    nobodys = []
    unowned = []
    for name, lines in files.items():
        mine = [owners.get((name, index)) for index in range(len(lines))]
        for index, event in enumerate(lines):
            if mine[index] is not None:
                continue
            unowned.append(event)
            owned = _inside(event, index, mine, cells)
            if owned is not None:
                left_out[owned].append(event)
            elif _work(event) and not excused(event):
                nobodys.append(event)
    for number, events in left_out.items():
        yield cells[number].cell, f"its evidence leaves out {_count(events)} of the journal: {_words(events[0])}"
    if nobodys:
        yield "", f"{_count(nobodys)} of work that no cell accounts for: {_words(nobodys[0])}"

    began = _starts(cells)
    earlier: list[Event] = []
    for number, cell in enumerate(cells):
        keys = {item["id"] for event in cell.during if event["ev"] == "request" for item in event["items"]}
        known = sorted([*earlier, *(event for event in unowned if event["t"] < began[number])], key=_order)
        if [_key(event) for event in relevant(known, keys)] != [_key(event) for event in cell.before]:
            yield cell.cell, "the earlier lines that its evidence keeps are not those of the journal"
        earlier += cell.during


def _inside(event: Event, index: int, mine: Sequence[int | None], cells: Sequence[CellEvidence]) -> int | None:
    """The cell to which a line that no cell has belongs: by its place in the file, its request, or its time."""
    before = next((owner for owner in reversed(mine[:index]) if owner is not None), None)
    behind = next((owner for owner in mine[index + 1 :] if owner is not None), None)
    if before is not None and before == behind:
        return before
    for number, cell in enumerate(cells):
        if not cell.answers:
            continue
        last = cell.answers[-1]
        if cell.answers[0].started <= event["t"] <= last.started + last.seconds:
            return number
        if _work(event) and any(answer.request_id in str(event.get("req", "")) for answer in cell.answers):
            return number
    return None


def _work(event: Event) -> bool:
    return event["ev"] in WORK or (event["ev"] == "step" and bool(event["new"] or event["encode"]))


def _starts(cells: Sequence[CellEvidence]) -> list[float]:
    """When each cell began; one that sent nothing and saw nothing began, as far as matters, with the next."""
    starts: list[float] = []
    following = float("inf")
    for cell in reversed(cells):
        moments = [answer.started for answer in cell.answers[:1]] + [float(event["t"]) for event in cell.during[:1]]
        following = min(moments, default=following)
        starts.append(following)
    return starts[::-1]


def _key(event: Event) -> str:
    return json.dumps(event, sort_keys=True)


def _order(event: Event) -> tuple[float, str, str, int]:
    return event["t"], event["server"], event["side"], event["seq"]


def _count(events: Sequence[Event]) -> str:
    return "a line" if len(events) == 1 else f"{len(events)} lines"


def _words(event: Event) -> str:
    return f"{event['ev']} of {event['server']} ({event['side']}), number {event['seq']}"
