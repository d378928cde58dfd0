"""`scripts/bench NAME [--json]`: prints `{name, value, unit, baseline, ratio, goal, met}` for each measurement."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epd_conformance.bench import boot, cell, connector, engine, proxy
from epd_conformance.bench.result import Measurement
from epd_conformance.errors import StackError, UsageError

BENCHMARKS: dict[str, Callable[[Path, Callable[[str], None]], list[Measurement]]] = {
    "boot": boot.measure,
    "cell": cell.measure,
    "connector": connector.measure,
    "engine": engine.measure,
    "proxy": proxy.measure,
}


def bench(
    name: Annotated[str, typer.Argument(help=f"one of: {', '.join(BENCHMARKS)}")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure one thing against its baseline. A missed goal is printed, and is no error."""
    if name not in BENCHMARKS:
        raise UsageError(f"no benchmark {name!r}: use {', '.join(BENCHMARKS)}")
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        results = BENCHMARKS[name](Path(folder), lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("name", "value", "unit", "baseline", "ratio", "goal", "met"):
        table.add_column(column, justify="left" if column in ("name", "unit", "goal", "met") else "right")
    for result in results:
        table.add_row(*result.cells())
    Console(highlight=False).print(table)


def main() -> None:
    try:
        typer.run(bench)
    except (UsageError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
