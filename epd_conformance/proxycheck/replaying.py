"""Replay of a cell of the layer `proxy`: its plan, as it stands in the evidence, against the same proxy once more."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_conformance.errors import UsageError
from epd_conformance.oracle.cell import Judgement
from epd_conformance.proxycheck import judges
from epd_conformance.proxycheck.case import ProxyCase
from epd_conformance.proxycheck.evidence import SCHEMA, ProxyEvidence
from epd_conformance.proxycheck.plan import ROLES
from epd_conformance.proxycheck.session import ProxySession
from epd_conformance.proxycheck.under_test import Foreign
from epd_conformance.verdict import Verdict


@dataclass(frozen=True)
class Recorded:
    """A cell as a run left it, with the verdict that its evidence gives."""

    path: Path
    evidence: ProxyEvidence
    judgement: Judgement

    @property
    def given(self) -> Foreign | None:
        """The proxy that was asked; None for our own."""
        told = self.evidence.proxy
        if told.get("own"):
            return None
        ports = {role: tuple(told["ports"][role]) for role in ROLES if role in told["ports"]} if told["ports"] else None
        return Foreign(told["name"], told["command"], told["url"], ports, told["limitS"])


def read(path: Path) -> Recorded | None:
    """A cell's evidence; None for a file of another kind. Raises UsageError for one that is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # whoever reads other kinds says what is wrong
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return None
    try:
        evidence = ProxyEvidence.from_json(data)
        recorded = Recorded(path, evidence, judges.judge(evidence))
        _ = recorded.given
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is no cell's evidence ({type(error).__name__}: {error}): name a file of a run's folder cells/"
        ) from error
    return recorded


def replay(recorded: Recorded, repeat: int, say: Callable[[str], None]) -> list[Judgement]:
    """Carry the plan out so many times. Raises UsageError where the proxy cannot be had."""
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: repeat a cell at least once")
    found = recorded.evidence
    options = found.proxy.get("options") or {}
    case = ProxyCase("replay", found.judge, found.plan, (found.arrangement,), options)
    results: list[Judgement] = []
    with ProxySession(recorded.path.parent, recorded.given, say=say) as session:
        for number in range(1, repeat + 1):
            results.append(judges.judge(session.carry_out(found.cell, found.arrangement, case)))
            say(f"{number} of {repeat}: {words(results[-1])}")
    return results


def words(judgement: Judgement) -> str:
    """A verdict in a few words."""
    return f"{judgement.verdict} {judgement.reason}".strip()


def exit_code(results: list[Judgement]) -> int:
    """0 where all passed, 1 where one failed, 3 for what decides nothing."""
    verdicts = {judgement.verdict for judgement in results}
    return 1 if Verdict.FAIL in verdicts else 0 if verdicts == {Verdict.PASS} else 3


def lines(recorded: Recorded, results: list[Judgement]) -> list[str]:
    """The replay for a person: what the first repetition that did not pass saw, and how often what came about."""
    odd = next((judgement for judgement in results if judgement.verdict is not Verdict.PASS), None)
    found = [f"expected: {odd.expected}", f"observed: {odd.observed}"] if odd is not None else []
    counts = Counter(map(words, results))
    now = ", ".join(f"{count} × {text}" for text, count in counts.items()) if len(results) > 1 else words(results[0])
    return [*found, f"{recorded.evidence.cell}: was {words(recorded.judgement)}, now {now}"]


def to_json(recorded: Recorded, results: list[Judgement]) -> Mapping[str, Any]:
    """The replay for programs."""

    def told(judgement: Judgement) -> dict[str, str]:
        return {"verdict": str(judgement.verdict), "reason": judgement.reason, "observed": judgement.observed}

    return {
        "cell": recorded.evidence.cell,
        "before": told(recorded.judgement),
        "now": [told(judgement) for judgement in results],
    }
