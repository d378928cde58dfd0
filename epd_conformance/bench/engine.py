"""`bench engine`: engine steps a second of the state machine, with vLLM's example connector and the reference connector.

Plans of the corpus in which nothing is damaged and everything is in one process, alternating between the two. A plan's time is all
of it: both objects made, steps, judgement, the end. What the connectors' own hooks take is in it: the example connector's do
little, so that its figure stands for the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from epd_conformance.bench.result import Measurement
from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.hosted import Host

SUBJECTS = ("vllm-example", "reference")
THEMES = ("transfer-", "chunks-", "preempt-", "refuse-", "ahead-", "aborted-", "ranks-", "text-")
ROUNDS = 9
#: The first rounds import the connectors and fill caches.
WARM_UP = 2
GOAL = 1000.0


def measure(folder: Path, say: Callable[[str], None]) -> list[Measurement]:
    """Steps a second, by subject. Raises UsageError where vLLM cannot be imported."""
    plans = [plan for name, plan in corpus(frozenset(), apart=False).items() if name.startswith(THEMES)]
    rates: dict[str, list[float]] = {subject: [] for subject in SUBJECTS}
    say("importing vLLM")
    with Host(SUBJECTS[0], log=folder / "log") as host:
        for number in range(ROUNDS + WARM_UP):
            for subject in SUBJECTS:
                done = [host.carry(plan, subject=subject) for plan in plans]
                rates[subject].append(sum(one.steps for one in done) / sum(one.seconds for one in done))
            say(f"round {number + 1} of {ROUNDS + WARM_UP}: {len(plans)} plans each")
    found = []
    for subject in SUBJECTS:
        made = Measurement.of(f"engine steps, {subject}", rates[subject][WARM_UP:], "steps/s")
        if subject == SUBJECTS[0]:
            made = replace(made, goal=f">= {GOAL:g}", met=made.value >= GOAL)
        found.append(made)
    return found
