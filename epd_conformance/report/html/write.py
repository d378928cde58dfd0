"""Makes the file: one template, style and script inside it, and nothing that a browser would have to fetch."""

from __future__ import annotations

import base64
import hashlib
import tempfile
from collections.abc import Iterable
from enum import IntEnum
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

import epd_conformance
from epd_conformance.report.html.folder import page_of
from epd_conformance.report.html.page import Page, TrendPoint, when
from epd_conformance.report.html.timeline import draw
from epd_conformance.report.schema import Report
from epd_conformance.report.writer import PAGE_NAME
from epd_conformance.verdict import PRECEDENCE, Verdict

# Opens at once on a telephone and fits into a mail.
LIMIT = 3_000_000

_FOLDER = Path(__file__).parent

# Never by colour alone: a mark for each verdict, also in black and white.
SIGNS: dict[Verdict, str] = {
    Verdict.PASS: "✓",
    Verdict.FAIL: "✗",
    Verdict.ERROR: "!",
    Verdict.INCONCLUSIVE: "?",
    Verdict.COULD_NOT_RUN: "–",
    Verdict.KNOWN_FAILING: "≈",
    Verdict.WAIVED: "w",
    Verdict.NOT_SUPPORTED: "·",
}


class Depth(IntEnum):
    """How much of each cell stands on the page. What does not fit is taken away in this order."""

    WHOLE = 0
    PASSES_BARE = 1
    """Cells that pass have no drill-down beyond their counts."""
    SHORT = 2
    """The others have no lists of events, thumbnails and logs either."""
    BARE = 3
    """The others have no drill-down beyond expected, observed and the command that runs them again."""


NOTES: dict[Depth, str] = {
    Depth.PASSES_BARE: "cells that pass are shown without their details",
    Depth.SHORT: "cells that pass are shown without their details, and the others without events, thumbnails and logs",
    Depth.BARE: "every cell is shown without its details",
}


def render(page: Page, limit: int = LIMIT) -> str:
    """The page as HTML of at most `limit` bytes, with as much detail as goes into that.

    A run whose bare page is larger still gets it: an outcome that cannot be opened helps nobody.
    """
    text = ""
    for depth in Depth:
        text = _render(page, depth, limit)
        if len(text.encode("utf-8", "replace")) <= limit:
            break
    return text


def write_page(folder: Path, report: Report, history: Iterable[TrendPoint] = ()) -> Path:
    """Write the page of a run into its folder, beside `report.json`; returns its path. `history`: other runs, for the trend."""
    path = folder / PAGE_NAME
    save(path, render(page_of(folder, report, history)))
    return path


def save(path: Path, text: str) -> None:
    """Write a file at once or not at all: a browser may be looking at the one that was there."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".page-", delete=False) as file:
        temporary = Path(file.name)
        try:
            # Half a surrogate pair, which a hostile uuid may hold, is no text.
            file.write(text.encode("utf-8", "replace").decode())
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _render(page: Page, depth: Depth, limit: int) -> str:
    style, script = _asset("style.css"), _asset("script.js")
    return _template().render(
        page=page,
        report=page.report,
        depth=depth,
        Depth=Depth,
        note=f"To stay below {limit / 1e6:g} MB, {NOTES[depth]}; the run's folder has them all." if depth else "",
        # Both are ours, and nothing of a run is in them.
        style=Markup(style),
        script=Markup(script),
        policy=_policy(style, script),
        signs=SIGNS,
        verdicts=tuple(Verdict),
        version=epd_conformance.__version__,
    )


def _policy(style: str, script: str) -> str:
    """Nothing is loaded, sent or run but what stands in this very file: not even a script that got past the escaping."""
    sources = " ".join(("default-src 'none';", f"style-src {_digest(style)};", f"script-src {_digest(script)};"))
    return f"{sources} img-src data:; base-uri 'none'; form-action 'none'"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"when": when, "draw": draw, "share": share, "sign": SIGNS.__getitem__}
    return environment.get_template("page.html.j2")


def share(counts: Iterable[tuple[Verdict, int]], width: float = 100.0) -> list[tuple[Verdict, float, float]]:
    """Counts as parts of a bar of a width: (verdict, x, width); each that occurs is wide enough to be seen."""
    found = sorted(((verdict, count) for verdict, count in counts if count), key=lambda pair: PRECEDENCE.index(pair[0]))
    total = sum(count for _, count in found)
    least = width / 60
    sizes = [max(least, width * count / total) for _, count in found]
    parts, x = [], 0.0
    for (verdict, _), size in zip(found, sizes, strict=True):
        size = size * width / sum(sizes)
        parts.append((verdict, x, size))
        x += size
    return parts
