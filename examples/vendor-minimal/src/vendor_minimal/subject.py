"""The connector's description for epd-conformance; registered as entry point, so that `--subject vendor-minimal` finds it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from epd_conformance import Feature, Implementation, Rows, StackInfo, StoreProbe, Subject
from vendor_minimal.store import Store, pack, unpack


class VendorMinimal(Subject):
    """How a server gets the connector, what the connector promises, and how its store is reached without it."""

    implementation = Implementation(
        organization="Vendor (imaginary)", project="vendor-minimal", version=version("vendor-minimal")
    )
    features = frozenset(
        {
            Feature.KV_DISAGGREGATION,
            Feature.EC_BOTH,
            Feature.MULTI_PRODUCER,
            Feature.MULTI_CONSUMER,
            Feature.PERSISTENT_STORE,
            Feature.STORE_PROBE,
        }
    )

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            "ec_connector": "MinimalConnector",
            "ec_connector_module_path": "vendor_minimal.connector",
            "ec_connector_extra_config": {"path": str(stack.store)},
        }

    def probe(self, stack: StackInfo) -> StoreProbe:
        return FolderProbe(stack.store)


class FolderProbe(StoreProbe):
    """The files of the store as they are, damaged ones too."""

    def __init__(self, root: Path) -> None:
        self._store = Store(root)

    def keys(self) -> list[str]:
        found = []
        for path in self._store.root.glob("*.item"):
            # The name is a hash; a file that is damaged has lost its key.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                found.append(unpack(path.read_bytes())[0].key)
        return found

    def read(self, key: str) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._store.path(key).read_bytes()
        return None

    def write(self, key: str, data: bytes) -> None:
        self._store.write(key, data)

    def delete(self, key: str) -> None:
        self._store.path(key).unlink(missing_ok=True)

    def unseal(self, data: bytes) -> Rows:
        about, rows = unpack(data)
        return Rows(rows, about.rows, about.width, about.dtype)

    def seal(self, rows: Rows, like: bytes) -> bytes:
        about, _ = unpack(like)
        return pack(replace(about, rows=rows.rows, width=rows.width, dtype=rows.dtype), rows.data)
