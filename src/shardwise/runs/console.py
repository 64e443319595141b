"""The one renderer: everything shardwise itself says on a terminal goes through here."""

from __future__ import annotations

import contextlib
import sys
from typing import TextIO


def say(text: str) -> None:
    """Write a line of result to standard output."""
    with contextlib.suppress(OSError):  # a closed terminal or pipe is nobody to talk to, not a failure
        _print(text, sys.stdout)


def complain(text: str) -> None:
    """Write a line to standard error."""
    with contextlib.suppress(OSError):
        _print(text, sys.stderr)


def _print(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except UnicodeEncodeError:  # a byte that is not UTF-8, or a letter that this terminal does not have
        encoding = stream.encoding or "ascii"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)
