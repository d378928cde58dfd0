"""docs/subjects.md tells every feature by its description, as the enum does."""

from __future__ import annotations

from pathlib import Path

from epd_conformance.features import Feature


def test_every_feature_is_told_by_its_description() -> None:
    page = (Path(__file__).parents[2] / "docs" / "subjects.md").read_text(encoding="utf-8")
    assert [feature for feature in Feature if f"| `{feature}` | {feature.description} |" not in page] == []
