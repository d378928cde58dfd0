"""What happened when in a cell, and where each mark of it is drawn: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

# Pixels of the drawing. A gap between two moments is at least wide enough that their marks do not lie on each other, and at most
# so wide that an idle second does not push everything else off the page; the list beside the drawing has the times.
LEFT, TOP, LANE, NEAREST, FARTHEST, MARGIN = 118, 22, 26, 11.0, 40.0, 16
# Bars that overlap in one lane lie below each other, at most so many.
BAR, MOST_BARS = 13, 8
# Pixels of a letter of a tick's label.
LETTER = 6.6
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
    """Something that lasted. An empty `lane`: it was in force for all of them, such as a fault. `name`: stands above its start."""

    lane: str
    start: float
    end: float
    kind: str
    text: str
    name: str = ""


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
class Lane:
    """The row of one server: its name's middle, and where it ends."""

    name: str
    middle: float
    bottom: float


@dataclass(frozen=True)
class Drawing:
    """A timeline with a place for everything."""

    width: float
    height: float
    top: float
    lanes: tuple[Lane, ...]
    shapes: tuple[Shape, ...]
    ticks: tuple[tuple[float, str], ...]


def draw(timeline: Timeline) -> Drawing:
    """Give everything its place. Moments keep their order, gaps are shortened (see the constants above)."""
    places = _places(timeline)
    top = bottom = 4.0 if timeline.ordered else float(TOP)
    lanes: dict[str, Lane] = {}
    shapes = []
    for span in (one for one in timeline.spans if not one.lane):
        # First, so that it lies behind all others.
        shapes.append(Shape(places[span.start], top, _width(places, span), span.kind, span.text, over_all=True))
    for name in timeline.lanes:
        rows = _rows([span for span in timeline.spans if span.lane == name])
        height = max(LANE, BAR * len(rows))
        first = bottom + (height - BAR * len(rows)) / 2 + BAR / 2
        for number, row in enumerate(rows):
            shapes += [
                Shape(places[span.start], first + BAR * number, _width(places, span), span.kind, span.text)
                for span in row
            ]
        lanes[name] = Lane(name, bottom + height / 2, bottom + height)
        bottom += height
    shapes += [Shape(places[mark.at], lanes[mark.lane].middle, 0.0, mark.kind, mark.text) for mark in timeline.marks]
    width = max(places.values(), default=LEFT) + MARGIN
    ticks = () if timeline.ordered else _ticks(timeline, places, width)
    return Drawing(width, bottom + 4, top, tuple(lanes.values()), tuple(shapes), ticks)


def _width(places: dict[float, float], span: Span) -> float:
    return max(places[span.end] - places[span.start], NEAREST / 2)


def _rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them without overlap."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one.start):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None and len(rows) < MOST_BARS:
            rows.append([span])
        else:
            (row or rows[-1]).append(span)
    return rows


def _ticks(timeline: Timeline, places: dict[float, float], width: float) -> tuple[tuple[float, str], ...]:
    """Where bars begin: when, and whose; the name only where there is room for it, and neither where there is none."""
    names: dict[float, str] = {}
    for span in timeline.spans:
        if span.lane:
            names[span.start] = names.get(span.start) or span.name
    starts = sorted(names)
    named = [start for start in starts if names[start]] or starts
    ticks: list[tuple[float, str]] = []
    free = 0.0
    for start, following in zip_longest(named, named[1:]):
        room = (places[following] if following is not None else width + 2 * LETTER) - places[start]
        time = _seconds(start)
        label = next((text for text in (f"{names[start]} {time}", time) if LETTER * len(text) < room), "")
        if label and places[start] >= free:
            ticks.append((places[start], label.strip()))
            free = places[start] + LETTER * len(label)
    return tuple(ticks)


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
    return tuple(replace(span, end=max(span.start, min(span.end, last))) for span in spans)
