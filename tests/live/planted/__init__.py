"""Planted defects: broken connectors, proxies and harness steps that the real suites must catch.

Run one with `python -m planted NAME --out DIR -- <pytest arguments>`; the tests beside this package do.
"""
