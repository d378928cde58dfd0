"""The stored object of the verified store: its bytes, its name, how it is published, read and checked.

An object is one safetensors file with one tensor, ``ec_cache``, of shape (rows, width), and string metadata
that says whose embedding it is. Anyone with a safetensors library can read it; this module reads it more
strictly, because a consumer of an embedding that is wrong answers wrongly without noticing. The format is
described for third parties in ``docs/verified-store.md``.

The checksums are xxh3: they find damage, not forgery. Whoever may write to the store can forge an object.

Nothing here imports vLLM, and torch only where a tensor is made or read.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import secrets
import stat
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import blake3
import xxhash

if TYPE_CHECKING:
    import torch

FORMAT = "epd-verified-store/1"
TENSOR_NAME = "ec_cache"
SUFFIX = ".safetensors"

#: torch name -> (safetensors name, bytes an element). Only floating types: an encoder output is never
#: anything else, and the engine would cast an integer or boolean tensor without a word.
DTYPES: dict[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}

#: A larger file is not read at all: whatever lies under a name is read into the memory of the scheduler's
#: process, and a sparse file of a terabyte must not end it. The largest outputs of today (32k rows x 16k
#: values, float32) are 2 GiB.
MAX_OBJECT_BYTES = 4 << 30

_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian u64
_CHECKSUM_PREFIX = "xxh3_128:"
_METADATA_KEYS = frozenset(
    {
        "format",
        "key",
        "model_fingerprint",
        "dtype",
        "rows",
        "width",
        "checksum",
        "creator",
        "created",
        "header_checksum",
    }
)


class Reason(enum.StrEnum):
    """Why an object was refused. A closed set: counters and tests may rely on it."""

    MISSING = "missing"  # nothing under this name
    UNREADABLE = "unreadable"  # it is there, but: mode, I/O error, not a regular file, too large
    TRUNCATED = "truncated"  # shorter than its own header says
    MALFORMED = "malformed"  # not a safetensors file of this layout
    VERSION = "version"  # another format or another version of it
    CHECKSUM = "checksum"  # header or payload is not what was written
    KEY = "key"  # another item's object
    MODEL = "model"  # made with other weights, dtype or processor settings
    ROWS = "rows"
    WIDTH = "width"
    DTYPE = "dtype"
    SHAPE = "shape"  # a tensor that is not (rows, width), or does not match its header


class ObjectError(Exception):
    """An object that must not be used.

    Attributes:
        reason: which of the closed set of reasons.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[type[ObjectError], tuple[Reason, str]]:
        return type(self), (self.reason, str(self))


class StatIdentity(NamedTuple):
    """Tells two states of the file under one name apart without reading it: publishing again changes the
    inode, writing in place the time or the size."""

    inode: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class Header:
    """What an object says about itself.

    Attributes:
        key: the engine's identifier of the item, exactly.
        model_fingerprint: of the producer, see ``fingerprint.py``.
        dtype: torch's name without the prefix, for example ``bfloat16``.
        rows: number of embeddings. width: values in each.
        checksum: ``xxh3_128:`` and 32 hex digits, over the tensor's bytes.
        creator: who made it, free text. created: UTC, ISO 8601.
    """

    key: str
    model_fingerprint: str
    dtype: str
    rows: int
    width: int
    checksum: str
    creator: str
    created: str

    @classmethod
    def of(
        cls,
        tensor: torch.Tensor,
        *,
        key: str,
        model_fingerprint: str,
        creator: str,
        created: str | None = None,
    ) -> Header:
        """Describe a tensor of shape (rows, width). It may be non-contiguous and on any device.

        Raises:
            ObjectError: ``shape`` if it has not two dimensions, ``dtype`` if its type cannot be stored.
        """
        if tensor.ndim != 2:
            raise ObjectError(Reason.SHAPE, f"an encoder output is (rows, width), not {tuple(tensor.shape)}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ObjectError(Reason.DTYPE, f"dtype {dtype} cannot be stored; can be: {', '.join(DTYPES)}")
        rows, width = tensor.shape
        return cls(
            key=key,
            model_fingerprint=model_fingerprint,
            dtype=dtype,
            rows=int(rows),
            width=int(width),
            checksum=_checksum(_payload(tensor)),
            creator=creator,
            created=created if created is not None else datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


@dataclass(frozen=True)
class Expectation:
    """What the reader knows of the object before it reads it. None means that the reader cannot know.

    Of the width it knows only which ones are possible, see ``widths.py``.
    """

    key: str
    fingerprint: str
    rows: int | None = None
    dtype: str | None = None


def show_key(key: str) -> str:
    """A key as it can stand in a log line: ASCII, quoted, at most 80 characters (a client chooses keys)."""
    text = ascii(key)
    return text if len(text) <= 80 else text[:77] + "..."


def object_name(key: str) -> str:
    """The path of a key's object below the root: ``ab/cd/<64 hex digits>.safetensors``.

    Any ``str`` is allowed, also with slashes, NUL or lone surrogates. A hash makes the name short, safe and,
    for any two keys that a client can find, different; the key itself stands in the header. Two levels of
    folders keep each of them small (256 entries; with a million objects 16 in a leaf).
    """
    digest = blake3.blake3(key.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{digest[:2]}/{digest[2:4]}/{digest}{SUFFIX}"


def encode(tensor: torch.Tensor, header: Header) -> bytes:
    """The bytes of an object.

    Args:
        tensor: (rows, width), any device, contiguous or not.
        header: from ``Header.of`` of the same tensor. The checksum is taken from it and not computed again.

    Raises:
        ObjectError: ``shape`` if the header describes another tensor.
    """
    return b"".join(encode_parts(tensor, header))


def encode_parts(tensor: torch.Tensor, header: Header) -> tuple[bytes, memoryview]:
    """As ``encode``, in two parts: what stands before the rows, and the rows where they lie. Joining them would copy
    every row once more."""
    described = (header.rows, header.width, header.dtype)
    actual = (*tensor.shape, str(tensor.dtype).removeprefix("torch."))
    if described != actual:
        raise ObjectError(Reason.SHAPE, f"the header describes {described}, the tensor is {actual}")
    return _front(header), _payload(tensor)


def pack(header: Header, payload: bytes | memoryview) -> bytes:
    """The bytes of an object with this header and these rows (row-major, little-endian), which are not looked at."""
    return b"".join((_front(header), payload))


def _front(header: Header) -> bytes:
    """Everything of an object that stands before its rows."""
    metadata = {
        "format": FORMAT,
        # Percent-encoded UTF-8 is exact for every str (JSON would join a pair of lone surrogates to one
        # character) and leaves the usual keys, hex digits and `name:hex`, readable.
        "key": urllib.parse.quote(header.key.encode("utf-8", "surrogatepass"), safe=":/"),
        "model_fingerprint": header.model_fingerprint,
        "dtype": header.dtype,
        "rows": str(header.rows),
        "width": str(header.width),
        "checksum": header.checksum,
        "creator": header.creator,
        "created": header.created,
    }
    metadata["header_checksum"] = _header_checksum(metadata)
    document = {"__metadata__": metadata, TENSOR_NAME: _layout(header)}
    text = json.dumps(document, separators=(",", ":")).encode("ascii")
    # safetensors aligns the payload to eight bytes, with spaces behind the header.
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def repack(header: Header, payload: bytes) -> bytes:
    """As `pack`, with the checksum of these rows."""
    return pack(replace(header, checksum=_checksum(memoryview(payload))), payload)


def unpack(data: bytes) -> tuple[Header, bytes]:
    """Header and rows of an object, checked as in `decode`; needs no torch.

    Raises:
        ObjectError: as `decode`.
    """
    header, start = check(data)
    return header, data[start:]


def decode(data: bytes | bytearray) -> tuple[Header, torch.Tensor]:
    """Parse an object and check everything that it says about itself.

    Returns:
        The header and a tensor of shape (rows, width) on the CPU. The tensor lies in private memory: in
        ``data`` itself if that is a ``bytearray`` (then hand it over and do not touch it again), else in a
        copy.

    Raises:
        ObjectError: ``truncated``, ``malformed``, ``version`` or ``checksum``.
    """
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    header, start = check(buffer)

    import torch

    dtype = getattr(torch, header.dtype)
    shape = (header.rows, header.width)
    if header.rows * header.width == 0:  # torch.frombuffer refuses an empty range
        return header, torch.empty(shape, dtype=dtype)
    return header, torch.frombuffer(buffer, dtype=dtype, offset=start).view(shape)


def _layout(header: Header) -> dict[str, Any]:
    """What a safetensors header says of the tensor."""
    name, element = DTYPES[header.dtype]
    size = header.rows * header.width * element
    return {"dtype": name, "shape": [header.rows, header.width], "data_offsets": [0, size]}


def check(buffer: bytes | bytearray | memoryview) -> tuple[Header, int]:
    """The header of an object and where its rows begin, everything that the object says about itself checked.

    Raises:
        ObjectError: ``truncated``, ``malformed``, ``version`` or ``checksum``.
    """
    header, start = read_header(buffer, len(buffer))
    if header.checksum != _checksum(memoryview(buffer)[start:]):
        raise ObjectError(Reason.CHECKSUM, f"the payload of {show_key(header.key)} is not what was written")
    return header, start


def read_header(beginning: bytes | bytearray | memoryview, size: int) -> tuple[Header, int]:
    """The header of an object of ``size`` bytes, of which at least the header is given, and where its rows begin.

    The rows are not looked at: good for listing a store, not for using an object.

    Raises:
        ObjectError: ``truncated``, ``malformed``, ``version``, or ``checksum`` of the header.
    """
    if len(beginning) < _LENGTH_BYTES:
        raise ObjectError(Reason.TRUNCATED, f"{len(beginning)} bytes are less than the length field of a header")
    start = _LENGTH_BYTES + int.from_bytes(beginning[:_LENGTH_BYTES], "little")
    if start > len(beginning):
        raise ObjectError(Reason.TRUNCATED, f"the header ends at byte {start}, the object at {len(beginning)}")
    entry, metadata = _parse_json(bytes(beginning[_LENGTH_BYTES:start]))
    header = _parse_metadata(metadata)

    layout = _layout(header)
    if entry != layout:
        raise ObjectError(Reason.MALFORMED, f"the tensor is {entry}, its metadata say {layout}")
    payload = layout["data_offsets"][1]
    if start + payload > size:
        raise ObjectError(Reason.TRUNCATED, f"the payload ends at byte {start + payload}, the object at {size}")
    if start + payload < size:
        raise ObjectError(Reason.MALFORMED, f"{size - start - payload} bytes follow the payload")
    return header, start


def verify_header(header: Header, expect: Expectation) -> None:
    """Check what an object says about itself against what its reader needs.

    Raises:
        ObjectError: ``key``, ``model``, ``rows`` or ``dtype``, the first that differs.
    """
    if header.key != expect.key:
        raise ObjectError(Reason.KEY, f"the object is of {show_key(header.key)}, wanted is {show_key(expect.key)}")
    if header.model_fingerprint != expect.fingerprint:
        raise ObjectError(
            Reason.MODEL,
            f"the object was made by the model {header.model_fingerprint[:16]}, this server runs "
            f"{expect.fingerprint[:16]} (weights, dtype or processor settings differ)",
        )
    wanted: list[tuple[Reason, Any, Any]] = [
        (Reason.ROWS, header.rows, expect.rows),
        (Reason.DTYPE, header.dtype, expect.dtype),
    ]
    for reason, actual, expected in wanted:
        if expected is not None and actual != expected:
            raise ObjectError(reason, f"{reason} of {show_key(expect.key)} is {actual}, wanted is {expected}")


def publish(root: Path, key: str, data: bytes | Sequence[bytes | memoryview], *, fsync: bool = False) -> Path:
    """Put an object under the name of its key, whole or not at all.

    It is written beside its final name and renamed. The rename is atomic on a local file system and on NFS
    (there for readers that open the name anew), so a reader sees the former object, this one, or none. Files
    get mode 0644 and folders 0777, less the umask: a consumer may run as another user (temporary files are
    usually 0600, and renaming keeps that).

    Args:
        data: the object, whole or in parts.
        root: must exist. It is never made here: a store whose mount has gone must not come up on the disk
        below.
        fsync: also survive a loss of power. Without it a crash of the machine, not of the process, may leave
            a torn object under the final name; its checksum then refuses it.

    Returns:
        The path of the object.

    Raises:
        OSError: as the file system says; what was written so far is removed.
    """
    path = root / object_name(key)
    # The name holds nothing of the key and is unlike any object's name, so a sweep can tell it from one.
    temporary = path.parent / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        descriptor = os.open(temporary, flags, 0o644)
    except FileNotFoundError:
        if not root.is_dir():
            raise FileNotFoundError(f"the store's root {root} is not there") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, flags, 0o644)
    try:
        try:
            views = [memoryview(part) for part in ((data,) if isinstance(data, bytes) else data)]
            while views:
                written = os.writev(descriptor, views)
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if views:
                    views[0] = views[0][written:]
            if fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if fsync:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return path


def identity_of(status: os.stat_result) -> StatIdentity:
    """The state of a file, from its status."""
    return StatIdentity(status.st_ino, status.st_size, status.st_mtime_ns)


@contextlib.contextmanager
def open_object(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor and the status of an object's file.

    Raises:
        ObjectError: ``missing`` or ``unreadable`` (also when what is done inside raises an OSError).
    """
    try:
        # O_NONBLOCK: opening a FIFO for reading would otherwise wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise ObjectError(Reason.MISSING, f"there is no {path}") from None
    except OSError as error:
        raise ObjectError(Reason.UNREADABLE, f"cannot open {path}: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ObjectError(Reason.UNREADABLE, f"{path} is not a regular file")
        if status.st_size > MAX_OBJECT_BYTES:
            raise ObjectError(
                Reason.UNREADABLE, f"{path} has {status.st_size} bytes, at most {MAX_OBJECT_BYTES} are read"
            )
        yield descriptor, status
    except OSError as error:
        raise ObjectError(Reason.UNREADABLE, f"cannot read {path}: {error}") from error
    finally:
        os.close(descriptor)


def fill(descriptor: int, view: memoryview, offset: int = 0) -> int:
    """Read into memory of this process until the view is full or the file ends; how many bytes were read.

    Never a mapping of the file: whoever truncates or overwrites it in place would reach into the reader.
    """
    filled = 0
    while filled < len(view) and (count := os.preadv(descriptor, [view[filled:]], offset + filled)):
        filled += count
    return filled


def _payload(tensor: torch.Tensor) -> memoryview:
    import torch

    if sys.byteorder != "little":
        raise ObjectError(Reason.MALFORMED, "objects hold little-endian values; this machine is big-endian")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    # numpy knows neither bfloat16 nor float8; the bytes are the same.
    return memoryview(flat.view(torch.uint8).numpy())


def _checksum(payload: memoryview) -> str:
    return _CHECKSUM_PREFIX + xxhash.xxh3_128_hexdigest(payload)


def _header_checksum(metadata: dict[str, str]) -> str:
    """Over every other metadata entry, as JSON of the sorted [name, value] pairs without spaces, in ASCII."""
    pairs = sorted([name, value] for name, value in metadata.items() if name != "header_checksum")
    text = json.dumps(pairs, ensure_ascii=True, separators=(",", ":"))
    return _CHECKSUM_PREFIX + xxhash.xxh3_128_hexdigest(text.encode("ascii"))


def _malformed(message: str) -> NoReturn:
    raise ObjectError(Reason.MALFORMED, message)


def _parse_json(raw: bytes) -> tuple[object, dict[str, str]]:
    """The tensor's entry and the metadata of a safetensors header."""
    try:
        document = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        _malformed("the header is not JSON")
    if not isinstance(document, dict) or set(document) != {TENSOR_NAME, "__metadata__"}:
        _malformed(f"the header does not name exactly one tensor, {TENSOR_NAME}, and metadata")
    metadata = document["__metadata__"]
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _malformed("the metadata are not strings")
    return document[TENSOR_NAME], metadata


def _parse_metadata(metadata: dict[str, str]) -> Header:
    version = metadata.get("format")
    if version is None:
        _malformed("the metadata name no format")
    if version != FORMAT:
        raise ObjectError(Reason.VERSION, f"the format is {ascii(version)[:80]}, this reader knows {FORMAT}")
    if set(metadata) != _METADATA_KEYS:
        _malformed(f"missing or unknown metadata: {sorted(set(metadata) ^ _METADATA_KEYS)}")
    if metadata["header_checksum"] != _header_checksum(metadata):
        raise ObjectError(Reason.CHECKSUM, "the metadata are not what was written")
    try:
        key = urllib.parse.unquote_to_bytes(metadata["key"]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        _malformed("the key is not percent-encoded UTF-8")
    if metadata["dtype"] not in DTYPES:
        _malformed(f"unknown dtype {ascii(metadata['dtype'])[:80]}")
    return Header(
        key=key,
        model_fingerprint=metadata["model_fingerprint"],
        dtype=metadata["dtype"],
        rows=_parse_count(metadata["rows"]),
        width=_parse_count(metadata["width"]),
        checksum=metadata["checksum"],
        creator=metadata["creator"],
        created=metadata["created"],
    )


def _parse_count(text: str) -> int:
    # 18 digits: any number a file can hold, and never one that int() takes long to parse.
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        _malformed(f"not a count: {ascii(text)[:80]}")
    return int(text)
