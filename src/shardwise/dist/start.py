"""Starting a world: who, where, on which device, by which backend, then the process group."""

from __future__ import annotations

import contextlib
import math
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.errors import EnvironmentVariablesError, WorldError
from shardwise.dist.adoption import adopt_group
from shardwise.dist.backends import choose_backend, default_device, default_timeout_s
from shardwise.dist.devices import choose_device
from shardwise.dist.identity import find_identity, place_by_hosts
from shardwise.engines.mpi.library import GROUP_NAME, torch_backend
from shardwise.engines.mpi.start import MET_BY_MPI, mpi_runtime
from shardwise.dist.rendezvous import Meeting, join, parse_meeting
from shardwise.dist.stores import HashStore, PrefixStore
from shardwise.dist.world import World

if TYPE_CHECKING:
    import torch

    from shardwise.environment import Identity
    from shardwise.dist.stores import Store


def world(
    *,
    backend: str | None = None,
    init_method: str | None = None,
    store: Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    timeout_s: float | None = None,
    device: str | torch.device | None = None,
    pg_options: Any = None,
) -> World:
    """Communicate to start the process group, called on every rank, and return who this rank is.

    What is not given is found out: rank and size from torchrun, SLURM, Open MPI or PMI, else a world of one that
    needs no port; the GPU of the local rank, else the CPU, which is what mpi takes; nccl on CUDA, else gloo; torch's
    own time limit. A process group that is already running is adopted, without communication.
    """
    if dist.is_initialized():
        return adopt_group(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            backend=backend,
            init_method=init_method,
            store=store,
            timeout_s=timeout_s,
            device=device,
            pg_options=pg_options,
        )
    _check_timeout(timeout_s)
    identity = find_identity(rank, world_size, local_rank)
    chosen = choose_device(default_device(backend) if device is None else device, identity)
    name = choose_backend(backend, chosen)
    limit_s = default_timeout_s(name) if timeout_s is None else float(timeout_s)
    over_mpi = torch_backend(name) == GROUP_NAME
    if over_mpi:
        identity = mpi_runtime().identity(identity)
    meeting = find_meeting(identity, init_method, store, over_mpi=over_mpi)
    if over_mpi:
        store = mpi_runtime().join(identity, limit_s, needs_store=meeting == MET_BY_MPI) or store
    if isinstance(meeting, Meeting):
        store = join(meeting, rank=identity.rank, world_size=identity.world_size, timeout_s=limit_s)
    elif store is None:
        store = HashStore()
    hosts = _start_group(
        identity, store, backend=name, device=chosen, timeout=timedelta(seconds=limit_s), pg_options=pg_options
    )
    return World.of(
        place_by_hosts(identity, hosts),
        device=chosen,
        backend=name,
        timeout_s=limit_s,
        store=store,
        init_method=str(meeting),
    )


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise WorldError(
            f"timeout_s={timeout_s:g} is no time limit",
            code="world.timeout-invalid",
            fix="use a number of seconds above 0",
        )


def find_meeting(
    identity: Identity, init_method: str | None, store: Store | None, *, over_mpi: bool = False
) -> Meeting | str:
    """Return where the ranks meet; "store" when the caller brought one, "alone" when there is nobody to meet.

    `over_mpi` they need no place: "mpi".
    """
    if init_method is not None and store is not None:
        raise WorldError(
            "both init_method and store were given", code="world.store-with-init-method", fix="pass one of them"
        )
    meeting = Meeting(scheme="env") if init_method is None else parse_meeting(init_method)
    if identity.source == "alone" and (store is not None or meeting.scheme != "env"):
        raise WorldError(
            f"{'a store' if store is not None else meeting} was given, but nothing says which rank this is",
            code="world.rank-unknown",
            fix="pass rank= and world_size=, or start the ranks with a launcher",
        )
    if store is not None:
        return "store"
    if meeting.scheme != "env":
        return meeting
    if over_mpi and init_method is None:
        return MET_BY_MPI
    if identity.world_size == 1:
        return "alone"
    if identity.source in ("shardwise", "torchrun", "arguments"):
        return meeting
    if identity.master_addr is None or identity.master_port is None:
        name = "MASTER_ADDR" if identity.master_addr is None else "MASTER_PORT"
        where = "on several nodes" if identity.master_addr is None else "without naming its job"
        raise EnvironmentVariablesError(
            f"MPI started {identity.world_size} ranks {where}, and {name} is not set",
            code="rendezvous.master-not-set",
            fix=f"export {name}=<{'host of rank 0' if identity.master_addr is None else 'a free port'}> and pass it on"
            f" (mpirun -x {name}, mpiexec -genvlist), or use backend='mpi', which needs neither",
        )
    return Meeting(scheme="tcp", host=identity.master_addr, port=identity.master_port)


def _start_group(
    identity: Identity, store: Store, *, backend: str, device: torch.device, timeout: timedelta, pg_options: Any
) -> list[str]:
    """Communicate through `store` to start the default process group, called on every rank; return their hosts."""
    hosts = [""] * identity.world_size
    try:
        dist.init_process_group(
            torch_backend(backend),
            store=PrefixStore("default_pg", store),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=timeout,
            pg_options=pg_options,
            # Bound to its GPU, nccl connects at once and never on a guessed one; gloo needs none.
            device_id=device if backend == "nccl" else None,
        )
        # Also the first proof that every rank reaches every other.
        dist.all_gather_object(hosts, socket.gethostname())
    except RuntimeError as error:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        raise WorldError(
            f"rank {identity.rank} could not start {backend}: {str(error).splitlines()[0]}",
            code="world.backend-start-failed",
            fix="see whether every rank started, and whether they can reach each other",
        ) from error
    return hosts
