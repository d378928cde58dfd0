"""Damage as functions of bytes: what stands in an object's place, raw or well formed. Pure.

*Raw* damage changes bytes, so that a checksum finds it. *Sealed* damage is a well-formed object with every checksum right and other
rows in it: without it, no test would reach a connector's checks of rows, width and dtype.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import replace

from epd_conformance.errors import StackError
from epd_conformance.probe import Rows


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _last_byte_missing(data: bytes) -> bytes:
    return data[:-1]


def _empty(data: bytes) -> bytes:
    return b""


def _garbage(data: bytes) -> bytes:
    return bytes(range(256))


def _header_only(data: bytes, payload: bytes) -> bytes:
    return data[: _begin(data, payload)]


def _flipped_bit(data: bytes, payload: bytes) -> bytes:
    at = _begin(data, payload) + len(payload) - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _not_a_number(data: bytes, payload: bytes) -> bytes:
    # All bits set are no number in every floating type there is, down to eight bits.
    at = _begin(data, payload) + len(payload) // 16 * 8
    return data[:at] + b"\xff" * 8 + data[at + 8 :]


def _zero_tail(data: bytes, payload: bytes) -> bytes:
    at = _begin(data, payload)
    tail = len(payload) // 2
    return data[: at + len(payload) - tail] + bytes(tail) + data[at + len(payload) :]


def _begin(data: bytes, payload: bytes) -> int:
    """Where the rows begin. Raises StackError where an object does not hold them as they are."""
    at = data.find(payload) if payload else -1
    if at < 0:
        raise StackError(
            "the object does not hold its rows as they are, so nobody but the subject can damage them in place: "
            "give this kind of damage by `Subject.faults`"
        )
    return at


#: Kind -> the bytes that take an object's place.
RAW: Mapping[str, Callable[[bytes], bytes]] = {
    "truncated": _truncated,
    "last-byte-missing": _last_byte_missing,
    "empty": _empty,
    "garbage": _garbage,
}

#: The same, of an object and the bytes of its rows.
AMONG_ROWS: Mapping[str, Callable[[bytes, bytes], bytes]] = {
    "header-only": _header_only,
    "flipped-bit": _flipped_bit,
    "not-a-number": _not_a_number,
    "zero-tail": _zero_tail,
}


def _one_row(rows: Rows) -> Rows:
    return rows.first(1)


def _rows_missing(rows: Rows) -> Rows:
    return rows.first(max(rows.rows - 1, 0))


def _no_rows(rows: Rows) -> Rows:
    return rows.first(0)


def _rows_added(rows: Rows) -> Rows:
    last = rows.data[len(rows.data) - _each(rows) :]
    return replace(rows, data=rows.data + last, rows=rows.rows + 1)


def _half_as_wide(rows: Rows) -> Rows:
    return _narrowed(rows, rows.width // 2)


def _one_wide(rows: Rows) -> Rows:
    return _narrowed(rows, 1)


def _cast(rows: Rows) -> Rows:
    """As a well-meant cast writes them: half precision, or full where the model has half."""
    if rows.dtype == "float32":
        halves = b"".join(rows.data[at + 2 : at + 4] for at in range(0, len(rows.data), 4))
        return replace(rows, data=halves, dtype="bfloat16")
    return replace(rows, data=struct.pack(f"<{_count(rows)}f", *_values(rows)), dtype="float32")


def _half(rows: Rows) -> Rows:
    """IEEE half precision, or bfloat16 where the model has that already."""
    if rows.dtype == "float16":
        floats = struct.pack(f"<{_count(rows)}f", *_values(rows))
        return _cast(replace(rows, data=floats, dtype="float32"))
    return replace(rows, data=_halves(rows), dtype="float16")


def _eight_bit(rows: Rows) -> Rows:
    # The upper half of an IEEE half-precision number is one of this type.
    return replace(rows, data=_halves(rows)[1::2], dtype="float8_e5m2")


def _each(rows: Rows) -> int:
    return len(rows.data) // max(rows.rows, 1)


def _count(rows: Rows) -> int:
    return rows.rows * rows.width


def _narrowed(rows: Rows, width: int) -> Rows:
    each = _each(rows)
    kept = each * width // max(rows.width, 1)
    return replace(rows, data=b"".join(rows.data[at : at + kept] for at in range(0, len(rows.data), each)), width=width)


def _values(rows: Rows) -> tuple[float, ...]:
    if rows.dtype == "float32":
        return struct.unpack(f"<{_count(rows)}f", rows.data)
    if rows.dtype == "float16":
        return struct.unpack(f"<{_count(rows)}e", rows.data)
    if rows.dtype == "bfloat16":
        widened = b"".join(b"\0\0" + rows.data[at : at + 2] for at in range(0, len(rows.data), 2))
        return struct.unpack(f"<{_count(rows)}f", widened)
    raise StackError(f"rows of dtype {rows.dtype} cannot be cast here: give this kind of damage by `Subject.faults`")


def _halves(rows: Rows) -> bytes:
    # The largest number of half precision: beyond it `struct` refuses.
    most = 65504.0
    return struct.pack(f"<{_count(rows)}e", *(max(-most, min(most, value)) for value in _values(rows)))


#: Kind -> the rows in a well-formed object that takes the place.
SEALED: Mapping[str, Callable[[Rows], Rows]] = {
    "one-row": _one_row,
    "rows-missing": _rows_missing,
    "no-rows": _no_rows,
    "rows-added": _rows_added,
    "width": _half_as_wide,
    "width-one": _one_wide,
    "dtype": _cast,
    "half": _half,
    "eight-bit": _eight_bit,
}
