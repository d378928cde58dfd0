"""Progress of a run, on stderr: a live table on a terminal, plain lines elsewhere (CI, a pipe)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from epd_conformance.report.render_text import STYLES
from epd_conformance.verdict import Verdict


class Progress:
    """Says what happens. `total` cells are expected; each ends with `cell_done`."""

    def __init__(self, live: bool | None = None) -> None:
        """`live` None: a table where stderr is a terminal and CI is not set."""
        self.console = Console(stderr=True, highlight=False)
        chosen = self.console.is_terminal and not os.environ.get("CI") if live is None else live
        self._live = Live(console=self.console, refresh_per_second=8, transient=True) if chosen else None
        self._began = time.monotonic()
        self._counts: dict[str, Counter[Verdict]] = {}
        self._totals: Counter[str] = Counter()
        self._line = "starting"
        # In a parallel run the lines of the workers come from another thread than the cells.
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def expect(self, topology: str) -> None:
        """One more cell of this topology will run."""
        self._totals[topology] += 1

    def say(self, line: str) -> None:
        """One line about what goes on now."""
        with self._lock:
            self._line = line
            if self._live is None:
                print(f"[{time.monotonic() - self._began:6.1f} s] {line}", file=sys.stderr, flush=True)
            else:
                self._draw()

    def cell_done(self, cell: str, topology: str, verdict: Verdict, reason: str, seconds: float) -> None:
        """A cell ended. What did not pass stays on the screen above the table."""
        with self._lock:
            self._counts.setdefault(topology, Counter())[verdict] += 1
            words = f"{verdict}: {reason}" if reason else str(verdict)
            if self._live is None:
                self.say(f"{words:<14} {cell} {seconds:.2f} s")
                return
            if verdict is not Verdict.PASS:
                self.console.print(Text.assemble((words, STYLES[verdict]), f"  {cell}"))
            self._line = cell
            self._draw()

    def _draw(self) -> None:
        assert self._live is not None
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("topology", "done", "pass", "fail", "other"):
            table.add_column(name, justify="left" if name == "topology" else "right")
        for topology, total in self._totals.items():
            counts = self._counts.get(topology, Counter())
            other = sum(counts.values()) - counts[Verdict.PASS] - counts[Verdict.FAIL]
            table.add_row(
                topology,
                f"{sum(counts.values())}/{total}",
                Text(str(counts[Verdict.PASS]), style="green"),
                Text(str(counts[Verdict.FAIL]), style="bold red" if counts[Verdict.FAIL] else "dim"),
                Text(str(other), style="yellow" if other else "dim"),
            )
        elapsed = time.monotonic() - self._began
        # As Text: a plain string is read as markup, in which a cell's brackets vanish and a path's may be an error.
        self._live.update(Group(table, Spinner("dots", Text(f" {elapsed:.0f} s  {self._line}"))))


class Relay(Progress):
    """The progress of a worker in a parallel run: its lines go into a file, which the controller shows (parallel.py)."""

    def __init__(self, path: Path) -> None:
        super().__init__(live=False)
        self._path = path

    def say(self, line: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(" ".join(line.splitlines()) + "\n")

    def cell_done(self, cell: str, topology: str, verdict: Verdict, reason: str, seconds: float) -> None:
        """Nothing: the test's report tells it to the controller."""
