"""A dict that notes which of its keys are read: how the recorder finds configuration that a connector ignores.

For a connector it is the dict that it would have got: same content, same methods, and a pickle or a copy of it is a plain dict.
Whoever takes the whole (iterates, copies, pickles, unpacks) is taken to read every key, so that no key is called ignored that
was not. What C code reads without calling a method (pydantic or msgspec, handed the dict itself) is not seen.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any


class ObservedDict(dict[str, Any]):
    """A dict; `unread` are those of its first keys that nobody has read, `given` all of these."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.given = tuple(content)
        self._read: set[Any] = set()

    @property
    def read(self) -> list[str]:
        """The keys that it came with and that somebody has read, in their order."""
        return [key for key in self.given if key in self._read]

    @property
    def unread(self) -> list[str]:
        """The keys that it came with and that nobody has read, in their order."""
        return [key for key in self.given if key not in self._read]

    def _all(self) -> None:
        self._read.update(self.given)

    # dict(x), {**x}, x | y and f(**x) call keys() and __getitem__ of a subclass that defines __iter__.
    def __iter__(self) -> Iterator[str]:
        self._all()
        return super().__iter__()

    def __reversed__(self) -> Iterator[str]:
        self._all()
        return super().__reversed__()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().setdefault(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self._read.add(key)
        return super().pop(key, *default)

    def popitem(self) -> tuple[str, Any]:
        self._all()
        return super().popitem()

    def keys(self) -> KeysView[str]:  # type: ignore[override]  # typeshed has the builtin's private view types
        self._all()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._all()
        return super().values()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        self._all()
        return super().copy()

    def __reduce_ex__(self, protocol: object) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        """Pickled and deep-copied as the plain dict that it stands for: another process may not have this module."""
        self._all()
        return dict, (super().copy(),)
