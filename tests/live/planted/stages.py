"""A broken proxy: the defect of the running cell, if it is one of these."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from epd_conformance.proxy.stages import Stages
from planted import STACK, on


class Defective(Stages):
    """Each method has the defects of one step."""

    async def encode(self, call: Any, items: Any) -> None:
        if on("SkipsPrimer"):
            return
        await super().encode(call, items)
        if on("SwapsImages"):
            call.body = with_swapped_images(call.body)

    async def decode(self, call: Any, prefill_response: Any) -> Any:
        kv = Path(os.environ[STACK]) / "kv"
        if on("EmptiesKV"):
            for entry in kv.iterdir():
                shutil.rmtree(entry)
        if on("DamagesKV"):
            for path in kv.rglob("*.safetensors"):
                path.write_bytes(damaged(path.read_bytes()))
        return await super().decode(call, prefill_response)


def with_swapped_images(body: dict[str, Any]) -> dict[str, Any]:
    """The body with its first two images in the other order."""
    body = copy.deepcopy(body)
    places = [
        (message["content"], position)
        for message in body["messages"]
        if isinstance(message["content"], list)
        for position, part in enumerate(message["content"])
        if part["type"] == "image_url"
    ]
    if len(places) > 1:
        (first, i), (second, j) = places[:2]
        first[i], second[j] = second[j], first[i]
    return body


def damaged(file: bytes) -> bytes:
    """A well-formed file of other numbers."""
    header = 8 + int.from_bytes(file[:8], "little")
    # Reversed within the payload: finite numbers stay finite, every position gets another one's.
    return file[:header] + np.frombuffer(file[header:], dtype="<f4")[::-1].tobytes()
