"""The repairs that vLLM's CPU build needs before it can serve a model with images; see docs/repairs.md.

Two kinds. A repair of a process (torchvision's operators) is a hook that reaches every process of a server by
PYTHONPATH, and is named in every report. A repair of the environment (torchaudio, torchcodec) is an
uninstall, done once at set-up. Nothing here imports torch: what needs it is asked in a subprocess.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from epd_conformance.errors import UsageError
from epd_conformance.runtime import vllm_info
from epd_conformance.runtime.site import _epd_torchvision

SITE = Path(__file__).resolve().parent / "site"

# Libraries that transformers imports as soon as they are present, and that vLLM's CPU build brings along as
# CUDA builds. Distribution and package have the same name.
MEDIA_LIBRARIES = ("torchaudio", "torchcodec")

# Importing torch takes 1-4 s, on a loaded machine with a cold disk half a minute. An import that takes five
# minutes hangs.
_PROBE_TIMEOUT_S = 300

_TORCHVISION_PROBE = """
import json, torchvision, _epd_torchvision
print(json.dumps(_epd_torchvision.defined))
"""

# A library whose torch is missing is not itself broken: nothing is uninstalled then.
_MEDIA_PROBE = """
import importlib, sys
try:
    import torch
except Exception:
    sys.exit(0)
importlib.import_module(sys.argv[1])
"""


@dataclass(frozen=True)
class Repair:
    """One deviation of the servers started here from an untouched vLLM.

    name: short and stable, for reports. what: what is changed. why: what would go wrong without it.
    needed: whether this environment needs it, and so whether it is in force.
    """

    name: str
    what: str
    why: str
    needed: Callable[[], bool]


@dataclass(frozen=True)
class Torchvision:
    """State of torchvision in a process that has the hook.

    state: "absent"; "loads", its own library works and nothing was touched; "repaired", the operators were
        defined; "broken", it does not import even so.
    detail: for "broken" the last line of the error, for "repaired" the operators, otherwise empty.
    """

    state: Literal["absent", "loads", "repaired", "broken"]
    detail: str = ""


@dataclass(frozen=True)
class BrokenLibrary:
    """An installed library that does not import, and the last line of its error."""

    name: str
    error: str


def torchvision() -> Torchvision:
    """How importing torchvision goes in a subprocess with the hook; tried once per environment (1-4 s)."""
    return _torchvision(sys.executable, os.environ.get("PYTHONPATH", ""))


TORCHVISION_OPS = Repair(
    name="torchvision-ops",
    what="defines the operators torchvision::nms and torchvision::qnms, without an implementation, when "
    "torchvision is first imported",
    why="the installed torchvision is built for another torch: its library does not load, and without the "
    "operators it fails to import, and with it the image processors of transformers",
    needed=lambda: torchvision().state == "repaired",
)

REPAIRS: tuple[Repair, ...] = (TORCHVISION_OPS,)


def install() -> None:
    """Put the hooks into this process, at no cost until torchvision is imported; again changes nothing."""
    _epd_torchvision.install()


def server_environment(base: Mapping[str, str]) -> dict[str, str]:
    """What to add to `base`, a server's environment, so that the hooks reach each of its processes."""
    existing = base.get("PYTHONPATH", "")
    site = str(SITE)
    others = [entry for entry in existing.split(os.pathsep) if entry != site] if existing else []
    return {"PYTHONPATH": os.pathsep.join([site, *others])}


def in_force(*further: Repair) -> list[dict[str, str]]:
    """The repairs in force in servers started here, as `{name, what, why}`.

    The doctor shows them, and reports carry them as `environment.patches`.

    further: repairs that other parts bring for this run (a changed start method, an emulated backend).
    """
    return [
        {"name": repair.name, "what": repair.what, "why": repair.why}
        for repair in (*REPAIRS, *further)
        if repair.needed()
    ]


def broken_media_libraries() -> tuple[BrokenLibrary, ...]:
    """Those of MEDIA_LIBRARIES that are installed and do not import, though torch does."""
    broken = []
    for name in MEDIA_LIBRARIES:
        if vllm_info.package_directory(name) is None:
            continue
        result = _python(_MEDIA_PROBE, name)
        if result.returncode != 0:
            broken.append(BrokenLibrary(name, _last_line(result)))
    return tuple(broken)


def uninstall_command(names: tuple[str, ...]) -> list[str]:
    """The command that uninstalls `names` from this environment."""
    return [sys.executable, "-m", "pip", "uninstall", "-y", *names]


def mend_broken_media_libraries() -> tuple[BrokenLibrary, ...]:
    """Uninstall exactly the broken media libraries and return them; UsageError where pip does not manage."""
    broken = broken_media_libraries()
    if not broken:
        return ()
    command = uninstall_command(tuple(library.name for library in broken))
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    # pip also ends with 0 when it has found nothing to remove (a copy on PYTHONPATH, a read-only parent
    # environment).
    left = [library.name for library in broken if vllm_info.package_directory(library.name) is not None]
    if result.returncode != 0 or left:
        raise UsageError(
            f"{', '.join(left) or broken[0].name} does not import and could not be uninstalled by "
            f"`{' '.join(command)}`: {_last_line(result)}"
        )
    return broken


@functools.cache
def _torchvision(executable: str, pythonpath: str) -> Torchvision:
    """`torchvision()` for one environment; the arguments are the cache key."""
    if vllm_info.package_directory("torchvision") is None:
        return Torchvision("absent")
    result = _python(_TORCHVISION_PROBE)
    if result.returncode != 0:
        return Torchvision("broken", _last_line(result))
    operators: list[str] = json.loads(result.stdout.strip().splitlines()[-1])
    return Torchvision("repaired", ", ".join(operators)) if operators else Torchvision("loads")


def _python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` as a server's process would run: this interpreter, with the hooks."""
    environment = {**os.environ, **server_environment(os.environ)}
    command = [sys.executable, "-c", code, *arguments]
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{sys.executable} did not finish importing torch, torchvision, {' or '.join(MEDIA_LIBRARIES)} "
            f"within {_PROBE_TIMEOUT_S} s: see whether the machine is overloaded, or reinstall them"
        ) from None


def _last_line(result: subprocess.CompletedProcess[str]) -> str:
    """The last line of what a failed process wrote, which for Python is the exception."""
    lines = (result.stderr or result.stdout).strip().splitlines()
    return lines[-1].strip() if lines else f"exit status {result.returncode}"


if __name__ == "__main__":
    # For scripts/setup: mends this environment and says what was removed.
    try:
        for library in mend_broken_media_libraries():
            print(f"removed {library.name}, which does not import beside this torch: {library.error}")
    except UsageError as error:
        sys.exit(str(error))
