"""Where a plan happens: the subject, its store, and what the harness does to the store behind the connector's back.

Damage goes through the subject's probe or straight into its files; a fault of the store works on this process only (a limit on
file sizes, a dropped capability), so every process of a plan applies it for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epd_conformance.engine.events import Event
from epd_conformance.engine.plan import SLOW, Plan
from epd_conformance.faults.damage import AMONG_ROWS, RAW, SEALED
from epd_conformance.probe import StoreProbe
from epd_conformance.subject import StackInfo, Subject

#: Smaller than any object with its header, so that none can be written whole.
FULL_AT_BYTES = 256

#: How long a file of a slow store takes to open: longer than a connector lets a scheduling pass wait, which is some milliseconds.
SLOW_S = 0.01

_CAP_DAC_OVERRIDE = 1  # linux/capability.h: root may write what its mode forbids
_CAPABILITY_VERSION_3 = 0x20080522

#: The file beside the store that appears when the damage `code` is unpickled: it is `open(<file>, "x")` in pickle protocol 0.
_TRACE = "executed"


class Site:
    """The folder of one plan: `root/stack/store` is the subject's, `root/outside` nobody's."""

    def __init__(self, subject: Subject, plan: Plan, root: Path, hidden: int) -> None:
        self.subject = subject
        self.plan = plan
        self.hidden = hidden
        self.root = root
        self.store = root / "stack" / "store"
        self.outside = root / "outside"
        self.store.mkdir(parents=True)
        self.outside.mkdir()
        roles = [server.role for server in plan.servers]
        self.stack = StackInfo(
            topology="aggregated" if roles == ["ec_both"] else "e-pd",
            sizes={role: roles.count(role) for role in dict.fromkeys(roles)},
            model="",
            environment_class="cpu-v2-emulated" if any(server.runner == "v2" for server in plan.servers) else "cpu-v1",
            store=self.store,
            ports={},
        )
        self.probe: StoreProbe | None = subject.probe(self.stack)
        self.keys = [item.identifier(str(self.outside)) for item in plan.items]

    def connector_config(self, role: str) -> dict[str, Any]:
        return dict(self.subject.connector_config(role, self.stack))

    # ---- looking ----

    def published(self) -> frozenset[str]:
        """The files of the store, by their relative names."""
        return frozenset(name for name, state in self._walk(self.store) if state is not None)

    def state(self) -> dict[str, tuple[int, int] | None]:
        """Everything below the root: file -> (size, time of change), folder -> None."""
        return dict(self._walk(self.root))

    def strays(self) -> list[str]:
        """What lies outside the store though nobody but the harness may put anything there."""
        known = {"stack", "stack/store", "outside"}
        return sorted(name for name in self.state() if name not in known and not name.startswith("stack/store/"))

    @staticmethod
    def _walk(top: Path) -> Iterator[tuple[str, tuple[int, int] | None]]:
        folders = [""]
        while folders:
            folder = folders.pop()
            with contextlib.suppress(OSError), os.scandir(f"{top}/{folder}") as entries:
                for entry in entries:
                    name = f"{folder}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{name}/")
                        yield name, None
                    else:
                        status = entry.stat(follow_symlinks=False)
                        yield name, (status.st_size, status.st_mtime_ns)

    # ---- damage ----

    def absent(self) -> list[str]:
        """The keys of which the probe finds no object, or one that was cut off by a full store. Empty where there is no probe."""
        return [key for key in self.keys if not self._there(key)]

    def _there(self, key: str) -> bool:
        if self.probe is None:
            return True
        try:
            found = self.probe.read(key)
        except Exception:
            return False  # the probe's way to say that the store is gone
        return found is not None and len(found) > FULL_AT_BYTES

    def damage(self, item: int, how: str, window: str = "") -> Event | None:
        """Damage an item's object. Returns the event, or None where nothing happened: no probe, no object, no fitting donor."""
        key = self.keys[item % len(self.keys)]
        if self.probe is None:
            return None
        try:
            before = self.probe.read(key)
            if before is None or not self._damage(item % len(self.keys), key, how, before):
                return None
            after = self.probe.read(key)
        except Exception:
            # The probe's own trouble, as under a store that is gone or with an object that is damaged already: no fault happened.
            return None
        return None if after == before else ("damaged", key, how, window)

    def _damage(self, item: int, key: str, how: str, before: bytes) -> bool:
        assert self.probe is not None
        if how == "deleted":
            self.probe.delete(key)
            return True
        if how in ("scribbled", "cut-in-place"):
            return self._in_place(before, how)
        after = self._damaged(item, how, before)
        if after is None:
            return False
        self.probe.write(key, after)
        return True

    def _damaged(self, item: int, how: str, before: bytes) -> bytes | None:
        assert self.probe is not None
        if how in RAW:
            return RAW[how](before)
        if how == "code":
            return f"cbuiltins\nopen\n(S'{self.outside / _TRACE}'\nS'x'\ntR.".encode()
        if how == "replaced":
            return self._donor(item)
        rows = self.probe.unseal(before)
        if how in AMONG_ROWS:
            return AMONG_ROWS[how](before, rows.data)
        if how in ("one-row", "rows-missing") and rows.rows == 1:
            return None
        return self.probe.seal(SEALED[how](rows), before)

    def _donor(self, item: int) -> bytes | None:
        """Another item's whole object, of the same shape."""
        assert self.probe is not None
        own = self.plan.items[item]
        for other, spec in enumerate(self.plan.items):
            if (
                spec.rows == own.rows
                and spec.seed != own.seed
                and (found := self.probe.read(self.keys[other])) is not None
            ):
                return found
        return None

    def _in_place(self, before: bytes, how: str) -> bool:
        """Change the file that holds these bytes without giving it a new inode."""
        for name in self.published():
            path = self.store / name
            if path.read_bytes() != before:
                continue
            if how == "cut-in-place":
                os.truncate(path, len(before) // 2)
            else:
                with path.open("r+b") as file:
                    file.seek(len(before) // 2)
                    file.write(bytes(byte ^ 0xFF for byte in before[len(before) // 2 :]))
            return True
        return False

    # ---- faults of the whole store ----

    def break_files(self, fault: str) -> None:
        """What a fault does to the folder itself, once for all processes."""
        if fault == "removed":
            self.store.rename(self.store.with_name("away"))
        elif fault == "read-only":
            self._modes(0o555)

    def mend_files(self, fault: str) -> None:
        """Undo `break_files`. What was put in the place of a removed store goes."""
        if fault == "removed":
            shutil.rmtree(self.store, ignore_errors=True)
            self.store.with_name("away").rename(self.store)
        elif fault == "read-only":
            self._modes(0o755)

    def _modes(self, mode: int) -> None:
        self.store.chmod(mode)
        for name, state in self._walk(self.store):
            if state is None:
                (self.store / name).chmod(mode)


def break_process(fault: str) -> None:
    """What a fault does to this process: a connector's writes fail, in this thread and those it starts from now on."""
    if fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    elif fault == "read-only":
        _override(False)
    elif fault == SLOW:
        _Opening.slow(True)


def mend_process(fault: str) -> None:
    """Undo `break_process`."""
    if fault == "full":
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    elif fault == "read-only":
        _override(True)
    elif fault == SLOW:
        _Opening.slow(False)


class _Opening:
    """Hears of every file that Python opens in this process, in any thread. An audit hook stays for good."""

    hooked = False
    is_slow = False

    @classmethod
    def slow(cls, slow: bool) -> None:
        cls.is_slow = slow
        if not cls.hooked:
            sys.addaudithook(cls._heard)
            cls.hooked = True

    @classmethod
    def _heard(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if cls.is_slow and event == "open" and "/stack/store/" in str(arguments[0]):
            time.sleep(SLOW_S)


def _override(may: bool) -> None:
    """Root obeys modes once it has dropped this capability; for anybody else nothing changes."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)()
    if libc.capget(header, data) != 0:
        return
    bit = 1 << _CAP_DAC_OVERRIDE
    # Words: effective, permitted, inheritable of the lower 32 capabilities, then of the upper ones.
    data[0] = data[0] | bit & data[1] if may else data[0] & ~bit
    libc.capset(header, data)
