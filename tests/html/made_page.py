"""A made run with failures of several kinds, for the page."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

# The makers of runs and of stories; test folders are no packages.
sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))

import made_run
from made_evidence import with_answer
from made_run import MODEL, MadeRun
from spoilt_faults import DAMAGE, VICTIM, loads

from epd_conformance.live import suites
from epd_conformance.oracle.cell import CellEvidence

TOKENS = f"EPD-TOK-002[e-pd/{MODEL}/img1]"
DAMAGED = f"EPD-INTEG-003[e-pd/{MODEL}/one-row]"
DIED = f"EPD-TOK-003[e-pd/{MODEL}/img2]"
PASSING = (f"EPD-TOK-003[e-pd/{MODEL}/img3]", f"EPD-XFER-001[e-pd/{MODEL}/img1]", f"EPD-ERR-001[e-pd/{MODEL}/deleted]")
# What a subject, or a server's log, could put there.
HOSTILE = "</style><script>alert(1)</script><img src=x onerror='alert(2)'>\"'{{ 7 * 7 }}"


def wrong_ids(cell: CellEvidence) -> CellEvidence:
    """Another id from the fourth output token on."""
    ids = cell.answers[0].ids
    return with_answer(cell, 0, ids=(*ids[:3], *(token + 1 for token in ids[3:])))


def died(cell: CellEvidence) -> CellEvidence:
    death = {"name": "e-pd.prefill_decode-0", "status": 1, "text": f"it ended\n{HOSTILE}"}
    return replace(cell, deaths=(death,))


def write(folder: Path) -> None:
    """A run in which tokens differ, damaged bytes are used, a server dies, and most cells do not run; with the end of a log."""
    changes = {TOKENS: wrong_ids, DAMAGED: loads(VICTIM, DAMAGE), DIED: died}
    MadeRun(folder, suites.installed(), changes=changes, only=frozenset({*changes, *PASSING})).write()
    log = folder / "logs" / "e-pd.prefill_decode-0.log"
    log.parent.mkdir()
    log.write_text(f"\x1b[36mbegin\x1b[0m\n{HOSTILE}\n--api-key hush\nlast line\n")

    def with_log(record: dict[str, Any]) -> dict[str, Any]:
        # As `_capture` does for what did not pass; the text is what `failure_text` makes.
        if record["verdict"] == "pass":
            return record
        message = f"{record['requirement']} (MUST, connector): …\ncell: {record['id']}\nexpected: what {record['id']} expects\n"
        message += f"observed: {record['observed']}\nlikely causes:\n  - one\n  - two\nrun again: …"
        artifacts = [*record["artifacts"], "logs/e-pd.prefill_decode-0.log"]
        return {**record, "artifacts": artifacts, "message": message, "reproduce": f"run {record['id']}"}

    made_run.change_results(folder, "cell", with_log)
    made_run.rewrite(folder, suites.installed())
