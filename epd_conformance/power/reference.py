"""What is changed of the reference connector: every module that runs in the engine's processes, less what is left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import epd_conformance
from epd_conformance.power.trial import Target
from epd_conformance.subject import ReferenceSubject, StackInfo

_FOLDER = "epd_conformance.connectors"

#: Only the command line of the store, the probe and the tests call these; they never run in a server.
_OUTSIDE_SERVERS = {
    "object_format": ("encode", "pack", "repack", "unpack", "decode"),
    "reclaim": ("header_of", "inspect", "purge"),
}
#: These only make text for people.
_TEXT = {
    "object_format": ("show_key",),
    "verified_store": ("VerifiedStoreConnector._warn", "VerifiedStoreConnector._warn_of_counter_keys"),
    "widths": ("Widths.wanted",),
}

#: Module -> qualified names that are left out. A module comes after those that it imports.
MODULES: Mapping[str, tuple[str, ...]] = {
    f"{_FOLDER}.{name}": _OUTSIDE_SERVERS.get(name, ()) + _TEXT.get(name, ())
    for name in (
        "object_format",
        "fingerprint",
        "widths",
        "pins",
        "store_threads",
        "reclaim",
        "store_stats",
        "verified_store",
    )
}


class Tight(ReferenceSubject):
    """The reference connector with every limit set, none of which a plan comes to: what then is lost was lost without need."""

    def connector_config(self, role: str, stack: StackInfo) -> dict[str, Any]:
        config = super().connector_config(role, stack)
        # Room for eight items at a time, the most that a plan asks for.
        limits = {"pin_bytes": 1 << 17, "max_bytes": 1 << 40, "max_age_s": 1e9, "fsync": True}
        return {**config, "ec_connector_extra_config": {**config["ec_connector_extra_config"], **limits}}


#: Its writers are started anew and never see a mutant; ten seconds.
_FRESH = "test_store_concurrency.py"


def target() -> Target:
    # The tests lie beside the package in a checkout, and nowhere in what is installed.
    root = Path(epd_conformance.__file__).parents[1]
    tests = [path for path in sorted((root / "tests" / "connectors").glob("test_*.py")) if path.name != _FRESH]
    tight = f"{__name__}:Tight"
    return Target("reference", ReferenceSubject.features, MODULES, tight=tight, tests=tests, root=root)
