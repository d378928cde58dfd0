"""What the directed checks measured, judged. Pure: `directed` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd_conformance.engine.findings import Finding

#: Saves and loads that a race must have had: fewer prove nothing about what happens at the same time.
RACED = 4


@dataclass(frozen=True)
class Check:
    """A directed check: the requirement that it is for, its function in `directed`, and the function's arguments."""

    requirement: str
    function: str
    arguments: Mapping[str, Any]


#: A torn write is met within tenths of a second where it can be met at all; a leak of an object in every second request shows
#: in as many requests as a growth by a quarter of them is told apart from caches that fill up.
CHECKS: dict[str, Check] = {
    "race": Check("EPD-RACE-008", "race", {"writers": 1, "readers": 1, "seconds": 1.5}),
    "race-of-two": Check("EPD-RACE-006", "race", {"writers": 2, "readers": 1, "seconds": 1.5}),
    "growth": Check("EPD-LIFE-001", "growth", {"cycles": 80}),
    "encoder-decoder": Check("EPD-ROLE-008", "encoder_decoder", {}),
    "identities": Check("EPD-KEY-015", "identities", {}),
}


def findings(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    """What did not hold, of what a check told. Raises KeyError where it told something else."""
    return _JUDGES[requirement](requirement, told)


def exercised(requirement: str, told: Mapping[str, Any]) -> bool:
    """Whether a check came to what it is for."""
    if requirement in ("EPD-RACE-006", "EPD-RACE-008"):
        return bool(told["saves"] >= RACED and told["loads"] >= RACED)
    if requirement == "EPD-LIFE-001":
        return bool(told["objects"])
    if requirement == "EPD-KEY-015":
        # They do differ, and identifiers tell images apart.
        return told["configurations"][0] != told["configurations"][1] and all(
            len(set(identifiers)) == len(identifiers) > 1 for identifiers in told["identifiers"]
        )
    return bool(told["saved"]) and told["answer"] is not None


def _race(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    expected = f"every load is a miss or one whole save, of {told['writers']} producers that save one identifier"
    return [Finding(requirement, "torn or lost", expected, text) for text in told["bad"][:3]]


def _growth(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    found = []
    for what in ("objects", "open files"):
        if told[what] and told[what][1] - told[what][0] >= told["cycles"] / 4:
            observed = (
                f"{told[what][0]} {what} after {told['cycles'] // 2} requests, {told[what][1]} after {told['cycles']}"
            )
            expected = "the connector holds no more after its requests have ended than before them"
            found.append(Finding(requirement, f"{what} grow", expected, observed))
    return found


def _encoder_decoder(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    if not told["answer"]:
        return []
    expected = "has_cache_item is False for an encoder-decoder model: no worker would load the item"
    return [Finding(requirement, "promised to a model that loads nothing", expected, "True")]


def _identities(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    found = []
    for name, what in (("identifiers", "identifiers of the same images"), ("hashes", "compile hashes")):
        one, other = told[name]
        if one != other:
            expected = f"equal {what} on servers that differ in EC configuration and engine id alone"
            found.append(Finding(requirement, f"other {name}", expected, f"{one} and {other}"))
    return found


_JUDGES = {
    "EPD-RACE-006": _race,
    "EPD-RACE-008": _race,
    "EPD-LIFE-001": _growth,
    "EPD-ROLE-008": _encoder_decoder,
    "EPD-KEY-015": _identities,
}
