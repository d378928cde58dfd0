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


@dataclass(frozen=True)
class ImageSpec:
    """One image as a plan names it. `seed` is at least 0; `width` and `height` are pixels, at least 1.

    `last`, where given, is the seed of the last row of pixels: such an image differs from the one without it there only.
    """

    seed: int
    # 4 × 3 tokens of the Qwen-VL families (28 pixels each way), so that the processor does not resize it.
    width: int = 112
    height: int = 84
    last: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("seed", 0), ("width", 1), ("height", 1), ("last", 0)):
            value = getattr(self, name)
            if name == "last" and value is None:
                continue
            if type(value) is not int or value < least:
                raise UsageError(f"image {name} is {value!r}: give an integer of at least {least}")

    def to_json(self) -> dict[str, int]:
        last = {} if self.last is None else {"last": self.last}
        return {"seed": self.seed, "width": self.width, "height": self.height, **last}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ImageSpec:
        """The inverse of `to_json`; raises UsageError for missing or unknown keys."""
        if not isinstance(value, dict) or {*value, "last"} != {"seed", "width", "height", "last"}:
            raise UsageError(f"image {value!r} must be an object with seed, width and height, and perhaps last")
        return cls(value["seed"], value["width"], value["height"], value.get("last"))

    def pixels(self) -> npt.NDArray[np.uint8]:
        """RGB noise, shape (height, width, 3). Size counts as seed: no image is the beginning of another."""
        count = self.height * self.width * 3
        stream = np.random.PCG64([self.seed, self.width, self.height]).random_raw(-(-count // 8))
        pixels = stream.astype("<u8").view(np.uint8)[:count].reshape(self.height, self.width, 3)
        if self.last is not None:
            pixels[-1] = ImageSpec(self.last, self.width, 1).pixels()[0]
        return pixels

    def png(self) -> bytes:
        return _png(self.pixels())

    def item(self) -> dict[str, Any]:
        """The image as a content part of an OpenAI chat request, inlined as a data URL."""
        return {"type": "image_url", "image_url": {"url": data_url(self.png())}}


def data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()
