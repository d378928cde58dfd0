"""Every fact that the catalogue was made from has a requirement or a reason, and every source can be found."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from epd_conformance.catalogue import NotTestable, Requirement, labels, load, not_testable
from epd_conformance.catalogue.page import AREAS, KINDS
from epd_conformance.errors import UsageError
from epd_conformance.features import FEATURE_OF_TOPOLOGY, Feature

# The numbering of public reports has holes; it is written out here so that a line lost from labels.toml is noticed.
REPORTS = [2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 16, 17, 19, 20, 21, 22, 24, 25, 27, 29, 30, 31]
REPORTS += [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 44]
ALL = {
    *(f"I{number}" for number in range(1, 26)),
    *(f"S{number}" for number in range(1, 25)),
    *(f"C{number}" for number in range(1, 63)),
    *(f"B{number:02d}" for number in REPORTS),
}


def uncovered(wanted: Collection[str], items: Iterable[Requirement | NotTestable]) -> list[str]:
    """The labels that nothing covers."""
    return sorted(set(wanted) - {label for item in items for label in item.covers})


class TestCoverage:
    def test_labels_are_complete_and_explained(self) -> None:
        assert set(labels()) == ALL
        assert all(labels().values())
        assert {label[0] for label in ALL} == set(KINDS)

    def test_every_label_has_a_requirement_or_a_reason(self) -> None:
        assert uncovered(ALL, [*load(), *not_testable()]) == []

    def test_a_lost_requirement_is_noticed(self) -> None:
        """C16 (too few rows) is answered for by one requirement only."""
        rest = [item for item in load() if "C16" not in item.covers]
        assert "C16" in uncovered(ALL, [*rest, *not_testable()])

    def test_areas_of_the_page_are_those_of_the_catalogue(self) -> None:
        assert set(load().areas) == set(AREAS)

    def test_every_feature_unlocks_something(self) -> None:
        needed = {feature for item in load() for feature in item.features} | set(FEATURE_OF_TOPOLOGY.values())
        assert needed == set(Feature)


class TestNotTestable:
    def test_names_only_requirements_that_exist(self) -> None:
        catalogue = load()
        named = [name for item in not_testable() for name in re.findall(r"EPD-[A-Z]+-\d{3}", item.instead)]
        assert len(named) > len(not_testable()) / 2
        assert [name for name in named if name not in catalogue] == []

    ENTRY = (
        '[[not_testable]]\ntitle = "a"\nstatement = "It is."\nreason = "No."\ninstead = "Nothing."\ncovers = ["I1"]\n'
    )

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('reason = "No."\n', "", "x.toml: a: `reason`: Field required"),
            ('"I1"', '"I99"', "x.toml: a: `covers` names I99, which labels.toml does not explain"),
            ('"I1"', '"nothing"', "x.toml: a: `covers.0`"),
            ('title = "a"\n', "", "x.toml: entry number 1: `title`"),
            ("[[not_testable]]", "[[requirement]]", "x.toml: unknown key `requirement`"),
        ],
    )
    def test_refuses_what_is_wrong(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        path = tmp_path / "x.toml"
        path.write_text(self.ENTRY)
        assert not_testable(path)[0].covers == ("I1",)
        assert old in self.ENTRY
        path.write_text(self.ENTRY.replace(old, new))
        with pytest.raises(UsageError, match=re.escape(message)):
            not_testable(path)

    def test_refuses_a_title_twice(self, tmp_path: Path) -> None:
        path = tmp_path / "x.toml"
        path.write_text(self.ENTRY * 2)
        with pytest.raises(UsageError, match="`a` stands in it twice"):
            not_testable(path)


def missing_sources(items: Iterable[Requirement], root: Path) -> list[str]:
    """Files of vLLM that a source names and that this vLLM does not have.

    A source is a list parted by semicolons; the part that begins with vLLM's version, and those after it without a name
    of their own, list paths in the package, each with names in it in brackets.
    """
    missing = []
    for item in items:
        for part in item.source.split("; "):
            if not part.startswith("vLLM 0.32.0: "):
                continue
            listed = re.sub(r" \([^)]*\)", "", part.removeprefix("vLLM 0.32.0: "))
            missing += [
                f"{item.id}: {path}" for path in re.findall(r"[\w/]+/[\w.]+", listed) if not (root / path).exists()
            ]
    return missing


@pytest.mark.needs_vllm
def test_sources_are_files_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    root = Path(spec.submodule_search_locations[0])
    assert missing_sources(load(), root) == []
    wrong = load()["EPD-XFER-001"].model_copy(update={"source": "vLLM 0.32.0: v1/core/sched/sheduler.py (schedule)"})
    assert missing_sources([wrong], root) == ["EPD-XFER-001: v1/core/sched/sheduler.py"]
