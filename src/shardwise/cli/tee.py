"""Copying what ranks write to the launcher's own output, from the files they write to."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from shardwise.run import Tail

if TYPE_CHECKING:
    from shardwise.launch.options import Shown
    from shardwise.run import RunDirectory


@dataclass(frozen=True)
class _Copy:
    tail: Tail
    stream: IO[bytes]
    prefix: bytes


class Tee:
    """An observer of the launcher: no pipe stands between a rank and its file, so nothing is lost or blocked."""

    def __init__(self, run: RunDirectory, shown: list[tuple[Shown, Shown]]) -> None:
        self._copies = [
            _Copy(Tail(path(rank)), stream.buffer, f"[rank{rank}]: ".encode() if view.prefixed else b"")
            for rank, views in enumerate(shown)
            for view, path, stream in zip(views, (run.stdout, run.stderr), (sys.stdout, sys.stderr), strict=True)
            if view.copied and not view.terminal
        ]

    def tick(self) -> None:
        """Copy what is new: as it is, or line by line behind the rank."""
        for copy in self._copies:
            if copy.prefix:
                new = b"".join(copy.prefix + line + b"\n" for line in copy.tail.lines())
            else:
                new = copy.tail.read()
            if new:
                with contextlib.suppress(OSError):  # a terminal that was closed: the files still have it all
                    copy.stream.write(new)
                    copy.stream.flush()
