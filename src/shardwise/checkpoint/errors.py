"""What can go wrong with a checkpoint: it cannot be written, it is damaged, or it does not fit."""

from __future__ import annotations

import errno

from shardwise.errors import ShardwiseError


class CheckpointError(ShardwiseError):
    """A checkpoint could not be saved or read; the same sentence on every rank."""


class DamagedError(CheckpointError):
    """A checkpoint is torn or altered; nothing of it was loaded."""

    exit_code = 2


class MismatchError(CheckpointError):
    """A checkpoint is whole, but holds other tensors than were asked for; nothing was loaded."""

    exit_code = 2


_FIXES = {
    errno.ENOSPC: "free space there, or keep fewer checkpoints",
    errno.EDQUOT: "raise the quota, or keep fewer checkpoints",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written",
    errno.EPERM: "choose a folder that can be written",
    errno.ENOENT: "bring the folder back, or choose another",
    errno.ENOTDIR: "choose a folder, not a file",
    errno.ESTALE: "mount the storage again",
    errno.EIO: "check the disk",
}


def explained(error: Exception) -> ShardwiseError:
    """Return `error` as one of the family, with what to do where that is known."""
    if isinstance(error, ShardwiseError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        return CheckpointError(f"{place}{error.strerror}", fix=_FIXES.get(error.errno, ""))
    return CheckpointError(f"{type(error).__name__}: {error}")
