"""Claims on what all runs of a host share: TCP ports, and memory that was promised but is not taken yet.

A port is claimed by binding an abstract unix socket of its number: like the port itself it belongs to the network namespace,
whichever user or temporary folder a run has. A promise of memory is a file under a folder common to the user's runs, locked
while its owner lives. Both end with their process, so a crash leaves no claim behind.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

from epd_conformance.errors import UsageError
from epd_conformance.topology.devices import SERVER_GIB, Inventory, never_fits, shortfall

# Below the range from which Linux and vLLM's own get_open_port take ports (32768 and up), above the registered services.
PORTS = range(20000, 32000)
# How often a run that waits for memory looks again: servers end within seconds.
POLL_S = 1.0
# A topology is three to five servers with its baselines, each of which computes in one thread (stack.py) and so keeps a core
# busy while a request is with it; harness and proxy need the rest. With fewer cores for each, two topologies at once would take
# as long as one after the other, need twice the memory, and come closer to every time limit.
CORES_PER_TOPOLOGY = 4
# How often a worker that waits for its turn looks again: often enough for nobody to notice, seldom enough to cost nothing.
TURN_POLL_S = 0.2


def folder() -> Path:
    """Where the promises of this user's runs lie. Raises UsageError where it cannot be used."""
    path = Path(tempfile.gettempdir()) / f"epd-conformance-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            raise PermissionError(0, "belongs to another user")
        (path / "memory").mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UsageError(f"the folder {path} cannot be used ({error.strerror}): remove it, or set TMPDIR") from None
    return path


def _lock(path: Path) -> IO[str] | None:
    """Open and lock a file; None when a living process holds it."""
    handle = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        return None
    return handle


def bindable(port: int, host: str = "127.0.0.1") -> bool:
    """Whether nobody listens on the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


class Ports:
    """Ports claimed by this run; released by `release`, `close` or the end of the process."""

    def __init__(self) -> None:
        self._held: dict[int, socket.socket] = {}
        # Not the module's functions: whoever seeds those would have every run try the same ports.
        self._random = random.Random()

    def take(self) -> int:
        """A free port that no other run will take. Raises UsageError when there is none."""
        for port in self._random.sample(PORTS, len(PORTS)):
            if self._claim(port):
                return port
        raise UsageError(f"no free port between {PORTS.start} and {PORTS.stop - 1}: stop what listens there")

    def take_exactly(self, port: int) -> int:
        """Claim a port that a person asked for. Raises UsageError when it is taken or no port."""
        if not 1 <= port <= 65535:
            raise UsageError(f"{port} is no port: use one from 1 to 65535")
        if not self._claim(port):
            raise UsageError(f"port {port} is taken by another program: stop it or choose another port")
        return port

    def _claim(self, port: int) -> bool:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0epd-conformance.port.{port}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        if not bindable(port):
            claim.close()
            return False
        self._held[port] = claim
        return True

    def release(self, ports: Iterable[int]) -> None:
        """Give ports back, whose servers have ended."""
        for port in ports:
            if (claim := self._held.pop(port, None)) is not None:
                claim.close()

    def close(self) -> None:
        self.release(list(self._held))


def topologies_at_once(device: str, cores: int) -> int:
    """How many topologies of one run may have servers at the same time."""
    # GPUs are shared out by memory among the servers of one topology (devices.py); a second one would not know of the first.
    return 1 if device == "cuda" else max(1, cores // CORES_PER_TOPOLOGY)


class Turn:
    """A worker's turn to have servers: of the workers that share a folder, `count` at most have one at a time.

    Given back by `release`, or by the end of the process.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self._paths = [folder / f"turn-{number}.lock" for number in range(count)]
        self._handle: IO[str] | None = None

    def take(self, say: Callable[[str], None]) -> None:
        """Wait for a turn, for as long as it takes: whoever has one is at work. A signal's exception ends the waiting."""
        told = False
        while self._handle is None:
            for path in self._paths:
                if (handle := _lock(path)) is not None:
                    self._handle = handle
                    return
            if not told:
                say(f"waiting for another topology to end ({len(self._paths)} at a time on this machine)")
                told = True
            time.sleep(TURN_POLL_S)

    def release(self) -> None:
        """Let another worker have the turn; its servers must be gone."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None


class Memory:
    """This run's promise of memory. While servers boot, the promise is larger than what they hold; the difference is reserved."""

    def __init__(self) -> None:
        self._path = folder() / "memory" / f"{os.getpid()}-{random.getrandbits(32):08x}"
        # In turn: between making and locking the file another run would take it for one that a dead run has left.
        with self._turn():
            handle = _lock(self._path)
        assert handle is not None, "the name is new"
        self._handle = handle

    def promise(self, outstanding_gib: float) -> None:
        """Say how much this run will still take."""
        self._handle.seek(0)
        self._handle.truncate()
        json.dump({"outstanding_gib": outstanding_gib}, self._handle)
        self._handle.flush()

    def others(self) -> float:
        """What all other living runs will still take, in GiB; files of dead ones are removed."""
        total = 0.0
        for path in (folder() / "memory").iterdir():
            if path == self._path:
                continue
            with contextlib.suppress(OSError):
                handle = _lock(path)
                if handle is not None:
                    path.unlink(missing_ok=True)
                    handle.close()
                    continue
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    total += float(json.loads(path.read_text(encoding="utf-8"))["outstanding_gib"])
        return total

    def admit(
        self,
        servers: int,
        wait_s: float,
        say: Callable[[str], None],
        read: Callable[[], Inventory] = lambda: Inventory.read(gpus=False),
    ) -> None:
        """Wait until `servers` more CPU servers fit, then promise their memory.

        Never lets the kernel decide: raises UsageError with the numbers at once when the machine is too small, or after
        `wait_s` seconds when others keep the memory.
        """
        deadline = time.monotonic() + wait_s
        told = False
        while True:
            with self._turn():
                inventory = read()
                if (impossible := never_fits(servers, inventory)) is not None:
                    raise UsageError(impossible)
                missing = shortfall(servers, inventory, self.others())
                if missing is None:
                    self.promise(servers * SERVER_GIB)
                    return
            if time.monotonic() >= deadline:
                raise UsageError(
                    f"too little memory: {missing}; waited {wait_s:.0f} s: stop something or use a smaller topology"
                )
            if not told:
                say(f"waiting for memory: {missing}")
                told = True
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One run at a time reads the memory and promises, else two could both see the same free gigabytes."""
        with (folder() / "memory-turn").open("a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._handle.close()
