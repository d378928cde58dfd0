"""The requirement catalogue: numbered MUST / SHOULD / MAY sentences, read from `requirements/*.toml`, one
file an area."""

from epd_conformance.catalogue.loader import Catalogue, load
from epd_conformance.catalogue.model import (
    TOPOLOGIES,
    ConformanceLevel,
    EnvironmentClass,
    Layer,
    Requirement,
    Status,
    Topology,
)
from epd_conformance.catalogue.selection import ExpectedCell, NotVerified, Selection, cell_id, parse_cell_id

__all__ = [
    "TOPOLOGIES",
    "Catalogue",
    "ConformanceLevel",
    "EnvironmentClass",
    "ExpectedCell",
    "Layer",
    "NotVerified",
    "Requirement",
    "Selection",
    "Status",
    "Topology",
    "cell_id",
    "load",
    "parse_cell_id",
]
