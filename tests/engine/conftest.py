"""One host for all tests that carry out plans: it imports vLLM once."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_conformance.engine.hosted import Host
from epd_conformance.errors import UsageError


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: the engine's own classes are driven")
    try:
        with Host("planted_engine:PlainStore_", paths=[str(Path(__file__).parent)]) as made:
            yield made
    except UsageError as error:
        pytest.skip(str(error))
