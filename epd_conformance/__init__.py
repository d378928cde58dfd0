"""epd-conformance: is the answer still the same, token for token, when the encoder is a server of its own?

The public interface, for those who describe a connector: derive from `Subject`, name an `Implementation`, declare `Feature`s.
Everything else is internal and may change.
"""

from __future__ import annotations

from epd_conformance.errors import UsageError
from epd_conformance.faults.fault import Fault, Receipt, Target
from epd_conformance.features import Feature
from epd_conformance.probe import Rows, StoreProbe
from epd_conformance.subject import Implementation, LaunchOptions, StackInfo, Subject

__version__ = "0.1.0"

__all__ = [
    "Fault",
    "Feature",
    "Implementation",
    "LaunchOptions",
    "Receipt",
    "Rows",
    "StackInfo",
    "StoreProbe",
    "Subject",
    "Target",
    "UsageError",
    "__version__",
]
