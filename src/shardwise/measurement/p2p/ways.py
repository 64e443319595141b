"""Three ways to send tensors from one rank to another: blocking, non-blocking, batched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardwise.dist import World

    Move = Callable[[Sequence[Tensor], int, dist.ProcessGroup], None]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How messages go: `push` gives them to a peer and `pull` takes them from one; both communicate over a group.

    The peer is a global rank. On a CPU both return when the memory may be used again, on a GPU when that is queued.
    """

    words: str
    push: Move
    pull: Move

    def on(self, world: World) -> Way:
        """Return the way that works on the world's device.

        gloo reads and writes host memory only, so messages of a GPU are copied through it, as a program would.
        """
        return _through_host(self) if world.device.type == "cuda" and world.backend == "gloo" else self


def _send(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
    for message in messages:
        dist.send(message, peer, group=group)


def _recv(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
    for message in messages:
        dist.recv(message, peer, group=group)


def _at_once(operation: Callable[..., dist.Work | None]) -> Move:
    def move(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        _wait([operation(message, peer, group=group) for message in messages])

    return move


def _batched(operation: Callable[..., dist.Work | None]) -> Move:
    def move(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        _wait(dist.batch_isend_irecv([dist.P2POp(operation, message, peer, group) for message in messages]))

    return move


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:  # None on ranks outside the group
            work.wait()


def _through_host(way: Way) -> Way:
    def push(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        way.push([message.cpu() for message in messages], peer, group)

    def pull(messages: Sequence[Tensor], peer: int, group: dist.ProcessGroup) -> None:
        landed = [torch.empty_like(message, device="cpu") for message in messages]
        way.pull(landed, peer, group)
        for message, host in zip(messages, landed, strict=True):
            message.copy_(host)

    return Way(words=f"{way.words}, copied through host memory", push=push, pull=pull)


WAYS = {
    "send": Way(words="send and recv, one after the other", push=_send, pull=_recv),
    "isend": Way(words="isend and irecv, all under way at once", push=_at_once(dist.isend), pull=_at_once(dist.irecv)),
    "batch": Way(words="batch_isend_irecv, all in one batch", push=_batched(dist.isend), pull=_batched(dist.irecv)),
}
"""Name -> how messages go from one rank to another."""
