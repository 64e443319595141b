"""Where compiled graphs are kept, so that the second run of a job starts warm."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardwise.environment import cache_directory

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch keeps graphs, kernels and what autograd made of them there, for all ranks of a machine; by default in /tmp,
which is emptied by restarts, and by some clusters after every job."""


def compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that keep its compiled graphs with the user's other caches.

    None where the user has named a folder, or where theirs cannot be written.
    """
    folder = cache_directory(environ) / "compiled"
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110 - Path.exists raises where a folder above may not be entered
    if FOLDER in environ or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return {}
    return {FOLDER: str(folder)}
