"""The corpus of the scheduler layer: one plan for each circumstance that a requirement of the engine names. Pure."""

from __future__ import annotations

from epd_conformance.engine.plan import Plan
from epd_conformance.features import Feature


def scheduler_corpus(features: frozenset[Feature]) -> dict[str, Plan]:
    """Name -> plan, for a subject with these features."""
    return {}
