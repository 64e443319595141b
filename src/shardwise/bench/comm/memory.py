"""Whether what a sweep allocates fits: refused before anything is, naming the size and what is free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.bench.comm.bus_bandwidth import buffer_bytes
from shardwise.bench.comm.spec import written_size
from shardwise.errors import InputError
from shardwise.hardware.memory import available_memory

if TYPE_CHECKING:
    from shardwise.bench.comm.spec import CommSpec
    from shardwise.dist import World

_STAGED = 2
"""What gloo holds in host memory of tensors on a GPU: a copy of what is sent and one of what is received."""


def needed_bytes(spec: CommSpec, ranks: int) -> int:
    """Return the most that one rank allocates at once, in groups of so many."""
    return max(buffer_bytes(name, spec.sizes[-1], ranks) for name in spec.collectives)


def check_room(spec: CommSpec, *, ranks: int, sharing: int, free: int, where: str) -> None:
    """Refuse sizes for which `sharing` ranks, in groups of `ranks`, need more than is free."""
    need = needed_bytes(spec, ranks) * sharing
    if need <= free:
        return
    fits = [size for size in spec.sizes if size * need // spec.sizes[-1] <= free]
    raise InputError(
        f"size {written_size(spec.sizes[-1])} needs {need / 2**30:.1f} GiB for {sharing} ranks, and {where} has"
        f" {free / 2**30:.1f} GiB free",
        code="bench.not-enough-memory",
        fix=f"use --sizes up to {written_size(fits[-1])}" if fits else "use smaller --sizes",
    )


def require_room(spec: CommSpec, world: World, kinds: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """Refuse what does not fit on this rank's host or GPU, before anything is allocated; does not communicate."""
    ranks = min(len(groups[0]) for groups in kinds.values())
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        import torch

        sharing = -(-world.local_size // torch.cuda.device_count())
        free = torch.cuda.mem_get_info(world.device)[0]
        check_room(spec, ranks=ranks, sharing=sharing, free=free, where=str(world.device))
    if not on_gpu or world.backend == "gloo":
        free = available_memory() // (_STAGED if on_gpu else 1)
        check_room(spec, ranks=ranks, sharing=world.local_size, free=free, where=f"host {world.host}")
