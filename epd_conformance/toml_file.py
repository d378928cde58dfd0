"""Reads a TOML file that a person wrote; what cannot be read is one sentence."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from epd_conformance.errors import UsageError


def read_toml(path: Path, what: str, page: str) -> dict[str, Any]:
    """The document in a file. `what` names it in an error; `page` of the docs has an example. Raises UsageError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{what} cannot be read ({error.strerror}): correct its name") from error
    except ValueError as error:  # tomllib's and the codec's
        raise UsageError(f"{path} is not TOML ({error}): correct it, {page} has an example") from error
