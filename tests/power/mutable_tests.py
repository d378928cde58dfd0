"""Tests of `mutable` that `test_own.py` lets mutants meet. Not named as a test, so that no run of the suite takes them."""

from __future__ import annotations

import os

import pytest
from mutable import greeting, is_there, pause


@pytest.mark.parametrize("found", [True, False])
def test_that_sees_a_change(found: bool) -> None:
    assert is_there(found) is found


def test_that_sees_none() -> None:
    greeting()


def test_in_a_forked_process() -> None:
    child = os.fork()
    if child == 0:
        pause()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
