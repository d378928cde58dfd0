"""Thumbnails of a plan's images, drawn from the plan's own numbers: nothing has to be kept for them. Pure."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from dataclasses import dataclass

from PIL import Image

from epd_conformance.plans.media import ImageSpec

# Pixels of a thumbnail's longer side. The images are noise, of which an average is grey and which does not compress: single pixels
# at even distances tell two of them apart and cost half a kilobyte.
SIDE = 16
# An image of more pixels than this is not drawn: a plan may name one that would fill the memory.
MOST_PIXELS = 64_000_000


@dataclass(frozen=True)
class Picture:
    """`source` is a data URL, empty where the image was not drawn; `labels` say in which requests it stands."""

    source: str
    width: int
    height: int
    seed: int
    labels: tuple[str, ...]


def pictures(named: Iterable[tuple[str, ImageSpec]]) -> tuple[Picture, ...]:
    """One picture for each different image, in order, with the labels of all places where it stands."""
    labels: dict[ImageSpec, list[str]] = {}
    for label, spec in named:
        labels.setdefault(spec, []).append(label)
    return tuple(
        Picture(thumbnail(spec), spec.width, spec.height, spec.seed, tuple(dict.fromkeys(found)))
        for spec, found in labels.items()
    )


def thumbnail(spec: ImageSpec) -> str:
    """Every n-th pixel of the image as a PNG in a data URL."""
    if spec.width * spec.height > MOST_PIXELS:
        return ""
    step = -(-max(spec.width, spec.height) // SIDE)
    out = io.BytesIO()
    Image.fromarray(spec.pixels()[::step, ::step].copy()).save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
