"""Where multiprocessing puts the sockets of its listeners.

multiprocessing makes a `pymp-*` folder in the temporary directory of each process that passes descriptors (every
DataLoader worker that returns tensors), and removes it when that process exits. A killed process removes nothing. So
the process that starts ranks, which outlives them, makes one folder for all of them and removes it at the end: workers
inherit the folder from their rank, however they are started.
"""

from __future__ import annotations

import contextlib
import shutil
from multiprocessing import process, util


def make_listener_folder() -> str:
    """Return the folder of this process, made at the first call; forks of this process use it too."""
    return util.get_temp_dir()


def use_listener_folder(path: str) -> None:
    """Use the folder of another process, which removes it, in this process and in the workers that it starts."""
    with contextlib.suppress(AttributeError):  # where `get_temp_dir` looks, though without a public name
        process.current_process()._config["tempdir"] = path  # type: ignore[attr-defined]  # noqa: SLF001


def remove_listener_folder(path: str) -> None:
    """Remove the folder and what killed ranks left in it."""
    shutil.rmtree(path, ignore_errors=True)
