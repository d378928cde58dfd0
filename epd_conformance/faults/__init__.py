"""Faults: damage that is done to a running stack on purpose, with a receipt that it happened."""
