"""All ranks go on, or all ranks raise the same error: the one way in which this room communicates."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from shardwise.checkpoint.errors import explained

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.errors import ShardwiseError

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
        raise verdict.told(doing, size_of(group)) from cause
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
        # The cause stays at home: a foreign exception need not survive pickling.
        return (_Failure, (self.rank, self.host, self.error, None))

    def told(self, doing: str, size: int) -> ShardwiseError:
        who = f" on rank {self.rank} ({self.host})" if size > 1 else ""
        return type(self.error)(f"{doing} failed{who}: {self.error.fact}", code=self.error.code, fix=self.error.fix)


def _attempt(rank: int, work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the peers must hear of it before anyone raises
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
