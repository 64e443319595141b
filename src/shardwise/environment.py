"""Environment variables: the identity of a rank under each launcher, and the environment of launched ranks."""

from __future__ import annotations

import os
import re
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from shardwise.environment_values import expand_hosts, number, rank_and_size, required_number
from shardwise.errors import EnvironmentVariablesError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DERIVED_PORTS = range(20_000, 30_000)
"""Range of ports derived from job ids. It is below 32768, where Linux's ephemeral ports start."""
_HYDRA_PORT = 29_500
"""Port of all jobs under Hydra, which sets no variable with a job id; torch's default port."""
MPI_STARTERS = ("openmpi", "pmi")
"""`Identity.source` of ranks started by mpirun or mpiexec: Open MPI is "openmpi", MPICH and Intel MPI are "pmi"."""
MPI_SOURCES = (*MPI_STARTERS, "mpi")
"""MPI_STARTERS, and "mpi" for ranks identified by the MPI library. Such ranks have a local rank, but no node rank."""
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""First id of SLURM's batch, interactive and extern steps; srun steps are numbered from 0."""
_LOOPBACK = "127.0.0.1"
_LAUNCHED = "SHARDWISE_LAUNCHED"
"""Variable that is set for ranks started by shardwise."""
_NOTHING: Mapping[str, str] = MappingProxyType({})
_CACHE_GB = 16
_LEAST_CACHE_GB = 1

_STALE = re.compile(
    r"SHARDWISE_(LAUNCHED|SECRET)|TORCHELASTIC_.*|PMI_.*|PMIX_.*|OMPI_COMM_WORLD_.*|MPI_LOCAL(RANKID|NRANKS)|LOCAL_SIZE|CROSS_(RANK|SIZE)"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS|NPROCS|STEP_?ID|STEP_NUM_TASKS|(STEP_)?TASKS_PER_NODE)"
)
"""Variables that other launchers set for the launching process, and that its ranks must not inherit."""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The rank of this process in its world and on its node, and the launcher that set it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "alone"
    """The launcher: "shardwise", "torchrun" (or variables set by hand), "slurm", "openmpi", "pmi" or "alone"."""
    master_addr: str | None = None
    """None if it is not set, as with MPI, which needs no rendezvous."""
    master_port: int | None = None
    local_rank_assumed: bool = False
    """Whether LOCAL_RANK is not set, so that a single node was assumed."""


def identify(environ: Mapping[str, str] | None = None) -> Identity:
    """Return the identity of this process; raises EnvironmentVariablesError if variables are inconsistent."""
    environ = os.environ if environ is None else environ
    for read in _LAUNCHERS:
        identity = read(environ)
        if identity is not None:
            return identity
    addr, port = master_endpoint(environ)
    return Identity(master_addr=addr, master_port=port)


def master_endpoint(environ: Mapping[str, str] | None = None) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT, each None if it is unset."""
    environ = os.environ if environ is None else environ
    port = number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 2**16:
        raise EnvironmentVariablesError(
            f"MASTER_PORT={port} is not a valid port", code="env.port-invalid", fix="use a port from 1 to 65535"
        )
    return environ.get("MASTER_ADDR") or None, port


def visible_cuda_devices(environ: Mapping[str, str] | None = None) -> tuple[str, ...] | None:
    """Return the valid entries of CUDA_VISIBLE_DEVICES, or None if it is unset and every device is visible."""
    environ = os.environ if environ is None else environ
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return None
    entries = [entry.strip() for entry in text.split(",")]
    # CUDA ignores all entries from the first invalid one, so "-1" and "" hide all devices.
    end = next((i for i, entry in enumerate(entries) if not entry or entry.startswith("-")), len(entries))
    return tuple(entries[:end])


def has_own_gpu(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether SLURM makes a different GPU visible to each task, so that every rank uses cuda:0."""
    environ = os.environ if environ is None else environ
    if {"SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"} & set(environ):
        return True
    # srun --gpus-per-task=1 sets neither; then a task sees fewer GPUs than its node has.
    visible = environ.get("SLURM_STEP_GPUS")
    num_gpus = number(environ, "SLURM_GPUS_ON_NODE") or 0
    return bool(visible) and len(str(visible).split(",")) < num_gpus


def rank_environment(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    cores: int | None = None,
    environ: Mapping[str, str] | None = None,
    extra: Mapping[str, str] = _NOTHING,
) -> dict[str, str]:
    """Return the complete environment of a rank on this machine.

    The local ranks share `cores`, by default those of this process. Variables that other launchers set for this
    process are removed, other variables are kept, and `extra` takes precedence.
    """
    kept = base_environment(local_world_size=local_world_size, cores=cores, environ=environ)
    if world_size == local_world_size:
        # Otherwise gloo uses the address of the host name, which may be that of another interface.
        kept.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    identity = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_world_size,
        "LOCAL_SIZE": local_world_size,  # read by DeepSpeed's CPU operators
        "GROUP_RANK": (rank - local_rank) // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world_size,
        "ROLE_NAME": "default",
        _LAUNCHED: 1,
    }
    return {**kept, **{name: str(value) for name, value in identity.items()}, **extra}


def base_environment(
    *, local_world_size: int, cores: int | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment that all ranks of a node have in common."""
    base = os.environ if environ is None else environ
    kept = {name: value for name, value in base.items() if not _STALE.fullmatch(name)}
    # torchrun sets 1 thread, which leaves most cores idle if a node has few ranks.
    kept.setdefault("OMP_NUM_THREADS", str(max(1, (cores or _own_cores()) // local_world_size)))
    return kept


def profiler(environ: Mapping[str, str] | None = None) -> str:
    """Return the variable that an attached profiler sets, or "". A process with an injected profiler must not fork."""
    environ = os.environ if environ is None else environ
    names = ("NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH")
    return next((name for name in names if environ.get(name)), "")


def variables(prefix: str, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables whose names start with `prefix`."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name.startswith(prefix)}


def run_secret(environ: Mapping[str, str] | None = None) -> str:
    """Return SHARDWISE_SECRET, which authenticates the nodes of a run, or "". It is not passed to ranks."""
    return (os.environ if environ is None else environ).get("SHARDWISE_SECRET", "")


def num_threads(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of threads in OMP_NUM_THREADS, or None if it is unset or invalid."""
    first = (os.environ if environ is None else environ).get("OMP_NUM_THREADS", "").partition(",")[0]
    return int(first) if first.isdigit() and int(first) > 0 else None


def config_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's configuration directory, which need not exist."""
    return _user_directory("XDG_CONFIG_HOME", ".config", os.environ if environ is None else environ)


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache directory, which need not exist."""
    return _user_directory("XDG_CACHE_HOME", ".cache", os.environ if environ is None else environ)


def storage_cache(environ: Mapping[str, str] | None = None) -> tuple[Path, int]:
    """Return the folder of the cache of object storage and its limit in bytes."""
    environ = os.environ if environ is None else environ
    size = number(environ, "SHARDWISE_STORAGE_CACHE_GB")
    if size is not None and size < _LEAST_CACHE_GB:
        raise EnvironmentVariablesError(
            f"SHARDWISE_STORAGE_CACHE_GB={size} is too small",
            code="env.storage-cache-too-small",
            fix=f"use {_LEAST_CACHE_GB} or more",
        )
    folder = environ.get("SHARDWISE_STORAGE_CACHE")
    return Path(folder) if folder else cache_directory(environ) / "storage", (size or _CACHE_GB) * 10**9


def adopt(environ: Mapping[str, str]) -> None:
    """Replace the environment of this process by `environ`, for forked ranks."""
    os.environ.clear()
    os.environ.update(environ)


def _user_directory(variable: str, default: str, environ: Mapping[str, str]) -> Path:
    base = Path(environ.get(variable) or "")
    if not base.is_absolute():  # the XDG specification requires that relative paths are ignored
        base = Path(environ.get("HOME") or "/") / default
    return base / "shardwise"


def _own_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def _from_torchrun(environ: Mapping[str, str]) -> Identity | None:
    rank, size = rank_and_size(environ, "RANK", "WORLD_SIZE")
    if rank is None or size is None:
        return None
    slurm = _from_slurm(environ)
    _compare_with_slurm(environ, rank, size, slurm)
    addr, port = master_endpoint(environ)
    source = "shardwise" if _LAUNCHED in environ else "torchrun"
    identity = Identity(rank=rank, world_size=size, source=source, master_addr=addr, master_port=port)
    local_rank = number(environ, "LOCAL_RANK")
    if local_rank is not None:
        return _placed(identity, local_rank, environ)
    if slurm is not None and slurm.world_size == size:
        return replace(slurm, source="torchrun", master_addr=addr, master_port=port)
    return replace(identity, local_rank=rank, local_world_size=size, local_rank_assumed=True)


def _placed(identity: Identity, local_rank: int, environ: Mapping[str, str]) -> Identity:
    """Return `identity` with the local rank and node rank of the LOCAL_* and GROUP_* variables."""
    rank, size = identity.rank, identity.world_size
    local_size = number(environ, "LOCAL_WORLD_SIZE")
    if local_size is None:
        local_size = number(environ, "LOCAL_SIZE")  # set by DeepSpeed's launcher
    if local_size is None:
        if local_rank != rank:
            raise EnvironmentVariablesError(
                f"RANK={rank} and LOCAL_RANK={local_rank} imply several nodes, but LOCAL_WORLD_SIZE is not set",
                code="env.local-size-missing",
                fix="export LOCAL_WORLD_SIZE=<number of ranks on this node>",
            )
        local_size = size
    if local_rank >= local_size:
        raise EnvironmentVariablesError(
            f"LOCAL_RANK={local_rank} must be below LOCAL_WORLD_SIZE={local_size}",
            code="env.local-rank-too-large",
            fix=f"set LOCAL_RANK to a value from 0 to {local_size - 1}",
        )
    if local_size > size:
        raise EnvironmentVariablesError(
            f"LOCAL_WORLD_SIZE={local_size} exceeds WORLD_SIZE={size}",
            code="env.local-size-too-large",
            fix="set LOCAL_WORLD_SIZE to the number of ranks on this node, and WORLD_SIZE to that of all nodes",
        )
    node = number(environ, "GROUP_RANK")
    nodes = number(environ, "GROUP_WORLD_SIZE")
    return replace(
        identity,
        local_rank=local_rank,
        local_world_size=local_size,
        node_rank=rank // local_size if node is None else node,
        num_nodes=-(-size // local_size) if nodes is None else nodes,
    )


def _compare_with_slurm(environ: Mapping[str, str], rank: int, size: int, slurm: Identity | None) -> None:
    """Raise EnvironmentVariablesError if torchrun's variables do not match those of the surrounding srun step."""
    if slurm is None or slurm.world_size == 1:
        return
    tasks = slurm.world_size
    agents = number(environ, "GROUP_WORLD_SIZE")
    if agents is not None and agents != tasks:
        raise EnvironmentVariablesError(
            f"SLURM started {tasks} tasks, but torchrun has {agents} agents",
            code="env.slurm-agents-mismatch",
            fix=f"use srun --ntasks={agents}, or torchrun --nnodes={tasks} with one rendezvous endpoint",
        )
    if agents is None and (size, rank) != (tasks, slurm.rank):
        fact = f"SLURM_PROCID={slurm.rank} does not equal RANK={rank}"
        if size != tasks:
            fact = f"SLURM started {tasks} tasks, but WORLD_SIZE={size}"
        raise EnvironmentVariablesError(
            fact,
            code="env.slurm-rank-mismatch",
            fix="unset RANK and WORLD_SIZE, because SLURM's variables are sufficient",
        )


def _from_openmpi(environ: Mapping[str, str]) -> Identity | None:
    rank, size = rank_and_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank = required_number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = required_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    port = None if job is None else _port_of(job)
    return _mpi_identity(environ, "openmpi", (rank, size), (local_rank, local_size), port)


def _from_pmi(environ: Mapping[str, str]) -> Identity | None:
    rank, size = rank_and_size(environ, "PMI_RANK", "PMI_SIZE")
    # srun --mpi=pmi2 sets PMI_RANK too, but without Hydra's local variables. Then SLURM's variables are used.
    if rank is None or size is None or ("MPI_LOCALRANKID" not in environ and _in_srun_step(environ)):
        return None
    local_rank = required_number(environ, "MPI_LOCALRANKID")
    local_size = required_number(environ, "MPI_LOCALNRANKS")
    return _mpi_identity(environ, "pmi", (rank, size), (local_rank, local_size), _HYDRA_PORT)


def _mpi_identity(
    environ: Mapping[str, str], source: str, world: tuple[int, int], local: tuple[int, int], port: int | None
) -> Identity:
    (rank, size), (local_rank, local_size) = world, local
    addr, given_port = master_endpoint(environ)
    port = port if given_port is None else given_port
    if addr is None and local_size < size and "SLURM_JOB_NODELIST" in environ:
        # With the default mapping, mpirun starts rank 0 on the first node.
        addr = expand_hosts(environ["SLURM_JOB_NODELIST"])[0]
    return Identity(
        rank=rank,
        world_size=size,
        local_rank=local_rank,
        local_world_size=local_size,
        # With the default mapping, mpirun and mpiexec fill one node after the other.
        node_rank=rank // local_size,
        num_nodes=-(-size // local_size),
        source=source,
        master_addr=addr or (_LOOPBACK if local_size == size else None),
        master_port=port,
    )


def _in_srun_step(environ: Mapping[str, str]) -> bool:
    step = number(environ, "SLURM_STEP_ID")
    return "SLURM_PROCID" in environ and step is not None and step < _FIRST_SPECIAL_STEP


def _from_slurm(environ: Mapping[str, str]) -> Identity | None:
    if not _in_srun_step(environ):
        return None  # batch and salloc shells have SLURM_PROCID=0 as well, but are not ranks
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = rank_and_size(environ, "SLURM_PROCID", tasks)
    if rank is None or size is None:
        return None
    node = number(environ, "SLURM_NODEID") or 0
    hosts = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or _LOOPBACK)
    addr, port = master_endpoint(environ)
    job = f"{environ.get('SLURM_JOB_ID', '0')}.{environ['SLURM_STEP_ID']}"
    return Identity(
        rank=rank,
        world_size=size,
        local_rank=required_number(environ, "SLURM_LOCALID"),
        local_world_size=_tasks_on_node(environ, node, size, len(hosts)),
        node_rank=node,
        num_nodes=len(hosts),
        source="slurm",
        master_addr=addr or (_LOOPBACK if len(hosts) == 1 else hosts[0]),
        master_port=_port_of(job) if port is None else port,
    )


def _tasks_on_node(environ: Mapping[str, str], node: int, size: int, nodes: int) -> int:
    """Return the tasks on a node from SLURM's "2(x3),1", which means two tasks on three nodes and one on the next."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts[node] if node < len(counts) else -(-size // nodes)


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Identity | None], ...] = (
    _from_torchrun,  # first: torchrun runs inside srun, never the reverse
    _from_openmpi,  # before SLURM: mpirun starts its daemons by srun, whose SLURM_PROCID the ranks inherit
    _from_pmi,  # before SLURM, for the same reason
    _from_slurm,
)


def _port_of(job: str) -> int:
    return DERIVED_PORTS[zlib.crc32(job.encode()) % len(DERIVED_PORTS)]
