"""Store probes: how the harness reaches a subject's store past its connector, to read it and to do damage.

What a probe says is not believed. A fault counts only where the consumer's look-up, load or answer shows that it met it; and what
a probe writes counts as an object only where the consumer loads such a one, undamaged, in the same cell (`Fault.rehearse`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Rows:
    """An encoder output without torch: `data` are its bytes in row-major order, `dtype` is torch's name (`bfloat16`)."""

    data: bytes
    rows: int
    width: int
    dtype: str

    def __post_init__(self) -> None:
        if self.rows < 0 or self.width < 0 or (len(self.data) % max(self.rows, 1)):
            raise ValueError(f"{len(self.data)} bytes are no {self.rows} rows")

    def first(self, count: int) -> Rows:
        """The first `count` rows. Raises ValueError where there are fewer."""
        if count > self.rows:
            raise ValueError(f"{self.rows} rows have no first {count}")
        each = len(self.data) // max(self.rows, 1)
        return replace(self, data=self.data[: each * count], rows=count)


class StoreProbe(ABC):
    """Reads and changes a store without the connector. A key is the engine's identifier of an item (`mm_hash`).

    Errors of the store may be raised as they come: the cell is then `error`, since no fault provably happened.
    """

    @abstractmethod
    def keys(self) -> list[str]:
        """The keys of all objects in the store, in any order."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The object under a key as it is stored, or None where there is none."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Store these bytes under a key, as they are, in place of what is there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove the object under a key; nothing happens where there is none."""

    def file(self, key: str) -> Path | None:
        """The file that holds the object under a key, whether there is one or not; needed for the feature `file_store`."""
        return None

    @abstractmethod
    def unseal(self, data: bytes) -> Rows:
        """The encoder output in an object's bytes."""

    @abstractmethod
    def seal(self, rows: Rows, like: bytes) -> bytes:
        """An object that the connector cannot tell from one of its own by form: as `like` (same key, same model), with other
        rows, and every checksum right."""
