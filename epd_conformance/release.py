"""Which files are the suite, and whether they are the ones that were released.

A wheel carries the digest of its own files (`suite.sha256`, written while it is built), so an installation can tell that somebody
changed it. That finds an accident, or a test that was edited to pass; whoever means to deceive writes the digest anew, which is
why `verify` compares with the suite of the reader and not with this. The build loads this file by its path, without the package
and its dependencies: it needs the standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

DIGEST_NAME = "suite.sha256"

# Where a wheel keeps what lies beside the package in a checkout. `suites` counts under a name of its own, `fixtures` does not.
BESIDE = ("suites", "fixtures")


def digest(package: Path, suites: Path) -> str:
    """`sha256:<hex>` over the suites and the whole package (names and contents): what a certificate was made with.

    The same for a checkout, where `suites` lies beside `package`, and for a wheel, where it lies in it.
    """
    files = [(path.relative_to(suites).as_posix(), path) for path in suites.rglob("*.py")]
    files += [
        (f"epd_conformance/{path.relative_to(package).as_posix()}", path)
        for pattern in ("*.py", "*.toml")
        for path in package.rglob(pattern)
        if path.relative_to(package).parts[0] not in BESIDE
    ]
    whole = hashlib.sha256()
    for name, path in sorted(files):
        content = path.read_bytes()
        whole.update(f"{name}\0{len(content)}\0".encode() + content)
    return "sha256:" + whole.hexdigest()


def modified(package: Path, now: str) -> bool | None:
    """Whether a package whose files have the digest `now` is another than the released one.

    None where nothing says what was released: a checkout, whose history says better what was changed.
    """
    try:
        released = (package / DIGEST_NAME).read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    return released.strip() != now
