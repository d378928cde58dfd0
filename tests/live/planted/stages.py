"""Broken proxies: subclasses of the proxy's stages, each with one defect."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from epd_conformance.proxy.stages import Stages

# Where the stack's KV files lie; set by the runner of the planted defect.
KV_STORE = "EPD_PLANTED_KV_STORE"


class SkipsPrimer(Stages):
    """Never primes an encode server."""

    async def encode(self, call: Any, items: Any) -> None:
        return


class SwapsImages(Stages):
    """Hands prefill and decode the first two images in the other order."""

    async def encode(self, call: Any, items: Any) -> None:
        await super().encode(call, items)
        body = copy.deepcopy(call.body)
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
        call.body = body


class EmptiesKV(Stages):
    """Removes all stored KV between prefill and decode."""

    async def decode(self, call: Any, prefill_response: Any) -> Any:
        import shutil

        for entry in Path(os.environ[KV_STORE]).iterdir():
            shutil.rmtree(entry)
        return await super().decode(call, prefill_response)


class DamagesKV(Stages):
    """Changes the numbers of all stored KV between prefill and decode, files staying well-formed."""

    async def decode(self, call: Any, prefill_response: Any) -> Any:
        for path in Path(os.environ[KV_STORE]).rglob("*.safetensors"):
            data = bytearray(path.read_bytes())
            header = 8 + int.from_bytes(data[:8], "little")
            values = data[header:]
            # Reversed within the payload: finite numbers stay finite, every position gets another one's.
            import numpy as np

            floats = np.frombuffer(bytes(values), dtype="<f4")[::-1].copy()
            path.write_bytes(bytes(data[:header]) + floats.tobytes())
        return await super().decode(call, prefill_response)
