"""The world of forks on one machine: gloo on the CPU, meeting in a file, with no port to lose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.dist.start import world

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.dist.world import World


def local_world(meeting: Path, rank: int, size: int, *, timeout_s: float) -> World:
    """Communicate to start the process group of `size` forks of one process, called on every rank.

    `meeting` is a file that none of them has made yet, in a folder that they share.
    """
    return world(
        backend="gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=size,
        local_rank=rank,
        device="cpu",
        timeout_s=timeout_s,
    )
