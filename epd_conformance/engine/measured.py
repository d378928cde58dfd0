"""What the directed checks measured, judged. Pure: `directed`, `starting` and `slow_store` measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from epd_conformance.engine.findings import Finding

#: Saves and loads that a race must have had: fewer prove nothing about what happens at the same time.
RACED = 4

#: What is asked: a quarter of the store's second. On a busy machine a tenth may be another process's turn.
WAITED_S = 0.25


@dataclass(frozen=True)
class Check:
    """A directed check: the requirement that it is for, its function (`module:name` of this package), and its arguments.

    `bare`: for a process in which nothing of the subject was imported; the function takes the subject's name.
    """

    requirement: str
    function: str
    arguments: Mapping[str, Any]
    bare: bool = False

    @property
    def path(self) -> str:
        """The function as `Host.call` takes it."""
        return f"epd_conformance.engine.{self.function}"


#: A torn write is met within tenths of a second where it can be met at all; a leak of an object in every second request shows
#: in as many requests as a growth by a quarter of them is told apart from caches that fill up.
CHECKS: dict[str, Check] = {
    "race": Check("EPD-RACE-008", "directed:race", {"writers": 1, "readers": 1, "seconds": 1.5}),
    "race-of-two": Check("EPD-RACE-006", "directed:race", {"writers": 2, "readers": 1, "seconds": 1.5}),
    "growth": Check("EPD-LIFE-001", "directed:growth", {"cycles": 80}),
    "encoder-decoder": Check("EPD-ROLE-008", "directed:encoder_decoder", {}),
    "identities": Check("EPD-KEY-015", "directed:identities", {}),
    "import": Check("EPD-INIT-002", "starting:imports", {}, bare=True),
    "unknown-setting": Check("EPD-INIT-004", "starting:unknown_setting", {}),
    "unusable-store": Check("EPD-INIT-005", "starting:unusable_store", {}),
    "slow-store": Check("EPD-LOAD-008", "slow_store:slow_store", {"seconds": 1.0}),
}


def findings(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    """What did not hold, of what a check told. Raises KeyError where it told something else."""
    return _JUDGES[requirement](requirement, told)


def exercised(requirement: str, told: Mapping[str, Any]) -> bool:
    """Whether a check came to what it is for."""
    if requirement in ("EPD-RACE-006", "EPD-RACE-008"):
        return not told.get("ended") and bool(told["saves"] >= RACED and told["loads"] >= RACED)
    if requirement == "EPD-LIFE-001":
        return bool(told["objects"])
    if requirement == "EPD-KEY-015":
        # They do differ, and identifiers tell images apart.
        return told["configurations"][0] != told["configurations"][1] and all(
            len(set(identifiers)) == len(identifiers) > 1 for identifiers in told["identifiers"]
        )
    if requirement == "EPD-ROLE-008":
        # One that cannot be made for such a model promises it nothing.
        return bool(told["saved"]) and (told["answer"] is not None or bool(told.get("refused")))
    if requirement == "EPD-INIT-002":
        return bool(told["asked"] and told["offline"])
    if requirement == "EPD-LOAD-008":
        return bool(told["held"]) and not told["died"]
    # Of what cannot be made at all nobody can tell why it is not made here, and a store elsewhere was not taken away.
    return bool(told["usable"] if requirement == "EPD-INIT-004" else told["configured"])


def also_exercised(requirement: str, told: Mapping[str, Any]) -> frozenset[str]:
    """Requirements beside its own that a check put to the test: a request that waited for a slow store, alone, and was served."""
    if requirement == "EPD-LOAD-008" and told["deferred"] and told["served"]:
        return frozenset({"EPD-LIFE-006", "EPD-LIFE-007"})
    return frozenset()


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
    expected = "has_cache_item is False for an encoder-decoder model: no worker would load the item"
    if told.get("raised"):
        return [Finding(requirement, "has_cache_item raised", expected, told["raised"])]
    if not told["answer"]:
        return []
    return [Finding(requirement, "promised to a model that loads nothing", expected, "True")]


def _identities(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    found = []
    for name, what in (("identifiers", "identifiers of the same images"), ("hashes", "compile hashes")):
        one, other = told[name]
        if one != other:
            expected = f"equal {what} on servers that differ in EC configuration and engine id alone"
            found.append(Finding(requirement, f"other {name}", expected, f"{one} and {other}"))
    return found


def _import(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    found = []
    if told["error"]:
        expected = "the module is imported, and its class gives statistics and metrics, without accelerator and network"
        found.append(Finding(requirement, "import or metrics raised", expected, told["error"]))
    if told["opened"]:
        expected = "neither a device nor a socket is opened by importing the module and asking its class for metrics"
        found.append(Finding(requirement, "opened by an import", expected, ", ".join(told["opened"][:3])))
    return found


def _unknown_setting(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    silent = [role for role, one in told["roles"].items() if told["usable"] and not one["refused"] and not one["named"]]
    expected = "with an unknown key in ec_connector_extra_config it refuses to start, or a warning names the key"
    return (
        [Finding(requirement, "unknown setting ignored", expected, f"{', '.join(silent)}: not a word")]
        if silent
        else []
    )


def _unusable_store(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    silent = {role: one["error"] or "not a word" for role, one in told["roles"].items() if not one["named"]}
    expected = "an error or a warning at start names the store whose folder cannot be made"
    observed = "; ".join(f"{role}: {text}" for role, text in silent.items())
    return [Finding(requirement, "unusable store not named", expected, observed)] if silent else []


def _slow_store(requirement: str, told: Mapping[str, Any]) -> list[Finding]:
    found = []
    slow = {hook: seconds for hook, seconds in told["slowest"].items() if seconds >= WAITED_S}
    if slow:
        expected = (
            "with a store that takes a second for each operation, no hook but loads and saves takes a quarter of that"
        )
        observed = ", ".join(f"{hook} took {seconds:.1f} s" for hook, seconds in slow.items())
        found.append(Finding(requirement, "a step waits for the store", expected, observed))
    if told["deferred"] and not told["served"] and not told["died"]:
        expected = "a deferred request that is the only one of its server is served, or named as unavailable"
        observed = f"deferred {told['deferred']} times on a slow store, and never served"
        found.append(Finding("EPD-LIFE-007", "deferred for ever", expected, observed))
    return found


_JUDGES = {
    "EPD-LOAD-008": _slow_store,
    "EPD-INIT-002": _import,
    "EPD-INIT-004": _unknown_setting,
    "EPD-INIT-005": _unusable_store,
    "EPD-RACE-006": _race,
    "EPD-RACE-008": _race,
    "EPD-LIFE-001": _growth,
    "EPD-ROLE-008": _encoder_decoder,
    "EPD-KEY-015": _identities,
}
