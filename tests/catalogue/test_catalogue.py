"""The catalogue that is shipped, the loader's refusals, and the expected set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epd_conformance.catalogue import (
    Catalogue,
    ConformanceLevel,
    EnvironmentClass,
    ExpectedCell,
    Layer,
    Requirement,
    Status,
    cell_id,
    load,
    parse_cell_id,
)
from epd_conformance.errors import UsageError
from epd_conformance.features import DESCRIPTIONS, FEATURE_OF_TOPOLOGY, Feature
from epd_conformance.verdict import Owner

CPU = EnvironmentClass.CPU_V1
ENTRY = """
[[requirement]]
id = "EPD-TOK-001"
title = "text only"
level = "MUST"
owner = "engine"
status = "active"
sentence = "The ids MUST be equal."
rationale = "Because."
source = "somewhere"
since = "0.1"
topologies = ["e-pd", "e-p-d"]
layer = "live"
conformance = "core"
"""


def write(folder: Path, text: str = ENTRY, name: str = "tok.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def make(requirement_id: str, **changes: object) -> Requirement:
    values: dict[str, object] = {
        "id": requirement_id,
        "title": "a title",
        "level": "MUST",
        "owner": "connector",
        "status": "active",
        "sentence": "It MUST hold.",
        "rationale": "Because.",
        "source": "somewhere",
        "since": "0.1",
        "topologies": ("e-pd",),
        "layer": "live",
        "conformance": "core",
    }
    return Requirement.model_validate(values | changes)


class TestShipped:
    def test_loads_and_every_owner_has_something_to_show(self) -> None:
        catalogue = load()
        assert {item.owner for item in catalogue} == set(Owner)
        assert {"INIT", "ROLE", "XFER", "TOK", "PROXY", "KV"} <= set(catalogue.areas)

    def test_core_cells_of_both_topologies_cover_every_owner(self) -> None:
        """An owner without a MUST cell can never be conformant, whatever the run shows."""
        chosen = load().select(
            topologies=["e-pd", "e-p-d"],
            environment=CPU,
            features=[Feature.KV_DISAGGREGATION],
            level=ConformanceLevel.CORE,
        )
        for topology in ("e-pd", "e-p-d"):
            assert {item.owner for item, kind in chosen.pairs if kind == topology} == set(Owner)

    def test_titles_tell_requirements_apart(self) -> None:
        titles = [item.title for item in load()]
        assert len(set(titles)) == len(titles)

    def test_says_nothing_about_the_machine_it_was_written_on(self) -> None:
        text = " ".join(f"{item.sentence} {item.rationale} {item.source}" for item in load())
        assert not re.search(r"(^|\s)/(root|home|tmp|work|opt)\b", text)

    def test_every_feature_is_described(self) -> None:
        assert set(DESCRIPTIONS) == set(Feature)
        assert len(set(DESCRIPTIONS.values())) == len(Feature)
        assert all(feature.description.endswith(".") for feature in Feature)


class TestLoader:
    def test_reads_a_file(self, tmp_path: Path) -> None:
        item = load(write(tmp_path))["EPD-TOK-001"]
        assert (item.area, item.status, item.environments) == ("TOK", Status.ACTIVE, tuple(EnvironmentClass))

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            (
                'owner = "engine"',
                'owner = "engine"\nowners = 1',
                "tok.toml: EPD-TOK-001: `owners`: Extra inputs",
            ),
            ('owner = "engine"', 'owner = "nobody"', "`owner`"),
            ('id = "EPD-TOK-001"', 'id = "EPD-TOK-1"', "tok.toml: EPD-TOK-1: `id`"),
            ('id = "EPD-TOK-001"', 'id = "EPD-KEY-001"', "EPD-KEY-001 belongs into key.toml"),
            ("MUST be equal", "SHOULD be equal", "level is MUST, but the sentence says SHOULD"),
            ("MUST be equal", "are equal", "none of MUST, SHOULD, MAY"),
            ("MUST be equal", "MUST be equal and MAY be long", "the sentence says MAY and MUST"),
            ("be equal.", "be equal. Always.", "not one sentence"),
            ("be equal.", "be equal", "not one sentence"),
            ('rationale = "Because."\n', "", "`rationale`: Field required"),
            ('"e-pd", "e-p-d"', '"e-pd", "e-pd"', "`topologies` names something twice"),
            ('"e-pd", "e-p-d"', '"pd-e"', "`topologies.0`"),
            ('"e-pd", "e-p-d"', "", "`topologies`"),
            ('since = "0.1"', 'features = ["magic"]\nsince = "0.1"', "`features.0`"),
            ("[[requirement]]", "[[requirements]]", "unknown key `requirements`"),
            ("[[requirement]]", "[[requirement", "not valid TOML"),
        ],
    )
    def test_refuses_by_file_and_id(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        assert old in ENTRY
        with pytest.raises(UsageError, match=re.escape(message)) as caught:
            load(write(tmp_path, ENTRY.replace(old, new)))
        assert str(caught.value).startswith("tok.toml")
        assert "\n" not in str(caught.value)

    def test_refuses_an_id_twice(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=r"tok\.toml: EPD-TOK-001 is defined twice"):
            load(write(tmp_path, ENTRY + ENTRY))

    @pytest.mark.parametrize("text", ["", "# nothing\n", "requirement = []\n", "requirement = 3\n"])
    def test_refuses_a_file_without_requirements(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(UsageError, match=r"tok\.toml holds no \[\[requirement\]\]"):
            load(write(tmp_path, text))

    def test_refuses_an_empty_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="holds no requirements"):
            load(tmp_path)

    def test_refuses_an_unknown_id(self) -> None:
        with pytest.raises(UsageError, match="no requirement EPD-TOK-999"):
            load()["EPD-TOK-999"]


class TestDigest:
    def test_depends_on_content_alone(self, tmp_path: Path) -> None:
        one = make("EPD-TOK-001")
        two = make("EPD-TOK-002")
        assert Catalogue([one, two]).digest() == Catalogue([two, one]).digest()
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", load().digest())

    @pytest.mark.parametrize(
        "changes", [{"sentence": "It MUST not hold."}, {"owner": "engine"}, {"conformance": "full"}]
    )
    def test_changes_with_any_meaning(self, changes: dict[str, object]) -> None:
        before = Catalogue([make("EPD-TOK-001")]).digest()
        assert Catalogue([make("EPD-TOK-001", **changes)]).digest() != before


class TestSelect:
    catalogue = Catalogue(
        [
            make("EPD-TOK-001", topologies=("e-pd", "e-p-d")),
            make("EPD-TOK-002", status="planned"),
            make("EPD-TOK-003", environments=("cuda",)),
            make("EPD-TOK-004", features=("lora", "stats")),
            make("EPD-TOK-005", conformance="full"),
            make("EPD-TOK-006", layer="contract", topologies=("contract",)),
            make("EPD-TOK-007", topologies=("aggregated",)),
        ]
    )

    def test_everything_else_is_named_and_why(self) -> None:
        chosen = self.catalogue.select(topologies=["e-pd", "e-p-d"], environment=CPU, features=[Feature.STATS])
        assert [(item.id[-3:], kind) for item, kind in chosen.pairs] == [
            ("001", "e-pd"),
            ("005", "e-pd"),
        ]
        gaps = {(gap.kind, gap.requirement[-3:]): gap.detail for gap in chosen.not_verified}
        assert set(gaps) == {
            ("feature", "001"),
            ("planned", "002"),
            ("environment", "003"),
            ("feature", "004"),
        }
        assert gaps["feature", "004"] == "e-pd: the subject does not declare lora"
        assert FEATURE_OF_TOPOLOGY["e-p-d"] in gaps["feature", "001"]

    def test_declared_features_open_topologies_and_requirements(self) -> None:
        chosen = self.catalogue.select(topologies=["e-pd", "e-p-d"], environment=CPU, features=list(Feature))
        assert ("EPD-TOK-001", "e-p-d") in chosen
        assert ("EPD-TOK-004", "e-pd") in chosen

    def test_a_layer_without_servers_is_asked_for_like_a_topology(self) -> None:
        chosen = self.catalogue.select(topologies=["contract"], environment=CPU)
        assert [(item.id, kind) for item, kind in chosen.pairs] == [("EPD-TOK-006", "contract")]

    @pytest.mark.parametrize(
        ("layer", "topologies"),
        [
            ("contract", ("e-pd",)),
            ("contract", ("contract", "e-pd")),
            ("scheduler", ("contract",)),
            ("live", ("contract",)),
        ],
    )
    def test_layer_and_topologies_fit_together(self, layer: str, topologies: tuple[str, ...]) -> None:
        with pytest.raises(ValueError, match="`topologies` must name"):
            make("EPD-TOK-001", layer=layer, topologies=topologies)
        assert make("EPD-TOK-001", layer="live", topologies=("contract", "e-pd")).layer is Layer.LIVE

    def test_level_and_layer(self) -> None:
        core = self.catalogue.select(
            topologies=["e-pd"], environment=CPU, level=ConformanceLevel.CORE, layers=[Layer.LIVE]
        )
        assert [item.id for item, _ in core.pairs] == ["EPD-TOK-001"]

    def test_environment_class_decides(self) -> None:
        cuda = self.catalogue.select(topologies=["e-pd"], environment=EnvironmentClass.CUDA)
        assert ("EPD-TOK-003", "e-pd") in cuda

    def test_expected_set_keeps_holes_and_drops_what_was_not_asked_for(self) -> None:
        chosen = self.catalogue.select(topologies=["e-pd"], environment=CPU, layers=[Layer.LIVE])
        expected = chosen.expected(
            [
                ExpectedCell("EPD-TOK-001", "e-pd", "tiny", "one"),
                ExpectedCell("EPD-TOK-001", "2e-1pd", "tiny", "one"),
                ExpectedCell("EPD-TOK-001", "e-p-d", "tiny", "one"),
                ExpectedCell("EPD-TOK-007", "aggregated", "tiny", "one"),
            ]
        )
        assert [cell.id for cell in expected] == [
            "EPD-TOK-001[2e-1pd/tiny/one]",
            "EPD-TOK-001[e-pd/tiny/one]",
            "EPD-TOK-005[e-pd]",
        ]


class TestCellId:
    @pytest.mark.parametrize(
        "text", ["EPD-XFER-003[e-pd/qwen2.5-vl/img2]", "EPD-XFER-003[e-pd]", "EPD-XFER-003[2e-1pd/m]"]
    )
    def test_there_and_back(self, text: str) -> None:
        assert cell_id(*parse_cell_id(text)) == text

    @pytest.mark.parametrize(
        "parts",
        [
            ("e-pd", "org/model", "x"),
            ("e-pd", "", "x"),
            ("", "", ""),
            ("e-pd", "m[1]", "x"),
            ("e-pd", "m", "a\n"),
        ],
    )
    def test_refuses_what_could_not_be_taken_apart(self, parts: tuple[str, str, str]) -> None:
        with pytest.raises(UsageError, match="no cell id"):
            cell_id("EPD-TOK-001", *parts)

    @pytest.mark.parametrize("text", ["", "EPD-TOK-001", "EPD-TOK-001[]", "EPD-TOK-001[a//b]", "x[e-pd]"])
    def test_refuses_other_text(self, text: str) -> None:
        with pytest.raises(UsageError, match="no cell id"):
            parse_cell_id(text)
