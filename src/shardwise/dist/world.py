"""The World: the identity of a rank, its process groups and meshes, and their teardown."""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.dist.rendezvous import HashStore
from shardwise.engines.backends import backend_row, backend_runtime, torch_name
from shardwise.errors import WorldError
from shardwise.layout import AXES
from shardwise.runs.console import echo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.dist.rendezvous import Store
    from shardwise.environment import Identity
    from shardwise.layout import Layout


THREADS_CATCH_UP_S, MOST_CATCH_UP_S = 0.02, 1.0
"""Times for gloo's threads to release the tensors of finished work before a process group is destroyed: at least the
first, and up to the second while a thread waits for a core. They need the GIL for that. A late thread would find an
interpreter that is shutting down, which aborts the process ("terminate called without an active exception"), or
deadlock with the destruction of the group, which waits for the thread."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """The identity, device and process group of this rank; a context manager that closes the world on exit."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    """Number of ranks on this node."""
    node: int
    num_nodes: int
    host: str
    device: torch.device
    backend: str
    timeout_s: float
    """Timeout of the operations of the process group."""
    store: Store
    """The store of the rendezvous; the key prefixes "shardwise/" and "default_pg/" are reserved."""
    source: str
    """Source of rank and size: shardwise, torchrun, slurm, openmpi, pmi, mpi, alone, arguments, adopted or fake."""
    init_method: str
    """The rendezvous: a URL, "mpi", "store", "alone", "adopted" or "fake"."""
    process_group: weakref.ref[ProcessGroup] = field(repr=False)
    created: bool = field(default=True, repr=False)
    """Whether this world started the process group, so that closing the world destroys it."""
    _groups: dict[Any, ProcessGroup | None] = field(default_factory=dict, repr=False)
    """Cache of process groups, because each of them opens connections."""

    @classmethod
    def of(
        cls,
        identity: Identity,
        *,
        device: torch.device,
        backend: str,
        timeout_s: float,
        store: Store,
        init_method: str,
        created: bool = True,
    ) -> World:
        """Return the world of the rank `identity` in the running process group."""
        return cls(
            rank=identity.rank,
            local_rank=identity.local_rank,
            size=identity.world_size,
            local_size=identity.local_world_size,
            node=identity.node_rank,
            num_nodes=identity.num_nodes,
            host=socket.gethostname(),
            device=device,
            backend=backend,
            timeout_s=timeout_s,
            store=store,
            source=identity.source,
            init_method=init_method,
            process_group=weakref.ref(running_group()),
            created=created,
        )

    def __post_init__(self) -> None:
        if self.created:
            atexit.register(self._abandon)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_initialized(self) -> bool:
        """Whether the process group of this world is running."""
        group = self.process_group()
        return group is not None and dist.group.WORLD is group

    def print(self, *values: object) -> None:
        """Print on rank 0 only."""
        if self.is_main:
            echo(" ".join(map(str, values)))

    def barrier(self) -> None:
        """Wait until all ranks have called this method. Communicates over the world; call on every rank."""
        # Without device_ids, nccl guesses the device from the rank.
        dist.barrier(device_ids=[self.device.index] if self.backend == "nccl" else None)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which must be picklable. Communicates over the world; call on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the fp64 sum over all ranks of each value; names must be equal. Communicates; call on every rank."""
        names = sorted(values)  # the order of insertion may differ between ranks
        total = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    @property
    def _host_backend(self) -> str:
        return torch_name(self.backend) if backend_row(self.backend).carries_host_values else "gloo"

    @cached_property
    def host_group(self) -> ProcessGroup:
        """A process group of all ranks for CPU tensors. The first use communicates; call on every rank."""
        return self.own_host_group()

    def own_host_group(self) -> ProcessGroup:
        """Return a new process group for CPU tensors, such as for a thread. Communicates; call on every rank."""
        return dist.new_group(backend=self._host_backend, timeout=timedelta(seconds=self.timeout_s))  # type: ignore[no-any-return]

    def group(self, ranks: Iterable[int]) -> ProcessGroup | None:
        """Return a new process group of `ranks`, or None on other ranks. Communicates; call on every rank."""
        members = list(ranks)
        _check_members(members, self.size)
        group = dist.new_group(members, timeout=timedelta(seconds=self.timeout_s))
        return group if self.rank in members else None

    def axis_group(self, layout: Layout, axes: Sequence[str], *, on_host: bool = False) -> ProcessGroup | None:
        """Return the process group of the ranks that differ from this one only along `axes`; None if it has one rank.

        Communicates; call on every rank. Groups with `on_host` are for CPU tensors.
        """
        groups = layout.groups(*axes)
        if len(groups[0]) == 1:
            return None
        if len(groups) == 1:
            return self.host_group if on_host else running_group()
        if (groups, on_host) in self._groups:
            return self._groups[groups, on_host]
        mine: ProcessGroup | None = None
        for ranks in groups:
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=self.timeout_s),
                backend=self._host_backend if on_host else None,
            )
            mine = group if self.rank in ranks else mine
        return self._groups.setdefault((groups, on_host), mine)

    def mesh(self, layout: Layout) -> DeviceMesh:
        """Return the device mesh of `layout`. Communicates; call on every rank."""
        return build_mesh(layout, world_size=self.size, device_type=self.device.type)

    def close(self) -> None:
        """Synchronize all ranks and destroy the process group, unless adopted. Communicates; call on every rank."""
        if not (self.created and self.is_initialized):
            return
        try:
            # The rank that hosts the store must not exit while others still need it.
            self.barrier()
        except RuntimeError as error:
            # A peer failed and reports its own error; this rank has finished without one.
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        else:
            self._end()
            if self.init_method.startswith("file://"):
                # The destructor of a FileStore writes to the file and recreates it if necessary. So every rank destroys
                # its store first and then removes the file.
                object.__setattr__(self, "store", HashStore())
                Path(self.init_method.removeprefix("file://")).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Destroy the process group after a failure of this rank; with MPI, this aborts the job."""
        runtime = backend_runtime(self.backend) if self.created else None
        if runtime is not None:
            runtime.fail(error)
        self._abandon()

    def _abandon(self) -> None:
        """Destroy the process group without waiting for other ranks or raising: an exception may be propagating."""
        group = self.process_group()
        if not self.created or group is None or not self.is_initialized:
            return
        if "nccl" in self.backend:
            # Without an abort, the destruction would wait for operations that wait for a failed peer.
            with contextlib.suppress(Exception):
                group.abort()
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        atexit.unregister(self._abandon)
        if self._host_backend == "gloo":
            _let_threads_catch_up()
        dist.destroy_process_group()


def _let_threads_catch_up() -> None:
    """Sleep until no other thread of this process can run; a thread that waited for the GIL gets it meanwhile."""
    end = time.monotonic() + MOST_CATCH_UP_S
    time.sleep(THREADS_CATCH_UP_S)
    while has_runnable_threads() and time.monotonic() < end:
        time.sleep(THREADS_CATCH_UP_S)


def has_runnable_threads() -> bool:
    """Return whether another thread of this process runs or waits for a core; False where Linux does not show it."""
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            # The state follows the name in parentheses, which may contain any character.
            state = path.read_text().rpartition(")")[2].split()[0]
            if state == "R" and int(path.parent.name) != threading.get_native_id():
                return True
    return False


def _check_members(members: Sequence[int], size: int) -> None:
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(size)):
        raise WorldError(
            f"ranks {members} are not a valid group in a world of {size} ranks",
            code="world.group-ranks-invalid",
            fix=f"pass at least one rank, each once, from 0 to {size - 1}",
        )


def running_group() -> ProcessGroup:
    """Return the default process group."""
    group = dist.group.WORLD
    if group is None:
        raise WorldError("no process group is running", code="world.not-running", fix="call world() first")
    return group


# Device meshes of layouts. The names of the mesh dimensions are the axes of the layout.


def build_mesh(layout: Layout, *, world_size: int, device_type: str) -> DeviceMesh:
    """Return the device mesh of `layout` with the axes of degree above 1. Communicates; call on every rank.

    The mesh of a layout of one rank has a single axis "replicate".
    """
    if layout.world_size != world_size:
        others = layout.world_size // layout.replicate
        is_divisible = world_size % others == 0
        raise WorldError(
            f"layout {layout} requires {layout.world_size} ranks, but the world has {world_size}",
            code="layout.world-size-mismatch",
            fix=f"set replicate={world_size // others}" if is_divisible else f"start a multiple of {others} ranks",
        )
    degrees = {axis: degree for axis, degree in zip(AXES, layout.degrees, strict=True) if degree > 1}
    degrees = degrees or {"replicate": 1}
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
