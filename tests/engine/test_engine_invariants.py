"""docs/engine.md says which requirements ask for which rule of the interface; the catalogue knows."""

from __future__ import annotations

import re
from pathlib import Path

from epd_conformance import catalogue

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
ROW = re.compile(r"^\| (I\d+) \| .+ \| (.+) \|$", re.MULTILINE)


def test_the_page_has_every_rule_and_its_requirements() -> None:
    known: dict[str, list[str]] = {}
    for item in catalogue.load():
        for rule in item.covers:
            if re.fullmatch(r"I\d+", rule):
                known.setdefault(rule, []).append(item.id)
    shown = {rule: found.split(", ") for rule, found in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    assert shown == {rule: sorted(found) for rule, found in known.items()}
    assert list(shown) == [f"I{number}" for number in range(1, 26)]
