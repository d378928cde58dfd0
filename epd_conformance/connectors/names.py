"""How a connector's name asks vLLM for its recorded form. Imports nothing, so that the stack can write what servers read."""

from __future__ import annotations

EC_PREFIX = "Recording:"
KV_PREFIX = "RecordingKV:"
MODULE = "epd_conformance.connectors.recording"


def ec_name(connector: str, module_path: str | None) -> str:
    """The value of `ec_connector` that makes vLLM load the recorded form of a connector."""
    return f"{EC_PREFIX}{module_path or ''}:{connector}"


def kv_name(connector: str, module_path: str | None) -> str:
    """The value of `kv_connector` that makes vLLM load the recorded form of a connector."""
    return f"{KV_PREFIX}{module_path or ''}:{connector}"
