"""What `epd-conformance list` chooses and how it prints it. Starts nothing, and needs no vLLM."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from epd_conformance.catalogue import Catalogue, Requirement
from epd_conformance.catalogue.model import TOPOLOGIES, Layer, NotTestable, Status
from epd_conformance.errors import UsageError
from epd_conformance.features import FEATURE_OF_TOPOLOGY, Feature
from epd_conformance.verdict import Level, Owner

# How far a sentence stands in, below the line with its id.
INDENT = 4


def choose(catalogue: Catalogue, **wanted: str) -> list[Requirement]:
    """The requirements that fit every filter; an empty one fits all.

    Filters: `area`, `owner`, `topology`, `status`, `level`, `layer`, `feature`, upper or lower case. Raises UsageError for a
    value that does not exist, with those that do, and where nothing is left.
    """
    filters = {name: _known(name, value, catalogue) for name, value in wanted.items() if value}
    found = [item for item in catalogue if all(_FITS[name](item, value) for name, value in filters.items())]
    if not found:
        words = ", ".join(f"--{name} {value}" for name, value in filters.items())
        raise UsageError(f"no requirement matches {words} together: leave one of them out")
    return found


def needs(item: Requirement, feature: str) -> bool:
    """Whether a requirement is only asked of a subject with this feature, in one of its topologies at least."""
    return feature in item.features or any(FEATURE_OF_TOPOLOGY.get(name) == feature for name in item.topologies)


_FITS: dict[str, Callable[[Requirement, str], bool]] = {
    "area": lambda item, value: item.area == value,
    "owner": lambda item, value: item.owner == value,
    "topology": lambda item, value: value in item.topologies,
    "status": lambda item, value: item.status == value,
    "level": lambda item, value: item.level == value,
    "layer": lambda item, value: item.layer == value,
    "feature": needs,
}


def _known(name: str, value: str, catalogue: Catalogue) -> str:
    values: dict[str, Iterable[str]] = {
        "area": catalogue.areas,
        "owner": Owner,
        "topology": TOPOLOGIES,
        "status": Status,
        "level": Level,
        "layer": Layer,
        "feature": Feature,
    }
    known = [str(one) for one in values[name]]
    for one in known:
        if one.lower() == value.lower():
            return one
    raise UsageError(f"no {name} {value!r}: use {', '.join(known)}")


def requirements(found: Sequence[Requirement]) -> RenderableType:
    """By area: a line with everything short, the sentence below it; how many there are comes last, where the eye ends."""
    parts: list[RenderableType] = []
    for area, group in groupby(found, key=lambda item: item.area):
        items = list(group)
        parts += [Text(f"{area}: {_counted(items)}", style="bold")]
        for item in items:
            words = f"{item.level:<6} {item.owner:<9} {item.status:<7} {item.layer:<9} {' '.join(item.topologies)}"
            # In columns; only what is asked nearly everywhere is longer than a narrow terminal.
            lines = textwrap.wrap(f"{item.id:<13} {words}", 79, subsequent_indent=" " * INDENT)
            parts += [Text(line) for line in lines]
            parts.append(Padding(Text(item.sentence, style="dim"), (0, 0, 0, INDENT)))
            if item.features:
                parts.append(Padding(Text(f"needs {', '.join(item.features)}", style="dim"), (0, 0, 0, INDENT)))
        parts.append(Text())
    return Group(*parts, Text(_counted(found)))


def not_testable(found: Sequence[NotTestable]) -> RenderableType:
    """What one would like to know, why no test tells, and what stands in for it."""
    parts: list[RenderableType] = []
    for item in found:
        parts.append(Text(item.title, style="bold"))
        for name, text in (("", item.statement), ("why not: ", item.reason), ("instead: ", item.instead)):
            parts.append(Padding(Text(name + text), (0, 0, 0, INDENT)))
        parts.append(Text())
    return Group(*parts, Text(f"{len(found)} that no test of this suite can show"))


def features() -> RenderableType:
    """Each feature and what declaring it promises."""
    parts: list[RenderableType] = []
    for feature in Feature:
        parts += [Text(str(feature), style="bold"), Padding(Text(feature.description), (0, 0, 0, INDENT))]
    return Group(*parts)


def _counted(items: Sequence[Requirement]) -> str:
    counts = Counter(item.status for item in items)
    parts = ", ".join(f"{counts[status]} {status}" for status in Status if counts[status])
    return f"{len(items)} requirement{'' if len(items) == 1 else 's'} ({parts})"
