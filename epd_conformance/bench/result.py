"""What a benchmark reports."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Measurement:
    """One figure. `value` and `baseline` are medians in `unit`, with least and most beside them; `ratio` is value over
    baseline. `met` is None where there is no goal."""

    name: str
    value: float
    unit: str
    least: float
    most: float
    baseline: float | None = None
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None

    @classmethod
    def of(
        cls,
        name: str,
        values: Sequence[float],
        unit: str,
        *,
        baseline: Sequence[float] | None = None,
        goal: str = "",
        limit: float | None = None,
    ) -> Measurement:
        """From samples; `limit` is the most that `value` may be to meet the goal."""
        value = statistics.median(values)
        base = statistics.median(baseline) if baseline else None
        return cls(
            name=name,
            value=round(value, 4),
            unit=unit,
            least=round(min(values), 4),
            most=round(max(values), 4),
            baseline=round(base, 4) if base is not None else None,
            ratio=round(value / base, 4) if base else None,
            goal=goal,
            met=value <= limit if limit is not None else None,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> tuple[str, ...]:
        """The row of a table: medians, with least and most where there were several samples."""
        spread = "" if self.least == self.most else f" ({self.least:g}-{self.most:g})"
        return (
            self.name,
            f"{self.value:g}{spread}",
            self.unit,
            "" if self.baseline is None else f"{self.baseline:g}",
            "" if self.ratio is None else f"{self.ratio:.3f}",
            self.goal,
            "" if self.met is None else ("yes" if self.met else "NO"),
        )


def print_table(results: Sequence[Measurement]) -> None:
    """The measurements as a table."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "value", "unit", "baseline", "ratio", "goal", "met"):
        table.add_column(column, justify="left" if column in ("name", "unit", "goal", "met") else "right")
    for result in results:
        table.add_row(*result.cells())
    Console(highlight=False).print(table)
