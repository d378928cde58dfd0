"""Ids that were released, each with a digest of its meaning: a published report names ids, and must go on saying what it said."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from epd_conformance.catalogue.loader import Catalogue, load
from epd_conformance.catalogue.model import Requirement, Status
from epd_conformance.errors import UsageError

RELEASED = Path(__file__).with_name("released.json")


def meaning(item: Requirement) -> str:
    """sha256, in hex, over what must not change under an id: level, owner and sentence."""
    content = json.dumps([str(item.level), str(item.owner), item.sentence], ensure_ascii=True)
    return hashlib.sha256(content.encode()).hexdigest()


def released(path: Path = RELEASED) -> dict[str, str]:
    """`{id: meaning}` of every id that was released."""
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found


def broken_releases(catalogue: Catalogue, before: Mapping[str, str]) -> list[str]:
    """A sentence for each id of `before` that vanished, went back to `planned`, or means something else now."""
    broken = []
    for name, digest in sorted(before.items()):
        if name not in catalogue:
            broken.append(
                f"{name} was released and is gone: put it back; a requirement that no longer holds gets no new one"
            )
        elif meaning(catalogue[name]) != digest:
            broken.append(
                f"{name} was released with another level, owner or sentence: put its old text back, "
                "and give the new meaning a new id"
            )
        elif catalogue[name].status is not Status.ACTIVE:
            broken.append(f"{name} was released and is planned again: put its test back and make it active")
    return broken


def release(catalogue: Catalogue | None = None, path: Path = RELEASED) -> list[str]:
    """Adds every active id that is not in the file yet, and returns these ids. Never changes one that is in it.

    Raises `UsageError` where a released id vanished or changed its meaning.
    """
    catalogue = catalogue or load()
    before = released(path) if path.exists() else {}
    if broken := broken_releases(catalogue, before):
        raise UsageError(broken[0])
    added = {item.id: meaning(item) for item in catalogue if item.status is Status.ACTIVE and item.id not in before}
    path.write_text(json.dumps(before | added, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return sorted(added)
