"""Where compiled graphs are kept, so that the second run of a job starts warm."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from typing import TYPE_CHECKING

from shardwise.environment import cache_directory

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch keeps graphs, kernels and what autograd made of them there, for all ranks of a machine; by default in /tmp,
which is emptied by restarts, and by some clusters after every job."""
_ELF = struct.Struct("<4s36xQ10xHH2x")
"""Magic, and where the table of sections is, which stands last in a file: its place, size of an entry, entries."""
_LINKED_S = 60.0
"""A younger library may be one that is being linked."""


def compile_cache(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a rank that keep its compiled graphs with the user's other caches.

    None where the user has named a folder, or where theirs cannot be written. Libraries that a run was killed over
    while it linked them are removed: torch takes a library that is there for a whole one, and every later run would
    end with "file too short".
    """
    folder = cache_directory(environ) / "compiled"
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110 - Path.exists raises where a folder above may not be entered
    if FOLDER in environ or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return {}
    for library in folder.glob("*/*.so") if sys.platform == "linux" else ():
        with contextlib.suppress(OSError):  # somebody else has removed it
            if _is_torn(library):
                library.unlink()
    return {FOLDER: str(folder)}


def _is_torn(library: Path) -> bool:
    """Whether a library ends before its last part, and nobody is writing it."""
    about = library.stat()
    if time.time() - about.st_mtime < _LINKED_S:
        return False
    with library.open("rb") as file:
        head = file.read(_ELF.size)
    if len(head) < _ELF.size:
        return True
    magic, place, entry_bytes, entries = _ELF.unpack(head)
    return bool(magic != b"\x7fELF" or about.st_size < place + entry_bytes * entries)
