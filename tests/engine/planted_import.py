"""The module of a connector that asks a peer on import."""

from __future__ import annotations

import contextlib
import socket

from planted_engine import AsksOnImport

__all__ = ["AsksOnImport"]

with contextlib.suppress(OSError):
    socket.create_connection(("192.0.2.1", 1), timeout=0.1)
