"""The rules from cells to outcome, exhaustively over small sets and by Hypothesis over larger ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.verdict import (
    PRECEDENCE,
    Cell,
    Level,
    Mode,
    Outcome,
    Owner,
    Verdict,
    blame_by_rung,
    complete,
    exit_code,
    outcome,
    requirement_verdict,
    summary,
)

# From worst to best. A lost failure may turn `nonconformant` into `incomplete` (nobody can know what was
# lost), so the law for lost cells looks only at whether the outcome may be shown as a success.
RANK = {Outcome.NONCONFORMANT: 0, Outcome.INCOMPLETE: 1, Outcome.PARTIAL: 2, Outcome.CONFORMANT: 3}


def good(result: Outcome) -> bool:
    return exit_code(result) == 0


def cell(number: int, verdict: Verdict, **changes: object) -> Cell:
    base = Cell(f"EPD-TOK-{number:03d}[e-pd]", f"EPD-TOK-{number:03d}", Level.MUST, Owner.CONNECTOR, verdict)
    return replace(base, **changes)


cells_strategy = st.lists(
    st.tuples(
        st.sampled_from(Verdict),
        st.sampled_from(Level),
        st.sampled_from(Owner),
        st.none() | st.sampled_from(Owner),
    ),
    max_size=8,
).map(
    lambda rows: [
        cell(number, verdict, level=level, owner=owner, blame=blame)
        for number, (verdict, level, owner, blame) in enumerate(rows)
    ]
)


def expectation(cells: list[Cell]) -> list[Cell]:
    return [replace(item, verdict=Verdict.COULD_NOT_RUN, blame=None) for item in cells]


class TestOutcome:
    @pytest.mark.parametrize(
        ("verdicts", "mode", "expected", "code"),
        [
            ("pass pass", Mode.CERTIFY, Outcome.CONFORMANT, 0),
            ("pass fail", Mode.CERTIFY, Outcome.NONCONFORMANT, 1),
            ("error fail could-not-run", Mode.DEVELOP, Outcome.NONCONFORMANT, 1),
            ("pass error", Mode.CERTIFY, Outcome.INCOMPLETE, 3),
            ("pass inconclusive", Mode.CERTIFY, Outcome.INCOMPLETE, 3),
            ("pass could-not-run", Mode.DEVELOP, Outcome.INCOMPLETE, 3),
            ("pass known-failing", Mode.DEVELOP, Outcome.PARTIAL, 0),
            ("pass waived", Mode.DEVELOP, Outcome.PARTIAL, 0),
            ("pass waived", Mode.CERTIFY, Outcome.INCOMPLETE, 3),
            ("pass not-supported", Mode.CERTIFY, Outcome.INCOMPLETE, 3),
            ("known-failing error", Mode.DEVELOP, Outcome.INCOMPLETE, 3),
            ("", Mode.DEVELOP, Outcome.INCOMPLETE, 3),
        ],
    )
    def test_words_of_the_contract(self, verdicts: str, mode: Mode, expected: Outcome, code: int) -> None:
        cells = [cell(number, Verdict(word)) for number, word in enumerate(verdicts.split())]
        result = outcome(complete(expectation(cells), cells), Owner.CONNECTOR, mode)
        assert (result, exit_code(result)) == (expected, code)

    def test_exhaustively_only_all_pass_is_conformant(self) -> None:
        for size in range(4):
            for verdicts in product(Verdict, repeat=size):
                cells = [cell(number, verdict) for number, verdict in enumerate(verdicts)]
                whole = complete(expectation(cells), cells)
                for mode in Mode:
                    result = outcome(whole, Owner.CONNECTOR, mode)
                    everything = size > 0 and set(verdicts) == {Verdict.PASS}
                    assert (result is Outcome.CONFORMANT) == everything, verdicts
                    assert (result is Outcome.NONCONFORMANT) == (Verdict.FAIL in verdicts), verdicts

    def test_exhaustively_the_two_laws(self) -> None:
        for verdicts in product(Verdict, repeat=3):
            cells = [cell(number, verdict) for number, verdict in enumerate(verdicts)]
            expected = expectation(cells)
            for mode in Mode:
                before = outcome(complete(expected, cells), Owner.CONNECTOR, mode)
                for lost in range(3):
                    left = cells[:lost] + cells[lost + 1 :]
                    after = outcome(complete(expected, left), Owner.CONNECTOR, mode)
                    assert not good(after), "a run with a hole in it is no success"
                    assert RANK[after] <= RANK[before] or verdicts[lost] is Verdict.FAIL
                for changed in range(3):
                    failing = [replace(c, verdict=Verdict.FAIL) if i == changed else c for i, c in enumerate(cells)]
                    assert outcome(complete(expected, failing), Owner.CONNECTOR, mode) is Outcome.NONCONFORMANT

    @given(
        cells_strategy,
        st.sampled_from(Level),
        st.sampled_from(Owner),
        st.none() | st.sampled_from(Owner),
        st.booleans(),
        st.sampled_from(Mode),
        st.sampled_from(Owner),
    )
    def test_a_failing_cell_never_improves(
        self,
        cells: list[Cell],
        level: Level,
        owner: Owner,
        blame: Owner | None,
        expected: bool,
        mode: Mode,
        asked: Owner,
    ) -> None:
        fail = cell(99, Verdict.FAIL, level=level, owner=owner, blame=blame)
        want = expectation(cells)
        before = outcome(complete(want, cells), asked, mode)
        after = outcome(complete(want + expectation([fail]) * expected, [*cells, fail]), asked, mode)
        assert RANK[after] <= RANK[before]
        if level is Level.MUST and (blame or owner) is asked:
            assert after is Outcome.NONCONFORMANT
        elif level is not Level.MUST:
            assert after is before

    @given(cells_strategy.filter(bool), st.data(), st.sampled_from(Mode), st.sampled_from(Owner))
    def test_a_lost_cell_never_improves(self, cells: list[Cell], data: st.DataObject, mode: Mode, asked: Owner) -> None:
        lost = data.draw(st.sampled_from(cells))
        want = expectation(cells)
        before = outcome(complete(want, cells), asked, mode)
        after = outcome(complete(want, [item for item in cells if item is not lost]), asked, mode)
        assert good(before) or not good(after)
        if lost.verdict is not Verdict.FAIL:
            assert RANK[after] <= RANK[before]

    @given(cells_strategy, st.sampled_from(Mode), st.sampled_from(Owner), st.data())
    def test_should_and_may_change_nothing(
        self, cells: list[Cell], mode: Mode, asked: Owner, data: st.DataObject
    ) -> None:
        whole = complete(expectation(cells), cells)
        changed = [
            item if item.level is Level.MUST else replace(item, verdict=data.draw(st.sampled_from(Verdict)))
            for item in whole
        ]
        assert outcome(whole, asked, mode) is outcome(changed, asked, mode)
        must = [item for item in whole if item.level is Level.MUST]
        assert outcome(whole, asked, mode) is outcome(must, asked, mode)

    def test_the_laws_can_fail(self) -> None:
        """Negative control: without the expected set, a lost cell does make the outcome better."""
        cells = [cell(1, Verdict.PASS), cell(2, Verdict.ERROR)]
        assert outcome(cells, Owner.CONNECTOR, Mode.CERTIFY) is Outcome.INCOMPLETE
        assert outcome(cells[:1], Owner.CONNECTOR, Mode.CERTIFY) is Outcome.CONFORMANT

    def test_certify_runs_the_expected_set_and_nothing_else(self) -> None:
        cells = [cell(1, Verdict.PASS), cell(2, Verdict.PASS)]
        whole = complete(expectation(cells[:1]), cells)
        assert outcome(whole, Owner.CONNECTOR, Mode.CERTIFY) is Outcome.INCOMPLETE
        assert outcome(whole, Owner.CONNECTOR, Mode.DEVELOP) is Outcome.CONFORMANT

    def test_an_unexpected_pass_is_worth_nothing(self) -> None:
        whole = complete([], [cell(1, Verdict.PASS)])
        assert outcome(whole, Owner.CONNECTOR, Mode.DEVELOP) is Outcome.INCOMPLETE


class TestBlame:
    @pytest.mark.parametrize("excused", [Verdict.KNOWN_FAILING, Verdict.WAIVED])
    def test_an_excused_failure_that_points_elsewhere_is_seen_there_too(self, excused: Verdict) -> None:
        cells = [
            cell(1, excused, blame=Owner.ENGINE),
            cell(2, Verdict.PASS, owner=Owner.ENGINE),
            cell(3, Verdict.PASS, owner=Owner.PROXY),
        ]
        found = {owner: outcome(cells, owner, Mode.DEVELOP) for owner in Owner}
        assert found == {
            Owner.CONNECTOR: Outcome.PARTIAL,
            Owner.ENGINE: Outcome.PARTIAL,
            Owner.PROXY: Outcome.CONFORMANT,
        }
        assert outcome(cells, Owner.ENGINE, Mode.CERTIFY) is Outcome.INCOMPLETE

    def test_failure_that_points_elsewhere_is_neither_blamed_nor_whitewashed(self) -> None:
        cells = [
            cell(1, Verdict.FAIL, blame=Owner.ENGINE),
            cell(2, Verdict.PASS),
            cell(3, Verdict.PASS, owner=Owner.ENGINE),
            cell(4, Verdict.PASS, owner=Owner.PROXY),
        ]
        whole = complete(expectation(cells), cells)
        assert outcome(whole, Owner.CONNECTOR, Mode.CERTIFY) is Outcome.INCOMPLETE
        assert outcome(whole, Owner.ENGINE, Mode.CERTIFY) is Outcome.NONCONFORMANT
        assert outcome(whole, Owner.PROXY, Mode.CERTIFY) is Outcome.CONFORMANT

    @pytest.mark.parametrize(
        ("owner", "digests_equal", "blamed"),
        [
            (Owner.CONNECTOR, False, Owner.CONNECTOR),
            (Owner.CONNECTOR, True, Owner.ENGINE),
            (Owner.CONNECTOR, None, Owner.CONNECTOR),
            (Owner.ENGINE, False, Owner.CONNECTOR),
            (Owner.ENGINE, True, Owner.ENGINE),
            (Owner.PROXY, True, Owner.PROXY),
            (Owner.PROXY, None, Owner.PROXY),
        ],
    )
    def test_by_rung(self, owner: Owner, digests_equal: bool | None, blamed: Owner) -> None:
        assert blame_by_rung(owner, digests_equal) is blamed

    def test_another_owners_cells_have_no_say(self) -> None:
        cells = [cell(1, Verdict.PASS), cell(2, Verdict.ERROR, owner=Owner.PROXY)]
        whole = complete(expectation(cells), cells)
        assert outcome(whole, Owner.CONNECTOR, Mode.CERTIFY) is Outcome.CONFORMANT
        assert outcome(whole, Owner.PROXY, Mode.CERTIFY) is Outcome.INCOMPLETE
        assert outcome(whole, Owner.ENGINE, Mode.CERTIFY) is Outcome.INCOMPLETE, "nothing was asked of it"


class TestComplete:
    def test_missing_cells_could_not_run(self) -> None:
        cells = [cell(1, Verdict.PASS), cell(2, Verdict.PASS)]
        whole = complete(expectation(cells), cells[1:])
        assert [item.verdict for item in whole] == [Verdict.COULD_NOT_RUN, Verdict.PASS]

    def test_a_result_cannot_change_what_is_expected_of_it(self) -> None:
        want = expectation([cell(1, Verdict.PASS)])
        forged = cell(1, Verdict.FAIL, level=Level.MAY, owner=Owner.PROXY, expected=False)
        assert complete(want, [forged]) == [cell(1, Verdict.FAIL)]

    def test_an_expected_cell_cannot_excuse_itself(self) -> None:
        want = expectation([cell(1, Verdict.PASS)])
        assert complete(want, [cell(1, Verdict.NOT_SUPPORTED)])[0].verdict is Verdict.COULD_NOT_RUN

    @pytest.mark.parametrize("order", [1, -1])
    def test_running_again_does_not_wash_a_failure_out(self, order: int) -> None:
        twice = [cell(1, Verdict.FAIL), cell(1, Verdict.PASS)][::order]
        assert complete(expectation(twice[:1]), twice) == [cell(1, Verdict.FAIL)]

    def test_a_proven_failure_outside_the_expected_set_is_kept(self) -> None:
        whole = complete([], [cell(1, Verdict.FAIL)])
        assert [(item.verdict, item.expected) for item in whole] == [(Verdict.FAIL, False)]
        assert outcome(whole, Owner.CONNECTOR, Mode.DEVELOP) is Outcome.NONCONFORMANT


class TestRequirement:
    def test_first_that_occurs(self) -> None:
        assert [str(verdict) for verdict in PRECEDENCE[:7]] == (
            ["fail", "error", "inconclusive", "could-not-run", "known-failing", "waived", "pass"]
        )
        for verdicts in product(PRECEDENCE[:7], repeat=3):
            cells = [cell(number, verdict) for number, verdict in enumerate(verdicts)]
            expected = next(verdict for verdict in PRECEDENCE if verdict in verdicts)
            assert requirement_verdict(cells) is expected

    def test_no_cells_is_no_pass(self) -> None:
        assert requirement_verdict([]) is Verdict.COULD_NOT_RUN

    def test_an_unexpected_cell_can_fail_it_but_not_pass_it(self) -> None:
        extra = replace(cell(1, Verdict.PASS), expected=False)
        assert requirement_verdict([extra]) is Verdict.COULD_NOT_RUN
        assert requirement_verdict([replace(extra, verdict=Verdict.FAIL)]) is Verdict.FAIL


def test_summary_counts_expected_cells_of_every_level() -> None:
    cells = [
        cell(1, Verdict.PASS),
        cell(2, Verdict.FAIL, level=Level.MAY),
        cell(3, Verdict.COULD_NOT_RUN),
        cell(4, Verdict.PASS, expected=False),
    ]
    counts = summary(cells)
    assert counts.pop("expected") == 3
    assert counts.pop("executed") == 2
    assert {key: value for key, value in counts.items() if value} == {
        "pass": 1,
        "fail": 1,
        "could-not-run": 1,
    }
    assert set(counts) == {str(verdict) for verdict in Verdict}
