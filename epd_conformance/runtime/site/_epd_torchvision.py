"""Import hook that makes a torchvision usable whose own library does not load beside the installed torch.

Loaded by `sitecustomize` in every process of a server, so it imports only `sys` until torchvision is really
imported. The cause and the proof are in docs/repairs.md.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # importing typing would cost every process of a server several milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

# The operators for which torchvision/_meta_registrations.py calls torch.library.register_fake while it is
# imported; that call raises where the operator does not exist. The signatures are those of torchvision's own
# C++ registration.
OPERATORS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# Names of the operators that this process had to define; read by the probe in
# epd_conformance.runtime.repairs.
defined: list[str] = []

# torch removes what a Library defined when the Library is collected, so it is kept for the life of the
# process.
_libraries: list[Any] = []


def install() -> None:
    """Put the hook in front of sys.meta_path; a second call, or a second copy of the module, adds nothing."""
    if not any(getattr(finder, "epd_torchvision_hook", False) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def repair(package: str) -> None:
    """Define the missing operators, if torchvision's own extension is absent or does not load.

    package: the directory of the installed torchvision. Where its extension loads, nothing is touched.
    """
    from importlib.machinery import EXTENSION_SUFFIXES
    from pathlib import Path

    try:
        import torch
    except ImportError:
        return  # torchvision is about to fail on the same import, in its own words

    for suffix in EXTENSION_SUFFIXES:
        extension = f"{package}/_C{suffix}"
        if Path(extension).exists():
            try:
                torch.ops.load_library(extension)
            except OSError:
                break
            return
    missing = [name for name in OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in missing:
            library.define(OPERATORS[name])
        _libraries.append(library)
        defined.extend(missing)


class _Finder:
    """Finds torchvision as the other finders do, and wraps its loader; blind to every other name.

    Looking for the spec alone (`importlib.util.find_spec`, as transformers does) therefore repairs nothing
    and imports
    nothing: the repair waits until the module is executed.
    """

    epd_torchvision_hook = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        for finder in sys.meta_path:
            if getattr(finder, "epd_torchvision_hook", False):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None and spec.origin is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # a loader by behaviour
                return spec
        return None


class _Loader:
    """torchvision's loader with one step in front; it takes itself out again, so that no trace stays."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        assert spec is not None and spec.origin is not None  # the finder wraps only such specs
        spec.loader = module.__loader__ = self._real
        repair(spec.origin.rpartition("/")[0])
        self._real.exec_module(module)
