"""Subjects around the broken connectors. Each is the reference subject with another class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from epd_conformance import StackInfo
from epd_conformance.connectors.probes import ExampleStoreProbe
from epd_conformance.faults.fault import Fault, Receipt, Target
from epd_conformance.subject import ReferenceSubject, VllmExampleSubject


class _Planted(ReferenceSubject):
    connector = ""

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            **super().connector_config(role, stack),
            "ec_connector": self.connector,
            "ec_connector_module_path": "planted.connectors",
        }


class Defective(_Planted):
    connector = "DefectiveConnector"


class OtherRows(_Planted):
    connector = "OtherRowsConnector"


class Raising(_Planted):
    connector = "RaisingConnector"


class Forgetful(_Planted):
    connector = "ForgetfulConnector"


class NoSuchModule(_Planted):
    connector = "AnyConnector"

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {**super().connector_config(role, stack), "ec_connector_module_path": "no_such_module_xyz"}


# -- probes and faults that lie; the connector beneath believes whatever lies in the store ------------------------------


class Nowhere(ExampleStoreProbe):
    """Changes nothing, and shows it."""

    def write(self, key: str, data: bytes) -> None: ...

    def delete(self, key: str) -> None: ...


class Elsewhere(ExampleStoreProbe):
    """Writes to a place of its own, and shows what it has written there as if it were the store."""

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._mine: dict[str, bytes] = {}

    def read(self, key: str) -> bytes | None:
        return self._mine.get(key, super().read(key))

    def write(self, key: str, data: bytes) -> None:
        self._mine[key] = data


class Deleting(Elsewhere):
    """The same, and removes the object: every fault is then the one that any connector survives."""

    def write(self, key: str, data: bytes) -> None:
        super().write(key, data)
        super().delete(key)


class FlippedBit(Fault):
    """The lowest bit of one number, so that the tokens stay as they are."""

    kind = "one-row"

    def inject(self, target: Target) -> Receipt:
        before = target.probe.read(target.key)
        assert before is not None
        after = before[:-4] + bytes([before[-4] ^ 1]) + before[-3:]
        target.probe.write(target.key, after)
        return Receipt(self.kind, target.key, before, after)


class Lying(VllmExampleSubject):
    """A probe that lies in another way in each cell, and in the last cell a true one with a fault of its own."""

    def __init__(self) -> None:
        self._probe: ExampleStoreProbe | None = None
        self._lies = iter([Nowhere, Elsewhere, Deleting, ExampleStoreProbe])

    def probe(self, stack: StackInfo) -> ExampleStoreProbe:
        self._probe = ExampleStoreProbe(stack.store)
        return self._probe

    def faults(self, stack: StackInfo) -> Mapping[str, Fault]:
        # Asked for once a cell, and the probe just before.
        lie = next(self._lies)(stack.store)
        assert self._probe is not None
        self._probe.__class__, self._probe.__dict__ = lie.__class__, lie.__dict__
        return {"one-row": FlippedBit()}
