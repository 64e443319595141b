"""The entry point of a rank that runs a pickled function: load the function, call it and store the result.

The launcher starts the ranks of `sw.launch(fn)` and `bench`, and reports the exceptions that they raise. Ranks started
by mpirun record their exceptions in files and exit with mpirun.
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
from shardwise.launcher.local.function import picklable, write_result


def main(folder: Path, *, by_mpirun: bool) -> None:
    """Load the function in `folder`, call it, and write its result or exception to the same directory."""
    if by_mpirun:
        _exit_with(os.getppid())
    call = cloudpickle.loads((folder / "call").read_bytes())
    rank = identify().rank
    if by_mpirun:
        write_result(call, rank, folder)
        return
    result = folder / f"{rank}.pickle"
    try:
        result.write_bytes(pickle.dumps(call()))
    except BaseException as error:
        result.write_bytes(picklable(error))
        raise


def _exit_with(parent: int) -> None:
    """Start a thread that exits this process when `parent` exits, because a killed mpirun cannot stop its ranks.

    PR_SET_PDEATHSIG is not suitable: it is sent when the thread that started this process ends, and Open MPI starts
    ranks from short-lived threads.
    """
    if not hasattr(os, "pidfd_open"):
        return
    descriptor = os.pidfd_open(parent)
    if os.getppid() != parent:  # mpirun exited before pidfd_open
        os._exit(1)

    def watch() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="mpirun", daemon=True).start()


if __name__ == "__main__":
    main(Path(sys.argv[1]), by_mpirun=sys.argv[2:] == ["mpirun"])
