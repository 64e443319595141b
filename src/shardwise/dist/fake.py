"""Worlds for tests in one process or on one machine: fake ones of any size, and forked gloo ranks."""

from __future__ import annotations

from shardwise.torch_private.distributed import fake_store

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.dist.backends import default_timeout_s
from shardwise.dist.start import world
from shardwise.dist.world import World
from shardwise.environment import Identity
from shardwise.errors import WorldError

if TYPE_CHECKING:
    from pathlib import Path

    from shardwise.dist.stores import Store


def fake_world(size: int, rank: int = 0, device: str = "cpu") -> World:
    """Return `rank` of a world of `size` whose collectives return at once and move nothing."""
    if dist.is_initialized():
        raise WorldError(
            "a process group is already running", code="world.already-running", fix="close it before a fake world"
        )
    if not 0 <= rank < size:
        raise WorldError(
            f"rank {rank} is outside a fake world of {size}", code="world.rank-out-of-range", fix="use 0 to size - 1"
        )
    store = _fake_store()
    dist.init_process_group("fake", store=store, rank=rank, world_size=size)
    identity = Identity(rank=rank, world_size=size, local_rank=rank, local_world_size=size, source="fake")
    return World.of(
        identity,
        device=torch.device(device),
        backend="fake",
        timeout_s=default_timeout_s("fake"),
        store=store,
        init_method="fake",
    )


def _fake_store() -> Store:
    """Register torch's fake backend, which lives with torch's own tests, and return its store."""
    try:
        return fake_store()
    except ImportError as error:
        raise WorldError(
            f"torch {torch.__version__} has no fake process group where shardwise looks for it",
            code="world.no-fake-backend",
            fix="pip install torch==2.13.0",
        ) from error


# The world of forks on one machine: gloo on the CPU, meeting in a file, with no port to lose.


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
