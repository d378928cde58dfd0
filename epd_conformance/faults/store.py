"""Faults of the store, all through the subject's probe: an object that is gone, damaged, another item's, or sealed and wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from epd_conformance.errors import StackError
from epd_conformance.faults.damage import AMONG_ROWS, RAW, SEALED
from epd_conformance.faults.fault import Fault, Receipt, Target, stored
from epd_conformance.probe import Rows, StoreProbe


class _Rewriting(Fault):
    """A fault that replaces the object by bytes made from it."""

    def inject(self, target: Target) -> Receipt:
        before = stored(target.probe, target.key)
        after = self.damaged(target, before)
        target.probe.write(target.key, after)
        return Receipt(self.kind, target.key, before, after)

    def damaged(self, target: Target, before: bytes) -> bytes:
        """The bytes that take the object's place."""
        raise NotImplementedError


class Deleted(Fault):
    """The object is gone."""

    kind = "deleted"

    def inject(self, target: Target) -> Receipt:
        before = stored(target.probe, target.key)
        target.probe.delete(target.key)
        return Receipt(self.kind, target.key, before, None)


class Replaced(_Rewriting):
    """Another item's whole object stands in its place: nothing in its shape tells."""

    kind = "replaced"

    def damaged(self, target: Target, before: bytes) -> bytes:
        return stored(target.probe, target.donor)


class Raw(_Rewriting):
    """Bytes of the object are changed or missing."""

    def __init__(self, kind: str, damage: Callable[[bytes], bytes]) -> None:
        self.kind = kind
        self._damage = damage

    def damaged(self, target: Target, before: bytes) -> bytes:
        return self._damage(before)


class AmongRows(_Rewriting):
    """Bytes of the rows in the object are changed or missing."""

    def __init__(self, kind: str, damage: Callable[[bytes, bytes], bytes]) -> None:
        self.kind = kind
        self._damage = damage

    def damaged(self, target: Target, before: bytes) -> bytes:
        return self._damage(before, target.probe.unseal(before).data)


class Sealed(_Rewriting):
    """A well-formed object with other rows: one row is broadcast over all places, another dtype is cast without a word."""

    def __init__(self, kind: str, change: Callable[[Rows], Rows]) -> None:
        self.kind = kind
        self._change = change

    def rehearse(self, probe: StoreProbe, key: str) -> None:
        """With the rows as they are: only if the consumer takes what the probe seals, it is the other rows that it refuses."""
        data = stored(probe, key)
        probe.write(key, probe.seal(probe.unseal(data), data))

    def damaged(self, target: Target, before: bytes) -> bytes:
        return target.probe.seal(self._change(target.probe.unseal(before)), before)


class Folder(Fault):
    """A folder stands where the object's file was: it is there, and cannot be opened."""

    kind = "folder"

    def inject(self, target: Target) -> Receipt:
        before, path = stored(target.probe, target.key), _file(target)
        path.unlink()
        path.mkdir()
        return Receipt(self.kind, target.key, before, None)

    def verify(self, target: Target, receipt: Receipt) -> bool:
        return _file(target).is_dir()

    def heal(self, target: Target, receipt: Receipt) -> None:
        path = _file(target)
        # A connector may have moved it away, and published again already.
        if path.is_dir():
            shutil.rmtree(path)
        super().heal(target, receipt)


def _file(target: Target) -> Path:
    path = target.probe.file(target.key)
    if path is None:
        raise StackError(
            "the probe names no file for the object: give it a method `file`, or leave out the feature `file_store`"
        )
    return path


FAULTS: Mapping[str, Fault] = {
    fault.kind: fault
    for fault in (
        Deleted(),
        Replaced(),
        Folder(),
        *(Raw(kind, damage) for kind, damage in RAW.items()),
        *(AmongRows(kind, damage) for kind, damage in AMONG_ROWS.items()),
        *(Sealed(kind, change) for kind, change in SEALED.items()),
    )
}
