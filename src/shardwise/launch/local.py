"""Launching an entry of ours as N ranks of this machine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from shardwise.environment import rank_environment
from shardwise.hardware import usable_cores
from shardwise.launch.processes import start_program
from shardwise.launch.supervise import Observer, Outcome, supervise

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardwise.run import RunDirectory


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A module of ours that every rank runs, and the JSON it gets as its only argument."""

    module: str
    payload: Mapping[str, Any]

    def argv(self) -> list[str]:
        """Return the command line of one rank."""
        return [sys.executable, "-m", self.module, msgspec.json.encode(self.payload).decode()]


def launch_local(entry: Entry, *, nproc: int, run: RunDirectory, observers: Sequence[Observer] = ()) -> Outcome:
    """Run `entry` on `nproc` ranks of this machine and wait for all of them."""
    processes, cores = [], usable_cores()
    for rank in range(nproc):
        environ = rank_environment(rank=rank, world_size=nproc, local_rank=rank, local_world_size=nproc, cores=cores)
        processes.append(start_program(rank, entry.argv(), environ, run.log(rank)))
    return supervise(processes, failure_path=run.error, observers=observers)
