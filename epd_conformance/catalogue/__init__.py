"""The requirement catalogue: numbered MUST / SHOULD / MAY sentences, read from `requirements/*.toml`, one
file an area.

`python -m epd_conformance.catalogue` writes what is made from them: `released.json` and the page of documentation.
"""

from epd_conformance.catalogue.loader import Catalogue, labels, load, not_testable
from epd_conformance.catalogue.model import (
    TOPOLOGIES,
    ConformanceLevel,
    EnvironmentClass,
    Layer,
    NotTestable,
    Requirement,
    Status,
    Topology,
)
from epd_conformance.catalogue.released import broken_releases, meaning, release
from epd_conformance.catalogue.selection import ExpectedCell, NotVerified, Selection, cell_id, parse_cell_id

__all__ = [
    "TOPOLOGIES",
    "Catalogue",
    "ConformanceLevel",
    "EnvironmentClass",
    "ExpectedCell",
    "Layer",
    "NotTestable",
    "NotVerified",
    "Requirement",
    "Selection",
    "Status",
    "Topology",
    "broken_releases",
    "cell_id",
    "labels",
    "load",
    "meaning",
    "not_testable",
    "parse_cell_id",
    "release",
]
