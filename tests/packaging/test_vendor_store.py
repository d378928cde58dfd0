"""The example vendor's store: whatever is not exactly the wanted item is a miss, and no key leaves the folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "vendor-minimal" / "src"
DATA = bytes(range(4 * 3 * 4))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SOURCE))
    return importlib.import_module("vendor_minimal.store")


def find(module: ModuleType, root: Path, key: str = "k", **changed: Any) -> Any:
    return module.Store(root).find(key, **{"model": "m", "dtype": "float32", "rows": 4, **changed})


def write(module: ModuleType, root: Path, key: str = "k") -> Path:
    store = module.Store(root)
    store.write(key, module.pack(module.About(key, "m", "float32", 4, 3), DATA))
    return Path(store.path(key))


def repacked(**changed: Any) -> Callable[[ModuleType, bytes], bytes]:
    """A well-formed file, every checksum right, that says something else about the same rows."""
    return lambda module, packed: module.pack(replace(module.unpack(packed)[0], **changed), DATA)


@pytest.mark.parametrize(
    "damage",
    [
        lambda module, packed: packed[: len(packed) // 2],
        lambda module, packed: b"",
        lambda module, packed: b"\0" * len(packed),
        lambda module, packed: packed + b"\0",
        lambda module, packed: packed[:-40] + bytes([packed[-40] ^ 1]) + packed[-39:],
        lambda module, packed: packed[:8] + bytes([packed[8] ^ 1]) + packed[9:],
        lambda module, packed: module.pack(module.About("k", "m", "float32", 1, 3), DATA[:12]),
        repacked(key="another"),
        repacked(model="another"),
        repacked(rows=3, width=4),
        repacked(dtype="float16", width=6),
        repacked(dtype="int8", width=12),
        repacked(rows="4"),
    ],
)
def test_what_is_not_exactly_the_item_is_a_miss(
    damage: Callable[[ModuleType, bytes], bytes], module: ModuleType, tmp_path: Path
) -> None:
    path = write(module, tmp_path)
    about, data = find(module, tmp_path)
    assert (about.width, data) == (3, DATA), "undamaged it is found"
    path.write_bytes(damage(module, path.read_bytes()))
    assert find(module, tmp_path) is None


@pytest.mark.parametrize("changed", [{"rows": 1}, {"rows": 5}, {"model": "another"}, {"dtype": "float16"}])
def test_another_wish_is_a_miss(changed: dict[str, Any], module: ModuleType, tmp_path: Path) -> None:
    write(module, tmp_path)
    assert find(module, tmp_path, **changed) is None


def test_a_folder_in_its_place_and_no_store_at_all_are_misses(module: ModuleType, tmp_path: Path) -> None:
    assert find(module, tmp_path / "nowhere") is None
    path = write(module, tmp_path)
    path.unlink()
    path.mkdir()
    assert find(module, tmp_path) is None


@pytest.mark.parametrize("key", ["", "../x", "/etc/passwd", "a/b", "\0", "k" * 10_000, "\ud800", "ключ"])
def test_no_key_leaves_the_folder(key: str, module: ModuleType, tmp_path: Path) -> None:
    root = tmp_path / "root"
    path = write(module, root, key)
    assert path.parent == root
    assert list(tmp_path.iterdir()) == [root]
    assert find(module, root, key) is not None
    assert find(module, root, key + "x") is None


def test_a_write_that_fails_leaves_nothing(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(module, tmp_path)
    before = path.read_bytes()

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        module.Store(tmp_path).write("k", b"new")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
