"""`publish`: what is given away verifies, names no folder of this machine, and says what fails."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest
from made_run import MODEL, MadeRun, change_results, rewrite

from epd_conformance.errors import UsageError
from epd_conformance.live import suites
from epd_conformance.report import publish as publishing
from epd_conformance.report.publish import BEGIN, END, publish, table, with_table
from epd_conformance.report.verify import verify

SUITE = suites.installed()
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run here"
    MadeRun(folder, SUITE, "e-pd").write()
    return folder


def name_folders(run: Path) -> None:
    """Put folders of this machine where a run has them: into the command, and into a log that a cell names."""
    command = ["epd-conformance", f"--out={run}", f"{Path.home()}/x", f"{sys.prefix}/bin/python"]
    change_results(run, "run", lambda data: {**data, "run": {**data["run"], "command": command}})
    rewrite(run, SUITE)


def test_the_published_evidence_verifies_and_names_no_folder(run: Path, tmp_path: Path) -> None:
    name_folders(run)
    report = publish(run, tmp_path / "reports" / "one")
    with tarfile.open(tmp_path / "reports" / "one" / publishing.EVIDENCE_NAME) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    assert verify(tmp_path / "out" / "evidence").ok
    assert report.run.command == ("epd-conformance", "--out=<run>", "<home>/x", "<venv>/bin/python")
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    texts += [path.read_text() for path in (tmp_path / "reports" / "one").glob("*.[jm]*")]
    assert not [text for text in texts if str(run) in text or sys.prefix in text]


def test_names_that_only_begin_or_end_alike_stay(tmp_path: Path) -> None:
    hide = publishing._Places(tmp_path)
    home = str(Path.home())
    assert hide(f"see {home}/a") == "see <home>/a"
    for text in (f"{home}issa", f"e-pd/model{home}", "nothing here"):
        assert hide(text) == text


def test_a_run_that_does_not_verify_is_not_published(run: Path, tmp_path: Path) -> None:
    (run / "report.json").write_text((run / "report.json").read_text().replace('"pass"', '"fail"', 1))
    with pytest.raises(UsageError, match="the run does not verify"):
        publish(run, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_a_taken_folder_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "x").touch()
    with pytest.raises(UsageError, match="is not empty"):
        publish(run, tmp_path / "taken")


def test_what_cannot_be_written_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for taken in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be made"):
            publish(run, taken)


def test_a_readme_that_does_not_fit_is_refused_before_anything_is_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.md").write_text("# A project")
    for readme, words in (("plain.md", "no place for the table"), ("none.md", "cannot be read")):
        with pytest.raises(UsageError, match=words):
            publish(run, tmp_path / "reports" / "one", tmp_path / readme)
    assert not (tmp_path / "reports").exists()


def test_the_summary_says_what_fails_and_how_to_make_it_again(run: Path, tmp_path: Path) -> None:
    cell = f"EPD-TOK-002[e-pd/{MODEL}/img1]"

    def fail(data: dict) -> dict:
        return data | {"verdict": "fail", "reason": "made", "observed": "a | b"} if data["id"] == cell else data

    change_results(run, "cell", fail)
    text = publishing.readme(rewrite(run, SUITE))
    assert "| EPD-TOK-002 one image | fail | 0 of 1 passed |" in text
    assert f"| `{cell}` | fail: made | a &#124; b |" in text
    assert SUITE.catalogue["EPD-TOK-002"].sentence in text
    assert "epd-conformance run --subject reference --profile e-pd --mode" in text


def test_the_table_says_what_ran_and_what_never_did(run: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# A project\n{BEGIN}\nold\n{END}\nend\n")
    publish(run, tmp_path / "reports" / "one", readme)
    rows = {
        line.split("|")[1].strip(): line.split("|")[3:-1] for line in readme.read_text().splitlines() if "|" in line
    }
    cells = len([cell for item in publishing.read_report(run).requirements for cell in item.cells])
    assert rows["cpu-v1"] == [
        *[" never run "] * 4,
        f" [reference](reports/one): {cells} of {cells} pass ",
        " never run ",
    ]
    assert rows["cuda"] == [" never run "] * 6
    assert readme.read_text().startswith("# A project\n") and readme.read_text().endswith("\nend\n")
    assert "old" not in readme.read_text()


def test_a_readme_without_a_place_is_refused() -> None:
    with pytest.raises(UsageError, match="no place for the table"):
        with_table("# A project", "|")


def test_the_readme_of_this_project_shows_the_reports_that_lie_here() -> None:
    text = (ROOT / "README.md").read_text()
    assert with_table(text, table(ROOT / "reports", "reports")) == text
