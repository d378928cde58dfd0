"""The rooms that decide import nothing that touches processes, vLLM or torch: docs/architecture.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "epd_conformance"
PURE = ("catalogue", "oracle", "plans", "report", "verdict")

# Whatever starts, watches or runs in servers, ours and others'.
HANDS = (
    "epd_conformance.connectors.recording",
    "epd_conformance.connectors.verified_store",
    "epd_conformance.engine.host",
    "epd_conformance.engine.hosted",
    "epd_conformance.live.session",
    "epd_conformance.pytest_plugin",
    "epd_conformance.run",
    "epd_conformance.runtime.doctor",
    "epd_conformance.topology.launcher",
    "epd_conformance.topology.stack",
    "aiohttp",
    "psutil",
    "requests",
    "torch",
    "vllm",
)


def modules() -> list[str]:
    """The modules of the pure rooms."""
    files = [
        path for name in PURE for path in (PACKAGE / f"{name}.py", *(PACKAGE / name).rglob("*.py")) if path.exists()
    ]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in files]
    return sorted(name.removesuffix(".__init__") for name in names if not name.endswith(".__main__"))


def hands_after(imported: list[str]) -> list[str]:
    """Which of `HANDS` an interpreter holds that has imported these modules and nothing else."""
    code = f"import sys, {', '.join(imported)}; print(*(name for name in {HANDS!r} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.split()


def test_what_decides_has_no_hands() -> None:
    assert len(modules()) > 30
    assert hands_after(modules()) == []


def test_hands_are_seen() -> None:
    assert "psutil" in hands_after(["epd_conformance.verdict", "epd_conformance.topology.devices"])
