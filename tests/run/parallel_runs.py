"""Runs of pytest over the fakes in processes of their own, and what became of them."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
from run_fakes import SCRIPT, Ended, read, start

from epd_conformance.report.writer import RESULTS_NAME
from epd_conformance.run import suites_folder

WORKERS = ("-n", "2")


@dataclass
class Fakes:
    """One run: `words` are options of pytest beside the usual ones; `script` says what becomes of which cell."""

    out: Path
    script: dict[str, str]

    def start(self, *words: object) -> Popen[str]:
        """`pytest suites --profile all`; the script carries the folder, so that processes of this run can be told."""
        usual = [
            suites_folder(),
            "-p",
            "run_fakes",
            "-s",
            "--subject",
            "reference",
            "--profile",
            "all",
            "--out",
            self.out,
        ]
        return start(["-m", "pytest", *usual, *words], {**self.script, "mark": str(self.out)})

    def wait(self, process: Popen[str]) -> Ended:
        out, err = process.communicate(timeout=60)
        return Ended(process.returncode, out, err, read(self.out))

    def run(self, *words: object) -> Ended:
        return self.wait(self.start(*words))

    def left(self, seconds: float = 0.0) -> list[psutil.Process]:
        """Processes of this run that are there, after `seconds` at most of waiting for their end."""
        deadline = time.monotonic() + seconds
        while (found := [process for process in psutil.process_iter() if self._mine(process)]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.1)
        return found

    def _mine(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return f'"mark": "{self.out}"' in process.environ().get(SCRIPT, "")
        return False

    def lines(self, name: str = RESULTS_NAME) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / name).read_text().splitlines()]


def order(lines: list[dict[str, Any]], topology: str) -> list[str]:
    """The cells of a topology in the order of their results."""
    found = [line["data"] for line in lines if line["kind"] == "cell"]
    return [cell["id"] for cell in found if cell["topology"] == topology]
