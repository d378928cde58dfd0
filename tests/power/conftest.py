"""One host for all of these tests: it imports vLLM, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd_conformance.engine.hosted import Host

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    with Host("mutable_store:MutableSubject", paths=[str(HERE), str(HERE.parent / "engine")]) as made:
        yield made
