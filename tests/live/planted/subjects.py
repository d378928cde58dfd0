"""Subjects around the broken connectors. Each is the reference subject with another class."""

from __future__ import annotations

from typing import Any

from epd_conformance import StackInfo
from epd_conformance.subject import ReferenceSubject


class _Planted(ReferenceSubject):
    connector = ""

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            **super().connector_config(role, stack),
            "ec_connector": self.connector,
            "ec_connector_module_path": "planted.connectors",
        }


class Off(_Planted):
    connector = "OffConnector"


class OtherRows(_Planted):
    connector = "OtherRowsConnector"


class Inventing(_Planted):
    connector = "InventingConnector"


class Casting(_Planted):
    connector = "CastingConnector"


class Raising(_Planted):
    connector = "RaisingConnector"


class NoSuchModule(_Planted):
    connector = "AnyConnector"

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {**super().connector_config(role, stack), "ec_connector_module_path": "no_such_module_xyz"}
