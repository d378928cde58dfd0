"""Planted defects: broken connectors, proxies and harness steps that the real suites must catch.

Run one with `python -m planted [--stages CLASS] -- --subject SUBJECT --out DIR …`; the tests beside this package do.
"""
