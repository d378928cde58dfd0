"""The page of requirements is what the catalogue says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epd_conformance.catalogue import Catalogue, labels, load, not_testable
from epd_conformance.catalogue.__main__ import main
from epd_conformance.catalogue.page import PAGE, render
from epd_conformance.catalogue.released import RELEASED


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "docs/requirements.md is not what the catalogue says: run `python -m epd_conformance.catalogue`"
    )


def test_it_changes_with_each_part() -> None:
    page = render()
    fewer = Catalogue([item for item in load() if item.id != "EPD-XFER-001"])
    assert "### EPD-XFER-001 " in page
    assert "### EPD-XFER-001 " not in render(fewer)
    assert not_testable()[0].statement not in render(untestable=not_testable()[1:])
    assert "| I1 |" not in render(explained={name: text for name, text in labels().items() if name != "I1"})


def test_everything_is_on_it_once() -> None:
    page = render()
    headings = re.findall(r"^### (EPD-\S+)", page, re.MULTILINE)
    assert sorted(headings) == [item.id for item in load()]
    assert all(f"\n{item.sentence}\n" in page for item in load())


def test_no_cell_of_a_table_breaks_it() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", render(), re.MULTILINE)
    assert len(tables) == 5
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1


class TestCommand:
    def test_writes_page_and_ids(self, tmp_path: Path) -> None:
        """Into another folder: a test that mended the checkout would hide what the tests above are for."""
        ids = tmp_path / "released.json"
        assert main(tmp_path / "requirements.md", ids) == 0
        assert (tmp_path / "requirements.md").read_text(encoding="utf-8") == render()
        assert ids.read_text() == RELEASED.read_text()

    def test_outside_a_checkout(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(tmp_path / "docs" / "requirements.md", tmp_path / "released.json") == 2
        assert "written in a checkout only" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    def test_a_changed_meaning_stops_it(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "released.json").write_text('{"EPD-TOK-001": "0"}')
        assert main(tmp_path / "requirements.md", tmp_path / "released.json") == 2
        assert capsys.readouterr().err.startswith("EPD-TOK-001 was released with another level, owner or sentence")
        assert not (tmp_path / "requirements.md").exists()
