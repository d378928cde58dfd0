"""Errors that a person can act on: each says in one sentence what is wrong and what mends it."""

from __future__ import annotations


class UsageError(Exception):
    """Bad input or a machine that cannot run what was asked. The command line prints the message and exits with 2."""


class StackError(Exception):
    """A server, or the stack as a whole, did not come up or died; the message holds the likely cause and the log's end."""
