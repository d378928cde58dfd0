"""A right connector that asks `mutable` in its look-up."""

from __future__ import annotations

from typing import Any

from mutable import greeting, is_there, pause
from planted_engine import PlainStore

from epd_conformance import Feature, Implementation, StackInfo, Subject


class MutableStore(PlainStore):
    def has_cache_item(self, identifier: str) -> bool:
        pause()
        self.said = greeting()
        return is_there(super().has_cache_item(identifier))


class MutableSubject(Subject):
    implementation = Implementation(organization="o", project="p", version="1")
    features = frozenset[Feature]()

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            "ec_connector": "MutableStore",
            "ec_connector_module_path": "mutable_store",
            "ec_connector_extra_config": {"root": str(stack.store)},
        }
