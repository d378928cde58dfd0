"""What crosses between an engine core and its workers, in the bytes that vLLM's message queue makes of it.

As v1's `MessageQueue.enqueue` (distributed/device_communicators/shm_broadcast.py of vLLM 0.32): the highest pickle protocol, and
CPU tensors by vLLM's own reducer. Buffers are kept in line, which vLLM does as well below one MiB.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from typing import Any

import torch

try:
    from vllm.distributed.device_communicators.shm_broadcast import _reduce_tensor
except ImportError:  # older versions let torch pickle its tensors itself
    _reduce_tensor = None

_TABLE = dict(copyreg.dispatch_table)
if _reduce_tensor is not None:
    _TABLE[torch.Tensor] = _reduce_tensor


def pack(message: Any) -> bytes:
    """Raises whatever pickling the message raises."""
    with io.BytesIO() as stream:
        pickler = pickle.Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL)
        pickler.dispatch_table = _TABLE
        pickler.dump(message)
        return stream.getvalue()


unpack = pickle.loads
