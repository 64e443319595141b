"""Errors of checkpoints, file names in a checkpoint folder, and the agreement of all ranks on an error."""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardwise.errors import ShardwiseError

if TYPE_CHECKING:
    from collections.abc import Callable


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


# File names in a checkpoint folder.


LATEST = "latest"
"""A small file that names the checkpoint saved last."""

_NAME = re.compile(r"step-(\d{8,18})(?:~(\d{1,9}))?")


def name_of(step: int, attempt: int = 1) -> str:
    """Return the folder name of a step; a step that is saved again gets "~2", so that the old one stays until then."""
    return f"step-{step:08d}" + (f"~{attempt}" if attempt > 1 else "")


def parse_name(name: str) -> tuple[int, int] | None:
    """Return step and attempt of a folder name, None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def shard_name(rank: int) -> str:
    """Return the name of one rank's shard file."""
    return f"rank-{rank:05d}.safetensors"


# All ranks continue, or all ranks raise the same error: the only way in which this package communicates.


T = TypeVar("T")
R = TypeVar("R")


def together(
    group: dist.ProcessGroup | None, doing: str, work: Callable[[], T], conclude: Callable[[list[T]], list[R]]
) -> R:
    """Run `work` on every rank, then `conclude` on the first over all results; communicates over `group`.

    Returns this rank's entry of what `conclude` returned. Whatever fails, on whichever rank, every rank raises the
    same error: what was being done, the first rank that failed, and why. Without a group this process is all.
    """
    mine = _attempt(rank_in(group), work)
    verdict = _conclude([mine], conclude)[0] if group is None else _exchange(mine, conclude, group)
    if isinstance(verdict, _Failure):
        cause = mine.cause if isinstance(mine, _Failure) else verdict.cause
        raise verdict.as_error(doing, size_of(group)) from cause
    reply: R = verdict
    return reply


def nothing_more(results: list[Any]) -> list[None]:
    """Conclude nothing: for work of which only the failures matter."""
    return [None] * len(results)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this rank's number in `group`; 0 without one."""
    return dist.get_rank(group) if group is not None else 0


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks `group` has; 1 without one."""
    return dist.get_world_size(group) if group is not None else 1


@dataclass(frozen=True)
class _Failure:
    rank: int
    host: str
    error: ShardwiseError
    cause: Exception | None

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the cause: a foreign exception need not survive pickling.
        return (_Failure, (self.rank, self.host, self.error, None))

    def as_error(self, doing: str, size: int) -> ShardwiseError:
        who = f" on rank {self.rank} ({self.host})" if size > 1 else ""
        return type(self.error)(f"{doing} failed{who}: {self.error.fact}", code=self.error.code, fix=self.error.fix)


def _attempt(rank: int, work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the peers must know of it before any rank raises
        return _Failure(rank, socket.gethostname(), explained(error), error)


def _conclude(everyone: list[Any], conclude: Callable[[list[Any]], list[Any]]) -> list[Any]:
    for outcome in everyone:
        if isinstance(outcome, _Failure):
            return [outcome] * len(everyone)
    verdict = _attempt(0, lambda: conclude(everyone))
    return [verdict] * len(everyone) if isinstance(verdict, _Failure) else verdict


def _exchange(mine: Any, conclude: Callable[[list[Any]], list[Any]], group: dist.ProcessGroup) -> Any:
    first, size = dist.get_global_rank(group, 0), dist.get_world_size(group)
    everyone: list[Any] | None = [None] * size if rank_in(group) == 0 else None
    dist.gather_object(mine, everyone, dst=first, group=group)
    verdicts = _conclude(everyone, conclude) if everyone is not None else None
    reply: list[Any] = [None]
    dist.scatter_object_list(reply, verdicts, src=first, group=group)
    return reply[0]
