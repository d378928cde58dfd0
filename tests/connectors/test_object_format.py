"""The stored object: round trips, every kind of damage, names, publication. Needs torch, not vLLM."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: objects hold torch tensors")

from stored_objects import load  # noqa: E402

from epd_conformance.connectors import object_format as of  # noqa: E402
from epd_conformance.connectors.object_format import Expectation, Header, ObjectError, Reason  # noqa: E402

FINGERPRINT = "ab" * 32
HOSTILE_KEYS = [
    "",
    "/",
    "/etc/passwd",
    "../../x",
    "a/b",
    "nul\0nul",
    "x" * 10_000,
    "lora:0123abcd",
    "ünï 💥",
    "\ud800",
    "\ud800\udc00",  # two lone surrogates, not the character U+10000
    "\U00010000",
    "%2F",
    "..",
    ".tmp",
]
any_key = st.text(st.characters(exclude_categories=()), max_size=40)


def tensor_of(rows: int = 2, width: int = 3, dtype: str = "float32") -> torch.Tensor:
    values = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width) / 7
    return values.to(getattr(torch, dtype))


def object_of(tensor: torch.Tensor, key: str = "k", creator: str = "test") -> bytes:
    header = Header.of(tensor, key=key, model_fingerprint=FINGERPRINT, creator=creator, created="2026-01-01")
    return of.encode(tensor, header)


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and raw(left) == raw(right)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def reason_of(call: Callable[[], object]) -> Reason:
    with pytest.raises(ObjectError) as caught:
        call()
    return caught.value.reason


@settings(deadline=None)  # the first example pays for torch's start
@given(
    key=any_key,
    creator=st.text(max_size=20),
    dtype=st.sampled_from(sorted(of.DTYPES)),
    rows=st.integers(0, 5),
    width=st.integers(0, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_round_trip_is_exact(key: str, creator: str, dtype: str, rows: int, width: int, seed: int) -> None:
    size = rows * width * of.DTYPES[dtype][1]
    random = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    tensor = random.view(getattr(torch, dtype)).reshape(rows, width)  # every bit pattern, NaN included
    header = Header.of(tensor, key=key, model_fingerprint=FINGERPRINT, creator=creator)
    read, loaded = of.decode(of.encode(tensor, header))
    assert read == header
    assert same_bytes(loaded, tensor)
    of.verify_header(read, Expectation(key, FINGERPRINT, rows, dtype))


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
def test_hostile_keys_survive_in_the_header(key: str) -> None:
    assert of.decode(object_of(tensor_of(), key))[0].key == key


def test_non_contiguous_tensor_is_stored_by_value() -> None:
    wide = tensor_of(4, 6)
    view = wide.t()[1:4]
    assert not view.is_contiguous()
    assert same_bytes(of.decode(object_of(view))[1], view)


def test_other_safetensors_readers_can_read_it(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = of.publish(tmp_path, "k", object_of(tensor_of()))
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["ec_cache"]
        assert torch.equal(file.get_tensor("ec_cache"), tensor_of())
        metadata = file.metadata()
    assert metadata["format"] == "epd-verified-store/1"
    assert (metadata["key"], metadata["rows"], metadata["width"]) == ("k", "2", "3")


def test_truncation_at_every_byte_is_found() -> None:
    data = object_of(tensor_of())
    for length in range(len(data)):
        assert reason_of(lambda length=length: of.decode(data[:length])) is Reason.TRUNCATED


def test_a_flip_of_any_bit_is_found_or_changes_nothing() -> None:
    data = object_of(tensor_of(), key="lora:π")
    original = of.decode(data)
    harmless = 0
    for position in range(len(data)):
        for mask in (*(1 << bit for bit in range(8)), 0xFF):
            damaged = bytearray(data)
            damaged[position] ^= mask
            try:
                header, tensor = of.decode(bytes(damaged))
            except ObjectError:
                continue
            harmless += 1
            assert header == original[0]
            assert same_bytes(tensor, original[1])
    # Only white space of the JSON header may change unnoticed: the test is about damage, not about nothing.
    assert harmless < 20


@given(data=st.binary(max_size=200))
def test_garbage_never_raises_anything_else(data: bytes) -> None:
    with pytest.raises(ObjectError):
        of.decode(data)


@given(inner=st.binary(max_size=100))
def test_a_header_of_garbage_never_raises_anything_else(inner: bytes) -> None:
    with pytest.raises(ObjectError):
        of.decode(struct.pack("<Q", len(inner)) + inner)


def test_a_deeply_nested_header_is_malformed() -> None:
    inner = b"[" * 200_000
    assert reason_of(lambda: of.decode(struct.pack("<Q", len(inner)) + inner)) is Reason.MALFORMED


def test_zero_tail_of_the_right_length_is_found() -> None:
    """What a writer leaves that sets the length first and dies: a valid header over zeros."""
    data = object_of(tensor_of(8, 8))
    assert reason_of(lambda: of.decode(data[:-64] + bytes(64))) is Reason.CHECKSUM


def test_bytes_after_the_payload_are_found() -> None:
    assert reason_of(lambda: of.decode(object_of(tensor_of()) + b"\0")) is Reason.MALFORMED


def test_another_version_is_told_from_damage() -> None:
    data = object_of(tensor_of()).replace(b"epd-verified-store/1", b"epd-verified-store/2")
    assert reason_of(lambda: of.decode(data)) is Reason.VERSION


def test_a_plain_safetensors_file_is_malformed() -> None:
    from safetensors.torch import save

    assert reason_of(lambda: of.decode(save({"ec_cache": tensor_of()}))) is Reason.MALFORMED
    assert reason_of(lambda: of.decode(save({"other": tensor_of()}))) is Reason.MALFORMED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key": "other"}, Reason.KEY),
        ({"fingerprint": "cd" * 32}, Reason.MODEL),
        ({"rows": 4}, Reason.ROWS),
        ({"rows": 1}, Reason.ROWS),
        ({"dtype": "bfloat16"}, Reason.DTYPE),
    ],
    ids=str,
)
def test_verify_names_what_differs(change: dict[str, object], reason: Reason) -> None:
    header, _ = of.unpack(object_of(tensor_of()))
    fits = Expectation("k", FINGERPRINT, rows=2, dtype="float32")
    of.verify_header(header, fits)
    of.verify_header(header, Expectation("k", FINGERPRINT))
    assert reason_of(lambda: of.verify_header(header, dataclasses.replace(fits, **change))) is reason


@pytest.mark.parametrize("shape", [(6,), (), (1, 2, 3)], ids=str)
def test_only_two_dimensions_are_stored(shape: tuple[int, ...]) -> None:
    assert reason_of(lambda: object_of(torch.zeros(shape))) is Reason.SHAPE


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64], ids=str)
def test_only_floating_types_are_stored(dtype: torch.dtype) -> None:
    assert reason_of(lambda: object_of(torch.zeros(2, 3, dtype=dtype))) is Reason.DTYPE


def test_encode_refuses_the_header_of_another_tensor() -> None:
    header = Header.of(tensor_of(2, 3), key="k", model_fingerprint=FINGERPRINT, creator="test")
    assert reason_of(lambda: of.encode(tensor_of(3, 2), header)) is Reason.SHAPE


def test_errors_cross_process_borders() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ObjectError(Reason.ROWS, "text")))
    assert (error.reason, str(error)) == (Reason.ROWS, "text")


@given(key=any_key)
def test_names_stay_in_the_root_and_short(key: str) -> None:
    name = of.object_name(key)
    first, second, last = name.split("/")
    assert (len(first), len(second), len(last)) == (2, 2, 64 + len(".safetensors"))
    assert set(first + second + last[:64]) <= set("0123456789abcdef")


def test_names_differ_for_keys_that_look_alike() -> None:
    assert len({of.object_name(key) for key in HOSTILE_KEYS}) == len(HOSTILE_KEYS)


@pytest.mark.parametrize("key", HOSTILE_KEYS, ids=ascii)
def test_hostile_keys_are_published_inside_the_root(tmp_path: Path, key: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    of.publish(root, key, object_of(tensor_of(), key))
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    header, tensor = load(root, Expectation(key, FINGERPRINT, rows=2))
    assert header.key == key
    assert torch.equal(tensor, tensor_of())


@pytest.mark.parametrize("fsync", [False, True])
def test_published_objects_are_readable_by_others(tmp_path: Path, fsync: bool) -> None:
    before = os.umask(0o022)
    try:
        for _ in range(2):  # the first one makes the folder
            path = of.publish(tmp_path, "k", object_of(tensor_of()), fsync=fsync)
            assert stat.S_IMODE(path.stat().st_mode) == 0o644
        os.umask(0o027)
        path = of.publish(tmp_path, "k2", object_of(tensor_of()), fsync=fsync)
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    finally:
        os.umask(before)


def test_a_failed_publication_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of.publish(tmp_path, "k", object_of(tensor_of()))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    calls = 0

    def full_disk(descriptor: int, parts: list[memoryview]) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(28, "No space left on device")
        return os.write(descriptor, parts[0][:10])

    monkeypatch.setattr(os, "writev", full_disk)
    with pytest.raises(OSError, match="No space"):
        of.publish(tmp_path, "k", object_of(tensor_of(5, 5)))
    assert calls == 2
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == files
    assert torch.equal(load(tmp_path, Expectation("k", FINGERPRINT))[1], tensor_of())


def test_short_writes_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may take part of what it is given, across the parts or inside one."""
    data = object_of(tensor_of(5, 5))
    limits = iter([3, 1, len(data) // 2, *[7] * len(data)])

    def short(descriptor: int, parts: list[memoryview]) -> int:
        return os.write(descriptor, b"".join(parts)[: next(limits)])

    monkeypatch.setattr(os, "writev", short)
    path = of.publish(tmp_path, "k", [data[:2], memoryview(data)[2:9], b"", data[9:]])
    assert path.read_bytes() == data


def test_a_vanished_root_is_not_made_again(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="root"):
        of.publish(tmp_path / "gone", "k", object_of(tensor_of()))
    assert not (tmp_path / "gone").exists()


KINDS = {"folder": Reason.UNREADABLE, "fifo": Reason.UNREADABLE, "nothing": Reason.MISSING}


def test_reading_what_is_not_a_regular_file(tmp_path: Path) -> None:
    folder = tmp_path / of.object_name("folder")
    folder.mkdir(parents=True)
    fifo = tmp_path / of.object_name("fifo")
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)  # must not block
    found = {key: reason_of(lambda key=key: load(tmp_path, Expectation(key, FINGERPRINT))) for key in KINDS}
    assert found == KINDS


def test_a_huge_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = of.publish(tmp_path, "k", b"")
    os.truncate(path, of.MAX_OBJECT_BYTES + 1)
    assert reason_of(lambda: load(tmp_path, Expectation("k", FINGERPRINT))) is Reason.UNREADABLE


def test_the_tensor_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = of.publish(tmp_path, "k", object_of(tensor_of(64, 64)))
    _, tensor = load(tmp_path, Expectation("k", FINGERPRINT))
    with path.open("r+b") as file:  # in place: a mapping would follow
        file.write(b"\xff" * path.stat().st_size)
        file.truncate(10)
    assert torch.equal(tensor, tensor_of(64, 64))


def test_identity_changes_when_published_again_or_written_in_place(tmp_path: Path) -> None:
    path = of.publish(tmp_path, "k", object_of(tensor_of()))
    first = of.identity_of(path.stat())
    with of.open_object(path) as (_, status):
        assert of.identity_of(status) == first
    keep = path.open("rb")  # so that the file system cannot hand out the same inode again
    of.publish(tmp_path, "k", object_of(tensor_of()))
    second = of.identity_of(path.stat())
    assert second != first
    os.utime(path, ns=(1, 1))
    assert of.identity_of(path.stat()) != second
    keep.close()


# ---- the format, as others write it ----

STORED_AS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def written(tensor: torch.Tensor, entry: object = None, **changed: str) -> bytes:
    """An object, from the description of the format alone. `entry`: what the header says of the tensor; `changed`: metadata."""
    rows, width = tensor.shape
    dtype = str(tensor.dtype).removeprefix("torch.")
    metadata = {
        "format": "epd-verified-store/1",
        "key": "a/b:%C3%A4%20%2B",
        "model_fingerprint": FINGERPRINT,
        "dtype": dtype,
        "rows": str(rows),
        "width": str(width),
        "checksum": f"xxh3_128:{xxhash.xxh3_128_hexdigest(raw(tensor))}",
        "creator": "ü",
        "created": "2026-01-01",
        **changed,
    }
    listed = ",".join(f"[{json.dumps(name)},{json.dumps(value)}]" for name, value in sorted(metadata.items()))
    metadata["header_checksum"] = f"xxh3_128:{xxhash.xxh3_128_hexdigest(f'[{listed}]'.encode('ascii'))}"
    shape = [rows, width]
    entry = entry or {"dtype": STORED_AS[dtype], "shape": shape, "data_offsets": [0, len(raw(tensor))]}
    return headed(json.dumps({"__metadata__": metadata, "ec_cache": entry}, separators=(",", ":"))) + raw(tensor)


def headed(text: str) -> bytes:
    data = text.encode("ascii")
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize("dtype", STORED_AS)
def test_the_format_is_what_others_read_and_write(dtype: str) -> None:
    assert set(of.DTYPES) == set(STORED_AS)
    tensor = tensor_of(dtype=dtype)
    assert object_of(tensor, key="a/b:ä +", creator="ü") == written(tensor)
    assert same_bytes(of.decode(written(tensor))[1], tensor)


def test_an_object_says_when_it_was_made() -> None:
    header = Header.of(tensor_of(), key="k", model_fingerprint=FINGERPRINT, creator="test")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", header.created)


def test_the_reasons_are_words_that_counters_show() -> None:
    words = "missing unreadable truncated malformed version checksum key model rows width dtype shape"
    assert [str(ObjectError(reason, "text").reason) for reason in Reason] == words.split()


@pytest.mark.parametrize("count", ["", "+2", "-2", "2.0", " 2", "²", "٢", "1" * 19, "9" * 5000], ids=ascii)
def test_what_is_no_count_is_malformed(count: str) -> None:
    with pytest.raises(ObjectError, match="not a count") as caught:
        of.decode(written(tensor_of(), rows=count))
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("beyond", ["9" * 18, "1" + "0" * 17])
def test_a_count_that_no_file_holds_is_an_honest_one(beyond: str) -> None:
    with pytest.raises(ObjectError, match="the tensor is"):
        of.decode(written(tensor_of(), rows=beyond))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(8), Reason.MALFORMED),
        (headed("[]"), Reason.MALFORMED),
        (headed('{"__metadata__":[],"ec_cache":{}}'), Reason.MALFORMED),
        (headed('{"__metadata__":{"format":1},"ec_cache":{}}'), Reason.MALFORMED),
        (written(tensor_of(), dtype="int8"), Reason.MALFORMED),
        (written(tensor_of(), key="%FF"), Reason.MALFORMED),
        (written(tensor_of(), more="x"), Reason.MALFORMED),
        (written(tensor_of(), {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}), Reason.MALFORMED),
        (written(tensor_of()).replace(b"2026-01-01", b"2026-01-02"), Reason.CHECKSUM),
    ],
)
def test_what_is_wrong_is_told(data: bytes, reason: Reason) -> None:
    with pytest.raises(ObjectError) as caught:
        of.decode(data)
    assert caught.value.reason is reason
    assert len(str(caught.value)) > 10


def test_a_machine_of_the_other_byte_order_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of, "sys", SimpleNamespace(byteorder="big"))
    assert reason_of(lambda: object_of(tensor_of())) is Reason.MALFORMED


# ---- files ----


def test_what_cannot_be_opened_or_read_is_unreadable(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    path = of.publish(tmp_path, "k", object_of(tensor_of()))

    def fail(path: Path) -> None:
        with of.open_object(path):
            raise OSError(5, "Input/output error")

    for one in (loop, path):
        assert reason_of(lambda one=one: fail(one)) is Reason.UNREADABLE
    os.truncate(path, of.MAX_OBJECT_BYTES)
    with of.open_object(path) as (_, status):
        assert of.identity_of(status) == (status.st_ino, of.MAX_OBJECT_BYTES, status.st_mtime_ns)


def test_short_reads_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real(fd, [views[0][:7]], offset))
    with path.open("rb") as file:
        for size, found in ((50, 50), (90, 80)):
            buffer = bytearray(size)
            assert of.fill(file.fileno(), memoryview(buffer), 20) == found
            assert buffer[:found] == bytes(range(20, 20 + found))


def test_writers_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    calls: list[object] = []

    def late(path: Path, *args: object) -> int:
        calls.append(path)
        if len(calls) == 1:
            path.parent.mkdir(parents=True)  # another writer has made it in this moment
            raise FileNotFoundError(path)
        return real(path, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", late)
        patched.setattr(os, "fsync", lambda descriptor: pytest.fail("flushed"))
        of.publish(tmp_path, "k", object_of(tensor_of()))
    monkeypatch.setattr(of.secrets, "token_hex", lambda size: "00")
    taken = (tmp_path / of.object_name("k")).parent / f".{os.getpid()}-00.tmp"
    taken.write_bytes(b"")
    with pytest.raises(FileExistsError):
        of.publish(tmp_path, "k", object_of(tensor_of()))
    assert torch.equal(load(tmp_path, Expectation("k", FINGERPRINT))[1], tensor_of())


def test_a_store_that_goes_while_it_is_written_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir()

    def gone(descriptor: int, parts: list[memoryview]) -> int:
        shutil.rmtree(root)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "writev", gone)
    with pytest.raises(OSError, match="Input/output"):
        of.publish(root, "k", object_of(tensor_of()))
