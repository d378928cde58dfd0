"""What a fault is: `inject` gives a receipt, `verify` says whether it holds, `heal` undoes it.

A fault that did not provably happen makes its cell `error`, never `pass`.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from epd_conformance.errors import StackError
from epd_conformance.probe import StoreProbe


def digest(data: bytes | None) -> str | None:
    """SHA-256 of an object's bytes; None for no object."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def stored(probe: StoreProbe, key: str) -> bytes:
    """The object under a key. Raises StackError where there is none."""
    data = probe.read(key)
    if data is None:
        raise StackError(f"the store has no object under {key}")
    return data


@dataclass(frozen=True)
class Target:
    """What a fault is done to: the object of `key` in the store behind `probe`. `donor` is another item of the same shape."""

    probe: StoreProbe
    key: str
    donor: str


@dataclass(frozen=True)
class Receipt:
    """What was done. `before` and `after` are the object's bytes (None: no object), `at` seconds since the epoch."""

    kind: str
    key: str
    before: bytes | None = field(repr=False)
    after: bytes | None = field(repr=False)
    at: float = field(default_factory=time.time)

    def to_json(self) -> dict[str, Any]:
        """Digests and sizes in place of the bytes."""
        return {
            "kind": self.kind,
            "key": self.key,
            "at": self.at,
            "before": {"sha256": digest(self.before), "bytes": None if self.before is None else len(self.before)},
            "after": {"sha256": digest(self.after), "bytes": None if self.after is None else len(self.after)},
        }


class Fault(ABC):
    """One kind of damage to one stored object. A subject may give its own way to do a kind (`Subject.faults`)."""

    kind: str

    def rehearse(self, probe: StoreProbe, key: str) -> None:
        """Do to the twin's object all that `inject` does, but no damage: it must still be loaded afterwards.

        Else a probe whose writing spoils an object by itself (or deletes it) would turn every fault into one that any
        connector survives. Raises where there is no object.
        """
        probe.write(key, stored(probe, key))

    @abstractmethod
    def inject(self, target: Target) -> Receipt:
        """Do the damage. Raises where it cannot be done; nothing has happened then."""

    def verify(self, target: Target, receipt: Receipt) -> bool:
        """Whether the store holds what the receipt says, and not what was there before."""
        return target.probe.read(receipt.key) == receipt.after and receipt.after != receipt.before

    def heal(self, target: Target, receipt: Receipt) -> None:
        """Put back what was there before."""
        if receipt.before is None:
            target.probe.delete(receipt.key)
        else:
            target.probe.write(receipt.key, receipt.before)
