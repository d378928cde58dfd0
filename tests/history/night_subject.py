"""A subject whose connector is `night_store:NightStore`, which each night of a test writes anew; it imports no vLLM."""

from __future__ import annotations

from typing import Any

from epd_conformance import Feature, Implementation, StackInfo, Subject


class Night(Subject):
    implementation = Implementation(organization="tests", project="night-store", version="1")
    features = frozenset({Feature.MULTI_PRODUCER, Feature.MULTI_CONSUMER, Feature.PERSISTENT_STORE})

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            "ec_connector": "NightStore",
            "ec_connector_module_path": "night_store",
            "ec_connector_extra_config": {"root": str(stack.store)},
        }
