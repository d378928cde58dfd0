"""`bench power`: how many faults, planted one by one in the reference connector, the contract layer finds (docs/power.md)."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from epd_conformance.bench.result import Measurement, print_table
from epd_conformance.errors import UsageError

try:
    from epd_conformance.power import explained, reference, trial
    from epd_conformance.power.mutants import Mutant, sources, spread
except ImportError as error:
    raise UsageError(f"`bench power` needs mutmut, which is not here ({error}): install the extra `dev`") from error

#: Of the mutants that are either killed or survive, so many are killed.
GOAL = 0.95
_WIDTH = 120
#: One of each kind, of which there are 101. Nearly every mutant that dies dies of the first; all take four times as long.
STEPS = 110
#: Each worker imports vLLM, which takes a gigabyte.
MOST_WORKERS = 2


@dataclass(frozen=True)
class Row:
    """What became of a group of mutants. `survived` includes those that no step runs, and those that are explained."""

    killed: int
    survived: int
    unreached: int
    explained: int
    timed_out: int
    broken: int

    @property
    def number(self) -> int:
        return self.killed + self.survived + self.timed_out + self.broken

    @property
    def rate(self) -> float | None:
        """Killed of those that are killed or survive; None where there are none."""
        return _rate(self.killed, self.survived)

    @property
    def rate_unexplained(self) -> float | None:
        """The same without the survivors that are explained."""
        return _rate(self.killed, self.survived - self.explained)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    sample: Annotated[int, typer.Option(min=0, help="only so many mutants, evenly spread; 0: all")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0, help="begin no further mutant after so many minutes; 0: no limit")
    ] = 0,
    module: Annotated[str, typer.Option(help="only this module, such as `pins`")] = "",
    survivors: Annotated[bool, typer.Option(help="list each mutant that survives")] = False,
    ledger: Annotated[
        Path | None, typer.Option(help="write what becomes of each mutant to this file, one a line")
    ] = None,
    again: Annotated[Path | None, typer.Option(help="only what survived according to this ledger")] = None,
    steps: Annotated[int, typer.Option(min=0, help="plans and checks that a mutant meets, at most; 0: all")] = STEPS,
    workers: Annotated[int, typer.Option(min=1, max=MOST_WORKERS, help="processes at a time")] = MOST_WORKERS,
) -> None:
    """Plant faults in the reference connector, one by one, and count those that the contract layer finds."""
    mutants = _chosen(module, again)
    picked = spread(mutants, sample or len(mutants))
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    say(f"{len(picked)} of {len(mutants)} mutants; drawn plans: {trial.DRAWN}, seed {trial.SEED}")
    began = time.monotonic()
    file = _opened(ledger) if ledger is not None else None
    try:
        fates, left = trial.run(
            reference.target(),
            picked,
            workers=workers,
            minutes=minutes or None,
            most=steps or None,
            say=say,
            take=lambda fate: _write(file, fate),
        )
    finally:
        if file is not None:
            file.close()
    fates.sort(key=lambda fate: (list(reference.MODULES).index(fate.mutant.module), fate.mutant.line))
    known = explained.read()
    results = measurements(fates, left, (time.monotonic() - began) / 60, known)
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    print_table(results)
    show(fates, known, survivors)
    if not (sample or module or again or left):
        lived = [fate.mutant for fate in fates if fate.outcome in _SURVIVED]
        for one in explained.stale(known, lived):
            print(f"explains no survivor: {one.module} {one.function}: {one.before} -> {one.after}")


_SURVIVED = ("survived", "not reached")


def _opened(ledger: Path) -> IO[str]:
    try:
        return ledger.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--ledger {ledger} cannot be written ({error.strerror}): name a file in a folder that is there"
        ) from error


def _chosen(module: str, again: Path | None) -> list[Mutant]:
    modules = {name: left for name, left in reference.MODULES.items() if module in ("", name.rpartition(".")[2])}
    if not modules:
        names = ", ".join(name.rpartition(".")[2] for name in reference.MODULES)
        raise UsageError(f"no module of the reference connector is called {module!r}: use {names}")
    found = list(sources(modules))
    if again is None:
        return found
    try:
        lines = [json.loads(line) for line in again.read_text(encoding="utf-8").splitlines()]
        wanted = {
            (line["module"], line["function"], line["before"], line["after"])
            for line in lines
            if line["outcome"] in _SURVIVED
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{again} is no ledger of `bench power --ledger` ({error})") from error
    return [mutant for mutant in found if mutant.key in wanted]


def _write(file: IO[str] | None, fate: trial.Fate) -> None:
    if file is None:
        return
    mutant = fate.mutant
    line: dict[str, Any] = {
        "module": mutant.module,
        "function": mutant.function,
        "line": mutant.line,
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
        "outcome": fate.outcome,
        "step": fate.step,
        "requirements": fate.requirements,
        "text": fate.text,
        "tried": fate.tried,
        "seconds": round(fate.seconds, 2),
    }
    print(json.dumps(line), file=file, flush=True)


def row(fates: Sequence[trial.Fate], known: Sequence[explained.Explanation]) -> Row:
    counts = Counter(fate.outcome for fate in fates)
    told = [fate for fate in fates if fate.outcome in _SURVIVED and explained.explanation_of(fate.mutant, known)]
    return Row(
        killed=counts["killed"],
        survived=counts["survived"] + counts["not reached"],
        unreached=counts["not reached"],
        explained=len(told),
        timed_out=counts["timed out"],
        broken=counts["broken"],
    )


def measurements(
    fates: Sequence[trial.Fate], left: int, minutes: float, known: Sequence[explained.Explanation]
) -> list[Measurement]:
    """The figures of a run. `left`: mutants that it did not come to."""
    all_ = row(fates, known)
    figures = [
        _figure("mutants", all_.number, ""),
        _figure("left when time was up", left, ""),
        _figure("time", minutes, "min"),
        _rated("kill rate", all_.rate),
        _rated("kill rate, explained aside", all_.rate_unexplained),
        _figure("killed", all_.killed, ""),
        _figure("survived", all_.survived, ""),
        _figure("of them explained", all_.explained, ""),
        _figure("of them run by no step", all_.unreached, ""),
        _figure("timed out", all_.timed_out, ""),
        _figure("cannot be imported", all_.broken, ""),
    ]
    return [figure for figure in figures if figure.name != "left when time was up" or left]


def show(fates: Sequence[trial.Fate], known: Sequence[explained.Explanation], survivors: bool) -> None:
    """Print survivors by module and by operator, kills by requirement, and the lists."""
    # Narrower, as where no terminal is, the names of functions and operators would be cut.
    console = Console(highlight=False, width=_WIDTH)
    for title, of in (("module", _module), ("operator", _operator)):
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(title, no_wrap=True)
        for column in ("mutants", "killed", "survived", "explained", "not run", "timed out", "no import", "rate"):
            table.add_column(column, justify="right", no_wrap=True)
        for name in dict.fromkeys(of(fate) for fate in fates):
            one = row([fate for fate in fates if of(fate) == name], known)
            numbers = (one.number, one.killed, one.survived, one.explained, one.unreached, one.timed_out, one.broken)
            table.add_row(name, *map(str, numbers), f"{one.rate:.1%}" if one.rate is not None else "")
        console.print()
        console.print(table)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("requirement", "killed first", "killed"):
        table.add_column(column, justify="left" if column == "requirement" else "right")
    first = Counter(fate.requirements[0] for fate in fates if fate.outcome == "killed")
    for name, number in sorted(Counter(id_ for fate in fates for id_ in fate.requirements).items()):
        table.add_row(name, str(first[name]), str(number))
    console.print()
    console.print(table)
    for outcome in ("timed out", "broken"):
        _list(outcome, [fate for fate in fates if fate.outcome == outcome])
    lived = [fate for fate in fates if fate.outcome in _SURVIVED]
    if survivors:
        _list("survived", [fate for fate in lived if explained.explanation_of(fate.mutant, known) is None])
        for fate in lived:
            told = explained.explanation_of(fate.mutant, known)
            if told is not None:
                print(f"explained ({told.kind}): {_line(fate)}\n    {told.why}")


def _list(title: str, fates: Sequence[trial.Fate]) -> None:
    for fate in fates:
        what = f"\n    {fate.step}: {fate.text}".rstrip(": ") if fate.step else ""
        print(f"{title}{' (not run)' if fate.outcome == 'not reached' else ''}: {_line(fate)}{what}")


def _line(fate: trial.Fate) -> str:
    mutant = fate.mutant
    place = f"{mutant.module.replace('.', '/')}.py:{mutant.line}"
    return f"{place} {mutant.function or 'on import'}, {mutant.operator}\n    {mutant.before}\n -> {mutant.after}"


def _module(fate: trial.Fate) -> str:
    return fate.mutant.module.rpartition(".")[2]


def _operator(fate: trial.Fate) -> str:
    return fate.mutant.operator


def _rate(killed: int, survived: int) -> float | None:
    return killed / (killed + survived) if killed + survived else None


def _figure(name: str, value: float, unit: str) -> Measurement:
    value = round(value, 4)
    return Measurement(name, value, unit, value, value)


def _rated(name: str, rate: float | None) -> Measurement:
    """A rate with its goal. Where nothing was killed and nothing survived there is no rate, and no goal is met."""
    if rate is None:
        return Measurement(name, 0.0, "", 0.0, 0.0, goal="not measured")
    return Measurement(
        name, round(rate, 4), "", round(rate, 4), round(rate, 4), goal=f"at least {GOAL:g}", met=rate >= GOAL
    )
