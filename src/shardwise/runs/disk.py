"""Whether a run directory can still be written, and what it keeps when it cannot."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.runs.directory import RunDirectory

_PROBE_BYTES = 1 << 16
"""Enough for what a failing rank writes: its traceback, in the log and in its error file."""


def write_error(folder: Path) -> OSError | None:
    """Return the error of writing 64 KiB into `folder`, None when that works; the probe is removed."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))  # written, not only sized: free blocks are no proof under a quota
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None


def describe_kept(run: RunDirectory) -> str:
    """Return what a run whose disk is full has kept, in one sentence."""
    names = sorted(path.name for path in run.checkpoints.glob("step-*"))  # published whole, or not at all
    if not names:
        return f"{run.path} keeps the logs and events up to the failure, and no checkpoint"
    checkpoints = "1 checkpoint" if len(names) == 1 else f"{len(names)} checkpoints"
    return f"{run.path} keeps {checkpoints}, the newest {names[-1]}: with free space, continue with --resume {run.path}"
