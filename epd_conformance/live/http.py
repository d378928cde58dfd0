"""Plain HTTP to servers on this host: never through a proxy of the caller's environment, never over a reused connection.

A connection that was idle for as long as the server keeps it may be closed under the request; the harness would then report a
failure that is its own.
"""

from __future__ import annotations

from typing import Any

import requests

_SESSION = requests.Session()
_SESSION.trust_env = False
_SESSION.headers["Connection"] = "close"


def post(url: str, **options: Any) -> requests.Response:
    """As `requests.post`."""
    return _SESSION.post(url, **options)


def get(url: str, **options: Any) -> requests.Response:
    """As `requests.get`."""
    return _SESSION.get(url, **options)
