"""`python -m epd_conformance.catalogue`: writes `released.json` and `docs/requirements.md` of a checkout anew."""

from __future__ import annotations

import sys
from pathlib import Path

from epd_conformance.catalogue import release
from epd_conformance.catalogue.page import PAGE, render
from epd_conformance.catalogue.released import RELEASED
from epd_conformance.errors import UsageError


def main(page: Path = PAGE, released: Path = RELEASED) -> int:
    """0, or 2 with one sentence on stderr where a released id changed or the page's folder is missing: no checkout."""
    try:
        if not page.parent.is_dir():
            raise UsageError(f"{page.parent} does not exist: the page of requirements is written in a checkout only")
        for name in release(path=released):
            print(f"released {name}")
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
