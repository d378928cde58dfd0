"""Hypothesis as a source of data: values of a strategy, the same ones for the same seed. Pure.

Nothing is carried out while Hypothesis draws, so that whoever checks a run can draw the same values again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, configuration, given, seed, settings
from hypothesis import strategies as st

T = TypeVar("T")


def feed(
    strategy: st.SearchStrategy[T], examples: int, random_seed: int, take: Callable[[T], None], database: Any = None
) -> None:
    """Call `take` with as many values, the first of them a simple one. `database`: Hypothesis' own, or none."""

    @settings(
        max_examples=examples,
        deadline=None,
        database=database,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @seed(random_seed)
    @given(strategy)
    def every(value: T) -> None:
        take(value)

    # Hypothesis keeps what it reads in the sources; not in the folder from which somebody runs us.
    with tempfile.TemporaryDirectory() as folder:
        configuration.set_hypothesis_home_dir(folder)
        try:
            every()
        finally:
            configuration.set_hypothesis_home_dir(None)


def draw(strategy: st.SearchStrategy[T], examples: int, random_seed: int) -> list[T]:
    """As many values, the same ones for the same seed and version of Hypothesis."""
    values: list[T] = []
    feed(strategy, examples, random_seed, values.append)
    return values
