"""The model zoo: tiny random-weight models that are made by code in well under a second, never downloaded."""

from __future__ import annotations

from epd_conformance.models.zoo import (
    MODELS,
    BuiltModel,
    ModelSpec,
    ResolvedModel,
    build,
    default_cache,
    digest,
    resolve,
)

__all__ = [
    "MODELS",
    "BuiltModel",
    "ModelSpec",
    "ResolvedModel",
    "build",
    "default_cache",
    "digest",
    "resolve",
]
