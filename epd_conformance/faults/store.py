"""Faults of the store: an object that is gone, cut short, another item's, or of one row. All through the subject's probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from epd_conformance.faults.fault import Fault, Receipt, Target, stored
from epd_conformance.probe import StoreProbe


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

    kind: ClassVar[str] = "deleted"

    def inject(self, target: Target) -> Receipt:
        before = stored(target.probe, target.key)
        target.probe.delete(target.key)
        return Receipt(self.kind, target.key, before, None)


class Truncated(_Rewriting):
    """The second half of the object is missing, as after a lost connection or on a full disk."""

    kind: ClassVar[str] = "truncated"

    def damaged(self, target: Target, before: bytes) -> bytes:
        return before[: len(before) // 2]


class Replaced(_Rewriting):
    """Another item's whole object stands in its place: nothing in its shape tells."""

    kind: ClassVar[str] = "replaced"

    def damaged(self, target: Target, before: bytes) -> bytes:
        return stored(target.probe, target.donor)


class OneRow(_Rewriting):
    """A well-formed object of the item's first row only: merged into the prompt, one row is broadcast over all places."""

    kind: ClassVar[str] = "one-row"

    def rehearse(self, probe: StoreProbe, key: str) -> None:
        """With every row: only if the consumer takes what the probe seals, it is the missing rows that it refuses."""
        data = stored(probe, key)
        probe.write(key, probe.seal(probe.unseal(data), data))

    def damaged(self, target: Target, before: bytes) -> bytes:
        return target.probe.seal(target.probe.unseal(before).first(1), before)


FAULTS: Mapping[str, Fault] = {fault.kind: fault for fault in (Deleted(), Truncated(), Replaced(), OneRow())}
