"""What a run must not leave behind, and how the tests find it: processes, ports, /dev/shm blocks, scratch folders."""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epd_conformance.topology.claims import bindable
from epd_conformance.topology.launcher import Launcher, Process

# Every process of a test has the test's token in its environment, which /proc shows as it was at the last exec: neither a
# new session nor a fork can take it off.
TOKEN = "EPD_TEST_TOKEN"
# What is killed is gone in milliseconds; the machine may be busy.
GONE_S = 15.0


def new_token() -> str:
    """A token, put into this process's environment for everything that is started from now on."""
    os.environ[TOKEN] = uuid.uuid4().hex
    return os.environ[TOKEN]


def marked(token: str) -> list[int]:
    """Living processes, this one excepted, that carry the token."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if state not in "ZX" and f"{TOKEN}={token}".encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


@dataclass
class Traces:
    """What one scenario has made, and so what must be gone."""

    token: str
    ports: tuple[int, ...] = ()
    blocks: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()

    @classmethod
    def of(cls, token: str, scratch: str | Path, made: Iterable[Mapping[str, Any]]) -> Traces:
        """`made`: what stand-ins have written about themselves."""
        made = list(made)
        blocks = tuple(block for one in made for block in one["blocks"])
        assert all(Path("/dev/shm", block).exists() for block in blocks), "nothing to find, nothing is proved"
        assert Path(scratch).is_dir(), "nothing to find, nothing is proved"
        return cls(token, tuple(one["port"] for one in made), blocks, (str(scratch),))

    def left(self) -> list[str]:
        """What is still there, in words."""
        return [
            *(f"process {pid}: {_command(pid)}" for pid in marked(self.token)),
            *(f"port {port}" for port in self.ports if not bindable(port)),
            *(f"/dev/shm/{block}" for block in self.blocks if Path("/dev/shm", block).exists()),
            *(f"folder {folder}" for folder in self.scratch if Path(folder).exists()),
        ]

    def assert_gone(self, seconds: float = GONE_S) -> float:
        """Wait until nothing is left; returns how long it took."""
        began = time.monotonic()
        while (left := self.left()) and time.monotonic() - began < seconds:
            time.sleep(0.02)
        assert not left, f"left after {seconds:.0f} s: {left}"
        return time.monotonic() - began


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "(gone meanwhile)"


class QuickLauncher(Launcher):
    """A launcher whose warmed parent is warm at once, since it imports no vLLM."""

    def warm(self) -> Process:
        self._was_ready = False
        self._zygote = self._launch(
            "warm",
            "warmed-parent",
            self.logs / "warmed-parent.log",
            argv=[sys.executable, "-m", "standin_zygote"],
            env={**self._environment, "PYTHONPATH": str(Path(__file__).parent)},
        )
        return self._zygote


def start_standin(launcher: Launcher, folder: Path, name: str, habits: Iterable[str]) -> Process:
    """Start a stand-in (see standin.py) under the launcher."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return launcher.start(name, "standin", [str(folder / f"{name}.json"), *habits], {"PYTHONPATH": path})


def wait_ready(folder: Path, name: str) -> dict[str, Any]:
    """What the stand-in has made, once it has."""
    path = folder / f"{name}.json"
    wait_until(path.exists, f"{name} to be ready")
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll until the condition holds; AssertionError when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
