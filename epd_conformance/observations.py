"""What a subject says about itself against what was seen: features, and configuration that its connector ignores.

Pure. What is seen comes from the connector's class (which hooks it has of its own), from the subject's probe, and from the
journals. A declared feature is contradicted only by proof; an override proves nothing but that it is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from epd_conformance.features import Feature
from epd_conformance.probe import StoreProbe

# Optional hooks of vLLM's ECConnectorBase (ec_connector/base.py) that a feature is about. Without an override the base class
# answers: nothing is ever deferred, and there are no statistics.
DEFERS = "ensure_cache_available"
COUNTS = "get_ec_connector_stats"
HOOKS = (DEFERS, COUNTS)
# Where the journals of a run's stacks lie, below its folder.
JOURNALS = "stacks/*/journal"


class State(StrEnum):
    """What became of a check. `not probed` is never a pass."""

    OK = "ok"
    FAIL = "fail"
    WARN = "warn"
    NOT_PROBED = "not probed"


@dataclass(frozen=True)
class FeatureFinding:
    """What was found about one feature: `words` say why, `mend` what to do about it."""

    feature: Feature
    state: State
    words: str
    mend: str = ""


def own_hooks(connector: type, base: type) -> list[str]:
    """Those of HOOKS that a connector class does not just inherit from vLLM's base class."""
    own = {name: inspect.getattr_static(connector, name, None) for name in HOOKS}
    return [
        name for name, hook in own.items() if hook is not None and hook is not inspect.getattr_static(base, name, None)
    ]


def features(
    declared: Collection[Feature], *, hooks: Collection[str] | None, probe: object, deferred: bool = False
) -> list[FeatureFinding]:
    """What can be said about every feature, in the order of the enum.

    `hooks`: what `own_hooks` found, None where the class was not seen. `probe`: what the subject's `probe` returned.
    `deferred`: whether a server's journal has a deferral.
    """
    found = {
        Feature.STORE_PROBE: _store_probe(Feature.STORE_PROBE in declared, probe),
        Feature.FILE_STORE: _file_store(Feature.FILE_STORE in declared, probe),
        Feature.ASYNC_TRANSFER: _async_transfer(Feature.ASYNC_TRANSFER in declared, hooks, deferred),
        Feature.STATS: _stats(Feature.STATS in declared, hooks),
    }
    for feature in Feature:
        if feature not in found:
            words = "declared" if feature in declared else "not declared"
            found[feature] = FeatureFinding(feature, State.NOT_PROBED, f"{words}; only running servers can show it")
    return [found[feature] for feature in Feature]


def _store_probe(declared: bool, probe: object) -> FeatureFinding:
    feature = Feature.STORE_PROBE
    if isinstance(probe, StoreProbe):
        if declared:
            return FeatureFinding(feature, State.OK, f"declared, and probe() gives a {type(probe).__name__}")
        return FeatureFinding(
            feature, State.WARN, "probe() gives a StoreProbe, and the feature is not declared", f"declare {feature}"
        )
    if declared:
        given = "None" if probe is None else f"a {type(probe).__name__}, which is no StoreProbe"
        return FeatureFinding(
            feature,
            State.FAIL,
            f"declared, and probe() gives {given}",
            "return an epd_conformance.StoreProbe, or take the feature back",
        )
    return FeatureFinding(
        feature, State.NOT_PROBED, "not declared, and no probe is given", "give a probe: the store faults need one"
    )


def _file_store(declared: bool, probe: object) -> FeatureFinding:
    feature = Feature.FILE_STORE
    names = isinstance(probe, StoreProbe) and type(probe).file is not StoreProbe.file
    if names == declared:
        words = "declared, and the probe names the files" if declared else "not declared, and the probe names no file"
        return FeatureFinding(feature, State.OK if declared else State.NOT_PROBED, words)
    if names:
        return FeatureFinding(
            feature,
            State.WARN,
            "the probe has a `file` of its own, and the feature is not declared",
            f"declare {feature}",
        )
    return FeatureFinding(
        feature,
        State.FAIL,
        "declared, and no probe with a `file` of its own is given",
        "override StoreProbe.file, or take the feature back",
    )


def _async_transfer(declared: bool, hooks: Collection[str] | None, deferred: bool) -> FeatureFinding:
    feature = Feature.ASYNC_TRANSFER
    if hooks is None:
        return FeatureFinding(feature, State.NOT_PROBED, "the connector's class was not seen")
    if DEFERS not in hooks:
        if declared:
            return FeatureFinding(
                feature,
                State.FAIL,
                f"declared, and the connector inherits `{DEFERS}` from vLLM's base class, which never defers",
                f"override `{DEFERS}`, or take the feature back",
            )
        return FeatureFinding(feature, State.OK, "not declared, and the connector cannot defer")
    if not declared and deferred:
        return FeatureFinding(
            feature,
            State.WARN,
            "the connector deferred requests, and the feature is not declared",
            f"declare {feature}: its requirements bound the deferral",
        )
    words = "declared" if declared else "not declared"
    return FeatureFinding(
        feature,
        State.NOT_PROBED,
        f"{words}; the connector overrides `{DEFERS}`, and only servers show whether it defers",
    )


def _stats(declared: bool, hooks: Collection[str] | None) -> FeatureFinding:
    feature = Feature.STATS
    if hooks is None:
        return FeatureFinding(feature, State.NOT_PROBED, "the connector's class was not seen")
    if COUNTS not in hooks:
        if declared:
            return FeatureFinding(
                feature,
                State.FAIL,
                f"declared, and the connector inherits `{COUNTS}` from vLLM's base class, which returns none",
                f"override `{COUNTS}`, or take the feature back",
            )
        return FeatureFinding(feature, State.OK, "not declared, and the connector returns none")
    if not declared:
        return FeatureFinding(
            feature,
            State.WARN,
            f"the connector overrides `{COUNTS}`, and the feature is not declared",
            f"declare {feature}",
        )
    return FeatureFinding(feature, State.NOT_PROBED, f"declared; what `{COUNTS}` returns is seen only in servers")


# -- journals ------------------------------------------------------------------------------------------------------------


def hooks_seen(events: Iterable[Mapping[str, Any]]) -> set[str] | None:
    """The hooks of their own that the connectors of a stack have, by its journal; None where no line says so."""
    told = [event["hooks"] for event in _of_ec(events) if event["ev"] == "init" and "hooks" in event]
    return {hook for hooks in told for hook in hooks} if told else None


def ignored_keys(events: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """By `ec_role`, the keys of `ec_connector_extra_config` that no connector object of that role has read in any process."""
    given: dict[str, dict[str, None]] = {}
    read: dict[str, set[str]] = {}
    roles: dict[tuple[str, str], str] = {}
    for event in _of_ec(events):
        place = (event["server"], event["side"])
        if event["ev"] == "init" and "extra" in event:
            roles[place] = event["ec_role"]
            given.setdefault(event["ec_role"], {}).update(dict.fromkeys(event["extra"]))
        if event["ev"] in ("init", "config") and place in roles:
            read.setdefault(roles[place], set()).update(event.get("read", ()))
    ignored = {role: [key for key in keys if key not in read.get(role, ())] for role, keys in given.items()}
    return {role: keys for role, keys in ignored.items() if keys}


def warnings(declared: Collection[Feature], journals: Iterable[Sequence[Mapping[str, Any]]]) -> list[str]:
    """What the report of a run has to say about its subject, from the journals of the stacks under test."""
    found: dict[str, None] = {}
    for events in journals:
        for role, keys in sorted(ignored_keys(events).items()):
            found |= dict.fromkeys(ignored_words(role, key) for key in keys)
        deferred = any(event["ev"] == "defer" for event in events)
        # The probe is the subject's own, and no journal knows of it.
        for finding in features(declared, hooks=hooks_seen(events), probe=None, deferred=deferred):
            if finding.state is State.WARN:
                found[f"{finding.feature}: {finding.words}"] = None
    return list(found)


def ignored_words(role: str, key: str) -> str:
    """The warning about one key that nobody read."""
    return (
        f"ec_connector_extra_config: the connector was not seen to read {key!r} as {role}: a key that does nothing looks like "
        "one that works"
    )


def _of_ec(events: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    return (event for event in events if event["side"] in ("scheduler", "worker"))
