"""Other people's formats: JUnit for a CI's test tab, Allure for its history. Both are made from the report and never decide
anything; what did not pass is never green in either of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epd_conformance.report.schema import Report
from epd_conformance.reporters import junit

if TYPE_CHECKING:
    from epd_conformance.run import Run


def complete(run: Run, report: Report) -> None:
    """Bring what pytest's own reporters wrote in line with the report, where they were asked for."""
    if run.options.junit is not None:
        junit.complete(run.options.junit, report)
    if run.options.allure is not None:
        # Needs a package that only those have who ask for it.
        from epd_conformance.reporters import allure

        allure.complete(run, report)
