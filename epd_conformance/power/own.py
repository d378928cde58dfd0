"""Which mutants the connector's own tests kill: those tests that run the mutant's statement, the shortest first, until one fails.

The tests are first run with nothing changed: all must pass, and which lines each runs is written down. Each mutant then has a
process of its own, in which pytest imports the tests and the connector anew.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_conformance.engine.hosted import Carried, Host
from epd_conformance.errors import StackError, UsageError
from epd_conformance.power.mutants import Mutant
from epd_conformance.power.trial import MUTANT_LIMIT_S, STEP_LIMIT_S, Fate, Outcome, Target, put, uncompilable

#: Seconds for all tests with nothing changed, each of whose lines is traced: half a minute, and ten times that on a busy machine.
_BASE_LIMIT_S = 600.0
#: What the child takes to import what the tests need, and to end a process.
_SPARE_S = 60.0


@dataclass(frozen=True)
class _Test:
    lines: dict[str, frozenset[int]]
    seconds: float


class OwnTests:
    """The tests of `target.tests`."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._tests: dict[str, _Test] = {}
        self._warm: list[str] = []

    def begin(self, host: Host) -> str:
        missing = [str(file) for file in self.target.tests if not file.is_file()]
        if missing or not self.target.tests:
            raise UsageError(
                f"the connector's own tests are not here ({missing[0] if missing else 'none are named'}): "
                "use a checkout of the repository, or `--against layer`"
            )
        told = self._carried(host, STEP_LIMIT_S * 4, _BASE_LIMIT_S)
        if told["hung"] or "failed" in told or "died" in told:
            what = told.get("failed") or told["at"]
            raise UsageError(
                f"{self.target.subject} as it is fails {what}, so nothing could be learnt from mutants: mend that first "
                f"({told.get('text') or told.get('died') or 'it does not end'})"
            )
        self._warm = told["loaded"]
        self._tests = {
            id_: _Test({name: frozenset(lines) for name, lines in ran["lines"].items()}, ran["seconds"])
            for id_, ran in told["ran"].items()
        }
        return f"{len(self._tests)} tests pass"

    def reaching(self, mutant: Mutant) -> list[str]:
        """Ids of the tests that run the mutant's statement; what runs on import, all do that run anything of the connector."""
        wanted = frozenset(mutant.lines)

        def reached(test: _Test) -> bool:
            return bool(test.lines[mutant.module] & wanted if mutant.function else any(test.lines.values()))

        found = [
            (not test.lines[mutant.module], test.seconds, id_) for id_, test in self._tests.items() if reached(test)
        ]
        return [id_ for *_, id_ in sorted(found)]

    def meet(self, host: Host, mutant: Mutant, name: str, folder: Path) -> Fate:
        began = time.monotonic()
        wanted = self.reaching(mutant)
        if not wanted:
            return Fate(mutant, "not reached", against="tests")
        if problem := uncompilable(mutant):
            return Fate(mutant, "broken", text=problem, against="tests")
        with put(mutant, name, folder) as mark:
            told = self._carried(host, STEP_LIMIT_S, MUTANT_LIMIT_S, wanted=wanted, mutant=mark)

        def ended(outcome: Outcome, test: str = "", text: str = "") -> Fate:
            seconds = time.monotonic() - began
            return Fate(mutant, outcome, test, (), text, told["begun"], seconds, "tests")

        if "broken" in told:
            return ended("broken", text=told["broken"])
        if "failed" in told:
            return ended("killed", told["failed"], told["text"])
        if told["hung"]:
            return ended("timed out", told["at"])
        if "died" in told:
            return ended("killed", told["at"], f"the process {told['died']}")
        if not told["active"]:
            raise StackError(f"the mutant {name} of {mutant.module} was not what the tests imported")
        return ended("survived")

    def _carried(self, host: Host, test_limit_s: float, limit_s: float, **more: Any) -> dict[str, Any]:
        files = self.target.tests
        wanted = more.get("wanted")
        if wanted is not None:
            holding = {id_.partition("::")[0] for id_ in wanted}
            files = [file for file in files if file.relative_to(self.target.root).as_posix() in holding]
        arguments = {
            "modules": list(self.target.modules),
            "files": [str(file) for file in files],
            "checkout": str(self.target.root),
            "test_limit_s": test_limit_s,
            "limit_s": limit_s,
            "warm": self._warm,
            **more,
        }
        told = host.call("epd_conformance.power.own_inside:carry", arguments, limit_s=limit_s + _SPARE_S)
        if isinstance(told, Carried):
            raise StackError(f"the process that runs the connector's own tests has ended: {told.output[-400:]}")
        answer: dict[str, Any] = told
        return answer
