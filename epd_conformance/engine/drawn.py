"""The drawn plans of a run: the same ones for the same seed and number, on whichever machine. Pure.

Hypothesis draws, as in a hunt; but nothing is carried out meanwhile, so that whoever checks a run can draw the plans again.
"""

from __future__ import annotations

from epd_conformance.drawing import draw
from epd_conformance.engine import strategies
from epd_conformance.engine.plan import Plan
from epd_conformance.features import Feature
from epd_conformance.verdict import Mode

#: Drawn plans of a run, by its mode. A plan takes some 30 ms: a developer waits a few seconds for them, a certificate half a
#: minute.
EXAMPLES: dict[Mode, int] = {Mode.DEVELOP: 120, Mode.CERTIFY: 600}


def drawn(features: frozenset[Feature], examples: int, seed: int) -> dict[str, Plan]:
    """Name -> plan. Each theme has its share."""
    found: dict[str, Plan] = {}
    themes = strategies.themes_for(features)
    for number, theme in enumerate(themes):
        share = (examples + number) // len(themes)
        plans = draw(strategies.plans(features, theme), share, seed + number) if share else []
        found.update({f"drawn-{theme}-{index}": plan for index, plan in enumerate(plans)})
    return found
