"""Two nights with a real connector whose code is broken in between: the night says exactly that."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path

import pytest

from epd_conformance import cli
from epd_conformance.history.database import History

PLANTED = Path(__file__).parents[1] / "engine"
CELL = "EPD-KEY-003[contract/tiny-qwen2.5-vl/plans]"
GOOD = "from planted_engine import PlainStore\n\nclass NightStore(PlainStore):\n    pass\n"
# It takes an adapter's name off a key: two items with one key, of which one gets the other's rows.
BAD = GOOD.replace("pass", "def path(self, key):\n        return super().path(key.rpartition(':')[2])")


@pytest.mark.needs_vllm
def test_a_regression_planted_between_two_nights_is_all_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: the connector is a vLLM connector")
    # The verb listens for SIGTERM, which the tests' own process goes on to need.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv(
        "PYTHONPATH", ":".join(map(str, (tmp_path, Path(__file__).parent, PLANTED, Path(cli.__file__).parents[1])))
    )
    history = tmp_path / "history.db"

    def nightly(connector: str, out: Path) -> tuple[int, str]:
        (tmp_path / "night_store.py").write_text(connector, encoding="utf-8")
        words = ["--subject", "night_subject:Night", "--profile", "contract", "--level", "core", "--examples", "0"]
        monkeypatch.setattr(
            "sys.argv", ["epd-conformance", "nightly", *words, "--history", str(history), "--out", str(out)]
        )
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    code, shown = nightly(GOOD, tmp_path / "first")
    assert code == 0, shown
    assert "* " not in shown
    code, shown = nightly(BAD, tmp_path / "second")
    assert code == 1, shown
    (line,) = [line for line in shown.splitlines() if line.startswith("* ")]
    assert line.startswith(f"* `{CELL}` (connector, fails each time since ")
    assert "another item's rows" in line
    assert "**Regressions since the last green night: 1**" in shown
    (profile,) = json.loads((tmp_path / "second" / "summary.json").read_text())["profiles"]
    assert profile["sinceGreen"]["counts"] == {"new-fail": 1, "unchanged": profile["run"]["counts"]["pass"]}
    with History(history) as stored:
        first, second = stored.runs()
    assert (first.green, second.green) == (True, False)
    assert first.inputs == second.inputs, "nothing that the subject says of itself gives the change away"
