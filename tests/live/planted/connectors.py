"""Broken EC connectors, each one small change away from right. Loaded by vLLM inside its servers.

Those that ask `on` keep to what they inherit while another cell's defect is in force, so that one class can have several.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from epd_conformance.connectors.verified_store import VerifiedStoreConnector
from planted import on


class OffConnector(VerifiedStoreConnector):
    """Never saves and never finds anything: what a connector that is switched off looks like."""

    def has_cache_item(self, identifier: str) -> bool:
        return not on("Off") and super().has_cache_item(identifier)

    def save_caches(self, encoder_cache: Any, mm_hash: str, **kwargs: Any) -> None:
        if not on("Off"):
            super().save_caches(encoder_cache, mm_hash, **kwargs)


class OtherRowsConnector(VerifiedStoreConnector):
    """Gives an item the rows of the item that was loaded before it, where both have the same shape."""

    _last: Any = None

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        before = set(encoder_cache)
        super().start_load_caches(encoder_cache, **kwargs)
        for key in [key for key in encoder_cache if key not in before]:
            mine = encoder_cache[key]
            if on("OtherRows") and self._last is not None and self._last.shape == mine.shape:
                encoder_cache[key] = self._last.clone()
            self._last = mine


class InventingConnector(VerifiedStoreConnector):
    """Says that it has whatever nobody saved, and gives zeros for it."""

    def has_cache_item(self, identifier: str) -> bool:
        return self.is_consumer if on("Inventing") else super().has_cache_item(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if not on("Inventing"):
            super().update_state_after_alloc(request, index)
            return
        feature = request.mm_features[index]
        self._invented = [
            *getattr(self, "_invented", []),
            (feature.identifier, request.get_num_encoder_embeds(index)),
        ]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        meta.invented, self._invented = getattr(self, "_invented", []), []
        return meta

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        import torch

        super().start_load_caches(encoder_cache, **kwargs)
        for key, rows in self._get_connector_metadata().invented:
            if key not in encoder_cache:
                encoder_cache[key] = torch.zeros(rows, 128)


class CastingConnector(VerifiedStoreConnector):
    """Loads what was saved, through bfloat16 and back: tokens mostly stay, bytes do not."""

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        import torch

        before = set(encoder_cache)
        super().start_load_caches(encoder_cache, **kwargs)
        for key in [key for key in encoder_cache if key not in before and on("Casting")]:
            encoder_cache[key] = encoder_cache[key].to(torch.bfloat16).to(torch.float32)


class DefectiveConnector(OffConnector, OtherRowsConnector, InventingConnector, CastingConnector):
    """Has the defect of the running cell, if it is one of these."""


class RaisingConnector(VerifiedStoreConnector):
    """Raises when it should load: the engine dies."""

    def start_load_caches(self, encoder_cache: Any, **kwargs: Any) -> None:
        if self._get_connector_metadata().loads:
            raise RuntimeError("planted: the load fails")


class ForgetfulConnector(VerifiedStoreConnector):
    """Publishes nothing again while a file `forgetful` lies beside its store."""

    def start_save_caches(self, **kwargs: Any) -> None:
        if not Path(self._config.root).with_name("forgetful").exists():
            super().start_save_caches(**kwargs)
