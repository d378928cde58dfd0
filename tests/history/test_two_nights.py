"""Two nights with a real connector whose code is broken in between: the night says exactly that."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from epd_conformance import cli
from epd_conformance.engine import session
from epd_conformance.engine.hosted import Host
from epd_conformance.errors import UsageError
from epd_conformance.history import nightly, summary
from epd_conformance.history.database import History
from epd_conformance.history.night import Night

HERE = Path(__file__).parent
CELL = "EPD-KEY-003[contract/tiny-qwen2.5-vl/plans]"
GOOD = "from planted_engine import PlainStore\n\nclass NightStore(PlainStore):\n    pass\n"
# It takes an adapter's name off a key: two items with one key, of which one gets the other's rows.
BAD = GOOD.replace("pass", "def path(self, key):\n        return super().path(key.rpartition(':')[2])")


class Lent:
    """One host for both nights: importing vLLM takes longer than all plans. Its children, and so the connector, are new ones."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.carry, self.call = host.carry, host.call

    def __call__(self, subject: str, **settings: Any) -> Lent:
        assert subject == self.host.subject
        return self

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.host.recycle()


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: the connector is a vLLM connector")
    paths = [str(tmp_path), str(HERE), str(HERE.parent / "engine")]
    try:
        with Host("night_subject:Night", paths=paths) as host:
            monkeypatch.setattr(session, "Host", Lent(host))
            yield
    except UsageError as error:
        pytest.skip(str(error))


@pytest.mark.needs_vllm
@pytest.mark.usefixtures("lent")
def test_a_regression_planted_between_two_nights_is_all_that_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = tmp_path / "history.db"
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)

    def start(words: Sequence[str], log: Path, limit_s: float) -> nightly.Ended:
        verb, *options = words
        assert verb == "run"
        return nightly.Ended(cli._pytest(options).code)

    def night(connector: str, name: str) -> tuple[Night, str]:
        (tmp_path / "night_store.py").write_text(connector, encoding="utf-8")
        asked = nightly.Asked("night_subject:Night", history, tmp_path / name, ["contract"], level="core", examples=0)
        found = nightly.nightly(asked, print, start)
        return found, summary.markdown(found)

    found, shown = night(GOOD, "first")
    assert found.code == 0, shown
    assert "* " not in shown
    found, shown = night(BAD, "second")
    assert found.code == 1, shown
    (line,) = [line for line in shown.splitlines() if line.startswith("* ")]
    assert line.startswith(f"* `{CELL}` (connector, fails each time since ")
    assert "another item's rows" in line
    assert "**Regressions since the last green night: 1**" in shown
    (profile,) = json.loads((tmp_path / "second" / "summary.json").read_text(encoding="utf-8"))["profiles"]
    assert profile["sinceGreen"]["counts"] == {"new-fail": 1, "unchanged": profile["run"]["counts"]["pass"]}
    page = (tmp_path / "second" / "contract" / "report.html").read_text(encoding="utf-8")
    assert "Trend over 2 runs" in page and CELL in page and "another item" in page
    with History(history) as stored:
        first, second = stored.runs()
    assert (first.green, second.green) == (True, False)
    assert first.inputs == second.inputs, "nothing that the subject says of itself gives the change away"
