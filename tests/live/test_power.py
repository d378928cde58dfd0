"""The tiny model tells images apart: without that every equality would be worthless."""

from __future__ import annotations

from pathlib import Path

import pytest

from epd_conformance.models import spread
from epd_conformance.run import Options, model_use
from epd_conformance.topology.spec import Shape, Topology
from epd_conformance.topology.stack import SERVED_NAME, Site, StackSpec

pytestmark = [pytest.mark.live, pytest.mark.needs_vllm]


def test_random_images_give_different_tokens(tmp_path: Path) -> None:
    with Site(tmp_path, model_use(Options(subject="reference"))) as site:
        (stack,) = site.boot(StackSpec("aggregated", Topology.parse("aggregated"), Shape()))
        found = spread.measure(stack.base_url, SERVED_NAME)
    assert found.pairs == 60 * 59 // 2
    assert found.share >= 0.99
    # It could fail: on one token alone many pairs agree.
    assert found.first_token_share < 1.0
