"""Runs the real suites with one defect planted around them: `python -m planted [--stages C] … -- <pytest arguments>`."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from pathlib import Path

import pytest

from epd_conformance.live import client
from epd_conformance.live.session import LiveSession, PlannedCell
from epd_conformance.pytest_plugin import PLANTED
from epd_conformance.run import Planted, suites_folder
from planted.stages import KV_STORE


def ask_before(session: LiveSession, cell: PlannedCell) -> None:
    """Send the cell's own first request, without a salt, before the cell does."""
    stage = session.stage(cell.topology)
    client.send(stage.stack.base_url, stage.plans[cell.id].requests[0], uuid.uuid4().hex)


class Plant:
    """The plug-in object that hands the defect to the run."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[PLANTED] = self.planted


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages")
    parser.add_argument("--no-salt", action="store_true", help="send the same prompt twice, without a salt")
    parser.add_argument("--no-recorder", action="store_true")
    parser.add_argument("--kv-store", type=Path)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.kv_store:
        os.environ[KV_STORE] = str(args.kv_store)
    planted = Planted(
        stages=f"planted.stages:{args.stages}" if args.stages else None,
        salted=not args.no_salt,
        recorder=not args.no_recorder,
        before_cell=ask_before if args.no_salt else None,
    )
    rest = args.rest[1:] if args.rest[:1] == ["--"] else args.rest
    return int(pytest.main([str(suites_folder()), "-p", "no:terminal", "-s", *rest], plugins=[Plant(planted)]))


if __name__ == "__main__":
    sys.exit(main())
