"""For test modules of the connectors: imports vLLM with the repairs it needs here, or skips the module and says why."""

from __future__ import annotations

import pytest


def import_vllm_or_skip() -> None:
    """Call before anything of vLLM is imported. A broken torchvision gives other errors than ImportError."""
    try:
        from epd_conformance.runtime import repairs

        repairs.install()
        import vllm.distributed.ec_transfer.ec_connector.base  # noqa: F401
    except Exception as error:
        pytest.skip(f"vLLM cannot be imported: {error!r}", allow_module_level=True)
