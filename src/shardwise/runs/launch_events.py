"""What a launcher writes down of a run: attempts, how ranks ended, restarts, the verdict; one file per node."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

from shardwise.runs.events import EventLog
from shardwise.runs.exitcodes import PREEMPTED, describe_exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardwise.runs.directory import RunDirectory
    from shardwise.runs.failure import Failure


class LaunchLog:
    """The events of one launcher: `attempt`, `exit`, `restart`, `verdict`, `finish`."""

    def __init__(self, run: RunDirectory, node: int = 0) -> None:
        self._log = EventLog(run.launcher_events(node))
        self._node = node

    def _write(self, kind: str, **fields: object) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end a launch
            self._log.write(kind, **fields)

    def attempt(self, number: int, pids: Mapping[int, int], *, target: str, world_size: int, nodes: int) -> None:
        """All ranks of this node were started: process ids by rank. `number` counts restarts before it."""
        self._write(
            "attempt",
            number=number,
            node=self._node,
            nodes=nodes,
            nproc=len(pids),
            world_size=world_size,
            ranks=pids,
            host=socket.gethostname(),
            launcher=os.getpid(),
            target=target,
        )

    def exit(self, rank: int, code: int, *, stopped: bool, failure: Failure | None) -> None:
        """A rank has ended, well or badly; `stopped` if it was asked to. A negative code is a signal."""
        said = (failure.message.splitlines() or [""])[0] if failure is not None else ""
        if failure is not None and failure.exit_code != PREEMPTED:  # one that stopped as asked tells of no error
            said = f"{failure.kind}: {said}"
        self._write("exit", rank=rank, code=code, stopped=stopped, words=said or describe_exit(code))

    def restart(self, number: int, most: int, cause: str) -> None:
        """All ranks are started again, for the `number`th time of at most `most`."""
        self._write("restart", number=number, most=most, cause=cause)

    def verdict(self, text: str) -> None:
        """The root cause, in one sentence."""
        self._write("verdict", text=text)

    def finish(self, state: str, *, restarts: int) -> None:
        """The launch is over: "finished", "failed" or "stopped"."""
        self._write("finish", state=state, restarts=restarts)

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._log.close()


@contextlib.contextmanager
def launch_log(run: RunDirectory, node: int = 0) -> Iterator[LaunchLog]:
    """Open the log of one node's launcher for the time of a launch."""
    log = LaunchLog(run, node)
    try:
        yield log
    finally:
        log.close()
