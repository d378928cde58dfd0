"""Writes into the wheel which suite it was built with, so that an installation can tell when its files were changed."""

from __future__ import annotations

import runpy
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class SuiteDigest(BuildHookInterface[Any]):
    """Adds `epd_conformance/suite.sha256`, see epd_conformance/release.py."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return  # its files are the checkout's, and are there to be changed
        root = Path(self.root)
        package = root / "epd_conformance"
        # By its path: the package's dependencies are not there while it is built.
        release = runpy.run_path(str(package / "release.py"))
        self.folder = tempfile.TemporaryDirectory()
        file = Path(self.folder.name) / release["DIGEST_NAME"]
        file.write_text(release["digest"](package, root / "suites") + "\n", encoding="ascii")
        build_data["force_include"][str(file)] = f"epd_conformance/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()
