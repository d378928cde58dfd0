"""Which cells a run has, what they draw, and what is written of them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import run_fakes
from run_fakes import Call

from epd_conformance import run as runs
from epd_conformance.bench.result import Measurement
from epd_conformance.catalogue import parse_cell_id
from epd_conformance.connectors import names
from epd_conformance.errors import UsageError
from epd_conformance.live.case import plan_of
from epd_conformance.live.session import PlannedCell, write_evidence
from epd_conformance.plans.plan import Plan
from epd_conformance.run import Options, Run, attention_backends, fresh_folder, model_label, suite_digest
from epd_conformance.topology.launcher import Boot

CELL = "EPD-TOK-002[e-pd/tiny-qwen2.5-vl/img1]"


@pytest.fixture
def planned(command: Call, monkeypatch: pytest.MonkeyPatch) -> list[PlannedCell]:
    """The cells of all profiles, as the suites declare them."""
    seen: list[PlannedCell] = []
    cells_of = Run.cells_of

    def keep(run: Run, *of: object) -> list[PlannedCell]:
        found = cells_of(run, *of)  # type: ignore[arg-type]
        seen.extend(found)
        return found

    monkeypatch.setattr(Run, "cells_of", keep)
    assert command("list", "--cells").code == 0
    return seen


def drawn(cells: list[PlannedCell], seed: int) -> dict[str, Plan]:
    return {cell.id: plan_of(cell.case, seed, cell.id) for cell in cells}


def test_plans_depend_on_the_seed_and_on_nothing_else(planned: list[PlannedCell]) -> None:
    assert drawn(planned, 7) == drawn(list(reversed(planned)), 7)
    for name, plan in drawn(planned, 7).items():
        assert not plan.requests or drawn(planned, 8)[name] != plan, name


def test_two_cells_never_share_an_image_or_words(planned: list[PlannedCell]) -> None:
    used = Counter[str]()
    for seed in (0, 1):
        for plan in drawn(planned, seed).values():
            requests = (*plan.requests, *plan.contrasts)
            images = {json.dumps(image.to_json()) for request in requests for image in request.images}
            # The words that a request opens with, where they are drawn.
            words = {str(part) for request in requests for part in request.messages[0].parts if "equest " in str(part)}
            used.update(images | words)
    assert len(used) > 200
    assert used.most_common(1)[0][1] == 1


def test_the_seed_of_the_command_line_reaches_the_run(fake_run: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = []
    stage = run_fakes.FakeSession.stage

    def spy(session: run_fakes.FakeSession, topology: str) -> Any:
        seeds.append(session.run_.options.seed)
        return stage(session, topology)

    monkeypatch.setattr(run_fakes.FakeSession, "stage", spy)
    ended = fake_run(None, "--seed", 5, "--cell", CELL)
    assert seeds == [5]
    assert ended.report is not None
    assert ended.report["run"]["seed"] == 5
    assert "--seed 5" in fake_run({"TOK-002": "fail"}, "--seed", 5).cells[CELL]["reproduce"]


def test_a_selection_leaves_the_expected_set_alone(fake_run: Call) -> None:
    everything = fake_run()
    for words in (("--cell", CELL), ("-k", "one_image")):
        ended = fake_run(None, *words)
        assert ended.code == 3
        assert set(ended.verdicts) == set(everything.verdicts)
        assert [name for name, verdict in ended.verdicts.items() if verdict == "pass"] == [CELL]


def test_the_core_is_a_part(fake_run: Call) -> None:
    core, full = fake_run(None, "--level", "core"), fake_run()
    assert core.code == 0
    assert set(core.verdicts) < set(full.verdicts)


def test_certify_runs_everything(fake_run: Call) -> None:
    ended = fake_run(None, "--mode", "certify", "--profile", "all")
    assert ended.code == 0
    assert ended.report is not None
    assert ended.report["run"]["mode"] == "certify"
    assert {parse_cell_id(name)[1] for name in ended.cells} == {"aggregated", "e-pd", "e-p-d"}


def test_sizes(fake_run: Call) -> None:
    ended = fake_run({"TOK-002": "fail"}, "--profile", "2e-1pd")
    assert ended.code == 1
    assert {parse_cell_id(name)[1] for name in ended.cells} == {"2e-1pd"}
    assert "--profile 2e-1pd" in ended.cells["EPD-TOK-002[2e-1pd/tiny-qwen2.5-vl/img1]"]["reproduce"]


# -- labels and ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("tiny-qwen2.5-vl", "tiny-qwen2.5-vl"),
        ("Qwen/Qwen2.5-VL-3B", "Qwen~Qwen2.5-VL-3B"),
        ("od[d]", "od-d-"),
        ("a/b", "a~b"),
        ("with spaces\n", "with-spaces-"),
    ],
)
def test_a_label_fits_into_an_id(model: str, label: str) -> None:
    assert model_label(model) == label
    assert parse_cell_id(f"EPD-TOK-002[e-pd/{label}/img1]")[2] == label


def test_a_folder_is_called_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my [odd] model").mkdir()
    assert model_label(str(tmp_path / "my [odd] model")) == "my--odd--model"
    monkeypatch.chdir(tmp_path / "my [odd] model")
    assert model_label(".") == "my--odd--model"


def test_a_run_of_an_oddly_named_model(fake_run: Call, tmp_path: Path) -> None:
    folder = tmp_path / "od[d] model"
    folder.mkdir()
    ended = fake_run({"TOK-002": "fail"}, "--model", folder)
    assert ended.code == 1
    cell = ended.cells["EPD-TOK-002[e-pd/od-d--model/img1]"]
    assert f"--model '{folder}'" in cell["reproduce"]
    assert "'EPD-TOK-002[e-pd/od-d--model/img1]'" in cell["reproduce"]


def test_evidence_files_never_collide(tmp_path: Path) -> None:
    cells = [
        f"EPD-TOK-002[e-pd/{model}/{case}]"
        for model in ("a", "a~b", "a_b", "a-b", "a.b", "a b", "a%5fb", "ä")
        for case in ("x", "b_x", "x_y", "x~y", "x-y", "x y", "x=y", "x%20y")
    ]
    good = run_fakes.passing("equality")
    paths = [write_evidence(tmp_path, replace(good, cell=cell)) for cell in cells]
    assert len(set(paths)) == len(cells)
    assert [json.loads(path.read_text())["cell"] for path in paths] == cells
    assert {path.parent for path in paths} == {tmp_path / "cells"}
    plain = write_evidence(tmp_path, replace(good, cell=CELL))
    assert plain.name == "EPD-TOK-002_e-pd_tiny-qwen2.5-vl_img1.json"


# -- options and parts of the report -----------------------------------------------------------------------------------


def test_how_servers_start() -> None:
    assert Options("s").how() is Boot.FORK
    assert Options("s", device="cuda").how() is Boot.PLAIN
    assert Options("s", boot="plain").how() is Boot.PLAIN
    for wrong in (Options("s", device="tpu"), Options("s", boot="nonsense")):
        with pytest.raises(UsageError, match=r"nonsense|tpu"):
            wrong.how()


def test_topologies_of_a_profile() -> None:
    assert Options("s", profile="all").topologies() == ("aggregated", "e-pd", "e-p-d")
    assert Options("s", profile="2e-1pd").topologies() == ("2e-1pd",)
    assert Options("s", profile="1e-1pd").topologies() == ("e-pd",)


def test_a_folder_is_made_up_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = fresh_folder(None, "my.module:Class"), fresh_folder(None, "my.module:Class")
    assert first.parent == second.parent == tmp_path / "runs"
    assert first != second
    assert "my.module-Class" in first.name


def test_attention_backends_are_read_from_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert attention_backends(log) == set()
    log.write_text(
        "INFO Using FLASH_ATTN attention backend out of potential backends\n"
        "INFO Using AttentionBackendEnum.TORCH_SDPA for MMEncoderAttention\n"
        "INFO Using something else\n"
    )
    assert attention_backends(log) == {"FLASH_ATTN", "TORCH_SDPA (vit)"}


def test_the_suite_digest_sees_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suites = tmp_path / "suites"
    suites.mkdir()
    monkeypatch.setattr(runs, "suites_folder", lambda: suites)
    seen = {suite_digest()}
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", "2")):
        (suites / name).write_text(text)
        seen.add(suite_digest())
    assert len(seen) == 4
    assert all(digest.startswith("sha256:") and len(digest) == 71 for digest in seen)


def test_names_ask_for_the_recorded_form() -> None:
    assert names.ec_name("C", "pkg.module") == "Recording:pkg.module:C"
    assert names.ec_name("C", None) == "Recording::C"
    assert names.kv_name("C", "pkg.module") == "RecordingKV:pkg.module:C"
    assert names.kv_name("C", None) == "RecordingKV::C"


# -- benchmarks --------------------------------------------------------------------------------------------------------


def test_a_measurement_is_made_of_medians() -> None:
    found = Measurement.of("n", [3.0, 1.0, 2.0], "s", baseline=[8.0, 4.0, 100.0], goal="<= 2 s", limit=2.0)
    assert (found.value, found.least, found.most, found.baseline, found.ratio, found.met) == (2, 1, 3, 8, 0.25, True)
    assert found.cells() == ("n", "2 (1-3)", "s", "8", "0.250", "<= 2 s", "yes")
    assert set(found.to_json()) >= {"name", "value", "unit", "baseline", "ratio", "goal", "met"}


def test_a_goal_may_be_missed_or_absent() -> None:
    missed = Measurement.of("n", [2.00001], "s", limit=2.0)
    assert missed.met is False
    assert missed.cells()[-1] == "NO"
    bare = Measurement.of("n", [2.0], "s")
    assert (bare.baseline, bare.ratio, bare.met) == (None, None, None)
    assert bare.cells() == ("n", "2", "s", "", "", "", "")
    assert Measurement.of("n", [2.0], "s", baseline=[0.0]).ratio is None, "nothing is a multiple of nothing"


def test_nothing_in_the_environment_names_the_cell(fake_run: Call) -> None:
    """Servers inherit it, and the subject's own code runs in this process."""
    ended = fake_run({"stage e-pd": "look for the test", "TOK-002": "look for the test"})
    assert ended.code == 0, ended.err
