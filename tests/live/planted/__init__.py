"""Planted defects: broken connectors, proxies and harness steps that the real suites must catch.

Run them with `python -m planted [--defects JSON --stack DIR] -- --subject SUBJECT --out DIR …`; the tests beside this package do.
"""

from __future__ import annotations

import os
from pathlib import Path

#: Names the folder of the stack under test, for the servers and the proxy, where each cell has a defect of its own.
STACK = "EPD_PLANTED_STACK"
#: The file in it that holds the name of the running cell's defect.
DEFECT = "defect"


def on(name: str) -> bool:
    """Whether a defect is in force: where each cell has its own, in its cell; otherwise always."""
    if STACK not in os.environ:
        return True
    try:
        return (Path(os.environ[STACK]) / DEFECT).read_text() == name
    except FileNotFoundError:
        return False  # no cell has begun
