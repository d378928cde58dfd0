"""Synthetic images: the same everywhere, and different from one another."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from epd_conformance.errors import UsageError
from epd_conformance.plans.media import ImageSpec, data_url


def decoded(png: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(io.BytesIO(png)) as image:
        assert image.format == "PNG"
        return np.array(image)


def test_a_png_is_the_same_in_every_process() -> None:
    code = "import sys; from epd_conformance.plans.media import ImageSpec; sys.stdout.buffer.write(ImageSpec(7).png())"
    for hash_seed in ("1", "99"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)
        assert result.stdout == ImageSpec(7).png()


def test_pixels_bit_for_bit() -> None:
    """Recorded plans name an image by its seed: it must never become another image."""
    assert hashlib.sha256(ImageSpec(7).pixels().tobytes()).hexdigest() == (
        "950cc86f8c9d03beb7ccd36e2c5ade38e83ab3a9d518ac2fe03a6ddbf2f0c55a"
    )


@pytest.mark.parametrize(("width", "height"), [(112, 84), (1, 1), (3, 5), (300, 29)])
def test_size_and_pixels_survive_the_png(width: int, height: int) -> None:
    pixels = decoded(ImageSpec(3, width, height).png())
    assert pixels.shape == (height, width, 3)
    assert (pixels == ImageSpec(3, width, height).pixels()).all()


def test_images_are_noise_and_unrelated() -> None:
    images = [ImageSpec(seed).pixels() for seed in range(20)] + [ImageSpec(0, 112, 112).pixels()[:84]]
    for index, image in enumerate(images):
        assert 120 < image.mean() < 135 and image.std() > 70
        for other in images[:index]:
            assert (image == other).mean() < 0.01  # 1/256 by chance


def test_item_is_an_openai_content_part() -> None:
    item = ImageSpec(1, 56, 56).item()
    assert item == {"type": "image_url", "image_url": {"url": data_url(ImageSpec(1, 56, 56).png())}}
    header, _, payload = item["image_url"]["url"].partition(",")
    assert header == "data:image/png;base64"
    assert base64.b64decode(payload, validate=True) == ImageSpec(1, 56, 56).png()


@pytest.mark.parametrize("last", [None, 0, 4])
def test_spec_round_trips_through_json(last: int | None) -> None:
    spec = ImageSpec(seed=9, width=56, height=28, last=last)
    assert ImageSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert ("last" in spec.to_json()) is (last is not None), "an image without it is written as it always was"


def test_another_last_row_is_the_only_difference() -> None:
    whole, other = ImageSpec(5).pixels(), ImageSpec(5, last=6).pixels()
    assert (whole[:-1] == other[:-1]).all()
    assert (whole[-1] != other[-1]).mean() > 0.9


@pytest.mark.parametrize(
    "value",
    [
        {"seed": 1, "width": 2},
        {"seed": 1, "width": 2, "height": 3, "depth": 4},
        {"seed": -1, "width": 2, "height": 3},
        {"seed": 1, "width": 0, "height": 3},
        {"seed": 1, "width": 2, "height": "3"},
        {"seed": True, "width": 2, "height": 3},
        {"seed": 1, "width": 2, "height": 3, "last": -1},
        {"seed": 1, "width": 2, "last": 3},
        [1, 2, 3],
    ],
)
def test_bad_specs_are_refused(value: object) -> None:
    with pytest.raises(UsageError, match="image"):
        ImageSpec.from_json(value)  # type: ignore[arg-type]
