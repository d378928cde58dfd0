"""Known deviations, waivers and flaky cells as pure code: what a list says, what it makes of a verdict, and when it is untrue."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd_conformance.deviations import covers, decide, early_problem, parse, read, remarks, review, words
from epd_conformance.errors import UsageError
from epd_conformance.report.failure import Divergence
from epd_conformance.report.schema import CellRecord, DeviationKind, KnownDeviation
from epd_conformance.verdict import EXCUSED, PRECEDENCE, Verdict

DAY = date(2026, 6, 15)
IMG1 = "EPD-TOK-002[e-pd/tiny/img1]"
IMG2 = "EPD-TOK-003[e-pd/tiny/img2]"

FILE = """
[[known]]
cells = "EPD-TOK-003[e-pd/*/img2]"
message = "tokens-differ"
issue = "https://example.com/1"
expires = 2026-12-31
note = "second image first"

[[waiver]]
cells = "EPD-KV-*"
reason = "no KV store on this runner"
issue = "OPS-7"
expires = 2026-07-01

[[flaky]]
cells = "EPD-TOK-002[*]"
issue = "OPS-8"
"""


def known(pattern: str = IMG1, message: str = "differ", expires: date = DAY) -> KnownDeviation:
    return KnownDeviation(kind=DeviationKind.KNOWN, pattern=pattern, message=message, issue="#1", expires=expires)


def waiver(pattern: str = IMG1, expires: date = DAY) -> KnownDeviation:
    return KnownDeviation(kind=DeviationKind.WAIVER, pattern=pattern, reason="later", issue="#2", expires=expires)


def flaky(pattern: str = IMG1) -> KnownDeviation:
    return KnownDeviation(kind=DeviationKind.FLAKY, pattern=pattern, issue="#3")


def cell(verdict: Verdict, *, name: str = IMG1, excused: Verdict | None = None, by: tuple[int, ...] = ()) -> CellRecord:
    return CellRecord(
        id=name,
        requirement=name[:11],
        topology="e-pd",
        model="tiny",
        verdict=verdict,
        reason="" if verdict is Verdict.PASS else "why",
        excused=excused,
        excused_by=by,
    )


class TestFile:
    def test_every_table_and_key(self, tmp_path: Path) -> None:
        path = tmp_path / "known.toml"
        path.write_text(FILE)
        first, second, third = read(path)
        assert first == KnownDeviation(
            kind=DeviationKind.KNOWN,
            pattern="EPD-TOK-003[e-pd/*/img2]",
            message="tokens-differ",
            issue="https://example.com/1",
            expires=date(2026, 12, 31),
            note="second image first",
        )
        assert (second.kind, second.reason, second.expires) == (
            DeviationKind.WAIVER,
            "no KV store on this runner",
            date(2026, 7, 1),
        )
        assert (third.kind, third.issue, third.expires) == (DeviationKind.FLAKY, "OPS-8", None)

    def test_an_empty_file_says_nothing(self) -> None:
        assert parse("", "known.toml") == ()

    def test_the_example_that_is_shipped(self) -> None:
        found = read(Path(__file__).parents[2] / "examples" / "known-deviations.toml")
        assert {entry.kind for entry in found} == set(DeviationKind)

    @pytest.mark.parametrize(
        ("old", "new", "says"),
        [
            ("[[known]]", "[[known", "known.toml is not valid TOML"),
            ("[[known]]", "[[unknown]]", "unknown key `unknown`; only [[known]], [[waiver]] and [[flaky]] tables"),
            ('cells = "EPD-TOK-003[e-pd/*/img2]"\n', "", "[[known]] number 1: `cells`: Field required"),
            ('message = "tokens-differ"\n', "", "[[known]] number 1: `message`: Field required"),
            ('message = "tokens-differ"', 'message = ""', "`message`: String should have at least 1 character"),
            ('message = "tokens-differ"', 'message = "(("', "`message`: '((' is no regular expression"),
            ('message = "tokens-differ"', 'message = ".*"', "`message`: '.*' fits every failure"),
            ('issue = "https://example.com/1"\n', "", "[[known]] number 1: `issue`: Field required"),
            ("expires = 2026-12-31\n", "", "[[known]] number 1: `expires`: Field required"),
            ("2026-12-31", '"soon"', "[[known]] number 1: `expires`: Input should be a valid date"),
            ("note =", "notes =", "[[known]] number 1: `notes`: Extra inputs are not permitted"),
            ("reason =", "message =", "[[waiver]] number 1: `reason`: Field required"),
            ('issue = "OPS-8"', 'issue = "OPS-8"\nexpires = 2026-01-01', "[[flaky]] number 1: `expires`: Extra inputs"),
            (FILE, "known = 3", "`known` is no table: write [[known]] above its entries"),
        ],
    )
    def test_what_is_wrong_is_one_sentence(self, old: str, new: str, says: str) -> None:
        assert FILE.count(old) >= 1
        with pytest.raises(UsageError) as caught:
            parse(FILE.replace(old, new, 1), "known.toml")
        assert str(caught.value).startswith("known.toml")
        assert says in str(caught.value)

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"cannot read .*none\.toml \(No such file or directory\): --known takes"):
            read(tmp_path / "none.toml")
        (tmp_path / "bytes.toml").write_bytes(b"\xff")
        with pytest.raises(UsageError, match=r"bytes\.toml is not valid TOML"):
            read(tmp_path / "bytes.toml")


class TestPattern:
    @pytest.mark.parametrize(
        ("pattern", "covered"),
        [
            (IMG2, {IMG2}),
            ("EPD-TOK-003[e-pd/*/img2]", {IMG2}),
            ("EPD-TOK-00?[e-pd/*]", {IMG1, IMG2}),
            ("EPD-TOK-*", {IMG1, IMG2}),
            ("*", {IMG1, IMG2}),
            # Brackets are no class of characters, and a pattern is a whole id.
            ("EPD-TOK-00[23][*", set()),
            ("EPD-TOK-003[e-pd]", set()),
            ("EPD-TOK-003", set()),
            ("epd-tok-*", set()),
        ],
    )
    def test_covers(self, pattern: str, covered: set[str]) -> None:
        assert {name for name in (IMG1, IMG2) if covers(pattern, name)} == covered


class TestDecide:
    @pytest.mark.parametrize("verdict", Verdict)
    def test_only_a_fail_becomes_known_failing(self, verdict: Verdict) -> None:
        made = decide([known()], IMG1, verdict, "ids differ", DAY)
        if verdict is Verdict.FAIL:
            assert (made.verdict, made.excused, made.by) == (Verdict.KNOWN_FAILING, Verdict.FAIL, (0,))
        else:
            assert (made.verdict, made.excused, made.by) == (verdict, None, ())

    @pytest.mark.parametrize("verdict", Verdict)
    def test_a_waiver_excuses_a_fail_and_what_was_not_exercised(self, verdict: Verdict) -> None:
        made = decide([waiver()], IMG1, verdict, "", DAY)
        excused = verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
        assert made.verdict is (Verdict.WAIVED if excused else verdict)
        assert made.excused is (verdict if excused else None)

    @pytest.mark.parametrize("verdict", Verdict)
    def test_flaky_changes_no_verdict(self, verdict: Verdict) -> None:
        assert decide([flaky()], IMG1, verdict, "differ", DAY).verdict is verdict

    @pytest.mark.parametrize(
        "entry", [known("EPD-TOK-003*"), known(message="^differ"), known(expires=DAY - timedelta(days=1))]
    )
    def test_another_cell_another_message_or_too_late(self, entry: KnownDeviation) -> None:
        assert decide([entry], IMG1, Verdict.FAIL, "ids differ", DAY).verdict is Verdict.FAIL

    def test_on_its_last_day_an_entry_counts(self) -> None:
        assert decide([known(expires=DAY)], IMG1, Verdict.FAIL, "differ", DAY).verdict is Verdict.KNOWN_FAILING

    def test_of_two_excuses_the_worse_word_stands_and_both_are_named(self) -> None:
        made = decide([waiver(), known(), flaky()], IMG1, Verdict.FAIL, "differ", DAY)
        assert (made.verdict, made.by) == (Verdict.KNOWN_FAILING, (0, 1))

    def test_a_message_is_sought_in_what_was_seen_and_nowhere_else(self) -> None:
        text = words("tokens-differ", "token ids [1, 2]", Divergence(3, [1], [2], margin=0.5))
        assert text.splitlines()[:3] == [
            "tokens-differ",
            "token ids [1, 2]",
            "first divergence: output token 3, margin 0.5 nats",
        ]
        assert "MUST" not in text

    def test_remarks_name_what_excused_the_cell(self) -> None:
        entries = [known(), waiver(), flaky(), known(IMG2), waiver(IMG2)]
        made = decide(entries, IMG1, Verdict.FAIL, "differ", DAY)
        assert remarks(entries, IMG1, made) == [
            "known deviation: #1, until 2026-06-15",
            "waived until 2026-06-15: later, #2; it is fail",
            "known flaky, which changes no verdict: #3",
        ]


class TestReview:
    """An entry stays in order only as long as all of its cells are as it says."""

    def problems(self, entry: KnownDeviation, *cells: CellRecord, day: date = DAY) -> list[str]:
        (made,) = review([entry], cells, day)
        assert made.cells == tuple(one.id for one in cells if covers(entry.pattern, one.id))
        return list(made.problems)

    @pytest.mark.parametrize("kind", ["known", "waiver"])
    def test_in_order(self, kind: str) -> None:
        if kind == "known":
            assert self.problems(known(), cell(Verdict.KNOWN_FAILING, excused=Verdict.FAIL, by=(0,))) == []
        else:
            assert self.problems(waiver(), cell(Verdict.WAIVED, excused=Verdict.INCONCLUSIVE, by=(0,))) == []

    @pytest.mark.parametrize("entry", [known(), waiver()])
    @pytest.mark.parametrize(
        ("verdict", "says"),
        [
            (Verdict.PASS, f"{IMG1}: passes: take it out, or narrow the pattern"),
            (Verdict.FAIL, f"{IMG1}: fails otherwise (why): a new failure, or a `message` that does not fit it"),
            (Verdict.INCONCLUSIVE, f"{IMG1}: is inconclusive (why), not the failure that was declared"),
            (Verdict.ERROR, f"{IMG1}: is error (why), which no list excuses"),
            (Verdict.COULD_NOT_RUN, f"{IMG1}: is could-not-run (why), which no list excuses"),
        ],
    )
    def test_anything_else_is_said(self, entry: KnownDeviation, verdict: Verdict, says: str) -> None:
        assert self.problems(entry, cell(verdict)) == [says]

    def test_excused_by_another_entry_is_not_excused_by_this_one(self) -> None:
        record = cell(Verdict.WAIVED, excused=Verdict.INCONCLUSIVE, by=(1,))
        first, second = review([known(), waiver()], [record], DAY)
        assert first.problems == (f"{IMG1}: is inconclusive (why), not the failure that was declared",)
        assert second.problems == ()

    def test_one_cell_of_several(self) -> None:
        fails = cell(Verdict.KNOWN_FAILING, excused=Verdict.FAIL, by=(0,))
        assert len(self.problems(known("EPD-TOK-*"), fails, cell(Verdict.PASS, name=IMG2))) == 1

    def test_no_cell(self) -> None:
        assert "matches no cell of this run" in self.problems(known("EPD-TOK-003"), cell(Verdict.PASS))[0]

    def test_expired(self) -> None:
        (said,) = self.problems(known(), cell(Verdict.FAIL), day=DAY + timedelta(days=1))
        assert said.startswith("expired on 2026-06-15")

    @pytest.mark.parametrize("verdict", Verdict)
    def test_a_flaky_entry_is_never_wrong(self, verdict: Verdict) -> None:
        assert self.problems(flaky(), cell(verdict)) == []
        assert self.problems(flaky("nothing"), cell(verdict)) == []

    def test_many_cells_are_one_sentence(self) -> None:
        cells = [cell(Verdict.PASS, name=f"EPD-TOK-002[e-pd/tiny/{number}]") for number in range(9)]
        (said,) = self.problems(known("EPD-TOK-*"), *cells)
        assert said.count("EPD-TOK-002") == 3
        assert "and 6 more: passes" in said


VERDICTS = st.sampled_from(list(Verdict))
ENTRIES = st.lists(
    st.one_of(
        st.builds(
            known,
            st.sampled_from([IMG1, IMG2, "EPD-TOK-*", "nothing"]),
            st.sampled_from(["differ", "other", "why"]),
            st.sampled_from([DAY, DAY - timedelta(days=1)]),
        ),
        st.builds(
            waiver,
            st.sampled_from([IMG1, IMG2, "EPD-TOK-*", "nothing"]),
            st.sampled_from([DAY, DAY - timedelta(days=1)]),
        ),
        st.builds(flaky, st.sampled_from([IMG1, "EPD-TOK-*"])),
    ),
    max_size=4,
)


class TestLaws:
    @given(ENTRIES, VERDICTS, st.sampled_from(["ids differ", "other", ""]))
    def test_a_list_excuses_failures_and_nothing_else(
        self, entries: list[KnownDeviation], verdict: Verdict, text: str
    ) -> None:
        made = decide(entries, IMG1, verdict, text, DAY)
        if made.verdict is not verdict:
            assert verdict in (Verdict.FAIL, Verdict.INCONCLUSIVE)
            assert made.verdict in EXCUSED
            assert made.verdict is Verdict.WAIVED or verdict is Verdict.FAIL
            assert (made.excused, bool(made.by)) == (verdict, True)
        # Never better than what a reader has to see: an excuse is not a pass.
        assert (made.verdict is Verdict.PASS) is (verdict is Verdict.PASS)
        assert PRECEDENCE.index(made.verdict) >= PRECEDENCE.index(verdict)

    @given(ENTRIES, st.lists(VERDICTS, min_size=2, max_size=2), st.sampled_from(["ids differ", "other"]))
    def test_an_entry_in_order_excuses_every_cell_that_it_covers(
        self, entries: list[KnownDeviation], verdicts: list[Verdict], text: str
    ) -> None:
        made = [decide(entries, name, verdict, text, DAY) for name, verdict in zip((IMG1, IMG2), verdicts, strict=True)]
        records = [
            cell(decision.verdict, name=name, excused=decision.excused, by=decision.by)
            for name, decision in zip((IMG1, IMG2), made, strict=True)
        ]
        for place, entry in enumerate(review(entries, records, DAY)):
            whole = bool(entry.cells) and all(
                place in record.excused_by for record in records if record.id in entry.cells
            )
            assert (entry.problems == ()) is (whole or entry.kind is DeviationKind.FLAKY)

    @given(ENTRIES)
    def test_what_is_said_before_the_run_is_said_after_it(self, entries: list[KnownDeviation]) -> None:
        after = review(entries, [cell(Verdict.PASS), cell(Verdict.PASS, name=IMG2)], DAY)
        for entry, made in zip(entries, after, strict=True):
            if early := early_problem(entry, [IMG1, IMG2], DAY):
                assert made.problems == (early,)
