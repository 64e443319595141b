"""What a rank of a function runs when it is not a fork of the caller: load the call, make it, keep the result.

Ranks of `sw.launch(fn)` and of `bench` are started by our launcher, which reports what they raise; those of mpirun
write that down themselves, and end with mpirun.
"""

from __future__ import annotations

import os
import pickle
import select
import sys
import threading
from pathlib import Path

import cloudpickle

from shardwise.environment import identify
from shardwise.launcher.local.function import leave_result, portable


def main(folder: Path, *, by_mpirun: bool) -> None:
    """Call the function in `folder`, and leave its result or exception there."""
    if by_mpirun:
        _end_with(os.getppid())
    call = cloudpickle.loads((folder / "call").read_bytes())
    rank = identify().rank
    if by_mpirun:
        leave_result(call, rank, folder)
        return
    result = folder / f"{rank}.pickle"
    try:
        result.write_bytes(pickle.dumps(call()))
    except BaseException as error:
        result.write_bytes(portable(error))
        raise


def _end_with(parent: int) -> None:
    """End this process when `parent` does, which a killed mpirun cannot see to.

    A thread, not the kernel's own signal for it: that one follows the thread which started this process, and Open
    MPI starts ranks from threads that do not last when they are many.
    """
    if not hasattr(os, "pidfd_open"):
        return
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:  # it ended between our start and the call above
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="mpirun", daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), by_mpirun=sys.argv[2:] == ["mpirun"])
