"""The state machine finds connectors that are one change away from right, by the requirement that the change breaks."""

from __future__ import annotations

import pytest

from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.findings import HOOK_REQUIREMENT
from epd_conformance.engine.hosted import Host
from epd_conformance.features import Feature

pytestmark = pytest.mark.needs_vllm

FEATURES = frozenset(
    {
        Feature.EC_BOTH,
        Feature.MULTI_PRODUCER,
        Feature.MULTI_CONSUMER,
        Feature.PERSISTENT_STORE,
        Feature.STORE_PROBE,
        Feature.METADATA_ONLY,
    }
)
CORPUS = corpus(FEATURES)
#: What `HOOK_REQUIREMENT` has beside hooks, and the maker, which has a connector of its own.
_NO_HOOKS = ("__init__", "import", "build_prom_metrics")

# Connector, the plan of the corpus that shows it, and the requirement that it is found by.
PLANTED = [
    ("Noop", "transfer-v1", "EPD-KEY-001"),
    ("KeyPrefix", "near-1", "EPD-KEY-003"),
    ("SharedItemsLost", "shared", "EPD-XFER-014"),
    ("CaseFolder", "near-0", "EPD-KEY-003"),
    ("PathJoiner", "key-6", "EPD-SEC-001"),
    ("PathJoiner", "key-1", "EPD-KEY-001"),
    ("NoEmptyKey", "key-0", "EPD-KEY-001"),
    ("AnswersWithPath", "transfer-v1", "EPD-KEY-001"),
    ("LastRowDropped", "transfer-v1", "EPD-XFER-006"),
    ("Caster", "transfer-v1", "EPD-XFER-006"),
    ("FlatBuffer", "strided", "EPD-XFER-009"),
    ("ConsumerSaves", "miss", "EPD-ROLE-011"),
    ("LazySaver", "saved-then-evicted", "EPD-XFER-010"),
    ("AppendingRanks", "ranks-v1", "EPD-RACE-007"),
    ("ModuleVariable", "apart", "EPD-INIT-006"),
    ("NeedsWorkerReport", "transfer-v1", "EPD-ROLE-010"),
    ("Swapper", "transfer-v1", "EPD-KEY-003"),
    ("LoadsOneOnly", "transfer-v1", "EPD-XFER-011"),
    ("LoadsLate", "transfer-v1", "EPD-XFER-011"),
    ("OtherOnReload", "transfer-v1", "EPD-XFER-015"),
    ("SharedMapping", "scribbled-held", "EPD-XFER-007"),
    ("SharedMapping", "cut-in-place-large", "EPD-XFER-007"),
    ("Unpickler", "code-before", "EPD-SEC-005"),
    ("NoneWhenIdle", "transfer-v2", "EPD-XFER-012"),
    ("Unpicklable", "transfer-v1", "EPD-XFER-012"),
    ("Changer", "transfer-v1", "EPD-XFER-013"),
    ("PlansTwice", "transfer-v1", "EPD-XFER-012"),
    ("UselessReport", "transfer-v1", "EPD-OBS-002"),
    ("FirstItemOnly", "text-v1", "EPD-LIFE-004"),
    ("Delayer", "transfer-v1", "EPD-LIFE-003"),
    ("SetOfKeys", "transfer-v1", "EPD-LIFE-005"),
    ("ForgetsOnce", "aborted-v1", "EPD-LIFE-004"),
    ("RemembersAllocated", "preempt-narrow-v1", "EPD-LIFE-002"),
    ("DropsAtTheEnd", "ahead-v1-late", "EPD-RACE-011"),
    ("WaitsForEver", "miss", "EPD-LIFE-006"),
    ("NeedsWorkerStep", "transfer-v1", "EPD-LIFE-007"),
    ("EmptiesTheCache", "miss", "EPD-XFER-011"),
    ("DecodeWaits", "chunks-v1", "EPD-LIFE-008"),
    ("TrustsParameters", "parameters-1", "EPD-SEC-004"),
    ("NeverIdle", "transfer-v1", "EPD-LIFE-009"),
    ("ClosesOnce", "transfer-v1", "EPD-LIFE-010"),
    ("RaisesWhenFull", "store-full", "EPD-ERR-003"),
    ("RaisesWhenFull", "store-removed", "EPD-ERR-004"),
    ("LooksByTouching", "lookup-watched", "EPD-KEY-002"),
    ("GivesUpOnce", "store-removed", "EPD-ERR-004"),
    ("PlainStore", "truncated-before", "EPD-INTEG-001"),
    ("PlainStore", "deleted-load", "EPD-RACE-002"),
    ("PlainStore", "reference-never-saved", "EPD-ERR-002"),
    ("NotMade", "transfer-v1", "EPD-INIT-001"),
    ("ExitsPolitely", "transfer-v1", "EPD-KEY-001"),
    ("Exits", "transfer-v1", "EPD-KEY-001"),
    ("Crashes", "transfer-v1", "EPD-XFER-011"),
    ("Eats", "transfer-v1", "EPD-XFER-012"),
]


@pytest.mark.parametrize(("connector", "name", "requirement"), PLANTED, ids=lambda value: str(value))
def test_is_found(host: Host, connector: str, name: str, requirement: str) -> None:
    carried = host.carry(CORPUS[name], subject=f"planted_engine:{connector}_")
    assert requirement in {finding.requirement for finding in carried.findings}, carried


@pytest.mark.parametrize("hook", [hook for hook in HOOK_REQUIREMENT if hook not in _NO_HOOKS])
def test_whichever_hook_raises_is_found_and_named(host: Host, hook: str) -> None:
    carried = host.carry(CORPUS["transfer-v2"], subject=f"planted_engine:RaisesIn_{hook}_")
    assert (HOOK_REQUIREMENT[hook], f"{hook} raised") in {finding.name for finding in carried.findings}, carried


def test_a_hook_that_hangs_is_found_and_named(host: Host) -> None:
    carried = host.carry(CORPUS["transfer-v1"], subject="planted_engine:Hangs_", limit_s=2)
    assert [finding.name for finding in carried.findings] == [("EPD-KEY-001", "has_cache_item hangs")]
    assert "in has_cache_item" in carried.output
    # The next plan gets a new process.
    assert host.carry(CORPUS["transfer-v1"]).findings == []


def test_the_right_connector_is_left_alone(host: Host) -> None:
    """Negative control: each change above is found, and what it was made from is not, in the same plans."""
    damaging = {"PlainStore"}
    for connector, name, _ in PLANTED:
        if connector in damaging or "scribbled" in name or "cut-in-place" in name or name == "code-before":
            continue
        assert host.carry(CORPUS[name]).findings == [], name


def test_the_reference_survives_the_corpus(host: Host) -> None:
    found = set()
    for plan in CORPUS.values():
        found |= {finding.name for finding in host.carry(plan, subject="reference").findings}
    assert found == set()


@pytest.mark.parametrize(
    ("fault", "requirement"), [("read-only", "EPD-ERR-004"), ("removed", "EPD-ERR-004"), ("full", "EPD-ERR-003")]
)
def test_a_fault_that_does_not_reach_the_store_shows_nothing(host: Host, fault: str, requirement: str) -> None:
    name = f"store-{fault}"
    # A limit on the size of files holds wherever they are.
    for subject, expected in (("PlainStore_", True), ("Elsewhere_", fault == "full")):
        evidence = host.carry(CORPUS[name], subject=f"planted_engine:{subject}", keep=name).evidence
        assert evidence is not None
        assert (requirement in evidence.exercised) is expected, subject
