"""Reports: the ndjson log of a run, `report.json` made from it, and what a person reads on a terminal."""

from epd_conformance.report.failure import Divergence, failure_text
from epd_conformance.report.redact import redact
from epd_conformance.report.writer import (
    ResultsLog,
    build_report,
    read_report,
    read_results,
    write_report,
)

__all__ = [
    "Divergence",
    "ResultsLog",
    "build_report",
    "failure_text",
    "read_report",
    "read_results",
    "redact",
    "write_report",
]
