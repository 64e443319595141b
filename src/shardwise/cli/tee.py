"""Copying what ranks write to the launcher's own output, from the files they write to."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from shardwise.runs import Tail

if TYPE_CHECKING:
    from shardwise.launcher.options import Shown
    from shardwise.runs import RunDirectory


@dataclass(frozen=True)
class _Copy:
    tail: Tail
    stream: IO[bytes]
    prefix: bytes


class Tee:
    """An observer of the launcher: no pipe stands between a rank and its file, so nothing is lost or blocked."""

    def __init__(self, run: RunDirectory, shown: list[tuple[Shown, Shown]]) -> None:
        """Copy the output of ranks 0 to N-1, which is right on one machine."""
        self._run = run
        self._shown = shown
        self._known: dict[tuple[int, int], _Copy] = {}
        self._copies: list[_Copy] = []
        self.ranks: set[int] = set()
        """Those whose standard error has been shown here."""
        self.follow(range(len(shown)))

    def follow(self, ranks: range) -> None:
        """Copy the output of these ranks from now on; what was copied of them before is not copied again."""
        self.ranks.update(
            rank for rank, (_, error) in zip(ranks, self._shown, strict=True) if error.copied or error.terminal
        )
        self._copies = [
            self._known.setdefault((rank, stream), self._copy(rank, stream, view))
            for rank, views in zip(ranks, self._shown, strict=True)
            for stream, view in enumerate(views)
            if view.copied and not view.terminal
        ]

    def _copy(self, rank: int, stream: int, view: Shown) -> _Copy:
        tail = Tail((self._run.stdout, self._run.stderr)[stream](rank))
        tail.read()  # what an earlier start of this run has written was shown then
        return _Copy(
            tail, (sys.stdout, sys.stderr)[stream].buffer, f"[rank{rank}]: ".encode() if view.prefixed else b""
        )

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
