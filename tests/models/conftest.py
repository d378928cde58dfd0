"""The marker of the tests that load a zoo model with the libraries that a server loads it with."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_vllm: imports what only an environment with vLLM has")
