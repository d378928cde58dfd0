"""What a pool makes of findings of a requirement that the run does not ask."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from epd_conformance.engine.evidence import Death, PlanEvidence
from epd_conformance.engine.plan import ItemSpec, Plan, ServerSpec
from epd_conformance.engine.pool import Pool

PLAN = Plan((ServerSpec("ec_producer"), ServerSpec("ec_consumer")), (ItemSpec("item-0", 0),), ())
FULL = [["producer-0", ["fault", "full"]], ["producer-0", ["raised", "worker 0", "save_caches", "OSError", []]]]
LOOK_UP = [["consumer-1", ["store", "EPD-KEY-002", "a file is new"]]]
DIED = Death("worker 0.build_connector_worker_meta", hung=False, status=11, limit_s=1.0)
READING = Death("reading rows", hung=False, status=7, limit_s=1.0)


@pytest.mark.parametrize(
    ("events", "death", "requirement", "otherwise"),
    [
        (FULL, None, "EPD-ERR-003", ["EPD-INIT-006"]),
        ([], DIED, "EPD-OBS-002", ["EPD-INIT-006"]),
        ([], READING, "EPD-XFER-007", ["EPD-INIT-006"]),
        # The store of who gives no probe is nobody's to look into.
        (LOOK_UP, None, "EPD-KEY-002", []),
    ],
)
def test_who_breaks_what_it_is_not_asked_for_is_broken_all_the_same(
    events: list[list[Any]], death: Death | None, requirement: str, otherwise: list[str]
) -> None:
    pool = Pool(0, 0, "", (PlanEvidence("plan", PLAN, 8, events, defaultdict(list), death),))
    others = {"EPD-INIT-006", "EPD-KEY-001"}
    for asked, expected in ((others | {requirement}, [requirement]), (others, otherwise)):
        assert sorted(pool.findings(asked).keys() & asked) == expected
