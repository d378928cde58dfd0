"""Probes of the two stores that are files: that of the reference connector, and that of vLLM's example connector."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

from epd_conformance.connectors import object_format
from epd_conformance.connectors.object_format import DTYPES, ObjectError
from epd_conformance.probe import Rows, StoreProbe

_TORCH_NAMES = {name: torch_name for torch_name, (name, _) in DTYPES.items()}


class VerifiedStoreProbe(StoreProbe):
    """The reference connector's store under `root`; see docs/verified-store.md."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def keys(self) -> list[str]:
        found = []
        for path in self._root.rglob(f"*{object_format.SUFFIX}"):
            with contextlib.suppress(ObjectError, OSError):
                found.append(object_format.unpack(path.read_bytes())[0].key)
        return found

    def read(self, key: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self.file(key).read_bytes()
        return None

    def write(self, key: str, data: bytes) -> None:
        object_format.publish(self._root, key, data)

    def delete(self, key: str) -> None:
        self.file(key).unlink(missing_ok=True)

    def unseal(self, data: bytes) -> Rows:
        header, payload = object_format.unpack(data)
        return Rows(payload, header.rows, header.width, header.dtype)

    def seal(self, rows: Rows, like: bytes) -> bytes:
        header, _ = object_format.unpack(like)
        header = replace(header, rows=rows.rows, width=rows.width, dtype=rows.dtype)
        return object_format.repack(header, rows.data)

    def file(self, key: str) -> Path:
        return self._root / object_format.object_name(key)


class ExampleStoreProbe(StoreProbe):
    """ECExampleConnector's store: one folder an item, named by its key, with one safetensors file (example_connector.py)."""

    FILE = "encoder_cache.safetensors"

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.normpath(root))

    def keys(self) -> list[str]:
        return [path.parent.relative_to(self._root).as_posix() for path in self._root.rglob(self.FILE)]

    def read(self, key: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self.file(key).read_bytes()
        return None

    def write(self, key: str, data: bytes) -> None:
        path = self.file(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        # As the connector's own writer does: a reader never meets half of what was not meant to be half.
        temporary = path.with_suffix(".writing")
        temporary.write_bytes(data)
        temporary.replace(path)

    def delete(self, key: str) -> None:
        path = self.file(key)
        with contextlib.suppress(FileNotFoundError):
            # The connector makes one of the store itself for a uuid like `.`.
            if path.parent == self._root:
                path.unlink()
            else:
                shutil.rmtree(path.parent)

    def unseal(self, data: bytes) -> Rows:
        length = int.from_bytes(data[:8], "little")
        entry = json.loads(data[8 : 8 + length])["ec_cache"]
        start, stop = entry["data_offsets"]
        rows, width = entry["shape"]
        return Rows(data[8 + length + start : 8 + length + stop], rows, width, _TORCH_NAMES[entry["dtype"]])

    def seal(self, rows: Rows, like: bytes) -> bytes:
        entry = {
            "dtype": DTYPES[rows.dtype][0],
            "shape": [rows.rows, rows.width],
            "data_offsets": [0, len(rows.data)],
        }
        text = json.dumps({"ec_cache": entry}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text + rows.data

    def file(self, key: str) -> Path:
        """Raises ValueError for a key that leads out of the store."""
        folder = Path(os.path.normpath(self._root / key))
        if not folder.is_relative_to(self._root):
            raise ValueError(f"the key {ascii(key)[:80]} leads out of the store")
        return folder / self.FILE
