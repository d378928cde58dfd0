"""The store: a folder that all servers see, one file an item. Needs neither vLLM nor torch.

A file is one line of JSON (whose rows these are, and their form), the rows, and a SHA-256 over both. It finds damage, not
forgery: whoever may write to the folder can make a file that looks right.
"""

from __future__ import annotations

import json
import logging
import uuid
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

# vLLM shows the lines of loggers below its own only.
logger = logging.getLogger("vllm.vendor_minimal")

FORMAT = "vendor-minimal/1"
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}  # torch's name, bytes a value


@dataclass(frozen=True)
class About:
    """What an item's file says in its first line: the engine's key, the model that made it, and the rows' form."""

    key: str
    model: str
    dtype: str
    rows: int
    width: int


def pack(about: About, data: bytes) -> bytes:
    """The bytes of an item's file."""
    body = json.dumps({"format": FORMAT, **asdict(about)}).encode() + b"\n" + data
    return body + sha256(body).digest()


def unpack(packed: bytes) -> tuple[About, bytes]:
    """The inverse. Raises ValueError, TypeError or KeyError for what `pack` did not make."""
    body, checksum = packed[:-32], packed[-32:]
    if sha256(body).digest() != checksum:
        raise ValueError("the checksum is not that of the content")
    line, _, data = body.partition(b"\n")
    header = json.loads(line)
    if header.pop("format") != FORMAT:
        raise ValueError("another format")
    about = About(**header)
    if len(data) != about.rows * about.width * DTYPES[about.dtype]:
        raise ValueError("the rows are not of the stated form")
    return about, data


class Store:
    """The folder `root`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, key: str) -> Path:
        """Where an item lies. A client may choose keys (`../x`, an absolute path, 10 kB): a hash stays in the folder."""
        return self.root / f"{sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}.item"

    def open(self) -> None:
        """Make the folder. What is wrong with it is said at the start, and not by a stack that never shares anything."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("vendor-minimal: %s cannot be made, nothing is shared: %s", self.root, error)

    def write(self, key: str, packed: bytes) -> None:
        """Put a file under its name, whole or not at all. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        temporary = self.root / f".{uuid.uuid4().hex}"
        try:
            temporary.write_bytes(packed)
            # Atomic: a reader sees the former file, this one, or none; of two writers the later wins.
            temporary.replace(self.path(key))
        finally:
            temporary.unlink(missing_ok=True)

    def find(self, key: str, *, model: str, dtype: str, rows: int) -> tuple[About, bytes] | None:
        """An item's rows in memory of our own, if they are exactly what is wanted. Never raises: all else is a miss."""
        path = self.path(key)
        try:
            if not path.is_file():  # also keeps away from what would block, such as a FIFO
                return None
            about, data = unpack(path.read_bytes())
            if (about.key, about.model, about.dtype, about.rows) != (key, model, dtype, rows):
                raise ValueError(f"it holds {about}, wanted are {rows} rows of {dtype} of {key!r} by {model}")
        except Exception as error:
            logger.warning("vendor-minimal: %s is not used: %s", path, str(error)[:500])
            return None
        return about, data
