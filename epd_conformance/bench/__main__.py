"""`scripts/bench NAME [--json]`: prints `{name, value, unit, baseline, ratio, goal, met}` for each measurement."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from epd_conformance.bench import boot, cell, connector, engine, proxy
from epd_conformance.bench.result import Measurement, print_table
from epd_conformance.errors import StackError, UsageError

BENCHMARKS: dict[str, Callable[[Path, Callable[[str], None]], list[Measurement]]] = {
    "boot": boot.measure,
    "cell": cell.measure,
    "connector": connector.measure,
    "engine": engine.measure,
    "proxy": proxy.measure,
}
#: It has options of its own, and is imported when it is asked for: it needs mutmut, which the others do not.
POWER = "power"
_NAMES = ", ".join([*BENCHMARKS, POWER])


def bench(
    name: Annotated[str, typer.Argument(help=f"one of: {_NAMES}")],
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure one thing against its baseline. A missed goal is printed, and is no error."""
    if name not in BENCHMARKS:
        raise UsageError(f"no benchmark {name!r}: use {_NAMES}")
    with tempfile.TemporaryDirectory(prefix="epd-bench-") as folder:
        results = BENCHMARKS[name](Path(folder), lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    print_table(results)


def main() -> None:
    command: Callable[..., None] = bench
    try:
        if sys.argv[1:2] == [POWER]:
            from epd_conformance.bench import power

            del sys.argv[1]
            command = power.command
        typer.run(command)
    except (UsageError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
