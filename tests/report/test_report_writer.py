"""Results are written as they come, survive a crash, and are all that a report is made from."""

from __future__ import annotations

import hashlib
import json
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from epd_conformance.catalogue import Catalogue, load
from epd_conformance.errors import UsageError
from epd_conformance.report.schema import (
    SCHEMA_FILE,
    CellRecord,
    ConfigurationRecord,
    EnvironmentInfo,
    Evidence,
    ExpectedRecord,
    ExpectedSet,
    FaultRecord,
    Model,
    NoiseFloor,
    NotVerifiedRecord,
    RejectedPrompt,
    Report,
    RunEnd,
    RunInfo,
    RunStart,
    SubjectInfo,
    SuiteInfo,
    WarningRecord,
    json_schema,
)
from epd_conformance.report.writer import (
    KINDS,
    REPORT_NAME,
    RESULTS_NAME,
    ResultsLog,
    build_report,
    read_report,
    read_results,
    write_report,
)
from epd_conformance.verdict import Mode, Outcome, Owner, Verdict

CATALOGUE = load()
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

# One cell for each owner: with fewer, an owner's outcome is incomplete whatever happens.
CELLS = ("EPD-XFER-001", "EPD-TOK-002", "EPD-TOK-001", "EPD-PROXY-001")


def start(catalogue: Catalogue = CATALOGUE, **run: Any) -> RunStart:
    info: dict[str, Any] = {
        "id": "r1",
        "mode": "certify",
        "profile": "e-pd",
        "level": "full",
        "seed": 7,
        "command": ["epd-conformance", "run"],
        "started": NOW,
    }
    return RunStart(
        suite=SuiteInfo(version="0.1.0", catalogue=catalogue.digest()),
        run=RunInfo.model_validate(info | run),
        subject=SubjectInfo(name="reference", features=("stats",)),
        environment_class="cpu-v1",
    )


def expected(*requirements: str) -> ExpectedSet:
    return ExpectedSet(
        cells=tuple(
            ExpectedRecord(id=f"{item}[e-pd/tiny/one]", requirement=item, topology="e-pd", model="tiny", case="one")
            for item in requirements
        )
    )


def cell(requirement: str, verdict: str = "pass", **changes: Any) -> CellRecord:
    values: dict[str, Any] = {
        "id": f"{requirement}[e-pd/tiny/one]",
        "requirement": requirement,
        "topology": "e-pd",
        "model": "tiny",
        "case": "one",
        "verdict": verdict,
    }
    return CellRecord.model_validate(values | changes)


def end(**changes: Any) -> RunEnd:
    return RunEnd(finished=NOW, **changes)


def log(folder: Path, *records: Model) -> Path:
    path = folder / RESULTS_NAME
    with ResultsLog(path) as results:
        for record in records:
            results.append(record)
    return path


def report_of(folder: Path, *records: Model) -> Report:
    return build_report(read_results(log(folder, *records)), CATALOGUE)


def whole_run(**verdicts: str) -> list[Model]:
    cells = [cell(item, verdicts.get(item.replace("-", "_"), "pass")) for item in CELLS]
    return [start(), expected(*CELLS), *cells, end()]


class TestLog:
    def test_a_line_is_on_disk_as_soon_as_it_is_written(self, tmp_path: Path) -> None:
        with ResultsLog(tmp_path / "new" / RESULTS_NAME) as results:
            results.append(start())
            line = json.loads((tmp_path / "new" / RESULTS_NAME).read_text())
        assert line["kind"] == "run"
        assert line["data"]["environmentClass"] == "cpu-v1"
        assert datetime.fromisoformat(line["time"]).utcoffset() == datetime.now(UTC).utcoffset()

    def test_every_kind_comes_back_as_it_went(self, tmp_path: Path) -> None:
        records = [
            start(),
            EnvironmentInfo(vllm_version="0.32.0", flags={"encode": ("--dtype", "float32")}),
            expected("EPD-TOK-001"),
            NoiseFloor(baseline="aggregated", model="tiny", runs=3, max_logprob_delta=0.0, admitted=("a", "b")),
            cell("EPD-TOK-001", evidence=Evidence(saves=1, digests_equal=True), artifacts=("logs",)),
            FaultRecord(kind="delete", injected=1, verified=1, met_by_victim=1),
            ConfigurationRecord(topology="e-pd", role="ec_producer", config={"ec_connector": "X"}, arguments=("--a",)),
            WarningRecord(text="told"),
            end(),
        ]
        assert {type(record) for record in records} == set(KINDS)
        lines = read_results(log(tmp_path, *records))
        assert [line.kind for line in lines] == list(KINDS.values())
        assert [lines.all(type(record)) for record in records] == [(record,) for record in records]

    def test_reopened_it_goes_on(self, tmp_path: Path) -> None:
        log(tmp_path, start())
        lines = read_results(log(tmp_path, end()))
        assert [line.kind for line in lines] == ["run", "end"]
        assert lines.torn == ()

    def test_a_torn_last_line_is_left_out_and_told(self, tmp_path: Path) -> None:
        path = log(tmp_path, start(), cell("EPD-TOK-001"))
        path.write_bytes(path.read_bytes()[:-9])
        lines = read_results(path)
        assert [line.kind for line in lines] == ["run"]
        assert lines.torn == (2,)

    def test_reopened_after_a_crash_nothing_written_later_is_lost(self, tmp_path: Path) -> None:
        path = log(tmp_path, start(), cell("EPD-TOK-001"))
        path.write_bytes(path.read_bytes()[:-9])
        lines = read_results(log(tmp_path, cell("EPD-TOK-002")))
        assert [line.kind for line in lines] == ["run", "reopened", "cell"]
        assert lines.torn == (2,)
        assert lines.all(CellRecord) == (cell("EPD-TOK-002"),)

    @pytest.mark.parametrize("damage", ["garbage", "{}", '{"kind":"cell","time":"now","data":{}}', ""])
    def test_a_bad_line_that_no_crash_explains_is_refused(self, tmp_path: Path, damage: str) -> None:
        path = log(tmp_path, start(), end())
        first, second, _ = path.read_text().split("\n")
        path.write_text("\n".join([first, damage, second, ""]))
        with pytest.raises(UsageError, match="damaged: line 2"):
            read_results(path)

    def test_a_record_that_does_not_fit_is_named(self, tmp_path: Path) -> None:
        path = log(tmp_path, start(), cell("EPD-TOK-001"))
        path.write_text(path.read_text().replace('"verdict":"pass"', '"verdict":"fine"'))
        with pytest.raises(UsageError, match=r"line 2 \(cell\): `verdict`"):
            build_report(read_results(path), CATALOGUE)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot read"):
            read_results(tmp_path / "nothing")

    def test_threads_do_not_tear_each_others_lines(self, tmp_path: Path) -> None:
        path = tmp_path / RESULTS_NAME
        with ResultsLog(path) as results, ResultsLog(path) as other:
            big = cell("EPD-TOK-001", message="x" * 20_000)
            threads = [
                threading.Thread(target=lambda log=log: [log.append(big) for _ in range(20)])
                for log in (results, other, results)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(read_results(path).all(CellRecord)) == 60

    def test_closed_twice_and_then_refused(self, tmp_path: Path) -> None:
        results = ResultsLog(tmp_path / RESULTS_NAME)
        results.close()
        results.close()
        with pytest.raises(ValueError, match="is closed"):
            results.append(end())


class TestBuild:
    def test_all_passed(self, tmp_path: Path) -> None:
        report = report_of(tmp_path, *whole_run())
        assert (report.outcome, report.engine_outcome, report.proxy_outcome) == (Outcome.CONFORMANT,) * 3
        assert report.complete
        assert not report.interrupted
        assert report.warnings == ()
        assert report.run.finished == NOW
        assert report.summary["expected"] == report.summary["executed"] == report.summary["pass"] == 4
        assert [item.id for item in report.requirements] == sorted(CELLS)
        assert report.requirements[0].sentence == CATALOGUE["EPD-PROXY-001"].sentence

    def test_a_failure_is_the_owners(self, tmp_path: Path) -> None:
        report = report_of(tmp_path, *whole_run(EPD_TOK_001="fail"))
        assert report.outcome is Outcome.CONFORMANT
        assert report.engine_outcome is Outcome.NONCONFORMANT
        assert report.certified_outcome is Outcome.CONFORMANT
        assert report.outcome_of(Owner.ENGINE) is Outcome.NONCONFORMANT

    def test_blame_moves_a_failure(self, tmp_path: Path) -> None:
        records = whole_run()
        records[3] = cell("EPD-TOK-002", "fail", blame="engine", rung="tokens")
        report = report_of(tmp_path, *records)
        assert (report.outcome, report.engine_outcome) == (Outcome.INCOMPLETE, Outcome.NONCONFORMANT)

    def test_after_a_crash_what_never_ran_could_not_run(self, tmp_path: Path) -> None:
        report = report_of(tmp_path, *whole_run()[:3])
        assert report.interrupted
        assert not report.complete
        assert (report.outcome, report.proxy_outcome) == (Outcome.INCOMPLETE, Outcome.INCOMPLETE)
        by_id = {item.id: item for item in report.requirements}
        assert by_id["EPD-XFER-001"].verdict is Verdict.PASS
        assert by_id["EPD-TOK-002"].cells[0].verdict is Verdict.COULD_NOT_RUN
        assert by_id["EPD-TOK-002"].cells[0].reason == "did not run"
        assert report.summary["could-not-run"] == 3
        assert any("did not come to its end" in warning for warning in report.warnings)

    def test_without_an_end_even_a_full_house_is_incomplete(self, tmp_path: Path) -> None:
        report = report_of(tmp_path, *whole_run()[:-1])
        assert report.outcome is Outcome.INCOMPLETE

    def test_interrupted_by_hand_keeps_the_proven_failure(self, tmp_path: Path) -> None:
        records = [*whole_run(EPD_XFER_001="fail")[:-1], end(interrupted=True, reason="Ctrl-C")]
        report = report_of(tmp_path, *records)
        assert report.outcome is Outcome.NONCONFORMANT
        assert report.interrupted
        assert "the run did not come to its end: Ctrl-C" in report.warnings

    def test_level_and_owner_come_from_the_catalogue(self, tmp_path: Path) -> None:
        """A results file cannot turn a MUST of the connector into something else: it has no word for it."""
        assert not {"level", "owner"} & (set(CellRecord.model_fields) | set(ExpectedRecord.model_fields))

    def test_the_worst_record_of_a_cell_stands_with_its_message(self, tmp_path: Path) -> None:
        records = [
            start(),
            expected(*CELLS),
            *(cell(item) for item in CELLS),
            cell("EPD-XFER-001", "fail", message="the reason"),
            cell("EPD-XFER-001"),
            end(),
        ]
        report = report_of(tmp_path, *records)
        assert report.outcome is Outcome.NONCONFORMANT
        assert report.requirements[-1].cells == (cell("EPD-XFER-001", "fail", message="the reason"),)

    def test_an_expected_cell_that_excuses_itself_is_shown_as_counted(self, tmp_path: Path) -> None:
        report = report_of(tmp_path, *whole_run(EPD_XFER_001="not-supported"))
        assert report.requirements[-1].cells[0].verdict is Verdict.COULD_NOT_RUN

    def test_a_cell_beside_the_expected_set_is_told(self, tmp_path: Path) -> None:
        records = [start(), expected(*CELLS[:-1]), *(cell(item) for item in CELLS), end()]
        report = report_of(tmp_path, *records)
        assert report.warnings == ("EPD-PROXY-001[e-pd/tiny/one] ran, but is not in the expected set",)
        assert report.proxy_outcome is Outcome.INCOMPLETE

    def test_too_few_stable_prompts_decide_nothing(self, tmp_path: Path) -> None:
        floor = NoiseFloor(
            baseline="p-d",
            model="tiny",
            runs=5,
            max_logprob_delta=0.1,
            admitted=tuple(f"p{number}" for number in range(8)),
            rejected=tuple(RejectedPrompt(prompt=f"q{number}", reason="unstable") for number in range(2)),
        )
        assert report_of(tmp_path / "a", *whole_run(), floor).outcome is Outcome.CONFORMANT
        third = RejectedPrompt(prompt="q3", reason="margin")
        for number, thin in enumerate(
            (
                floor.model_copy(update={"rejected": (*floor.rejected, third)}),
                floor.model_copy(update={"admitted": floor.admitted[:7], "rejected": ()}),
            )
        ):
            report = report_of(tmp_path / str(number), *whole_run(), thin)
            assert report.outcome is report.engine_outcome is report.proxy_outcome is Outcome.INCOMPLETE
            assert "too few to decide anything" in report.warnings[0]

    def test_faults_are_added_up_by_kind(self, tmp_path: Path) -> None:
        faults = [
            FaultRecord(kind=kind, injected=1, verified=1, met_by_victim=met)
            for kind, met in (("truncate", 1), ("delete", 0), ("truncate", 0))
        ]
        report = report_of(tmp_path, *whole_run(), *faults)
        assert report.faults == (
            FaultRecord(kind="delete", injected=1, verified=1, met_by_victim=0),
            FaultRecord(kind="truncate", injected=2, verified=2, met_by_victim=1),
        )

    def test_gaps_are_carried_over_once(self, tmp_path: Path) -> None:
        gap = NotVerifiedRecord(kind="planned", requirement="EPD-SEC-001", detail="no test yet")
        one = expected(*CELLS).model_copy(update={"not_verified": (gap,)})
        report = report_of(tmp_path, start(), one, one, end())
        assert report.not_verified == (gap,)

    def test_refuses_another_catalogue(self, tmp_path: Path) -> None:
        lines = read_results(log(tmp_path, start(Catalogue([])), end()))
        with pytest.raises(UsageError, match=r"another catalogue .* 0\.1\.0"):
            build_report(lines, CATALOGUE)

    def test_refuses_no_run_and_two_runs(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no `run` line"):
            report_of(tmp_path / "a", end())
        with pytest.raises(UsageError, match="two runs"):
            report_of(tmp_path / "b", start(), start(id="r2"), end())

    def test_refuses_a_requirement_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="EPD-NONE-001"):
            report_of(tmp_path, start(), expected("EPD-NONE-001"), end())

    def test_develop_with_a_known_failure_is_partial(self, tmp_path: Path) -> None:
        records = whole_run(EPD_XFER_001="known-failing")
        records[0] = start(mode=Mode.DEVELOP)
        assert report_of(tmp_path / "a", *records).outcome is Outcome.PARTIAL
        assert report_of(tmp_path / "b", *records[:-1]).outcome is Outcome.INCOMPLETE


class TestWrite:
    def test_report_on_disk_fits_its_schema_and_comes_back(self, tmp_path: Path) -> None:
        report = write_report(tmp_path, report_of(tmp_path, *whole_run(EPD_TOK_001="fail")))
        document = json.loads((tmp_path / REPORT_NAME).read_text())
        assert document["schema"] == "epd-conformance/report/v1"
        assert document["engineOutcome"] == "nonconformant"
        jsonschema.Draft202012Validator.check_schema(json_schema())
        jsonschema.validate(document, json_schema())
        assert read_report(tmp_path) == report

    @pytest.mark.parametrize(
        ("key", "value"), [("outcome", "fine"), ("extra", 1), ("schema", "epd-conformance/report/v2")]
    )
    def test_schema_refuses(self, tmp_path: Path, key: str, value: object) -> None:
        write_report(tmp_path, report_of(tmp_path, *whole_run()))
        path = tmp_path / REPORT_NAME
        document = json.loads(path.read_text()) | {key: value}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document, json_schema())
        path.write_text(json.dumps(document))
        with pytest.raises(UsageError, match="no report of this version"):
            read_report(tmp_path)

    def test_schema_in_the_package_is_the_models(self) -> None:
        assert json.loads(SCHEMA_FILE.read_text()) == json_schema(), (
            "run epd_conformance.report.schema.export_json_schema()"
        )

    def test_manifest_holds_results_and_named_evidence(self, tmp_path: Path) -> None:
        (tmp_path / "logs" / "a b").mkdir(parents=True)
        (tmp_path / "logs" / "a b" / "encode.log").write_bytes(b"hello")
        (tmp_path / "logs" / "link").symlink_to("/etc/hostname")
        (tmp_path / "other").write_bytes(b"not named")
        records = whole_run()
        records[2] = cell("EPD-XFER-001", artifacts=["logs", "gone"])
        report = write_report(tmp_path, report_of(tmp_path, *records))
        assert [item.path for item in report.artifacts] == ["logs/a b/encode.log", RESULTS_NAME]
        first = report.artifacts[0]
        assert (first.sha256, first.bytes) == (hashlib.sha256(b"hello").hexdigest(), 5)
        assert report.warnings == ("gone is named as evidence but is not there",)

    def test_evidence_never_lies_outside(self, tmp_path: Path) -> None:
        for path in ("/etc/hostname", "../x", "a/../../x", ""):
            with pytest.raises(ValueError, match="not a path below"):
                cell("EPD-TOK-001", artifacts=[path])
        (tmp_path / "out").symlink_to("/etc")
        records = whole_run()
        records[2] = cell("EPD-XFER-001", artifacts=["out/hostname"])
        report = write_report(tmp_path, report_of(tmp_path, *records))
        assert [item.path for item in report.artifacts] == [RESULTS_NAME]
        assert "leads out of" in report.warnings[0]

    def test_a_failed_write_leaves_the_old_report_and_no_rest(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        report = report_of(tmp_path, *whole_run())
        write_report(tmp_path, report)
        before = (tmp_path / REPORT_NAME).read_bytes()

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_report(tmp_path, report)
        assert (tmp_path / REPORT_NAME).read_bytes() == before
        assert sorted(path.name for path in tmp_path.iterdir()) == [REPORT_NAME, RESULTS_NAME]

    def test_secrets_reach_neither_file(self, tmp_path: Path) -> None:
        records = whole_run()
        records[0] = start(command=["run", "--api-key", "s3cret-1", "HF_TOKEN=s3cret-2"])
        records.insert(1, EnvironmentInfo(details={"env": {"AWS_SECRET_ACCESS_KEY": "s3cret-3"}}))
        records[3] = cell("EPD-XFER-001", message="Authorization: Bearer s3cret-4-and-more")
        write_report(tmp_path, report_of(tmp_path, *records))
        for name in (RESULTS_NAME, REPORT_NAME):
            text = (tmp_path / name).read_text()
            assert "s3cret" not in text
            assert text.count("[redacted]") == 4

    def test_secrets_that_came_by_another_way_go_too(self, tmp_path: Path) -> None:
        report = report_of(tmp_path, *whole_run())
        leaky = report.model_copy(update={"environment": EnvironmentInfo(details={"password": "s3cret"})})
        write_report(tmp_path, leaky)
        assert "s3cret" not in (tmp_path / REPORT_NAME).read_text()

    def test_a_report_read_from_nowhere(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot read"):
            read_report(tmp_path)
