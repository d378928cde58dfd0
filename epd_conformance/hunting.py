"""The hunt on real servers: draw scripts for as long as there is time, carry each out, and make what fails as small as it goes.

A run asks the same few generated scripts of everybody (EPD-STALE-011). A hunt asks for as many as fit in its time, ends servers
too where it is told to, and takes operations out of a script that fails, one by one, as long as it fails for the same reason.
What is left is a cell's evidence like any other, for `replay`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epd_conformance import catalogue as catalogues
from epd_conformance import subject as subjects
from epd_conformance.catalogue import cell_id
from epd_conformance.drawing import draw
from epd_conformance.errors import StackError, UsageError
from epd_conformance.features import Feature
from epd_conformance.live.case import Case, plan_of
from epd_conformance.live.session import LiveSession, PlannedCell, write_evidence
from epd_conformance.oracle import judges
from epd_conformance.oracle.cell import Judgement
from epd_conformance.plans.generated import Operation, operations, script
from epd_conformance.plans.plan import Plan, Request
from epd_conformance.replay import forget
from epd_conformance.run import Options, fresh_folder, model_use
from epd_conformance.runtime import doctor, vllm_info
from epd_conformance.topology.stack import Site, Stack
from epd_conformance.verdict import Verdict

REQUIREMENT = "EPD-STALE-011"
TOPOLOGIES = ("e-pd", "e-p-d")
#: Scripts for which servers are booted once, since their baselines are asked together, after the boot. They take about a minute,
#: and the boot a sixth of one; a hunt of a few minutes shall not spend most of them on baselines.
BATCH = 10
#: The first ones that Hypothesis draws are simple, each time anew.
_SIMPLE = 12
#: Attempts at making one failure smaller. A script has ten operations at most, and an attempt takes some seconds.
ATTEMPTS = 30


@dataclass
class Catch:
    """One reason for which scripts failed: the smallest one found, its evidence, and how many failed for it."""

    operations: list[Operation]
    judgement: Judgement
    evidence: Path
    scripts: int = 1
    attempts: int = 0

    @property
    def words(self) -> str:
        return ", ".join(" ".join(operation) for operation in self.operations)


@dataclass
class Hunt:
    """What a hunt found. `verdicts` counts what came of each script, with the reason of all that did not pass."""

    out: Path
    catches: dict[str, Catch] = field(default_factory=dict)
    verdicts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def scripts(self) -> int:
        return self.verdicts.total()

    @property
    def exit_code(self) -> int:
        """1 where something was found, 0 where scripts passed and nothing was, 3 where none passed."""
        if self.catches:
            return 1
        return 0 if self.verdicts[str(Verdict.PASS)] else 3


def hunt(
    options: Options, topology: str, budget_s: float, *, restarts: bool = False, say: Callable[[str], None]
) -> Hunt:
    """Draw and carry out scripts until the time is over; at least one batch is begun, and a failure is still made smaller.

    The same seed draws the same scripts in the same order. Raises UsageError where nothing can be booted, or where the subject
    gives no probe, without which nothing can be damaged.
    """
    if topology not in TOPOLOGIES:
        raise UsageError(f"--topology {topology}: hunts are for {' and '.join(TOPOLOGIES)}")
    subject = subjects.load(options.subject)
    if Feature.STORE_PROBE not in subject.features:
        raise UsageError(f"{options.subject} declares no feature `store_probe`, so nothing in its store can be damaged")
    how = options.how()
    doctor.preflight(vllm_info.require())
    model = model_use(options)
    done = Hunt(fresh_folder(options.out, f"hunt-{options.subject}"))
    began = time.monotonic()

    def over() -> bool:
        return time.monotonic() - began >= budget_s

    with Site(done.out, model, device=options.device, boot=how, say=say, memory_wait_s=options.memory_wait_s) as site:
        for batch in range(_MOST_BATCHES):
            if batch and over():
                break
            found = draw(operations(restarts), _SIMPLE + BATCH, options.seed * _MOST_BATCHES + batch)[_SIMPLE:]
            cells = {
                _cell(topology, model.name, f"hunt-{options.seed}-{batch}-{number}", one): one
                for number, one in enumerate(found)
            }
            session = LiveSession(site, subject, done.out, seed=options.seed, cells=list(cells), say=say)
            try:
                for cell, one in cells.items():
                    if done.scripts and over():
                        break
                    _try(session, cell, one, done, say)
            finally:
                session.end_stage()
            say(f"{done.scripts} scripts in {time.monotonic() - began:.0f} s: {_counts(done)}")
    done.seconds = time.monotonic() - began
    return done


#: A seed's batches do not overlap the next seed's. At one batch a minute these are two years.
_MOST_BATCHES = 1_000_000


def _cell(topology: str, model: str, name: str, given: Sequence[Operation]) -> PlannedCell:
    owner = catalogues.load()[REQUIREMENT].owner
    return PlannedCell(
        cell_id(REQUIREMENT, topology, model, name), topology, owner, Case(name, "scripted", script(given))
    )


def _try(
    session: LiveSession, cell: PlannedCell, given: list[Operation], done: Hunt, say: Callable[[str], None]
) -> None:
    try:
        evidence = session.run(cell)
    except StackError as error:
        done.verdicts[f"{Verdict.ERROR} stack"] += 1
        say(f"{cell.case.name}: {error}")
        return
    judgement = judges.judge(evidence)
    done.verdicts[f"{judgement.verdict} {judgement.reason}".strip()] += 1
    if judgement.verdict is not Verdict.FAIL:
        return
    known = done.catches.get(judgement.reason)
    if known is not None:
        known.scripts += 1
        return
    catch = Catch(given, judgement, write_evidence(done.out, evidence))
    done.catches[judgement.reason] = catch
    say(f"{judgement.reason}: {judgement.observed.splitlines()[0] if judgement.observed else ''} ({catch.words})")
    _shrink(session, cell, catch, say)


def _shrink(session: LiveSession, cell: PlannedCell, catch: Catch, say: Callable[[str], None]) -> None:
    """Take operations out as long as the script fails for the same reason; the evidence becomes that of the smallest."""
    stage = session.stage(cell.topology)
    whole = stage.plans[cell.id]
    for position in reversed(range(len(catch.operations))):
        if catch.attempts >= ATTEMPTS:
            break
        shorter = [*catch.operations[:position], *catch.operations[position + 1 :]]
        catch.attempts += 1
        plan = _as_settled(_plan(cell, session.seed, shorter), whole)
        if plan is None:
            continue
        stage.plans[cell.id] = plan
        try:
            stack = session.stage(cell.topology).stack
            forget(session, stack, restart=False)
            _empty(session, stack)
            evidence = session.run(cell)
        except StackError as error:
            say(f"an attempt at a smaller script broke off: {error}")
            continue
        judgement = judges.judge(evidence)
        if (judgement.verdict, judgement.reason) == (Verdict.FAIL, catch.judgement.reason):
            catch.operations, catch.judgement = shorter, judgement
            write_evidence(session.folder, evidence)
    say(f"{catch.judgement.reason}: {catch.words or 'nothing but the first and the last request'}")


def _plan(cell: PlannedCell, seed: int, given: Sequence[Operation]) -> Plan:
    """The plan of other operations with the contents of a cell."""
    return plan_of(replace(cell.case, build=script(given)), seed, cell.id)


def _as_settled(plan: Plan, whole: Plan) -> Plan | None:
    """The same plan with the requests whose baselines were asked: in e-p-d some are a little longer than they were drawn.

    None where one was not asked: an operation that had no sense before may have one once another is gone.
    """
    known: dict[str, Request] = {request.label: request for request in (*whole.requests, *whole.contrasts)}
    if any(request.label not in known for request in plan.requests):
        return None
    return replace(
        plan,
        requests=tuple(known[request.label] for request in plan.requests),
        contrasts=tuple(known[contrast.label] for contrast in plan.contrasts),
    )


def _empty(session: LiveSession, stack: Stack) -> None:
    """Remove all objects, so that an attempt finds the store as a script's first carrying out does: without its items."""
    probe = session.subject.probe(stack.info) if stack.info is not None else None
    if probe is None:
        raise StackError("the subject gives no probe, so nobody can empty its store")
    keys = probe.keys()
    for key in keys:
        probe.delete(key)


def _counts(done: Hunt) -> str:
    return ", ".join(f"{count} {words}" for words, count in done.verdicts.most_common())


def lines(done: Hunt, options: Options) -> list[str]:
    """The hunt for a person: each reason with its smallest script and how to carry it out again, then the counts."""
    found = []
    for reason, catch in done.catches.items():
        found += [
            f"{reason}: {catch.scripts} script{'s' if catch.scripts > 1 else ''}, the smallest after "
            f"{catch.attempts} attempts: {catch.words or 'nothing but the first and the last request'}",
            f"  expected: {catch.judgement.expected}",
            f"  observed: {catch.judgement.observed}",
            f"  again: epd-conformance replay --subject {options.subject} {catch.evidence}",
        ]
    found.append(f"{done.scripts} scripts in {done.seconds:.0f} s: {_counts(done)}")
    found.append(f"evidence: {done.out}")
    return found


def to_json(done: Hunt) -> dict[str, Any]:
    """The hunt for programs."""
    return {
        "scripts": done.scripts,
        "seconds": round(done.seconds, 1),
        "counts": dict(done.verdicts),
        "found": [
            {
                "reason": reason,
                "scripts": catch.scripts,
                "operations": [list(operation) for operation in catch.operations],
                "expected": catch.judgement.expected,
                "observed": catch.judgement.observed,
                "evidence": str(catch.evidence),
            }
            for reason, catch in done.catches.items()
        ],
        "out": str(done.out),
    }


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """What `90s`, `30m` or `8h` mean; a bare number is seconds. Raises UsageError."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        found = float(number) * _UNITS[unit]
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise UsageError(f"{text!r} is no time: write it as 90s, 30m or 8h")
    return found
