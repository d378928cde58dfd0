"""The vendor interface: what is being certified, as an object that says how to configure one EC connector.

A subject supplies data, never tests. It learns the topology, sizes, model, environment class, ports and directories of a
stack; never which requirement, cell or fault runs. What it says about itself is not evidence: only the recorder, the
server's answers and the harness's own reading of the store are.
"""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from epd_conformance.connectors.probes import ExampleStoreProbe, VerifiedStoreProbe
from epd_conformance.errors import UsageError
from epd_conformance.faults.fault import Fault
from epd_conformance.features import Feature
from epd_conformance.probe import StoreProbe

ENTRY_POINTS = "epd_conformance.subjects"


@dataclass(frozen=True)
class Implementation:
    """Who made the connector, for the report. `version` is a released version, never a branch."""

    organization: str
    project: str
    version: str
    url: str = ""
    contact: str = ""


@dataclass(frozen=True)
class StackInfo:
    """What a subject may know about the stack it is configured for.

    `store`: an empty directory of this stack that all its servers can read and write. `ports`: free TCP ports by server
    name, for connectors that need side channels of their own (one for each server).
    """

    topology: str
    sizes: Mapping[str, int]
    model: str
    environment_class: str
    store: Path
    ports: Mapping[str, int]


@dataclass(frozen=True)
class LaunchOptions:
    """Extra arguments and environment for one role's servers; arguments come last on vLLM's command line."""

    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


class Subject(ABC):
    """One EC connector under test. Only `connector_config` is required; each optional method unlocks requirements."""

    implementation: Implementation
    features: frozenset[Feature] = frozenset()

    @abstractmethod
    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        """The JSON of vLLM's `--ec-transfer-config` for a server.

        `role` is the `ec_role` the server plays: `ec_producer`, `ec_consumer` or `ec_both`. The result must name
        `ec_connector`, and `ec_connector_module_path` unless vLLM itself registers the connector; `ec_role` is filled in.
        """

    def launch(self, role: str, stack: StackInfo) -> LaunchOptions:
        """Arguments and environment that the connector needs beyond its configuration; `role` as in `connector_config`."""
        return LaunchOptions()

    def probe(self, stack: StackInfo) -> StoreProbe | None:
        """How the harness reaches this stack's store past the connector; needed for the feature `store_probe`."""
        return None

    def faults(self, stack: StackInfo) -> Mapping[str, Fault]:
        """The subject's own way to do a kind of damage, by kind, where writing bytes through the probe is not enough."""
        return {}


class ReferenceSubject(Subject):
    """The connector of this project: a file store whose objects are verified before they are promised."""

    implementation = Implementation(
        organization="epd-conformance", project="verified-store", version="0.1.0", url="", contact=""
    )
    features = frozenset(
        {
            Feature.KV_DISAGGREGATION,
            Feature.EC_BOTH,
            Feature.METADATA_ONLY,
            Feature.MULTI_PRODUCER,
            Feature.MULTI_CONSUMER,
            Feature.PERSISTENT_STORE,
            Feature.STORE_PROBE,
            Feature.ASYNC_TRANSFER,
            Feature.STATS,
        }
    )

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            "ec_connector": "VerifiedStoreConnector",
            "ec_connector_module_path": "epd_conformance.connectors.verified_store",
            "ec_connector_extra_config": {"root": str(stack.store)},
        }

    def probe(self, stack: StackInfo) -> StoreProbe:
        return VerifiedStoreProbe(stack.store)


def vllm_example_probe(stack: StackInfo) -> StoreProbe:
    """The probe of `vllm-example`, in the form that a TOML subject names."""
    return ExampleStoreProbe(stack.store)


class VllmExampleSubject(Subject):
    """ECExampleConnector, the example that vLLM ships."""

    implementation = Implementation(
        organization="vLLM",
        project="ECExampleConnector",
        version="0.32.0",
        url="https://github.com/vllm-project/vllm",
    )
    features = frozenset(
        {
            Feature.KV_DISAGGREGATION,
            Feature.EC_BOTH,
            Feature.METADATA_ONLY,
            Feature.MULTI_PRODUCER,
            Feature.MULTI_CONSUMER,
            Feature.PERSISTENT_STORE,
            Feature.STORE_PROBE,
        }
    )

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        return {
            "ec_connector": "ECExampleConnector",
            "ec_connector_extra_config": {"shared_storage_path": str(stack.store)},
        }

    def probe(self, stack: StackInfo) -> StoreProbe:
        return vllm_example_probe(stack)


BUILT_IN: dict[str, type[Subject]] = {"reference": ReferenceSubject, "vllm-example": VllmExampleSubject}


def load(name: str) -> Subject:
    """The subject that `--subject` names: a built-in, a TOML file, an entry point, or `module:Class` (or `module:object`).

    Raises UsageError, with one sentence, when there is none such or it does not follow the interface.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name.endswith(".toml"):
        # Not above: it describes a Subject.
        from epd_conformance import subject_toml

        return subject_toml.read(Path(name))
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in found:
        try:
            return _check(name, found[name].load())
        except UsageError:
            raise
        except (Exception, SystemExit) as error:  # as in `imported`
            raise UsageError(
                f"the entry point {name!r} does not load ({_raised(error)}): mend the package that has it"
            ) from error
    if not all(name.partition(":")):
        known = ", ".join(sorted({*BUILT_IN, *found}))
        raise UsageError(
            f"no subject is called {name!r}: known are {known}; or give module:Class, or a file that ends in .toml"
        )
    return _check(name, imported(name, "--subject"))


def imported(name: str, where: str) -> Any:
    """What `module:attribute` names. `where` is the option or key that names it, for the message.

    Raises UsageError where the form is another, the module does not import, or it has no such attribute.
    """
    module, separator, attribute = name.partition(":")
    if not separator or not module or not attribute:
        raise UsageError(f"{where} names {name!r}: write it as module:Class")
    # As `python -m` does: a module beside the caller needs no installation.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        loaded = importlib.import_module(module)
    except (
        Exception,
        SystemExit,
    ) as error:  # a module's own code may raise anything; an exit would pass for exit code 0
        raise UsageError(
            f"{where}: the module {module!r} does not import ({_raised(error)}): install it or correct its name"
        ) from error
    if not hasattr(loaded, attribute):
        raise UsageError(f"{where}: the module {module!r} has no {attribute!r}: correct the name after the colon")
    return getattr(loaded, attribute)


def _raised(error: BaseException) -> str:
    """What somebody's own code raised, in the words of one sentence."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _check(name: str, found: Any) -> Subject:
    try:
        subject = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:  # a constructor may raise anything
        raise UsageError(f"the subject {name!r} cannot be made ({_raised(error)}): mend its class") from error
    if not isinstance(subject, Subject):
        raise UsageError(f"the subject {name!r} is no epd_conformance.Subject: derive its class from it")
    implementation = getattr(subject, "implementation", None)
    if not isinstance(implementation, Implementation):
        raise UsageError(f"the subject {name!r} has no `implementation`: set it to an epd_conformance.Implementation")
    for item in fields(implementation):
        if not isinstance(value := getattr(implementation, item.name), str):
            raise UsageError(f"the subject {name!r} has {value!r} for `implementation.{item.name}`: make it a string")
    features: object = subject.features
    if not isinstance(features, Collection):
        raise UsageError(f"the subject {name!r} has {features!r} for `features`: make it a set of Feature")
    unknown = [feature for feature in subject.features if not isinstance(feature, Feature)]
    if unknown:
        raise UsageError(
            f"the subject {name!r} declares {unknown[0]!r}, which is no Feature: see epd-conformance list --features"
        )
    return subject
