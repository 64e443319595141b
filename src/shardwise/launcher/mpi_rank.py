"""What a rank of mpirun runs when shardwise started mpirun: load the call, make it, leave the result."""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path

import cloudpickle

from shardwise.environment import identify
from shardwise.launcher.local.function import leave_result


def main(folder: Path) -> None:
    """Make the call that lies in `folder`, and leave its result or exception there."""
    _end_with(os.getppid())
    leave_result(cloudpickle.loads((folder / "call").read_bytes()), identify().rank, folder)


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
    main(Path(sys.argv[1]))
