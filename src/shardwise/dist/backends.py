"""Selection of the communication backend, and the identity of this rank from arguments or a launcher."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout

from shardwise.engines.backends import backend_row, is_own, require_available
from shardwise.environment import MPI_SOURCES, Identity, identify
from shardwise.errors import EnvironmentVariablesError, WorldError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


def choose_backend(requested: str | None, device: torch.device) -> str:
    """Return the requested backend, or by default nccl for a CUDA device and gloo for the CPU.

    Raises WorldError if the requested backend is not available or does not support the device.
    """
    if requested is None:
        requested = "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    name = backend_row(requested).name
    devices = _per_device(name) if ":" in name else dict.fromkeys(_capability(name), name)
    for backend in dict.fromkeys(devices.values()):
        require_available(backend)
    if device.type not in devices:
        raise WorldError(
            f"backend {name!r} supports {', '.join(devices)} tensors only, but the device is {device}",
            code="world.backend-device-mismatch",
            fix=f"use backend='gloo', or a {next(iter(devices))} device",
        )
    return name


def default_device(backend: str | None) -> str | None:
    """Return the default device of `backend`, or None if any device is possible."""
    return backend_row(backend).default_device


def default_timeout_s(backend: str) -> float:
    """Return torch's default timeout of the operations of `backend`, in seconds."""
    if backend == "nccl" and default_pg_nccl_timeout is not None:
        return default_pg_nccl_timeout.total_seconds()
    return default_pg_timeout.total_seconds()


def _per_device(name: str) -> dict[str, str]:
    devices: dict[str, str] = {}
    for entry in name.split(","):
        device, colon, backend = entry.strip().partition(":")
        if not (device and colon and backend):
            raise WorldError(
                f"entry {entry!r} of backend {name!r} must have the form device:backend",
                code="world.backend-syntax",
                fix="use entries such as cpu:gloo,cuda:nccl",
            )
        if is_own(backend):
            raise WorldError(
                f"backend {name!r} uses {backend} for {device} only, which requires a torch built with {backend}",
                code="world.backend-mpi-partial",
                fix=f"use backend={backend!r} for all devices, or cpu:gloo",
            )
        if device in devices:
            raise WorldError(
                f"backend {name!r} contains device {device} twice",
                code="world.backend-device-repeated",
                fix="list each device once",
            )
        if device not in _capability(backend):
            raise WorldError(
                f"backend {backend!r} does not support {device} tensors",
                code="world.backend-device-mismatch",
                fix="use cpu:gloo,cuda:nccl",
            )
        devices[device] = backend
    return devices


def _capability(backend: str) -> list[str]:
    """Return the device types that `backend` supports."""
    registered = {
        name: devices
        for name, devices in dist.Backend.backend_capability.items()
        if name not in {dist.Backend.FAKE, backend_row(name).own_name}
    }
    if is_own(backend):
        return ["cpu"]
    if backend not in registered:
        raise WorldError(
            f"backend {backend!r} is unknown", code="world.unknown-backend", fix=nearest(backend, registered)
        )
    return registered[backend]


# The identity of this rank, from the caller's arguments or the environment variables of a launcher.


def find_identity(rank: int | None, world_size: int | None, local_rank: int | None) -> Identity:
    """Return the identity of this rank; arguments take precedence over environment variables.

    Raises WorldError if only one of `rank` and `world_size` was passed.
    """
    if rank is None and world_size is None:
        identity = identify()
    elif rank is None or world_size is None:
        given, other = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise WorldError(
            f"{given} was passed without {other}",
            code="world.rank-incomplete",
            fix="pass both, or neither if a launcher starts the ranks",
        )
    elif not 0 <= rank < world_size:
        raise WorldError(
            f"rank {rank} is out of range for a world of {world_size} ranks",
            code="world.rank-out-of-range",
            fix=f"pass a rank from 0 to {world_size - 1}",
        )
    else:
        identity = _complete(rank, world_size)
    return identity if local_rank is None else replace(identity, local_rank=local_rank, local_rank_assumed=False)


def _complete(rank: int, world_size: int) -> Identity:
    """Return the launcher's identity if it has the same rank and world size, else an identity that assumes one node."""
    try:
        identity = identify()
    except EnvironmentVariablesError:
        identity = Identity()
    if identity.source != "alone" and (identity.rank, identity.world_size) == (rank, world_size):
        return identity
    return Identity(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        source="arguments",
        local_rank_assumed=True,
    )


def locate_by_hosts(identity: Identity, hosts: Sequence[str]) -> Identity:
    """Return `identity` with the local rank and the node rank computed from the host names of all ranks.

    Values that a launcher or the caller set are kept. MPI launchers set the local rank but not the node rank.
    """
    host = hosts[identity.rank]
    nodes = list(dict.fromkeys(hosts))
    if identity.source in MPI_SOURCES and hosts.count(host) == identity.local_world_size:
        return replace(identity, node_rank=nodes.index(host), num_nodes=len(nodes))
    if not (identity.source == "arguments" or identity.local_rank_assumed):
        return identity
    local_rank = hosts[: identity.rank].count(host) if identity.local_rank_assumed else identity.local_rank
    return replace(
        identity,
        local_rank=local_rank,
        local_world_size=hosts.count(host),
        node_rank=nodes.index(host),
        num_nodes=len(nodes),
        local_rank_assumed=False,
    )
