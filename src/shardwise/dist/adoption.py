"""Adopting a process group that someone else started; the one file that looks into its private options."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.errors import WorldError
from shardwise.dist.backends import default_timeout_s
from shardwise.dist.devices import choose_device
from shardwise.dist.identity import find_identity
from shardwise.engines.mpi.group import MpiGroup
from shardwise.engines.mpi.library import shown_backend
from shardwise.dist.world import World, running_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def adopt_group(*, local_rank: int | None, device: str | torch.device | None, **asked: Any) -> World:
    """Return the world of the process group that is running; no communication.

    `asked` holds the other arguments of `world`, None where not given; one that is not true of the group is refused.
    """
    group = running_group()
    running: dict[str, Any] = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": shown_backend(dist.get_backend()),
    }
    for name, value in asked.items():
        if value is not None and (name not in running or running[name] != value):
            said = f"{name}={running[name]}" if name in running else "its own"
            raise WorldError(
                f"{name}={value} was asked, but a process group is already running with {said}",
                code="world.group-differs",
                fix=f"leave {name} out to adopt that group, or call world() before init_process_group",
            )
    place = find_identity(running["rank"], running["world_size"], local_rank)
    chosen = _device(group) if device is None else choose_device(device, place)
    return World.of(
        replace(place, source="adopted"),
        device=chosen,
        backend=running["backend"],
        timeout_s=_timeout_s(group, running["backend"], chosen),
        store=group.get_group_store(),
        init_method="adopted",
        created=False,
    )


def _device(group: ProcessGroup) -> torch.device:
    """Return the device the group was bound to, else the current GPU if the group serves it, else the CPU."""
    if group.bound_device_id is not None:
        return group.bound_device_id
    if "cuda:" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _timeout_s(group: ProcessGroup, backend: str, device: torch.device) -> float:
    if isinstance(group, MpiGroup):
        return group.limit_s
    try:
        limit = group._get_backend(device).options._timeout  # noqa: SLF001 - torch has no public way to ask
    except (AttributeError, RuntimeError):
        return default_timeout_s(backend)
    return float(limit.total_seconds())
