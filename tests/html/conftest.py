"""Fixtures: the folder of a made run, and its page."""

from __future__ import annotations

from pathlib import Path

import made_page
import pytest

from epd_conformance.report.html import Page, read_page, render


@pytest.fixture(scope="session")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    made_page.write(folder)
    return folder


@pytest.fixture(scope="session")
def page(failing: Path) -> Page:
    return read_page(failing)


@pytest.fixture(scope="session")
def text(page: Page) -> str:
    return render(page)
