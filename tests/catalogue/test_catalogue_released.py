"""A released id keeps its meaning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from epd_conformance.catalogue import Catalogue, Requirement, Status, broken_releases, load, meaning, release
from epd_conformance.catalogue.released import released
from epd_conformance.errors import UsageError


def changed(requirement_id: str, **changes: object) -> Catalogue:
    return Catalogue(
        [
            Requirement.model_validate(item.model_dump() | (changes if item.id == requirement_id else {}))
            for item in load()
        ]
    )


def test_no_released_id_vanished_or_changed_its_meaning() -> None:
    assert broken_releases(load(), released()) == []


def test_every_active_id_is_released() -> None:
    active = {item.id for item in load() if item.status is Status.ACTIVE}
    assert active - set(released()) == set(), "run `python -m epd_conformance.catalogue` and commit what it writes"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"owner": "proxy"}, "give the new meaning a new id"),
        ({"level": "MAY", "sentence": "Text MAY be equal."}, "give the new meaning a new id"),
        ({"sentence": "The token ids MUST be similar."}, "give the new meaning a new id"),
        ({"status": "planned"}, "is planned again"),
    ],
)
def test_each_change_is_found_and_says_what_to_do(changes: dict[str, object], words: str) -> None:
    (message,) = broken_releases(changed("EPD-TOK-001", **changes), released())
    assert message.startswith("EPD-TOK-001 was released")
    assert words in message


def test_a_vanished_id_is_found() -> None:
    rest = Catalogue([item for item in load() if item.id != "EPD-TOK-001"])
    assert [line.split()[0] for line in broken_releases(rest, released())] == ["EPD-TOK-001"]


@pytest.mark.parametrize("changes", [{"rationale": "For another reason."}, {"title": "words"}, {"covers": ("I2",)}])
def test_everything_else_may_be_mended(changes: dict[str, object]) -> None:
    assert broken_releases(changed("EPD-TOK-001", **changes), released()) == []


class TestRelease:
    def test_adds_and_never_changes(self, tmp_path: Path) -> None:
        path = tmp_path / "released.json"
        path.write_text(json.dumps({"EPD-TOK-001": meaning(load()["EPD-TOK-001"])}))
        added = release(load(), path)
        assert "EPD-TOK-002" in added
        assert "EPD-TOK-001" not in added
        assert {name for name in released(path) if load()[name].status is Status.PLANNED} == set()
        before = path.read_text()
        assert release(load(), path) == []
        assert path.read_text() == before

    def test_refuses_a_changed_meaning_and_writes_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / "released.json"
        path.write_text(json.dumps({"EPD-TOK-001": "0" * 64}))
        with pytest.raises(UsageError, match="EPD-TOK-001 was released with another level, owner or sentence"):
            release(load(), path)
        assert released(path) == {"EPD-TOK-001": "0" * 64}
