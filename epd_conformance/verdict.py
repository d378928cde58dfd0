"""From the verdicts of cells to the outcome of a run: pure, and short enough to be read by whoever doubts a
certificate.

Two laws hold, and are tested exhaustively. Adding a failing cell never improves an outcome. Losing the result
of an expected cell never improves one either: it counts as `could-not-run`, and no run with a hole in it is
conformant. (A lost *failure* turns `nonconformant` into `incomplete`: neither is a certificate, and no
function of the cells that are left could know better.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Level(StrEnum):
    """How binding a requirement is (RFC 2119). Only MUST decides an outcome; the others are counted and
    printed."""

    MUST = "MUST"
    SHOULD = "SHOULD"
    MAY = "MAY"


class Owner(StrEnum):
    """Who has to mend it when a requirement is not met."""

    CONNECTOR = "connector"
    ENGINE = "engine"
    PROXY = "proxy"


class Mode(StrEnum):
    """`certify` accepts nothing but the whole expected set; `develop` allows selections, known deviations and
    waivers."""

    DEVELOP = "develop"
    CERTIFY = "certify"


class Verdict(StrEnum):
    """What became of one cell. Only `pass` verifies anything; a skip is never a pass."""

    PASS = "pass"
    FAIL = "fail"
    ERROR = "error"  # the harness failed, or a fault did not provably happen
    INCONCLUSIVE = "inconclusive"  # the path under test was not exercised
    COULD_NOT_RUN = "could-not-run"  # expected, did not run
    KNOWN_FAILING = "known-failing"
    WAIVED = "waived"
    NOT_SUPPORTED = "not-supported"  # needs a feature that was not declared: not expected


class Outcome(StrEnum):
    """What a run says about one owner."""

    CONFORMANT = "conformant"
    PARTIAL = "partial"  # develop mode only: nothing failed but what was known or waived
    INCOMPLETE = "incomplete"
    NONCONFORMANT = "nonconformant"


PRECEDENCE: tuple[Verdict, ...] = (
    Verdict.FAIL,  # first: a broken neighbour never hides a proven failure
    Verdict.ERROR,
    Verdict.INCONCLUSIVE,
    Verdict.COULD_NOT_RUN,
    Verdict.KNOWN_FAILING,
    Verdict.WAIVED,
    Verdict.PASS,
    Verdict.NOT_SUPPORTED,
)
"""A requirement takes the first of these that occurs among its cells, and so does a cell that was recorded
twice."""

EXCUSED = frozenset({Verdict.KNOWN_FAILING, Verdict.WAIVED})
"""Not passed, and declared beforehand: what makes an outcome `partial` at best."""

EXIT_CODES: dict[Outcome, int] = {
    Outcome.CONFORMANT: 0,
    Outcome.PARTIAL: 0,
    Outcome.NONCONFORMANT: 1,
    Outcome.INCOMPLETE: 3,  # 2 is the command line's: no report could be made
}


@dataclass(frozen=True)
class Cell:
    """One requirement in one combination of axes, and what became of it.

    `blame` is who a failure points at where that is not the requirement's owner (see `blame_by_rung`);
    `expected` is False for a cell that ran although the expected set, fixed before the run, does not hold it.
    """

    id: str
    requirement: str
    level: Level
    owner: Owner
    verdict: Verdict = Verdict.COULD_NOT_RUN
    blame: Owner | None = None
    expected: bool = True

    def seen_by(self, owner: Owner) -> Verdict | None:
        """The verdict as it counts for `owner`; None where the cell says nothing about that owner.

        A failure counts against whom it points at, an excused one too. For the requirement's owner, a failure
        that points at somebody else is a question left open: neither blamed on the one nor whitewashed.
        """
        failed = self.verdict is Verdict.FAIL or self.verdict in EXCUSED
        if failed and (self.blame or self.owner) is owner:
            return self.verdict
        if self.owner is not owner:
            return None
        return Verdict.INCONCLUSIVE if self.verdict is Verdict.FAIL else self.verdict


def blame_by_rung(owner: Owner, digests_equal: bool | None) -> Owner:
    """Who a failure points at: loaded bytes that differ from the saved ones → connector; equal bytes and
    different ids → not it.

    `digests_equal` is None where no digest was compared: the requirement's owner is then asked first.
    """
    if digests_equal is False:
        return Owner.CONNECTOR
    if digests_equal and owner is Owner.CONNECTOR:
        return Owner.ENGINE
    return owner


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The first of `PRECEDENCE` that occurs; `could-not-run` when there is none at all."""
    return min(verdicts, key=PRECEDENCE.index, default=Verdict.COULD_NOT_RUN)


def complete(expected: Sequence[Cell], cells: Iterable[Cell]) -> list[Cell]:
    """The expected cells with their results, in the expected order, then whatever ran beside them
    (`expected=False`).

    Level, owner and requirement are those of the expected cell, whatever a result says. A cell without a
    result, or one that calls itself `not-supported` although it is expected, counts as `could-not-run`. Of
    several results for one cell the worst stands, so that running again cannot wash a failure out.
    """
    results: dict[str, Cell] = {}
    for cell in cells:
        before = results.get(cell.id)
        if before is None or PRECEDENCE.index(cell.verdict) < PRECEDENCE.index(before.verdict):
            results[cell.id] = cell
    whole: list[Cell] = []
    for want in expected:
        got = results.pop(want.id, None)
        verdict = got.verdict if got else Verdict.COULD_NOT_RUN
        if verdict is Verdict.NOT_SUPPORTED:
            verdict = Verdict.COULD_NOT_RUN
        whole.append(replace(want, verdict=verdict, blame=got.blame if got else None, expected=True))
    whole.extend(replace(extra, expected=False) for extra in results.values())
    return whole


def requirement_verdict(cells: Iterable[Cell]) -> Verdict:
    """The verdict of a requirement over its cells: the worst of the expected ones, and of any that provably
    failed."""
    return worst(cell.verdict for cell in cells if cell.expected or cell.verdict is Verdict.FAIL)


def outcome(cells: Iterable[Cell], owner: Owner, mode: Mode) -> Outcome:
    """The outcome for one owner over the MUST cells of a run, as `complete` returns them."""
    must = [cell for cell in cells if cell.level is Level.MUST]
    seen = [(cell, verdict) for cell in must if (verdict := cell.seen_by(owner)) is not None]
    if any(verdict is Verdict.FAIL for _, verdict in seen):
        return Outcome.NONCONFORMANT
    expected = [verdict for cell, verdict in seen if cell.expected and cell.owner is owner]
    if not expected or any(verdict is not Verdict.PASS and verdict not in EXCUSED for verdict in expected):
        return Outcome.INCOMPLETE
    excused = any(verdict in EXCUSED for _, verdict in seen)
    if mode is Mode.CERTIFY and (len(expected) < len(seen) or excused):
        return Outcome.INCOMPLETE  # the executed set is the expected set, and nothing in it is excused
    return Outcome.PARTIAL if excused else Outcome.CONFORMANT


def exit_code(result: Outcome) -> int:
    """The exit code of a run whose certified owner has this outcome: 0, 1 or 3."""
    return EXIT_CODES[result]


def summary(cells: Iterable[Cell]) -> dict[str, int]:
    """How many cells were expected, how many of those ran, and a count for each verdict (of expected cells).

    SHOULD and MAY are counted here like everything else; they only have no say in the outcome.
    """
    expected = [cell for cell in cells if cell.expected]
    counts = Counter(cell.verdict for cell in expected)
    executed = len(expected) - counts[Verdict.COULD_NOT_RUN]
    return {"expected": len(expected), "executed": executed} | {str(v): counts[v] for v in Verdict}
