"""The one renderer: everything shardwise itself says on a terminal goes through here."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write a line of result to standard output."""
    print(text, flush=True)


def complain(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=sys.stderr, flush=True)
