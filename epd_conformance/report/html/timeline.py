"""What happened when in a cell, and where each mark of it is drawn: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Pixels of the drawing. A gap between two moments is at least wide enough that their marks do not lie on each other, and at most
# so wide that an idle second does not push everything else off the page; the list beside the drawing has the times.
LEFT, TOP, LANE, NEAREST, FARTHEST, MARGIN = 118, 22, 26, 11.0, 40.0, 16
# How wide a gap of one second is before it is held within those two.
PER_SECOND = 400.0


@dataclass(frozen=True)
class Mark:
    """One event: `at` in seconds since the cell began (or its place, where nothing has a time), `kind` one of KINDS."""

    lane: str
    at: float
    kind: str
    text: str


@dataclass(frozen=True)
class Span:
    """Something that lasted. An empty `lane`: it was in force for all of them, such as a fault."""

    lane: str
    start: float
    end: float
    kind: str
    text: str


@dataclass(frozen=True)
class Timeline:
    """`lanes` from top to bottom. `ordered`: `at` is a place in the order and no time."""

    lanes: tuple[str, ...]
    marks: tuple[Mark, ...]
    spans: tuple[Span, ...] = ()
    ordered: bool = False
    left_out: int = 0
    """Events at the end that were too many to show."""

    @property
    def rows(self) -> list[tuple[float, str, str, str]]:
        """The same as a list: (at, lane, kind, text), in order."""
        found = [(mark.at, mark.lane, mark.kind, mark.text) for mark in self.marks]
        found += [(span.start, span.lane or "all", span.kind, span.text) for span in self.spans]
        return sorted(found, key=lambda row: row[0])


@dataclass(frozen=True)
class Shape:
    """A mark (`width` 0) or a bar, in pixels; `y` is the middle of its lane."""

    x: float
    y: float
    width: float
    kind: str
    text: str
    over_all: bool = False


@dataclass(frozen=True)
class Drawing:
    """A timeline with a place for everything."""

    width: float
    height: float
    lanes: tuple[tuple[str, float], ...]
    shapes: tuple[Shape, ...]
    ticks: tuple[tuple[float, str], ...]


def draw(timeline: Timeline) -> Drawing:
    """Give everything its place. Moments keep their order, gaps are shortened (see the constants above)."""
    places = _places(timeline)
    lanes = {name: TOP + LANE * number + LANE / 2 for number, name in enumerate(timeline.lanes)}
    bottom = TOP + LANE * len(lanes)
    shapes = [
        Shape(
            places[span.start],
            lanes.get(span.lane, TOP),
            max(places[span.end] - places[span.start], NEAREST / 2),
            span.kind,
            span.text,
            not span.lane,
        )
        # What is in force for all lanes lies behind them.
        for span in sorted(timeline.spans, key=lambda one: bool(one.lane))
    ]
    shapes += [Shape(places[mark.at], lanes[mark.lane], 0.0, mark.kind, mark.text) for mark in timeline.marks]
    starts = sorted({span.start for span in timeline.spans if span.lane})
    ticks: list[tuple[float, str]] = []
    for start in [] if timeline.ordered else starts:
        # A label is about so wide.
        if not ticks or places[start] - ticks[-1][0] > 52:
            ticks.append((places[start], _seconds(start)))
    width = max(places.values(), default=LEFT) + MARGIN
    return Drawing(width, bottom + 6, tuple(lanes.items()), tuple(shapes), tuple(ticks))


def _places(timeline: Timeline) -> dict[float, float]:
    moments = sorted(
        {mark.at for mark in timeline.marks} | {moment for span in timeline.spans for moment in (span.start, span.end)}
    )
    places: dict[float, float] = {}
    x, before = float(LEFT), None
    for moment in moments:
        if before is not None:
            x += min(FARTHEST, max(NEAREST, (moment - before) * (0 if timeline.ordered else PER_SECOND)))
        places[moment] = x
        before = moment
    return places


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value else "0"


def spaced(spans: Sequence[Span], last: float) -> tuple[Span, ...]:
    """Spans whose end is not known end with the last moment, and none ends before it began."""
    return tuple(
        Span(span.lane, span.start, max(span.start, min(span.end, last)), span.kind, span.text) for span in spans
    )
