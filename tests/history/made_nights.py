"""Made reports of made nights, for the tests of the history: `night(3, {"EPD-TOK-002 img1": "fail"})`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from epd_conformance.catalogue import load
from epd_conformance.report.schema import (
    CellRecord,
    EnvironmentInfo,
    ExpectedRecord,
    ExpectedSet,
    ImplementationInfo,
    KnownDeviation,
    ModelInfo,
    Report,
    RunEnd,
    RunInfo,
    RunStart,
    SubjectInfo,
    SuiteInfo,
)
from epd_conformance.report.writer import RESULTS_NAME, ResultsLog, build_report, read_results, write_report

CATALOGUE = load()
FIRST = datetime(2026, 3, 1, 2, 0, tzinfo=UTC)
CELL = "EPD-TOK-002[e-pd/tiny/img1]"
GOOD = {"EPD-TOK-002 img1": "pass", "EPD-TOK-003 img2": "pass", "EPD-XFER-001 img1": "pass"}


def write(
    folder: Path,
    day: int,
    cells: dict[str, str],
    *,
    profile: str = "e-pd",
    run_id: str = "",
    ended: bool = True,
    interrupted: bool = False,
    vllm: str = "0.32.0",
    config: str = "",
    known: tuple[KnownDeviation, ...] = (),
) -> None:
    """The results of a run on a day, without its report. `cells`: `{"EPD-TOK-002 img1": "fail"}`; "" is a cell that did not run."""
    folder.mkdir(parents=True)
    started = FIRST + timedelta(days=day)
    places: dict[str, dict[str, Any]] = {}
    for name in cells:
        requirement, case = name.split()
        place = {"requirement": requirement, "topology": "e-pd", "model": "tiny", "case": case}
        places[name] = {"id": f"{requirement}[e-pd/tiny/{case}]", **place}
    with ResultsLog(folder / RESULTS_NAME) as log:
        log.append(
            RunStart(
                suite=SuiteInfo(version="0.1.0", digest="sha256:" + "a" * 64, catalogue=CATALOGUE.digest()),
                run=RunInfo(
                    id=run_id or f"{profile}-{day}",
                    mode="develop",
                    profile=profile,
                    level="full",
                    seed=0,
                    command=(),
                    started=started,
                ),
                subject=SubjectInfo(name="mine", implementation=ImplementationInfo(version="1")),
                environment_class="cpu-v1",
                known_deviations=known,
            )
        )
        log.append(EnvironmentInfo(vllm_version=vllm, models=(ModelInfo(id="tiny", digest="d" * 64),), torch=config))
        log.append(ExpectedSet(cells=tuple(ExpectedRecord(**place) for place in places.values())))
        for name, verdict in cells.items():
            if verdict:
                # As the run does it: a list makes `known-failing` of a failure.
                excused = {"known-failing": "fail"}.get(verdict)
                reason, observed = ("", "") if verdict == "pass" else ("tokens-differ", "token ids\n[44, 218 `x`]")
                log.append(
                    CellRecord(
                        **places[name],
                        verdict=verdict,
                        excused=excused,
                        excused_by=(0,) if excused else (),
                        reason=reason,
                        observed=observed,
                    )
                )
        if ended:
            log.append(RunEnd(finished=started + timedelta(minutes=5), interrupted=interrupted))


def night(folder: Path, day: int, cells: dict[str, str], **more: Any) -> Report:
    """A whole run, written into a new folder."""
    write(folder, day, cells, **more)
    return write_report(folder, build_report(read_results(folder / RESULTS_NAME), CATALOGUE))


def with_(verdict: str) -> dict[str, str]:
    """All cells pass, and one has this verdict."""
    return GOOD | {"EPD-TOK-002 img1": verdict}
