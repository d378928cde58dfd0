"""Takes secrets out of whatever is about to be written: evidence is published, keys and passwords are not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

REDACTED = "[redacted]"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_SECRET_WORDS = {
    "password", "passwd", "passphrase", "secret", "secrets", "authorization", "credential", "credentials",
    "cookie", "bearer", "apikey",
}  # fmt: skip
_SECRET_PAIRS = {("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("account", "key")}
# Messages can hold long logs: each pattern begins where no word is under way and repeats possessively, so that
# none takes more than linear time.
_ASSIGNMENT = re.compile(r"(?P<key>-{0,2}[A-Za-z][\w.-]*+)=(?P<value>\S.*)", re.DOTALL)
_USERINFO = re.compile(r"(?P<scheme>(?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://)[^/\s@\"']++@", re.IGNORECASE)
_BEARER = re.compile(r"\b(?P<kind>Bearer|Basic)\s++[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
# key=value, --option value, "key": "value", each with a key that looks_secret then judges.
_PAIR_IN_TEXT = re.compile(
    r"(?<![\w.-])(?P<key>[A-Za-z][\w.-]*+)(?P<between>=|\"\s*:\s*\"|'\s*:\s*')(?P<value>[^\s\"'&,;]++)"
    r"|(?<![\w.-])(?P<option>--[a-z][a-z0-9-]*+)(?P<space>\s++)(?P<argument>[^\s-]\S*+)"
)


def looks_secret(key: str, value: Any = "") -> bool:
    """Whether a value under this key has to be hidden; `value` settles the one word that has two meanings.

    This suite is full of tokens that are no secret: `kvTokens`, `max_tokens`, `eos_token_id`. So only a key
    that ends in the singular `token` counts, and only where its value is text and no number.
    """
    words = [word.lower() for word in _WORD.findall(key)]
    if _SECRET_WORDS.intersection(words) or _SECRET_PAIRS.intersection(pairwise(words)):
        return True
    return bool(words) and words[-1] == "token" and isinstance(value, str) and not value.isdigit()


def redact(value: Any) -> Any:
    """A copy of a JSON-like value with every secret in it replaced by `[redacted]`.

    Secret are values under a secret-looking key, also where key and value hide in text: `--api-key X` and
    `HF_TOKEN=X` in lists of arguments, JSON in a string, user and password in a URL, a bearer header.
    """
    if isinstance(value, str):
        return _redact_text(value)
    if isinstance(value, Mapping):
        return {key: _hide(item) if looks_secret(str(key), item) else redact(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return _redact_list(value)
    return value


def _hide(value: Any) -> Any:
    return value if value is None or value == "" else REDACTED


def _redact_list(items: Sequence[Any]) -> list[Any]:
    result: list[Any] = []
    hide_next = False
    for item in items:
        option = isinstance(item, str) and item.startswith("-")
        result.append(REDACTED if hide_next and not option else redact(item))
        hide_next = option and "=" not in item and looks_secret(item)
    return result


def _redact_text(text: str) -> str:
    assignment = _ASSIGNMENT.fullmatch(text)
    if not assignment:
        return _redact_value(text)
    key, value = assignment["key"], assignment["value"]
    return f"{key}={REDACTED if looks_secret(key, value.split()[0]) else _redact_value(value)}"


def _redact_value(text: str) -> str:
    if text.startswith(("{", "[")):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            pass  # not JSON after all
        else:
            clean = redact(document)
            return text if clean == document else json.dumps(clean)
    text = _USERINFO.sub(rf"\g<scheme>{REDACTED}@", text)
    text = _BEARER.sub(rf"\g<kind> {REDACTED}", text)
    return _PAIR_IN_TEXT.sub(_redact_pair, text)


def _redact_pair(match: re.Match[str]) -> str:
    key, between, value = (match[name] for name in ("key", "between", "value"))
    if key is None:
        key, between, value = (match[name] for name in ("option", "space", "argument"))
    return f"{key}{between}{REDACTED if looks_secret(key, value) else value}"
