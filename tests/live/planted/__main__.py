"""Runs the real suites with defects planted around them: `python -m planted [--defects JSON] … -- <pytest arguments>`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from epd_conformance.live import client
from epd_conformance.live.session import LiveSession, PlannedCell
from epd_conformance.pytest_plugin import PLANTED
from epd_conformance.run import Planted, suites_folder
from planted import DEFECT, STACK

#: The defect of a harness that asks the same prompt twice, without a salt.
UNSALTED = "Unsalted"


@dataclass(frozen=True)
class Each:
    """Before each cell, puts its defect in the place of the last one's. `defects`: names by cell id."""

    stack: Path
    defects: dict[str, str]

    def __call__(self, session: LiveSession, cell: PlannedCell) -> None:
        name = self.defects.get(cell.id, "")
        stage = session.stage(cell.topology)
        (self.stack / DEFECT).write_text(name)
        session.salted = name != UNSALTED
        if not session.salted:
            # The cell's own first request, before the cell sends it.
            client.send(stage.stack.base_url, stage.plans[cell.id].requests[0], uuid.uuid4().hex)


class Plant:
    """The plug-in object that hands the defects to the run."""

    def __init__(self, planted: Planted) -> None:
        self.planted = planted

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[PLANTED] = self.planted


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--defects", type=json.loads, help="the defect of each cell, as JSON; needs --stack")
    parser.add_argument("--stack", type=Path, help="the folder of the stack under test")
    parser.add_argument("--no-recorder", action="store_true")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    planted = Planted(recorder=not args.no_recorder)
    if args.defects:
        os.environ[STACK] = str(args.stack)
        planted.stages = "planted.stages:Defective"
        planted.before_cell = Each(args.stack, args.defects)
    rest = args.rest[1:] if args.rest[:1] == ["--"] else args.rest
    return int(pytest.main([str(suites_folder()), "-p", "no:terminal", "-s", *rest], plugins=[Plant(planted)]))


if __name__ == "__main__":
    sys.exit(main())
