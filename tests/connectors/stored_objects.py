"""Reading a stored object as a consumer does: whole, from memory of its own, against what it needs. Needs torch, not vLLM."""

from __future__ import annotations

from pathlib import Path

import torch

from epd_conformance.connectors.object_format import (
    Expectation,
    Header,
    decode,
    fill,
    object_name,
    open_object,
    verify_header,
)


def load(root: Path, expect: Expectation) -> tuple[Header, torch.Tensor]:
    """
    Raises:
        ObjectError: for any reason why it must not be used.
    """
    with open_object(root / object_name(expect.key)) as (descriptor, status):
        buffer = bytearray(status.st_size)
        with memoryview(buffer) as view:
            filled = fill(descriptor, view)
        del buffer[filled:]
    header, tensor = decode(buffer)
    verify_header(header, expect)
    return header, tensor
