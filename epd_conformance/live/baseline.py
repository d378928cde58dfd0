"""The matched baselines: each prompt is asked of them several times before the subject's arm runs.

For `e-pd` the aggregated server; for `e-p-d` the aggregated server and a `p-d` pair without encode server, which must itself
prove that decode took the KV, or it is no `p-d` baseline.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from epd_conformance.live import client, faulting
from epd_conformance.oracle import transport
from epd_conformance.oracle.answers import Answer
from epd_conformance.oracle.transport import Roles
from epd_conformance.plans.plan import Draw, Plan, Request, lengthen
from epd_conformance.topology.spec import Role
from epd_conformance.topology.stack import Stack

# Three runs show a difference that appears in every second one with 75 % in one prompt, and practically always over dozens.
REPETITIONS = 3
# A machine is judged on at least this many prompts, also when somebody runs a single cell.
FLOOR_PROMPTS = 8
# More than this many steps would mean that the length does not react to the text at all.
LENGTHENINGS = 4
# The baseline is asked without streaming also where the cell streams: that the two agree is what such a cell shows.
NOT_STREAMED = {"stream": False}


@dataclass
class Baselines:
    """Answers by arm, then by request digest, one for each repetition."""

    arms: dict[str, dict[str, list[Answer]]] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)

    def first(self, digest: str) -> dict[str, Answer]:
        """The first answer of every arm to a request."""
        return {arm: answers[digest][0] for arm, answers in self.arms.items() if digest in answers}


def floor_requests(seed: int, topology: str) -> list[Request]:
    """The fixed prompts that every noise floor is measured on, whatever cells are chosen."""
    draw = Draw(seed, f"noise-floor/{topology}")
    return [draw.request(f"floor-{number}", draw.image()) for number in range(FLOOR_PROMPTS)]


def settle(request: Request, ask: Callable[[Request], Answer], block: int) -> Request:
    """The request, lengthened until the file KV connector can serve its prompt length.

    The length depends on the tokenizer, so it is asked for. Raises RuntimeError when lengthening changes nothing.
    """
    return lengthen(request, _lengthenings(request, ask, block))


def settle_plan(plan: Plan, ask: Callable[[Request], Answer], block: int) -> Plan:
    """The plan with each request settled, and its contrasts lengthened as far.

    A contrast that kept its length would differ from its request in the text as well: the power check would always find a
    difference, and show nothing about the items.
    """
    counts = [_lengthenings(request, ask, block) for request in plan.requests]
    return replace(
        plan,
        requests=tuple(lengthen(request, count) for request, count in zip(plan.requests, counts, strict=True)),
        contrasts=tuple(lengthen(contrast, counts[i % len(counts)]) for i, contrast in enumerate(plan.contrasts)),
    )


def _lengthenings(request: Request, ask: Callable[[Request], Answer], block: int) -> int:
    for count in range(LENGTHENINGS + 1):
        answer = ask(lengthen(request, count))
        if answer.status != 200 or transport.kv_servable(len(answer.prompt_ids), block):
            return count
    raise RuntimeError(f"request {request.label!r}: its prompt length does not change with its text")


def ask_aggregated(
    baselines: Baselines,
    stack: Stack,
    requests: Sequence[Request],
    tick: Callable[[], None] = lambda: None,
    *,
    sequences: Sequence[Plan] = (),
) -> None:
    """Ask the aggregated server each request, and each whole sequence, several times, each time with a salt of its own."""
    answers = baselines.arms.setdefault("aggregated", {})
    for _ in range(REPETITIONS):
        for request in requests:
            _keep(answers, request, _ask(stack, request, uuid.uuid4().hex))
            tick()
        for plan in sequences:
            _ask_sequence(
                baselines, stack, plan, lambda request, rid: _keep(answers, request, _ask(stack, request, rid))
            )


def _ask(stack: Stack, request: Request, rid: str) -> Answer:
    return client.send(stack.base_url, request, rid, salt=f"aa-{rid}", overrides=NOT_STREAMED, model=stack.served_name)


def _keep(answers: dict[str, list[Answer]], request: Request, answer: Answer) -> None:
    answers.setdefault(request.digest(), []).append(answer)


def _ask_sequence(baselines: Baselines, stack: Stack, plan: Plan, ask: Callable[[Request, str], None]) -> None:
    """Ask the requests of a script in its order, and empty the caches that it has emptied in between.

    Raises ValueError for a script that does anything else: that could not be done to a baseline.
    """
    rest = iter(plan.requests)
    for step in plan.steps:
        if step["do"] == "send":
            ask(next(rest), uuid.uuid4().hex)
        elif step["do"] == "reset":
            refused = [server.name for server in stack.servers if faulting.reset(server.url, step["cache"]) != 200]
            for request in plan.requests if refused else ():
                why = f"the baseline: {', '.join(refused)} did not empty its {step['cache']} cache"
                baselines.unproven.setdefault(request.digest(), why)
        else:
            raise ValueError(f"a sequence of requests to a baseline cannot {step['do']}")


def ask_pd(
    baselines: Baselines,
    stack: Stack,
    requests: Sequence[Request],
    repetitions: int,
    tick: Callable[[], None] = lambda: None,
    *,
    sequences: Sequence[Plan] = (),
) -> None:
    """Ask the p-d pair, and hold every answer to proof of KV.

    The file KV connector keys on tokens and items, not on the salt, so a repetition finds the KV of the first: prefill then
    computes nothing new for it, and decode takes it as before.
    """
    answers = baselines.arms.setdefault("p-d", {})
    roles = Roles(decode=frozenset(server.name for server in stack.of(Role.DECODE)))
    before = stack.journal.read()

    def ask(request: Request, rid: str) -> None:
        mark = stack.journal.mark()
        _keep(answers, request, _ask(stack, request, rid))
        proof = transport.kv_transfer(before, stack.journal.read(mark), rid, roles)
        if proof.problem is not None:
            baselines.unproven.setdefault(request.digest(), f"the p-d baseline: {proof.problem}")
        tick()

    for _ in range(repetitions):
        for request in requests:
            ask(request, uuid.uuid4().hex)
        for plan in sequences:
            _ask_sequence(baselines, stack, plan, ask)
