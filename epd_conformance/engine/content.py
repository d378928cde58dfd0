"""The synthetic encoder: an item's rows are a function of its content, so that what every load must be is known before it runs.

Pure: bytes and digests only. Values are random in all bits but always finite, since equality is that of bytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import xxhash

#: torch's name of a dtype -> bytes of one value.
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Content:
    """What an item shows. `rows` embeddings of `width` values of `dtype` (torch's name), drawn from `seed`."""

    seed: int
    rows: int
    width: int
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.width


@functools.lru_cache(maxsize=4096)
def rows_of(content: Content) -> bytes:
    """The encoder's output for a content: its bytes, row by row, little-endian."""
    generator = np.random.default_rng([content.seed, content.rows, content.width])
    values = generator.standard_normal((content.rows, content.width), dtype=np.float32)
    if content.dtype == "bfloat16":
        # The upper half of a float32 is a bfloat16 (rounded towards zero).
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if content.dtype == "float16" else "<f4").tobytes()


def digest(data: bytes | memoryview) -> str:
    """A digest of rows: 16 hex digits. It tells contents of one test apart; nobody attacks it."""
    return xxhash.xxh3_64_hexdigest(data)


@functools.lru_cache(maxsize=4096)
def expected_digest(content: Content) -> str:
    """The digest of `rows_of`."""
    return digest(rows_of(content))
