"""Start a world: choose rank, device and backend, then start the process group or adopt a running one."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.dist.backends import choose_backend, default_device, default_timeout_s, find_identity, locate_by_hosts
from shardwise.dist.rendezvous import HashStore, PrefixStore, Rendezvous, join, parse_rendezvous
from shardwise.dist.world import World, running_group
from shardwise.engines.backends import backend_row, backend_runtime, torch_name
from shardwise.environment import Identity, has_own_gpu
from shardwise.errors import EnvironmentVariablesError, WorldError
from shardwise.torch_private.distributed import clear_dtensor_caches, fake_store, timeout_s

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardwise.dist.rendezvous import Store


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
    """Start the process group and return the world of this rank. Communicates; call on every rank.

    By default, rank and world size are those set by torchrun, SLURM, Open MPI or PMI; without them, the world has one
    rank and needs no port. The default device is the GPU of the local rank, or the CPU without a GPU or with backend
    mpi. The default backend is nccl on CUDA and gloo on the CPU, and the default timeout is torch's. A process group
    that is already running is adopted without communication.
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
    runtime = backend_runtime(name)
    if runtime is None:
        rdzv = find_rendezvous(identity, init_method, store)
    else:
        identity = runtime.identity(identity)
        rdzv = find_rendezvous(identity, init_method, store, own=runtime.rendezvous)
        store = runtime.join(identity, limit_s, needs_store=rdzv == runtime.rendezvous) or store
    if isinstance(rdzv, Rendezvous):
        store = join(rdzv, rank=identity.rank, world_size=identity.world_size, timeout_s=limit_s)
    elif store is None:
        store = HashStore()
    hosts = _start_group(
        identity, store, backend=name, device=chosen, timeout=timedelta(seconds=limit_s), pg_options=pg_options
    )
    return World.of(
        locate_by_hosts(identity, hosts),
        device=chosen,
        backend=name,
        timeout_s=limit_s,
        store=store,
        init_method=str(rdzv),
    )


def _check_timeout(timeout_s: float | None) -> None:
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise WorldError(
            f"timeout_s must be positive and finite, got {timeout_s:g}",
            code="world.timeout-invalid",
            fix="pass a positive number of seconds, such as timeout_s=600",
        )


def find_rendezvous(
    identity: Identity, init_method: str | None, store: Store | None, *, own: str = ""
) -> Rendezvous | str:
    """Return the rendezvous of the ranks, "store" if the caller passed a store, or "alone" for a world of one rank.

    `own` is the result for a backend whose library has its own rendezvous, such as "mpi".
    """
    if init_method is not None and store is not None:
        raise WorldError(
            "init_method and store cannot be combined",
            code="world.store-with-init-method",
            fix="pass either init_method= or store=",
        )
    rdzv = Rendezvous(scheme="env") if init_method is None else parse_rendezvous(init_method)
    if identity.source == "alone" and (store is not None or rdzv.scheme != "env"):
        raise WorldError(
            f"{'a store' if store is not None else rdzv} was passed, but the rank of this process is unknown",
            code="world.rank-unknown",
            fix="pass rank= and world_size=, or start the ranks with a launcher",
        )
    if store is not None:
        return "store"
    if rdzv.scheme != "env":
        return rdzv
    if own and init_method is None:
        return own
    if identity.world_size == 1:
        return "alone"
    if identity.source in ("shardwise", "torchrun", "arguments"):
        return rdzv
    if identity.master_addr is None or identity.master_port is None:
        name = "MASTER_ADDR" if identity.master_addr is None else "MASTER_PORT"
        where = "on several nodes" if identity.master_addr is None else "without a job id"
        value = "host of rank 0" if identity.master_addr is None else "a free port"
        raise EnvironmentVariablesError(
            f"MPI started {identity.world_size} ranks {where}, but {name} is not set",
            code="rendezvous.master-not-set",
            fix=f"export {name}=<{value}> to all ranks (mpirun -x {name}, mpiexec -genvlist), or use backend='mpi',"
            " which needs neither",
        )
    return Rendezvous(scheme="tcp", host=identity.master_addr, port=identity.master_port)


def _start_group(
    identity: Identity, store: Store, *, backend: str, device: torch.device, timeout: timedelta, pg_options: Any
) -> list[str]:
    """Start the default process group and return the host names of all ranks. Communicates; call on every rank."""
    hosts = [""] * identity.world_size
    clear_dtensor_caches()
    if identity.world_size > 1 and backend == "gloo" and device.type == "cpu":
        _schedule_as_batch()
    try:
        dist.init_process_group(
            torch_name(backend),
            store=PrefixStore("default_pg", store),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=timeout,
            pg_options=pg_options,
            # With a device id, nccl connects immediately and does not guess the device from the rank.
            device_id=device if backend == "nccl" else None,
        )
        # This collective also verifies that all ranks can communicate.
        dist.all_gather_object(hosts, socket.gethostname())
    except RuntimeError as error:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        raise WorldError(
            f"rank {identity.rank} could not start {backend}: {str(error).splitlines()[0]}",
            code="world.backend-start-failed",
            fix="check that every rank started and that the ranks can reach each other",
        ) from error
    return hosts


def _schedule_as_batch() -> None:
    """Have Linux schedule this process, and the threads it starts from now on, by SCHED_BATCH; keep any other policy.

    By default, a message that arrives wakes gloo's thread, which preempts the thread that is sending, tries its lock
    again and again, and so spends the rest of its time slice. A woken thread of SCHED_BATCH waits for a core. On 2
    cores, all-reduces of 10 numbers take a seventh of the time on 2 ranks and on 4 (1,000: 0.15 instead of 1.0 s on 2).
    """
    if hasattr(os, "sched_setscheduler") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


# Adoption of a process group that the caller started.


def adopt_group(*, local_rank: int | None, device: str | torch.device | None, **requested: Any) -> World:
    """Return the world of the running process group, without communication.

    `requested` contains the other arguments of `world`; raises WorldError if one differs from the running group.
    """
    group = running_group()
    running: dict[str, Any] = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "backend": backend_row(dist.get_backend()).name,
    }
    for name, value in requested.items():
        if value is not None and (name not in running or running[name] != value):
            actual = f" with {name}={running[name]}" if name in running else ""
            raise WorldError(
                f"{name}={value} was requested, but a process group is already running{actual}",
                code="world.group-differs",
                fix=f"omit {name} to adopt that group, or call world() instead of init_process_group",
            )
    identity = find_identity(running["rank"], running["world_size"], local_rank)
    chosen = _device(group) if device is None else choose_device(device, identity)
    return World.of(
        replace(identity, source="adopted"),
        device=chosen,
        backend=running["backend"],
        timeout_s=_timeout_s(group, running["backend"], chosen),
        store=group.get_group_store(),
        init_method="adopted",
        created=False,
    )


def _device(group: ProcessGroup) -> torch.device:
    """Return the device to which the group is bound, else the current GPU if the group supports CUDA, else the CPU."""
    if group.bound_device_id is not None:
        return group.bound_device_id
    if "cuda:" in dist.get_backend_config() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _timeout_s(group: ProcessGroup, backend: str, device: torch.device) -> float:
    own_s: float | None = getattr(group, "limit_s", None)  # attribute of shardwise's MPI process group
    if own_s is not None:
        return own_s
    limit_s = timeout_s(group, device)
    return default_timeout_s(backend) if limit_s is None else limit_s


# The device of a rank: the GPU of its local rank, or the CPU if no GPU is available.


def choose_device(requested: str | torch.device | None, identity: Identity) -> torch.device:
    """Return the device of this rank and make it torch's current device; raises WorldError if it does not exist."""
    if requested is None:
        requested = "cuda" if torch.cuda.is_available() else "cpu"
    device = _parse(requested)
    if device.type == "cpu":
        return torch.device("cpu")
    num_visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_visible == 0:
        raise WorldError(
            f"device {requested!s} was requested, but no GPU is visible", code="world.no-gpu", fix="use device='cpu'"
        )
    if ":" not in str(device):
        device = torch.device("cuda", gpu_index(identity, num_visible, own_gpu=has_own_gpu()))
    elif device.index >= num_visible:
        raise WorldError(
            f"device {requested!s} was requested, but only {num_visible} GPUs are visible",
            code="world.gpu-index-invalid",
            fix=f"use cuda:0 to cuda:{num_visible - 1}",
        )
    torch.cuda.set_device(device)
    return device


def _parse(requested: str | torch.device) -> torch.device:
    try:
        device = torch.device(requested)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise WorldError(
            f"device {requested!s} is not supported",
            code="world.unknown-device",
            fix="use 'cpu', 'cuda' or 'cuda:0'",
        )
    return device


def gpu_index(identity: Identity, num_visible: int, *, own_gpu: bool) -> int:
    """Return the index of this rank's GPU; with `own_gpu`, the launcher makes a different GPU visible to each rank."""
    if own_gpu and num_visible == 1:
        return 0
    if identity.local_rank < num_visible:
        return identity.local_rank
    if identity.local_rank_assumed:
        raise WorldError(
            f"only {num_visible} GPUs are visible to local rank {identity.local_rank} (LOCAL_RANK is not set, so it was"
            " assumed to equal the rank)",
            code="world.local-rank-without-gpu",
            fix="export LOCAL_RANK=<rank on this node>, or pass local_rank=",
        )
    raise WorldError(
        f"only {num_visible} GPUs are visible to local rank {identity.local_rank}",
        code="world.local-rank-without-gpu",
        fix=f"start at most {num_visible} ranks on this node, add GPUs to CUDA_VISIBLE_DEVICES, or pass device='cuda:0'"
        " if a different GPU is visible to every rank",
    )


# Worlds for tests: fake worlds of any size in one process, and gloo worlds of forked ranks.


def fake_world(size: int, rank: int = 0, device: str = "cpu") -> World:
    """Return `rank` of a fake world of `size` ranks, whose collectives return immediately without communication."""
    if dist.is_initialized():
        raise WorldError(
            "a process group is already running", code="world.already-running", fix="close it before fake_world()"
        )
    if not 0 <= rank < size:
        raise WorldError(
            f"rank {rank} is out of range for a fake world of {size} ranks",
            code="world.rank-out-of-range",
            fix=f"pass a rank from 0 to {size - 1}",
        )
    try:
        store = fake_store()  # registers torch's fake backend
    except ImportError as error:
        raise WorldError(
            f"the fake process group was not found in torch {torch.__version__}",
            code="world.no-fake-backend",
            fix="pip install torch==2.13.0",
        ) from error
    clear_dtensor_caches()
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


def local_world(store_path: Path, rank: int, size: int, *, timeout_s: float) -> World:
    """Start a gloo world of `size` forked processes. Communicates; call on every rank.

    `store_path` is a new file in a directory that all ranks share; the file must not exist yet.
    """
    return world(
        backend="gloo",
        init_method=f"file://{store_path}",
        rank=rank,
        world_size=size,
        local_rank=rank,
        device="cpu",
        timeout_s=timeout_s,
    )
