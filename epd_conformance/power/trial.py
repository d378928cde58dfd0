"""Which mutants the contract layer kills: plans and directed checks against one mutant after the other.

The layer is first carried out with nothing changed: it must find nothing, and what each of its steps runs is written down. A mutant
then meets the steps that run its statement, the shortest first, until one of them finds something. Each mutant has a process of its
own, forked from one that has imported vLLM. `run` does so with the connector's own tests as well, see `own.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from epd_conformance.engine import measured
from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.drawn import drawn
from epd_conformance.engine.hosted import Carried, Host
from epd_conformance.engine.plan import Plan
from epd_conformance.errors import StackError, UsageError
from epd_conformance.features import Feature
from epd_conformance.power.mutants import Mutant

#: Seconds that a step may take. The longest that is right takes two, on a busy machine perhaps five.
STEP_LIMIT_S = 15.0
#: Seconds that a mutant may take. All steps together take a quarter of a minute.
MUTANT_LIMIT_S = 120.0
#: The steps of one mutant that a child carries out: what a connector leaks, its child's end frees.
STEPS_A_CHILD = 100
#: Drawn plans, as many as in a run while one works on a connector.
DRAWN = 120
#: Seconds of a race, for each mutant that survives so long: enough for some hundreds of saves and loads.
RACE_S = 0.4
SEED = 0

Against = Literal["layer", "tests"]
Outcome = Literal["killed", "survived", "not reached", "timed out", "broken"]
#: In the order in which mutants meet them.
AGAINST: tuple[Against, ...] = ("layer", "tests")
ALIVE = ("survived", "not reached")
_INSIDE = "epd_conformance.power.inside"


@dataclass(frozen=True)
class Target:
    """A connector whose modules are changed.

    Attributes:
        subject: as `--subject` takes it.
        modules: dotted name -> qualified names that are left out; those that others import first.
        paths: folders that children have in front of `sys.path`.
        tight: a second subject, the same connector in another configuration; it meets the corpus. Empty: none.
        tests: the files of the connector's own tests. root: the folder that holds them, of which their ids are relative.
    """

    subject: str
    features: frozenset[Feature]
    modules: Mapping[str, Collection[str]]
    paths: Sequence[str] = ()
    tight: str = ""
    tests: Sequence[Path] = ()
    root: Path = Path()


@dataclass(frozen=True)
class Step:
    """A plan, or else a directed check, for a subject."""

    name: str
    subject: str
    plan: Plan | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        if self.plan is not None:
            return {"plan": self.plan.to_json()}
        seconds = {"seconds": RACE_S} if "seconds" in measured.CHECKS[self.name].arguments else {}
        return {"check": self.name, "changed": seconds}


@dataclass(frozen=True)
class Fate:
    """What became of a mutant that met the contract layer, or the connector's own tests.

    Attributes:
        step: the one, or the id of the test, that killed it, or in which it hung.
        requirements: those that this step found broken, the first one first.
        text: what was found, or why the mutant is broken.
        tried: how many steps were carried out, or tests begun.
    """

    mutant: Mutant
    outcome: Outcome
    step: str = ""
    requirements: tuple[str, ...] = ()
    text: str = ""
    tried: int = 0
    seconds: float = 0.0
    against: Against = "layer"

    @property
    def alive(self) -> bool:
        return self.outcome in ALIVE


class Trial(Protocol):
    """What mutants meet."""

    target: Target

    def begin(self, host: Host) -> str:
        """Carry everything out with nothing changed; returns what that was. Raises UsageError where it finds something."""

    def meet(self, host: Host, mutant: Mutant, name: str, folder: Path) -> Fate:
        """After `begin`, with any host. `name`: of the mutant; another one for each. folder: for its source."""


@dataclass
class Baseline:
    """The steps, and the lines that each of them runs, by module."""

    steps: list[Step] = field(default_factory=list)
    lines: dict[str, dict[str, frozenset[int]]] = field(default_factory=dict)

    def reaching(self, mutant: Mutant, most: int | None = None) -> list[Step]:
        """The first steps that run the mutant's statement; what runs on import, all of them do."""
        wanted = frozenset(mutant.lines)
        found = [step for step in self.steps if not mutant.function or self.lines[step.name][mutant.module] & wanted]
        return found[:most]


def steps_of(target: Target) -> list[Step]:
    """The corpus, the directed checks and the drawn plans; of each kind of plan first one, then a second one, and so on."""
    plans = corpus(target.features)
    steps = [Step(name, target.subject, plan) for name, plan in plans.items()]
    # Not what needs a process that has imported nothing of the connector: here a mutant is imported first.
    steps += [Step(name, target.subject) for name, check in measured.CHECKS.items() if not check.bare]
    steps += [Step(name, target.subject, plan) for name, plan in drawn(target.features, DRAWN, SEED).items()]
    if target.tight:
        # Not what watches the store during a look-up: a producer that keeps limits writes there whenever it likes.
        watched = [name for name, plan in plans.items() if any(one.get("watch") for one in plan.operations)]
        steps += [Step(f"{_TIGHT}{name}", target.tight, plan) for name, plan in plans.items() if name not in watched]
    turns: Counter[str] = Counter()
    turn = {}
    for step in steps:
        kind = _kind(step.name)
        turns[kind] += 1
        turn[step.name] = turns[kind]
    return sorted(steps, key=lambda step: turn[step.name])


_TIGHT = "tight-"


def _kind(name: str) -> str:
    """What a step has in common with its like: `transfer` of `transfer-v1`, `drawn-evict` of `drawn-evict-3`."""
    if name.startswith("drawn-"):
        return name.rpartition("-")[0]
    bare = name.removeprefix(_TIGHT)
    # The checks with a dash in their names are two.
    return name if bare in measured.CHECKS else name.removesuffix(bare) + bare.partition("-")[0]


def baseline(host: Host, target: Target, steps: Sequence[Step]) -> Baseline:
    """Carry out everything with nothing changed. Raises UsageError where that finds something."""
    found = Baseline(list(steps))
    host.recycle()
    for step in steps:
        arguments = {**step.arguments, "modules": list(target.modules)}
        answer = host.call(f"{_INSIDE}:traced", arguments, subject=step.subject, limit_s=MUTANT_LIMIT_S)
        shown = answer.findings if isinstance(answer, Carried) else answer["findings"]
        if shown:
            raise UsageError(
                f"{step.subject} as it is fails {step.name} of the contract layer, so nothing could be learnt from mutants: "
                f"mend that first ({shown[0]})"
            )
        found.lines[step.name] = {name: frozenset(lines) for name, lines in answer["lines"].items()}
    host.recycle()
    return found


class Layer:
    """The contract layer. `most`: the steps that a mutant meets, at most. None: all that run its statement."""

    def __init__(self, target: Target, most: int | None = None) -> None:
        self.target = target
        self._most = most
        self._base = Baseline()

    def begin(self, host: Host) -> str:
        self._base = baseline(host, self.target, steps_of(self.target))
        return f"{len(self._base.steps)} steps find nothing"

    def meet(self, host: Host, mutant: Mutant, name: str, folder: Path) -> Fate:
        return fate(host, self.target, mutant, name, self._base.reaching(mutant, self._most), folder)


def fate(host: Host, target: Target, mutant: Mutant, name: str, steps: Sequence[Step], folder: Path) -> Fate:
    """Carry out steps with a mutant until one finds something. `name`: of the mutant; another one for each."""
    began = time.monotonic()
    if not steps:
        return Fate(mutant, "not reached")
    if problem := uncompilable(mutant):
        return Fate(mutant, "broken", text=problem)

    def ended(outcome: Outcome, tried: int, step: str = "", requirements: Sequence[str] = (), text: str = "") -> Fate:
        seconds = time.monotonic() - began
        return Fate(mutant, outcome, step, tuple(dict.fromkeys(requirements)), text, tried, seconds)

    host.recycle()
    with put(mutant, name, folder) as told:
        for tried, step in enumerate(steps, 1):
            if time.monotonic() - began > MUTANT_LIMIT_S:
                return ended("timed out", tried, step.name, text=f"more than {MUTANT_LIMIT_S:.0f} s in all")
            if tried % STEPS_A_CHILD == 0:
                host.recycle()
            arguments = {**step.arguments, "modules": list(target.modules), "mutant": told}
            try:
                answer = host.call(f"{_INSIDE}:step", arguments, subject=step.subject, limit_s=STEP_LIMIT_S)
            except StackError as error:
                # Outside any hook, as in a thread of the connector's that the step's end waits for. Where it is the host that has
                # ended, the next mutant cannot be begun.
                return ended("timed out", tried, step.name, text=str(error).partition(":")[0])
            if isinstance(answer, Carried):
                finding = answer.findings[0]
                hung = answer.death is not None and answer.death.hung
                text = f"{finding.requirement}: {finding.observed}"
                return ended("timed out" if hung else "killed", tried, step.name, [finding.requirement], text)
            if "broken" in answer:
                return ended("broken", tried, step.name, text=answer["broken"])
            if not answer["active"]:
                raise StackError(f"the mutant {name} of {mutant.module} was not what the connector imported")
            if answer["findings"]:
                found = answer["findings"]
                text = f"{found[0]['requirement']}: {found[0]['kind']}"
                return ended("killed", tried, step.name, [one["requirement"] for one in found], text)
        return ended("survived", len(steps))


def uncompilable(mutant: Mutant) -> str:
    """Why it is no Python; empty if it is."""
    try:
        compile(mutant.source, mutant.module, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return str(error)
    return ""


@contextlib.contextmanager
def put(mutant: Mutant, name: str, folder: Path) -> Iterator[dict[str, str]]:
    """Its source lies in the folder meanwhile; yields what a child is told of it."""
    path = folder / f"{name}.py"
    path.write_text(mutant.source, encoding="utf-8")
    try:
        yield {"name": name, "module": mutant.module, "path": str(path)}
    finally:
        path.unlink()


def run(
    trial: Trial,
    mutants: Sequence[Mutant],
    *,
    workers: int,
    minutes: float | None,
    say: Callable[[str], None],
    take: Callable[[Fate], None] = lambda fate: None,
) -> tuple[list[Fate], int]:
    """The fates of mutants, in their order, and how many were left when time was up.

    Args:
        workers: processes at a time, one or two: each of them imports vLLM.
        minutes: no further mutant is begun after so many; the baseline counts. None: no limit.
        take: called with each fate as it comes.
    """
    began = time.monotonic()
    fates: dict[int, Fate] = {}
    numbers = itertools.count()
    lock = threading.Lock()
    troubles: list[BaseException] = []
    begun = False

    def work() -> None:
        nonlocal begun
        with Host(trial.target.subject, paths=trial.target.paths) as host, tempfile.TemporaryDirectory() as folder:
            while not troubles:
                with lock:
                    if not begun:
                        say(f"{trial.target.subject} as it is")
                        say(f"{trial.begin(host)}; {_minutes(began):.1f} min")
                        begun = True
                    if minutes is not None and _minutes(began) >= minutes:
                        return
                    number = next(numbers)
                if number >= len(mutants):
                    return
                mutant = mutants[number]
                one = trial.meet(host, mutant, f"m{number}", Path(folder))
                with lock:
                    fates[number] = one
                    take(one)
                    if len(fates) % _SAY_EVERY == 0:
                        say(_progress(list(fates.values()), len(mutants), _minutes(began)))

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            troubles.append(error)

    threads = [threading.Thread(target=guarded, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if troubles:
        raise troubles[0]
    done = [fates[number] for number in sorted(fates)]
    return done, len(mutants) - len(done)


#: Mutants between two lines of progress: ten seconds or so.
_SAY_EVERY = 25


def _minutes(began: float) -> float:
    return (time.monotonic() - began) / 60


def _progress(fates: Sequence[Fate], number: int, minutes: float) -> str:
    counts = Counter(one.outcome for one in fates)
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return f"{len(fates)} of {number} mutants in {minutes:.1f} min: {told}"
