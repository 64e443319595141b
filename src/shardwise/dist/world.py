"""The world of a rank: its identity, its process groups and meshes, and teardown that always happens."""

from __future__ import annotations

import atexit
import contextlib
import socket
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

from shardwise.dist.stores import HashStore
from shardwise.engines.backends import backend_row, backend_runtime, torch_name
from shardwise.errors import WorldError
from shardwise.layout import AXES
from shardwise.runs.console import echo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.dist.stores import Store
    from shardwise.environment import Identity
    from shardwise.layout import Layout


THREADS_CATCH_UP_S = 0.02
"""What gloo's threads get before a group ends. They drop the tensors of finished work, for which they take the
interpreter's lock: a late thread finds an interpreter that ends, and the process aborts, or a group whose
end waits for the thread without limit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """Who this rank is, where it computes, and the process group it belongs to; closed at the end of `with`."""

    rank: int
    local_rank: int
    size: int
    local_size: int
    """Ranks on this node."""
    node: int
    num_nodes: int
    host: str
    device: torch.device
    backend: str
    timeout_s: float
    """How long one operation may take before the backend gives up."""
    store: Store
    """The store of the rendezvous; keys that start with "shardwise/" and "default_pg/" are taken."""
    source: str
    """Source of rank and size: shardwise, torchrun, slurm, openmpi, pmi, mpi, alone, arguments, adopted or fake."""
    init_method: str
    """The rendezvous: a URL, or "mpi", "store", "alone", "adopted", "fake"."""
    process_group: weakref.ref[ProcessGroup] = field(repr=False)
    created: bool = field(default=True, repr=False)
    """Whether closing this world ends the process group: not one that was running before."""
    _groups: dict[Any, ProcessGroup | None] = field(default_factory=dict, repr=False)
    """Groups made so far: each costs connections, and they last as long as the world."""

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
        """Return the world that `identity` has in the process group now running."""
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
        """Print on rank 0 alone."""
        if self.is_main:
            echo(" ".join(map(str, values)))

    def barrier(self) -> None:
        """Communicate over the whole world, called on every rank: return when all have called."""
        # Without its device, nccl guesses one from the rank.
        dist.barrier(device_ids=[self.device.index] if self.backend == "nccl" else None)

    def gather(self, value: Any) -> list[Any]:
        """Communicate over the whole world, called on every rank: return each rank's picklable value, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Communicate over the whole world, called on every rank with the same names: sum each value in fp64."""
        names = sorted(values)  # ranks may have filled their mappings in different orders
        total = torch.tensor([values[name] for name in names], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return dict(zip(names, total.tolist(), strict=True))

    @property
    def _host_backend(self) -> str:
        return torch_name(self.backend) if backend_row(self.backend).carries_host_values else "gloo"

    @cached_property
    def host_group(self) -> ProcessGroup:
        """A group of all ranks for small values on the host; communicates at its first use, on every rank."""
        return self.own_host_group()

    def own_host_group(self) -> ProcessGroup:
        """Communicate to make one more group of all ranks, called on every rank: for a thread of its own."""
        return dist.new_group(backend=self._host_backend, timeout=timedelta(seconds=self.timeout_s))  # type: ignore[no-any-return]

    def group(self, ranks: Iterable[int]) -> ProcessGroup | None:
        """Communicate to make a group of `ranks`, called on every rank; None on those outside it."""
        members = list(ranks)
        _check_members(members, self.size)
        group = dist.new_group(members, timeout=timedelta(seconds=self.timeout_s))
        return group if self.rank in members else None

    def axis_group(self, layout: Layout, axes: Sequence[str], *, on_host: bool = False) -> ProcessGroup | None:
        """Communicate to join this rank with those that differ from it only along `axes`; None when it is alone.

        Called on every rank. `on_host` groups carry small values of the host beside other traffic.
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
        """Communicate to make the named mesh of `layout`, called on every rank."""
        return build_mesh(layout, world_size=self.size, device_type=self.device.type)

    def close(self) -> None:
        """Communicate so that all ranks leave together, then end the group if this world began it; again: nothing."""
        if not (self.created and self.is_initialized):
            return
        try:
            # The rank that hosts the store must not leave while others still need it.
            self.barrier()
        except RuntimeError as error:
            # A peer died and reports that itself; a rank that is done has nothing to report.
            self._fail(error)
        except BaseException as error:
            self._fail(error)
            raise
        else:
            self._end()
            if self.init_method.startswith("file://"):
                # A FileStore writes once more when it is freed, and creates the file again for that: so every rank
                # frees its own first and then removes the file, and the last of them leaves none.
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
        """End the process group as a rank that failed: over MPI, the job ends with it."""
        runtime = backend_runtime(self.backend) if self.created else None
        if runtime is not None:
            runtime.fail(error)
        self._abandon()

    def _abandon(self) -> None:
        """End the process group without waiting for others and without output: an exception may be propagating."""
        group = self.process_group()
        if not self.created or group is None or not self.is_initialized:
            return
        if "nccl" in self.backend:
            # Operations that wait for a lost peer would keep the end waiting too.
            with contextlib.suppress(Exception):
                group.abort()
        with contextlib.suppress(Exception):
            self._end()

    def _end(self) -> None:
        atexit.unregister(self._abandon)
        if self.size > 1 and self._host_backend == "gloo":
            time.sleep(THREADS_CATCH_UP_S)
        dist.destroy_process_group()


def _check_members(members: Sequence[int], size: int) -> None:
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(size)):
        raise WorldError(
            f"ranks {members} are not a group in a world of {size}",
            code="world.group-ranks-invalid",
            fix=f"name at least one rank, each once, 0 to {size - 1}",
        )


def running_group() -> ProcessGroup:
    """Return the default process group."""
    group = dist.group.WORLD
    if group is None:
        raise WorldError("no process group is running", code="world.not-running", fix="call world() first")
    return group


# Device meshes made from layouts: the axes that partition the world, by name.


def build_mesh(layout: Layout, *, world_size: int, device_type: str) -> DeviceMesh:
    """Communicate to make the mesh of `layout`, called on every rank; its axes are those of degree over 1.

    A layout of one rank gives a mesh of one, named "replicate".
    """
    if layout.world_size != world_size:
        others = layout.world_size // layout.replicate
        fits = world_size % others == 0
        raise WorldError(
            f"layout {layout} needs {layout.world_size} ranks, the world has {world_size}",
            code="layout.world-size-mismatch",
            fix=f"set replicate={world_size // others}" if fits else f"start a multiple of {others} ranks",
        )
    degrees = {axis: degree for axis, degree in zip(AXES, layout.degrees, strict=True) if degree > 1}
    degrees = degrees or {"replicate": 1}
    return init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
