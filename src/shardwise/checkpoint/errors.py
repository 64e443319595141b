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


_NOT_WRITABLE = ("checkpoint.not-writable", "choose a folder that can be written")

_KNOWN = {
    errno.ENOSPC: ("checkpoint.disk-full", "free space there, or keep fewer checkpoints"),
    errno.EDQUOT: ("checkpoint.quota-exceeded", "raise the quota, or keep fewer checkpoints"),
    errno.EROFS: _NOT_WRITABLE,
    errno.EACCES: _NOT_WRITABLE,
    errno.EPERM: _NOT_WRITABLE,
    errno.ENOENT: ("checkpoint.folder-missing", "bring the folder back, or choose another"),
    errno.ENOTDIR: ("checkpoint.not-a-folder", "choose a folder, not a file"),
    errno.ESTALE: ("checkpoint.storage-stale", "mount the storage again"),
    errno.EIO: ("checkpoint.disk-failed", "check the disk"),
}
"""Code and fix of the operating system's errors."""


def explained(error: Exception) -> ShardwiseError:
    """Return `error` as one of the family, with what to do where that is known."""
    if isinstance(error, ShardwiseError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        place = f"{error.filename}: " if error.filename else ""
        code, fix = _KNOWN.get(error.errno, ("checkpoint.io-failed", ""))
        return CheckpointError(f"{place}{error.strerror}", code=code, fix=fix)
    return CheckpointError(f"{type(error).__name__}: {error}", code="checkpoint.unexpected-error")
