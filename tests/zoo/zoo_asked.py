"""What the zoo asks in a child of the host."""

from __future__ import annotations

from pathlib import Path

from epd_conformance.subject import Subject


def features(subject: Subject, root: Path) -> list[str]:
    return sorted(subject.features)
