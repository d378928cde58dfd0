"""What the directed checks told, judged: what was not brought about is not exercised."""

from __future__ import annotations

import pytest

from epd_conformance.engine import measured


@pytest.mark.parametrize("offline", [True, False])
def test_an_import_with_the_network_at_hand_shows_nothing_about_one_without(offline: bool) -> None:
    told = {"asked": True, "error": "", "opened": [], "offline": offline}
    assert measured.exercised("EPD-INIT-002", told) is offline
    assert [one.kind for one in measured.findings("EPD-INIT-002", {**told, "error": "x"})] == [
        "import or metrics raised"
    ]
