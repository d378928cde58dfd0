"""What a night says: exactly what changed, whose it is, and the exit code that goes with it. Over made runs."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import made_nights
import pytest
from made_nights import CELL, GOOD, night, with_

from epd_conformance import __version__, cli
from epd_conformance.errors import UsageError
from epd_conformance.history import nightly as nights
from epd_conformance.history import summary
from epd_conformance.history.database import History
from epd_conformance.history.night import Night
from epd_conformance.history.nightly import Asked, Ended
from epd_conformance.report.schema import KnownDeviation

Does = Callable[[Path], Ended]


class Nights:
    """One night after the other: `nights(run(GOOD), fail)` makes each profile's run by a call instead of a process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.history = folder / "history.db"
        self.day = -1
        self.calls: list[list[str]] = []

    def __call__(self, *does: Does, **asked: Any) -> Night:
        self.day += 1
        profiles = [f"{number + 1}e-1pd" for number in range(len(does))]
        by_profile = dict(zip(profiles, does, strict=True))

        def start(words: Sequence[str], log: Path, limit_s: float) -> Ended:
            self.calls.append(list(words))
            log.write_text("starting\n", encoding="utf-8")
            if words[0] == "hunt":
                log.write_text("server-died: 3 scripts\n", encoding="utf-8")
                return Ended(1)
            return by_profile[log.stem](Path(words[words.index("--out") + 1]))

        out = self.folder / f"night-{self.day}"
        given = Asked("mine", self.history, out, profiles=profiles, **asked)
        return nights.nightly(given, lambda line: None, start)

    def run(self, cells: dict[str, str], code: int = 0, **more: Any) -> Does:
        def does(folder: Path) -> Ended:
            night(folder, self.day, cells, profile=folder.name, run_id=f"{folder.name}-{self.day}", **more)
            return Ended(code)

        return does


@pytest.fixture
def nightly(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


def text(found: Night) -> str:
    """What was written, which is what the verb prints."""
    written = (found.out / "summary.md").read_text(encoding="utf-8")
    assert written == summary.markdown(found)
    assert json.loads((found.out / "summary.json").read_text(encoding="utf-8"))["code"] == found.code
    return written


def bullets(found: Night) -> list[str]:
    return [line for line in text(found).splitlines() if line.startswith("* ")]


def test_the_first_night_has_the_exit_code_of_its_runs(tmp_path: Path) -> None:
    for name, verdict, code in (("a", "pass", 0), ("b", "fail", 1), ("c", "error", 3)):
        nightly = Nights(tmp_path / name)
        found = nightly(nightly.run(with_(verdict)))
        assert found.code == code
        assert "no green night yet" in text(found)


def test_a_regression_stays_one_until_it_is_mended(nightly: Nights) -> None:
    codes, lines = [], []
    for verdict in ("pass", "fail", "fail", "pass", "pass"):
        found = nightly(nightly.run(with_(verdict)))
        codes.append(found.code)
        lines.append(bullets(found))
    assert codes == [0, 1, 1, 0, 0], "not old on its second day"
    observed = ": `tokens-differ: token ids [44, 218 'x']`"
    assert lines == [
        [],
        [f"* `{CELL}` (connector, fails each time since 2026-03-02 (1 night)){observed}"],
        [f"* `{CELL}` (connector, fails each time since 2026-03-02 (2 nights)){observed}"],
        # Twice on unchanged inputs: what a repair looks like if nobody says what was built.
        [f"* `{CELL}` (connector, failed on 2 of 4 nights, 2 turns on unchanged inputs; pass tonight)"],
        [f"* `{CELL}` (connector, failed on 2 of 5 nights, 2 turns on unchanged inputs; pass tonight)"],
    ]


def test_mended_by_another_build(nightly: Nights) -> None:
    found = [
        nightly(nightly.run(with_(word)), build=build) for word, build in (("pass", "a"), ("fail", "b"), ("pass", "c"))
    ]
    assert [one.code for one in found] == [0, 1, 0]
    assert bullets(found[-1]) == [f"* `{CELL}` (connector, passes since 2026-03-03)"]
    assert "**Mended: 1**" in text(found[-1])


def test_five_nights_tell_a_flaky_cell_from_a_broken_one(nightly: Nights) -> None:
    flaky, broken = "EPD-TOK-002 img1", "EPD-TOK-003 img2"
    codes = []
    for one, other in zip("PFPFF", "PPPFF", strict=True):
        cells = GOOD | {flaky: "fail" if one == "F" else "pass", broken: "fail" if other == "F" else "pass"}
        found = nightly(nightly.run(cells))
        codes.append(found.code)
    assert codes == [0, 1, 0, 1, 1]
    (profile,) = found.profiles
    assert [item.cell for item in profile.regressions] == ["EPD-TOK-003[e-pd/tiny/img2]"]
    assert [item.cell for item in profile.flaking] == [CELL]
    shown = text(found)
    regression, rest = shown.split("**Flaky (no regression, and not well): 1**")
    assert "**Regressions since the last green night: 1**" in regression
    assert "EPD-TOK-003[e-pd/tiny/img2]` (connector, fails each time since 2026-03-04 (2 nights))" in regression
    assert CELL not in regression
    assert f"`{CELL}` (connector, failed on 3 of 5 nights, 3 turns on unchanged inputs; fail tonight)" in rest
    # Only the flaky one fails: nothing new, never hidden, and never a night that later ones are held against.
    found = nightly(nightly.run(with_("fail")))
    assert found.code == 0
    assert CELL in text(found)
    assert found.profiles[0].stored is not None and not found.profiles[0].stored.green
    # Until it fails so often that it is no flake any more.
    codes = [nightly(nightly.run(with_("fail"))).code for _ in range(12)]
    assert codes == sorted(codes) and codes[0] == 0 and codes[-1] == 1


def test_what_is_not_shown_any_more_is_incomplete(nightly: Nights) -> None:
    nightly(nightly.run(GOOD))
    found = nightly(nightly.run(with_("inconclusive")))
    assert found.code == 3
    assert "**Not shown any more: 1**" in text(found)
    assert bullets(found)[0].startswith(f"* `{CELL}` (connector, pass → inconclusive (tokens-differ))")
    found = nightly(nightly.run(with_("inconclusive") | {"EPD-TOK-003 img2": "fail"}))
    assert found.code == 1, "a broken neighbour hides no failure"


def test_a_cell_that_is_gone_is_a_regression_and_one_that_nobody_asked_for_is_none(nightly: Nights) -> None:
    nightly(nightly.run(GOOD))
    left_out = nightly(nightly.run(with_("")))
    assert left_out.code == 3, "a run with a hole"
    assert left_out.profiles[0].regressions == left_out.profiles[0].lost == ()
    gone = {name: verdict for name, verdict in GOOD.items() if "TOK-002" not in name}
    found = nightly(nightly.run(gone))
    assert found.code == 1
    assert [(item.cell, item.owner) for item in found.profiles[0].regressions] == [(CELL, "connector")]


def test_a_declared_failure_is_no_regression(nightly: Nights) -> None:
    entry = KnownDeviation(kind="known", pattern=CELL, message="tokens-differ", issue="#1", expires=date(2027, 1, 1))
    nightly(nightly.run(GOOD))
    found = nightly(nightly.run(with_("known-failing"), known=(entry,)))
    assert found.code == 0
    assert "**Fails as before**: 1 in 1e-1pd" in text(found)
    assert found.profiles[0].stored is not None and found.profiles[0].stored.green


def test_a_failure_of_the_engine_is_one_beside_a_conformant_connector(nightly: Nights) -> None:
    nightly(nightly.run(GOOD | {"EPD-ROLE-001 one": "pass"}))
    for _ in range(2):
        found = nightly(nightly.run(GOOD | {"EPD-ROLE-001 one": "fail"}))
        assert found.profiles[0].stored is not None
        assert (str(found.profiles[0].stored.outcome), found.code) == ("conformant", 1)
        assert "(engine, fails each time" in bullets(found)[0]


def test_a_flaky_cell_of_the_engine_that_breaks_is_a_regression(nightly: Nights) -> None:
    """The connector's certificate stands on each of these nights: none on which it fails may become the last green one."""
    codes, greens = [], []
    for one in "PFPF" + "F" * 12:
        found = nightly(nightly.run(GOOD | {"EPD-ROLE-001 one": "fail" if one == "F" else "pass"}))
        stored = found.profiles[0].stored
        assert stored is not None
        codes.append(found.code)
        greens.append(stored.green)
    assert codes[:4] == [0, 1, 0, 0] and codes[-1] == 1
    assert greens[:4] == [True, False, True, False] and not any(greens[4:])


def test_what_changed_beside_the_verdicts_is_said(nightly: Nights) -> None:
    nightly(nightly.run(GOOD))
    assert "vLLM differs (0.32.0 → 0.33.0)" in text(nightly(nightly.run(GOOD, vllm="0.33.0")))


class TestRelease:
    def test_it_stands_beside_the_last_green_night(self, nightly: Nights, tmp_path: Path) -> None:
        releases = tmp_path / "reports"
        night(releases / "mine-0.9", -30, with_("fail"), profile="1e-1pd")
        night(releases / "mine-1.0", -9, GOOD, profile="1e-1pd")
        night(releases / "other", -1, GOOD, profile="e-p-d")
        nightly(nightly.run(GOOD), releases=[releases])
        found = nightly(nightly.run(with_("fail")), releases=[releases])
        assert found.code == 1
        (line,) = [line for line in bullets(found) if "since" in line and "mine-1.0" in line]
        assert line == f"* 1e-1pd, since mine-1.0: 1 new-fail, 2 unchanged: `{CELL}`"

    def test_it_decides_where_no_night_was_green(self, nightly: Nights, tmp_path: Path) -> None:
        night(tmp_path / "release", -9, with_("fail"), profile="1e-1pd")
        for verdicts, code in (
            (with_("fail"), 0),
            (with_("fail") | {"EPD-TOK-003 img2": "fail"}, 1),
            (with_("fail"), 0),
        ):
            found = nightly(nightly.run(verdicts), releases=[tmp_path / "release"])
            assert found.code == code
        assert "no green night yet; since release: nothing new" in text(found)

    def test_a_release_of_something_else_is_not_taken(self, nightly: Nights, tmp_path: Path) -> None:
        night(tmp_path / "release", -9, GOOD, profile="all")
        found = nightly(nightly.run(GOOD), releases=[tmp_path / "release"])
        assert "no report of this subject, profile" in text(found)


class TestWhatDoesNotRun:
    def test_one_profile_that_dies_loses_nothing_else(self, nightly: Nights) -> None:
        def dies(folder: Path) -> Ended:
            return Ended(-signal.SIGKILL)

        def refuses(folder: Path) -> Ended:
            folder.with_suffix(".log").write_text("error: the machine has too little memory\n", encoding="utf-8")
            return Ended(2)

        def raises(folder: Path) -> Ended:
            raise OSError("no process")

        def leaves_half(folder: Path) -> Ended:
            made_nights.write(folder, nightly.day, with_(""), profile=folder.name, run_id=folder.name, ended=False)
            return Ended(-signal.SIGKILL, "it did not end within 5 s")

        def leaves_rubbish(folder: Path) -> Ended:
            night(folder, nightly.day, GOOD, profile=folder.name, run_id=folder.name)
            (folder / "report.json").write_text("{", encoding="utf-8")
            return Ended(0)

        found = nightly(dies, refuses, raises, leaves_half, leaves_rubbish, nightly.run(GOOD))
        assert found.code == 3
        assert [profile.report is not None for profile in found.profiles] == [False] * 3 + [True, False, True]
        said = bullets(found)
        for words in (
            "* 1e-1pd: `it was ended by SIGKILL`",
            "* 2e-1pd: `the machine has too little memory`",
            "* 3e-1pd: `it could not be started (no process)`",
            "* 4e-1pd was cut short, 1 of 3 cells did not run: `it did not end within 5 s`",
        ):
            assert words in said
        assert "Not shown" not in text(found), "of what a run did not come to, cells are only counted"
        assert any(line.startswith("* 5e-1pd: `its report cannot be read") for line in said)
        with History(nightly.history) as history:
            assert sorted(run.series.profile for run in history.runs()) == ["4e-1pd", "6e-1pd"]

    def test_nothing_at_all(self, nightly: Nights) -> None:
        assert nightly(lambda folder: Ended(2)).code == 2

    def test_a_night_that_is_cut_short_is_reported(self, nightly: Nights) -> None:
        def stopped(folder: Path) -> Ended:
            nightly.run(GOOD, interrupted=True)(folder)
            raise KeyboardInterrupt

        found = nightly(nightly.run(GOOD), stopped, nightly.run(GOOD))
        assert (found.code, found.interrupted) == (3, True)
        assert "**The night was interrupted.**" in text(found)
        assert found.profiles[1].seconds == 0.0 and "| 5 min |" in text(found), "as its report has it"
        assert [profile.report is not None for profile in found.profiles] == [True, True, False]

    def test_a_history_that_breaks_meanwhile_loses_no_summary(self, nightly: Nights) -> None:
        def breaks(folder: Path) -> Ended:
            nightly.history.write_bytes(b"{}" * 500)
            return nightly.run(GOOD)(folder)

        found = nightly(breaks)
        assert "not stored" in text(found)
        assert found.code == 3, "nobody knows what it would have been held against"


def test_a_hunt_is_told_and_counts(nightly: Nights) -> None:
    found = nightly(nightly.run(GOOD), hunt="30m")
    assert found.code == 1
    assert "**Hunt: found something**" in text(found) and "server-died: 3 scripts" in text(found)
    words = nightly.calls[-1]
    assert words[words.index("--time-budget") + 1] == "30m"
    assert int(words[words.index("--seed") + 1]) == found.started.toordinal()


def test_it_stays_short(nightly: Nights) -> None:
    cells = {f"EPD-TOK-002 img{number}": "pass" for number in range(9)}
    cells |= {f"{item.id} one": "pass" for item in list(made_nights.CATALOGUE)[:40] if item.id != "EPD-TOK-002"}
    nightly(nightly.run(cells))
    shown = text(nightly(nightly.run(dict.fromkeys(cells, "fail"))))
    assert "EPD-TOK-002, 9 cells" in shown or "more lines" in shown
    assert len(shown.splitlines()) < 30


class TestWords:
    """What each profile's run is given: options that mean nothing for it would be refused there."""

    def test_by_profile(self, tmp_path: Path) -> None:
        known = {"": tmp_path / "all.toml", "contract": tmp_path / "contract.toml"}
        asked = Asked(
            "mine", tmp_path / "h", tmp_path, model="m", dtype="d", boot="plain", known=known, examples=5, workers=2
        )
        contract, proxy, live = (asked.words(profile) for profile in ("contract", "proxy", "2e-1pd"))
        assert "--subject" in contract and "--examples" in contract and str(known["contract"]) in contract
        assert not {"--model", "--device", "--workers"} & {*contract, *proxy}
        assert "--subject" not in proxy
        assert {"--model", "--dtype", "--boot", "--device", "--workers", str(known[""])} <= set(live)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            ({"profiles": ()}, "needs a profile"),
            ({"profiles": ("contract", "contract")}, "given twice"),
            ({"profiles": ("odd",)}, "no profile 'odd'"),
            ({"known": {"e-pd": Path("none.toml")}}, "the night has no profile e-pd"),
            ({"known": {"": Path("none.toml")}}, "there is no such file"),
            ({"releases": (Path("nowhere"),)}, "there is no such folder"),
            ({"hunt": "soon"}, "is no time"),
        ],
    )
    def test_usage_is_found_before_anything_runs(self, given: dict[str, Any], says: str, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=says):
            nights.nightly(Asked("mine", tmp_path / "h", tmp_path / "out", **given), print, lambda *_: Ended(0))
        assert not (tmp_path / "out").exists()


class TestProcess:
    """The real `start`; with a program in the place of the command line where it has to behave badly."""

    def test_it_is_the_command_line(self, tmp_path: Path) -> None:
        assert nights.start(["--version"], tmp_path / "log", 600.0) == Ended(0)
        assert (tmp_path / "log").read_text() == f"{__version__}\n"

    @pytest.fixture
    def program(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
        def make(source: str) -> Path:
            path = tmp_path / "interpreter"
            path.write_text(f"#!{sys.executable}\n{source}", encoding="utf-8")
            path.chmod(0o755)
            monkeypatch.setattr(nights.sys, "executable", str(path))
            return tmp_path / "log"

        return make

    def test_how_it_ends(self, program: Callable[[str], Path]) -> None:
        log = program("import sys; print('error: it cannot', file=sys.stderr); sys.exit(2)")
        assert nights.start(["run"], log, 600.0) == Ended(2)
        assert log.read_text() == "error: it cannot\n"

    def test_what_hangs_is_told_to_end(self, program: Callable[[str], Path]) -> None:
        log = program(
            "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\ntime.sleep(600)"
        )
        ended = nights.start(["run"], log, 0.5)
        assert ended.told == "it did not end within 0 s"
        assert ended.code in (3, -signal.SIGTERM), "it may have been told before it could listen"

    def test_and_killed_where_it_does_not(
        self, program: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nights, "GRACE_S", 0.1)
        log = program(
            "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(1, flush=True)\ntime.sleep(600)"
        )

        class Patient(nights.subprocess.Popen):
            def send_signal(self, number: int) -> None:
                while not log.read_bytes():
                    time.sleep(0.01)
                super().send_signal(number)

        monkeypatch.setattr(nights.subprocess, "Popen", Patient)
        assert nights.start(["run"], log, 0.1).code == -signal.SIGKILL


def test_the_verb(
    nightly: Nights, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[Asked] = []
    told = nightly(nightly.run(with_("fail")))

    def instead(asked: Asked, say: Callable[[str], None]) -> Night:
        seen.append(asked)
        return told

    monkeypatch.setattr(nights, "nightly", instead)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> int:
        monkeypatch.setattr("sys.argv", ["epd-conformance", "nightly", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert isinstance(ended.value.code, int)
        return ended.value.code

    assert call("--history", "h.db", "--known", "contract=k.toml", "--known", "a.toml", "--limit", "90s") == 1
    assert capsys.readouterr().out.startswith("### Nightly `mine`")
    assert seen[-1].profiles == ("contract", "scheduler", "proxy", "all")
    assert (seen[-1].known, seen[-1].limit_s) == ({"contract": Path("k.toml"), "": Path("a.toml")}, 90.0)
    assert seen[-1].releases == ()
    night(tmp_path / "reports" / "one", -3, GOOD)
    assert call("--history", "h.db", "--json", "--profile", "e-pd") == 1
    assert json.loads(capsys.readouterr().out)["code"] == 1
    assert [path.name for path in seen[-1].releases] == ["reports"]
    assert call("--history", "h.db", "--known", "a.toml", "--known", "b.toml") == 2
    assert "given twice" in capsys.readouterr().err
