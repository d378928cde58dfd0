"""Synthetic images for plans: a seed and a size say every pixel, in every process and on every machine.

The pixels are noise from the raw stream of PCG64, which NumPy promises to keep. Noise does not compress, so
the PNG stores it uncompressed: its bytes then do not depend on which zlib Pillow was built with.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from epd_conformance.errors import UsageError

# The pixels of one token in the Qwen-VL families (patches of 14, merged two by two). A default image of
# 112x84 is a whole number of such patches, 4x3, so that the processor does not resize it and one patch stays
# one token.
PATCH_EDGE = 28


@dataclass(frozen=True)
class ImageSpec:
    """One image as a plan names it. `seed` is at least 0; `width` and `height` are pixels, at least 1."""

    seed: int
    width: int = 112
    height: int = 84

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("width", 1), ("height", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise UsageError(f"image {name} is {value!r}: give an integer of at least {least}")

    def to_json(self) -> dict[str, int]:
        return {"seed": self.seed, "width": self.width, "height": self.height}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ImageSpec:
        """The inverse of `to_json`; raises UsageError for missing or unknown keys."""
        if not isinstance(value, dict) or set(value) != {"seed", "width", "height"}:
            raise UsageError(f"image {value!r} must be an object with exactly seed, width and height")
        return cls(value["seed"], value["width"], value["height"])

    def pixels(self) -> npt.NDArray[np.uint8]:
        """RGB noise, shape (height, width, 3). Size counts as seed: no image is the beginning of another."""
        count = self.height * self.width * 3
        stream = np.random.PCG64([self.seed, self.width, self.height]).random_raw(-(-count // 8))
        return stream.astype("<u8").view(np.uint8)[:count].reshape(self.height, self.width, 3)

    def png(self) -> bytes:
        return _png(self.pixels())

    def item(self) -> dict[str, Any]:
        """The image as a content part of an OpenAI chat request, inlined as a data URL."""
        return {"type": "image_url", "image_url": {"url": data_url(self.png())}}


def image_png(seed: int, width: int = 112, height: int = 84) -> bytes:
    """PNG of the image that `ImageSpec(seed, width, height)` names."""
    return ImageSpec(seed, width, height).png()


def image_item(seed: int, width: int = 112, height: int = 84) -> dict[str, Any]:
    """OpenAI `image_url` content part of the image that `ImageSpec(seed, width, height)` names."""
    return ImageSpec(seed, width, height).item()


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def with_patch_changed(png: bytes, row: int = 0, column: int = 0) -> bytes:
    """PNG equal to `png` but for one 28x28 patch, inverted: the smallest difference that a cell may rely on.

    `row` and `column` count patches. One pixel is too small a difference for a tiny model: most outputs stay
    equal. Raises UsageError where the patch does not lie wholly inside the image.
    """
    with Image.open(io.BytesIO(png)) as image:
        pixels = np.array(image.convert("RGB"))
    rows, columns = pixels.shape[0] // PATCH_EDGE, pixels.shape[1] // PATCH_EDGE
    if not (0 <= row < rows and 0 <= column < columns):
        raise UsageError(f"patch ({row}, {column}) is outside the image, which has {rows} rows of {columns} patches")
    patch = np.s_[row * PATCH_EDGE : (row + 1) * PATCH_EDGE, column * PATCH_EDGE : (column + 1) * PATCH_EDGE]
    pixels[patch] = 255 - pixels[patch]
    return _png(pixels)


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()
