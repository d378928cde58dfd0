"""The report as one HTML page: no server, no network, readable without scripts, below 3 MB.

`page` is what the page shows, built from the report and the raw evidence; `evidence` reads what a cell left behind; `folder` finds
both in the folder of a run; `write` makes the file. Only `folder` and `write` touch files, nothing here touches processes.
"""

from epd_conformance.report.html.folder import read_page
from epd_conformance.report.html.page import Page, TrendPoint, trend_point
from epd_conformance.report.html.write import render, save, write_page

__all__ = ["Page", "TrendPoint", "read_page", "render", "save", "trend_point", "write_page"]
