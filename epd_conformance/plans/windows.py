"""Windows: the moments of a request's life at which a fault is done to the object of its item. Pure.

A request is held at the point where its window begins (connectors/barriers.py says what each point is), the fault is done, and the
request goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """`point`: where the request is held, at the `nth` time. `loads_later`: the item is loaded behind it, or not at all; else it
    was loaded before. `again`: a fifth request asks for the victim's item once more, which its consumer holds by then."""

    point: str
    words: str
    loads_later: bool
    nth: int = 1
    again: bool = False


WINDOWS: Mapping[str, Window] = {
    "looked-up": Window("looked-up", "between look-up and allocation", loads_later=True),
    "allocated": Window("allocated", "between allocation and load", loads_later=True),
    "loaded": Window("loaded", "after the load, before the next local hit", loads_later=False, again=True),
    "chunk": Window("scheduled", "between two steps that take rows of the item", loads_later=False, nth=2),
    "prefilled": Window("prefilled", "between prefill and decode", loads_later=False),
}
