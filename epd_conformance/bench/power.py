"""`bench power`: how many faults, planted one by one in the reference connector, the contract layer and the connector's own tests
find (docs/power.md)."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from epd_conformance.bench.result import Measurement, print_table
from epd_conformance.errors import UsageError

try:
    from epd_conformance.power import explained, reference
    from epd_conformance.power.ledger import Life, line, lives
    from epd_conformance.power.mutants import Mutant, sources, spread
    from epd_conformance.power.own import OwnTests
    from epd_conformance.power.trial import AGAINST, DRAWN, SEED, Against, Fate, Layer, Trial, run
except ImportError as error:
    raise UsageError(f"`bench power` needs mutmut, which is not here ({error}): install the extra `dev`") from error

#: Of the mutants that are either killed or survive, so many are killed.
GOAL = 0.95
_WIDTH = 140
#: One of each kind, of which there are 101. Nearly every mutant that dies dies of the first; all take four times as long.
STEPS = 110
#: Each worker imports vLLM, which takes a gigabyte.
MOST_WORKERS = 2


@dataclass(frozen=True)
class Row:
    """What became of a group of mutants. `survived` includes those that nothing runs, and those that are explained."""

    layer: int
    tests: int
    survived: int
    unreached: int
    equivalent: int
    accepted: int
    timed_out: int
    broken: int

    @property
    def number(self) -> int:
        return self.killed + self.survived + self.timed_out + self.broken

    @property
    def killed(self) -> int:
        return self.layer + self.tests

    @property
    def unexplained(self) -> int:
        return self.survived - self.equivalent - self.accepted

    @property
    def rate(self) -> float | None:
        """Killed of those that are killed or survive; None where there are none."""
        return _rate(self.killed, self.survived)

    @property
    def rate_different(self) -> float | None:
        """The same without the survivors that are equivalent to what was changed."""
        return _rate(self.killed, self.survived - self.equivalent)


def command(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    against: Annotated[
        Literal["layer", "tests", "both", "nothing"],
        typer.Option(
            help="what mutants meet; both: the contract layer, and what survives it the connector's own tests; "
            "nothing: only what the ledgers say"
        ),
    ] = "both",
    sample: Annotated[int, typer.Option(min=0, help="only so many mutants, evenly spread; 0: all")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0, help="begin no further mutant after so many minutes with either; 0: no limit")
    ] = 0,
    module: Annotated[str, typer.Option(help="only this module, such as `pins`")] = "",
    survivors: Annotated[bool, typer.Option(help="list each mutant that survives")] = False,
    ledger: Annotated[
        Path | None, typer.Option(help="write what becomes of each mutant to this file, one a line")
    ] = None,
    again: Annotated[
        list[Path] | None, typer.Option(help="try only what lives according to this ledger; may be given several times")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="plans and checks that a mutant meets, at most; 0: all")] = STEPS,
    workers: Annotated[int, typer.Option(min=1, max=MOST_WORKERS, help="processes at a time")] = MOST_WORKERS,
) -> None:
    """Plant faults in the reference connector, one by one, and count those that are found."""
    mutants = _chosen(module)
    found = lives(spread(mutants, sample or len(mutants)), again or ())
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    say(f"{len(found)} of {len(mutants)} mutants; drawn plans: {DRAWN}, seed {SEED}")
    began = time.monotonic()
    target = reference.target()
    trials: dict[Against, Trial] = {"layer": Layer(target, steps or None), "tests": OwnTests(target)}
    with _written(ledger) as take:
        todo = [life for life in found if not life.dead]
        for name in AGAINST:
            if against not in (name, "both"):
                continue
            of = {id(life.mutant): life for life in todo}
            fates, left = run(
                trials[name],
                [life.mutant for life in todo],
                workers=workers,
                minutes=minutes or None,
                say=say,
                take=take,
            )
            for fate in fates:
                of[id(fate.mutant)].fates[name] = fate
            if left:
                say(f"{left} mutants left when time was up")
            todo = [of[id(fate.mutant)] for fate in fates if fate.alive]
    found.sort(key=lambda life: (list(reference.MODULES).index(life.mutant.module), life.mutant.line))
    known = explained.read()
    results = measurements(found, (time.monotonic() - began) / 60, known)
    if as_json:
        print(json.dumps([result.to_json() for result in results], indent=2))
        return
    print_table(results)
    show(found, known, survivors)
    if not (sample or module) and all(life.dead or len(life.fates) == len(AGAINST) for life in found):
        for one in explained.stale(known, [life.mutant for life in found if life.lives]):
            print(f"explains no survivor: {one.module} {one.function}: {one.before or one.part} -> {one.after}")


@contextlib.contextmanager
def _written(ledger: Path | None) -> Iterator[Callable[[Fate], None]]:
    """What takes fates as they come."""
    if ledger is None:
        yield lambda fate: None
        return
    try:
        file = ledger.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--ledger {ledger} cannot be written ({error.strerror}): name a file in a folder that is there"
        ) from error
    with file:
        yield lambda fate: print(line(fate), file=file, flush=True)


def _chosen(module: str) -> list[Mutant]:
    modules = {name: left for name, left in reference.MODULES.items() if module in ("", name.rpartition(".")[2])}
    if not modules:
        names = ", ".join(name.rpartition(".")[2] for name in reference.MODULES)
        raise UsageError(f"no module of the reference connector is called {module!r}: use {names}")
    return list(sources(modules))


def row(found: Iterable[Life], known: Sequence[explained.Explanation]) -> Row:
    met = [life for life in found if life.fates]
    counts = Counter(life.end for life in met)
    told = [explained.explanation_of(life.mutant, known) for life in met if life.lives]
    kinds = Counter(one.kind for one in told if one is not None)
    return Row(
        layer=counts["killed"],
        tests=counts["killed by tests"],
        survived=len(told),
        unreached=counts["not reached"],
        equivalent=kinds["equivalent"],
        accepted=kinds["accepted"],
        timed_out=counts["timed out"],
        broken=counts["broken"],
    )


def measurements(found: Sequence[Life], minutes: float, known: Sequence[explained.Explanation]) -> list[Measurement]:
    """The figures of a run."""
    all_ = row(found, known)
    left = sum(not life.fates for life in found)
    figures = [
        _figure("mutants", all_.number, ""),
        _figure("left when time was up", left, ""),
        _figure("time", minutes, "min"),
        _rated("kill rate, layer alone", _of_layer(found), None),
        _rated("kill rate", all_.rate, GOAL),
        _rated("kill rate, equals aside", all_.rate_different, GOAL),
        _figure("killed by the layer", all_.layer, ""),
        _figure("killed by tests", all_.tests, ""),
        _figure("survived", all_.survived, ""),
        _figure("of them equivalent", all_.equivalent, ""),
        _figure("of them accepted", all_.accepted, ""),
        _figure("of them unexplained", all_.unexplained, ""),
        _figure("of them run by nothing", all_.unreached, ""),
        _figure("timed out", all_.timed_out, ""),
        _figure("cannot be imported", all_.broken, ""),
    ]
    return [figure for figure in figures if figure.name != "left when time was up" or left]


def _of_layer(found: Iterable[Life]) -> float | None:
    """None unless every mutant has met the layer: of those that the tests left alive it kills fewer than of all."""
    met = [life for life in found if life.fates and life.end != "broken"]
    if any("layer" not in life.fates for life in met):
        return None
    counts = Counter(life.fates["layer"].outcome for life in met)
    return _rate(counts["killed"], counts["survived"] + counts["not reached"])


def show(found: Sequence[Life], known: Sequence[explained.Explanation], survivors: bool) -> None:
    """Print what became of mutants by module and by operator, kills by requirement, and the lists."""
    # Narrower, as where no terminal is, the names of functions and operators would be cut.
    console = Console(highlight=False, width=_WIDTH)
    columns = (
        "mutants",
        "layer",
        "tests",
        "survived",
        "equivalent",
        "accepted",
        "unexplained",
        "timed out",
        "no import",
    )
    for title, of in (("module", _module), ("operator", _operator)):
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(title, no_wrap=True)
        for column in (*columns, "rate", "aside"):
            table.add_column(column, justify="right", no_wrap=True)
        for name in dict.fromkeys(of(life) for life in found):
            one = row([life for life in found if of(life) == name], known)
            numbers = [one.number, one.layer, one.tests, one.survived, one.equivalent, one.accepted, one.unexplained]
            rates = [f"{rate:.1%}" if rate is not None else "" for rate in (one.rate, one.rate_different)]
            table.add_row(name, *map(str, [*numbers, one.timed_out, one.broken]), *rates)
        console.print()
        console.print(table)
    fates = [life.fates["layer"] for life in found if "layer" in life.fates]
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("requirement", "killed first", "killed"):
        table.add_column(column, justify="left" if column == "requirement" else "right")
    first = Counter(fate.requirements[0] for fate in fates if fate.outcome == "killed")
    for name, number in sorted(Counter(id_ for fate in fates for id_ in fate.requirements).items()):
        table.add_row(name, str(first[name]), str(number))
    if fates:
        console.print()
        console.print(table)
    for end in ("timed out", "broken"):
        _list(end, [life for life in found if life.end == end])
    lived = [life for life in found if life.lives]
    if survivors:
        _list("survived", [life for life in lived if explained.explanation_of(life.mutant, known) is None])
        for life in lived:
            told = explained.explanation_of(life.mutant, known)
            if told is not None:
                print(f"explained ({told.kind}): {_line(life)}\n    {told.why}")


def _list(title: str, found: Sequence[Life]) -> None:
    for life in found:
        steps = [f"\n    {fate.step}: {fate.text}".rstrip(": ") for fate in life.fates.values() if fate.step]
        print(f"{title}{' (not run)' if life.end == 'not reached' else ''}: {_line(life)}{''.join(steps)}")


def _line(life: Life) -> str:
    mutant = life.mutant
    place = f"{mutant.module.replace('.', '/')}.py:{mutant.line}"
    return f"{place} {mutant.function or 'on import'}, {mutant.operator}\n    {mutant.before}\n -> {mutant.after}"


def _module(life: Life) -> str:
    return life.mutant.module.rpartition(".")[2]


def _operator(life: Life) -> str:
    return life.mutant.operator


def _rate(killed: int, survived: int) -> float | None:
    return killed / (killed + survived) if killed + survived else None


def _figure(name: str, value: float, unit: str) -> Measurement:
    value = round(value, 4)
    return Measurement(name, value, unit, value, value)


def _rated(name: str, rate: float | None, goal: float | None) -> Measurement:
    """A rate with its goal. Where there is no rate, no goal is met."""
    if rate is None:
        return Measurement(name, 0.0, "", 0.0, 0.0, goal="not measured")
    rounded = round(rate, 4)
    if goal is None:
        return Measurement(name, rounded, "", rounded, rounded)
    return Measurement(name, rounded, "", rounded, rounded, goal=f"at least {goal:g}", met=rate >= goal)
