"""What each layer without servers carries out: its fixed plans, its drawn ones, and how many. Pure."""

from __future__ import annotations

from epd_conformance.engine.corpus import corpus
from epd_conformance.engine.drawn import EXAMPLES, drawn
from epd_conformance.engine.plan import Plan
from epd_conformance.engine.scheduler_corpus import scheduler_corpus
from epd_conformance.features import Feature
from epd_conformance.verdict import Mode

SCHEDULER = "scheduler"
#: The layers that carry out engine plans: a proxy before fake servers has plans of its own.
LAYERS = ("contract", SCHEDULER)
#: Of the plans that the contract layer draws, the scheduler layer carries out this share: vLLM's Scheduler takes about twice as
#: long for a step as the core of the contract layer, and shows the same of the connector.
_SHARE = 3


def fixed(layer: str, features: frozenset[Feature]) -> dict[str, Plan]:
    """Name -> plan: those that are the same on every run."""
    return corpus(features) | (scheduler_corpus(features) if layer == SCHEDULER else {})


def plans(layer: str, features: frozenset[Feature], examples: int, seed: int) -> dict[str, Plan]:
    """Name -> plan: everything that a run of the layer carries out, in its order."""
    return fixed(layer, features) | drawn(features, examples, seed)


def examples(layer: str, mode: Mode) -> int:
    """How many plans a run of the layer draws, where nobody says so."""
    return EXAMPLES[mode] // (_SHARE if layer == SCHEDULER else 1)
