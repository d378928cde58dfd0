"""What became of mutants, in one run or in several: fates as lines of a file, and what they come to together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from epd_conformance.errors import UsageError
from epd_conformance.power.mutants import Mutant
from epd_conformance.power.trial import AGAINST, ALIVE, Against, Fate

End = Literal["killed", "killed by tests", "survived", "not reached", "timed out", "broken", "not met"]
_Key = tuple[str, str, str, str]


@dataclass
class Life:
    """A mutant, and its fate with each of what it has met."""

    mutant: Mutant
    fates: dict[Against, Fate] = field(default_factory=dict)

    @property
    def end(self) -> End:
        """`killed`: by the contract layer; `not reached`: nothing that it met runs its statement; `not met`: it met nothing."""
        outcomes = [fate.outcome for fate in self.fates.values()]
        if not outcomes:
            return "not met"
        for against, fate in self.fates.items():
            if fate.outcome == "killed":
                return "killed" if against == "layer" else "killed by tests"
        ends: tuple[End, ...] = ("timed out", "broken", "survived", "not reached")
        return next(end for end in ends if end in outcomes)

    @property
    def lives(self) -> bool:
        return self.end in ALIVE

    @property
    def dead(self) -> bool:
        """Whether nothing needs to be tried any more."""
        return not self.lives and bool(self.fates)


def line(fate: Fate) -> str:
    mutant = fate.mutant
    told: dict[str, Any] = {
        "module": mutant.module,
        "function": mutant.function,
        "line": mutant.line,
        "operator": mutant.operator,
        "before": mutant.before,
        "after": mutant.after,
        "against": fate.against,
        "outcome": fate.outcome,
        "step": fate.step,
        "requirements": fate.requirements,
        "text": fate.text,
        "tried": fate.tried,
        "seconds": round(fate.seconds, 2),
    }
    return json.dumps(told)


def lives(mutants: Iterable[Mutant], ledgers: Sequence[Path] = ()) -> list[Life]:
    """Of each mutant what ledgers say of it. Dead in one of them is dead.

    Raises UsageError for what is no ledger.
    """
    found = [Life(mutant) for mutant in mutants]
    for path in ledgers:
        told = _read(path)
        for life in found:
            for against in AGAINST:
                fates = told.get((life.mutant.key, against))
                former = life.fates.get(against)
                if fates and (former is None or former.alive):
                    # Two mutants have one key where one change is made of two lines alike: if one of them lives, this one may.
                    one = next((fate for fate in fates if fate["outcome"] in ALIVE), fates[0])
                    life.fates[against] = Fate(mutant=life.mutant, **one)
    return found


def _read(path: Path) -> dict[tuple[_Key, Against], list[dict[str, Any]]]:
    """By mutant and what it met: the rest of a fate, one for each line."""
    found: dict[tuple[_Key, Against], list[dict[str, Any]]] = {}
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(text)
            key = (told["module"], told["function"], told["before"], told["after"])
            fate = {name: told[name] for name in ("outcome", "step", "text", "tried", "seconds", "against")}
            fate["requirements"] = tuple(told["requirements"])
            found.setdefault((key, told["against"]), []).append(fate)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no ledger of `bench power --ledger` ({error})") from error
    return found
