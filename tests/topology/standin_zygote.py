"""A stand-in for the warmed parent: the real one, without the ten seconds of imports."""

from __future__ import annotations

from epd_conformance.topology import zygote

if __name__ == "__main__":
    zygote.warm = lambda: None
    zygote.main()
