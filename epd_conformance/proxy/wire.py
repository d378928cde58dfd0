"""A client's JSON body as it came: parsed once, and cut into the legs' bodies without writing again what did not change (pure).

A request is mostly base64. Writing 1 MB of it as JSON takes 2.8 ms here, copying it 0.1 ms, and a request with one item in
three stages would write it three times. Two more things follow: numbers keep the form in which the client wrote them, and a
leg whose body is the client's own gets the client's very bytes.
"""

from __future__ import annotations

import json
import re
from json import decoder
from typing import Any

# Below it, parsing and writing with the C code of `json` costs less than finding the places in Python (about 2 µs for each).
WALKED_FROM_BYTES = 16_384

# Both are what `json.loads` itself is made of, and take the place to begin at; the stubs do not know them.
_scan: Any = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
_scan_string: Any = decoder.scanstring  # type: ignore[attr-defined]
_blank = re.compile(r"[ \t\n\r]*").match


class Wire:
    """A JSON value that arrived as `raw`; `body` is the value.

    Objects of `body` stand for their text: whoever changes a request makes new objects and leaves these as they are.
    """

    def __init__(self, raw: bytes) -> None:
        """Raises ValueError where `raw` is no JSON, RecursionError where it is nested too deeply."""
        self.raw = raw
        # Where the values of the outermost object stand, and by id the messages, their contents and their parts. `body`
        # keeps all of them alive, so no other object can have one of these ids.
        self._members: dict[str, tuple[int, int]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._text = ""
        self.body: Any = None
        if len(raw) < WALKED_FROM_BYTES or not self._walked():
            self.body = json.loads(raw)

    def _walked(self) -> bool:
        """Parses `raw` and remembers places. False for all that is not an ordinary JSON object in UTF-8: `json` then decides."""
        try:
            self._text = self.raw.decode()
            self.body, self._members, end = self._object(_skip(self._text, 0), outermost=True)
            whole = _skip(self._text, end) == len(self._text)
        except (ValueError, StopIteration, IndexError, RecursionError):
            whole = False
        if not whole:
            self._members, self._places = {}, {}
        elif self._text.isascii():
            # Places in the text are then places in `raw` too, and one copy is saved.
            self._text = ""
        return whole

    def _object(self, at: int, *, outermost: bool) -> tuple[dict[str, Any], dict[str, tuple[int, int]], int]:
        text = self._text
        value: dict[str, Any] = {}
        members: dict[str, tuple[int, int]] = {}
        if text[at] != "{":
            raise ValueError
        at = _skip(text, at + 1)
        if text[at] == "}":
            return value, members, at + 1
        walked = "messages" if outermost else "content"
        while True:
            if text[at] != '"':
                raise ValueError
            key, at = _scan_string(text, at + 1, True)
            if key in value:
                # Of two values the last counts, and the places of the first would outlive its objects.
                raise ValueError
            at = _skip(text, at)
            if text[at] != ":":
                raise ValueError
            at = start = _skip(text, at + 1)
            if key == walked and text[at] == "[":
                value[key], at = self._array(at, objects=outermost)
            else:
                value[key], at = _scan(text, at)
            members[key] = (start, at)
            at = _skip(text, at)
            if text[at] == "}":
                return value, members, at + 1
            if text[at] != ",":
                raise ValueError
            at = _skip(text, at + 1)

    def _array(self, at: int, *, objects: bool) -> tuple[list[Any], int]:
        """An array whose elements are walked through (`objects`: the messages) or only placed (the parts of one)."""
        text = self._text
        begin = at
        value: list[Any] = []
        at = _skip(text, at + 1)
        if text[at] == "]":
            return value, at + 1
        while True:
            start = at
            element: Any
            if objects and text[at] == "{":
                element, _, at = self._object(at, outermost=False)
            else:
                element, at = _scan(text, at)
            value.append(element)
            if isinstance(element, dict | list):
                self._places[id(element)] = (start, at)
            at = _skip(text, at)
            if text[at] == "]":
                self._places[id(value)] = (begin, at + 1)
                return value, at + 1
            if text[at] != ",":
                raise ValueError
            at = _skip(text, at + 1)

    def dumps(self, body: dict[str, Any]) -> bytes:
        """`body` as JSON; what in it is an object of the client's body is copied as the client wrote it."""
        if body is self.body:
            return self.raw
        if not self._members:
            return json.dumps(body).encode()
        pieces: list[bytes | memoryview] = []
        for key, value in body.items():
            pieces.append(b"," if pieces else b"{")
            pieces.append(json.dumps(key).encode() + b":")
            place = self._members.get(key)
            if place is not None and value is self.body[key]:
                pieces.append(self._slice(place))
            else:
                self._write(value, pieces, depth=4 if key == "messages" else 0)
        return b"".join(pieces) + b"}" if pieces else b"{}"

    def _write(self, value: Any, pieces: list[bytes | memoryview], depth: int) -> None:
        """Writes a value; down to `depth` (messages, message, content, part) it looks for objects of the client's."""
        place = self._places.get(id(value))
        if place is not None:
            pieces.append(self._slice(place))
        elif depth and isinstance(value, list) and value:
            for number, element in enumerate(value):
                pieces.append(b"," if number else b"[")
                self._write(element, pieces, depth - 1)
            pieces.append(b"]")
        elif depth and isinstance(value, dict) and value:
            for number, (key, element) in enumerate(value.items()):
                pieces.append((b"," if number else b"{") + json.dumps(key).encode() + b":")
                self._write(element, pieces, depth - 1)
            pieces.append(b"}")
        else:
            pieces.append(json.dumps(value).encode())

    def _slice(self, place: tuple[int, int]) -> bytes | memoryview:
        start, end = place
        return self._text[start:end].encode() if self._text else memoryview(self.raw)[start:end]


def _skip(text: str, at: int) -> int:
    """The place of the next character that is no blank; the length of the text where there is none."""
    # Most JSON on the wire has no blanks or a single one; the pattern is for the rest.
    if at < len(text) and text[at] > " ":
        return at
    found = _blank(text, at)
    assert found is not None
    return found.end()
