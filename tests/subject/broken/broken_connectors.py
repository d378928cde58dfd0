"""Connectors with one defect each, for test_check_subject: loaded by vLLM in a process of its own."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorRole

from epd_conformance.connectors import verified_store
from epd_conformance.connectors.verified_store import StoreConfig, VerifiedStoreConnector


class Ignoring(VerifiedStoreConnector):
    """Looks only at `root`, and counts nothing."""

    get_ec_connector_stats = ECConnectorBase.get_ec_connector_stats

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        root = vllm_config.ec_transfer_config.ec_connector_extra_config["root"]
        parse = StoreConfig.parse
        verified_store.StoreConfig.parse = lambda extra: parse({"root": root})  # type: ignore[method-assign]
        super().__init__(vllm_config, role)


class Unfinished(ECConnectorBase):
    """Without `save_caches`."""

    def start_load_caches(self, *args: Any, **kwargs: Any) -> None: ...

    def has_cache_item(self, identifier: str) -> bool:
        return False

    def update_state_after_alloc(self, *args: Any) -> None: ...

    def build_connector_meta(self, *args: Any) -> Any: ...


class Refusing(VerifiedStoreConnector):
    """Has no device in the worker, and counts nothing."""

    get_ec_connector_stats = ECConnectorBase.get_ec_connector_stats

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        if role is ECConnectorRole.WORKER:
            raise RuntimeError("no device")
