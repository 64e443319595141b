"""The one renderer: everything shardwise itself says on a terminal goes through here."""

from __future__ import annotations

import contextlib
import sys


def say(text: str) -> None:
    """Write a line of result to standard output."""
    with contextlib.suppress(OSError):  # a closed terminal or pipe is nobody to talk to, not a failure
        print(text, flush=True)


def complain(text: str) -> None:
    """Write a line to standard error."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
