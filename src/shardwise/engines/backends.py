"""The table of collective backends: what each moves, who starts its ranks, and what a rank must start before its group.

Torch brings gloo, nccl, ucc and fake. MPI is a process group of ours over mpi4py where torch was built without it: its
row names the module that starts it, which is imported when a world of that backend starts, so that no other rank has
mpi4py. Backends that are not in the table (plugins, pairs such as cpu:gloo,cuda:nccl) get a row of defaults.

This module imports no torch: the launcher's process asks it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from shardwise.errors import MissingExtraError, WorldError

if TYPE_CHECKING:
    from shardwise.dist.stores import Store
    from shardwise.environment import Identity


@dataclass(frozen=True, kw_only=True)
class CollectiveBackend:
    """One backend."""

    name: str
    is_in_torch: str = ""
    """The function of torch.distributed that returns whether this torch was built with it; none for plugins."""
    missing: str = ""
    """What to do where it is not."""
    default_device: str | None = None
    """The device type that a world of it is on, where there is no choice."""
    starts_by_mpirun: bool = False
    """Whether its ranks are mpirun's and not forks."""
    is_rare: bool = False
    """Whether few machines have it, so that it is looked for before ranks start."""
    carries_host_values: bool = False
    """Whether its groups also carry small values on the host; else a group of gloo does."""
    chooses_transport: bool = False
    """Whether its library takes shared memory or a fabric as it finds them, so that no link is its limit."""
    own_name: str = ""
    """What torch calls the process group of ours that stands in for it, after the library beneath it."""
    extra: str = ""
    """The extra of shardwise that installs the library."""
    runtime_module: str = ""
    """Has `runtime()` and `try_library()`."""


class BackendRuntime(Protocol):
    """What a process starts before a process group of ours."""

    rendezvous: str
    """What `World.init_method` says of ranks that it brought together."""

    def identity(self, found: Identity) -> Identity:
        """Return `found`, or who this rank is by the library itself where no launcher left variables."""

    def join(self, identity: Identity, limit_s: float, *, needs_store: bool) -> Store | None:
        """Communicate, called on every rank: join the world, and return a store if `needs_store`."""

    def fail(self, error: BaseException) -> None:
        """Note that this rank failed."""


_ROWS = (
    CollectiveBackend(
        name="gloo",
        is_in_torch="is_gloo_available",
        missing="install a torch built with gloo",
        carries_host_values=True,
    ),
    CollectiveBackend(
        name="nccl",
        is_in_torch="is_nccl_available",
        missing="install a CUDA build of torch, or use backend='gloo'",
    ),
    CollectiveBackend(
        name="ucc",
        is_in_torch="is_ucc_available",
        missing="use a torch built with UCC (USE_UCC=1); no published wheel has it",
        is_rare=True,
    ),
    CollectiveBackend(
        name="mpi",
        is_in_torch="is_mpi_available",
        default_device="cpu",
        starts_by_mpirun=True,
        is_rare=True,
        carries_host_values=True,
        chooses_transport=True,
        own_name="mpi4py",
        extra="mpi",
        runtime_module="shardwise.engines.mpi.start",
    ),
    CollectiveBackend(name="fake", carries_host_values=True),
)
_BY_NAME = {row.name: row for row in _ROWS}
_BY_OWN_NAME = {row.own_name: row for row in _ROWS if row.own_name}


def backend_row(name: str | None) -> CollectiveBackend:
    """Return the row of a backend, by the name that users or torch have for it; one of defaults for any other."""
    key = (name or "").lower()
    return _BY_NAME.get(key) or _BY_OWN_NAME.get(key) or CollectiveBackend(name=key)


def is_own(name: str) -> bool:
    """Return whether a process group of ours stands in for this backend; imports torch."""
    row = backend_row(name)
    return bool(row.own_name) and not _torch_has(row)


def torch_name(name: str) -> str:
    """Return what torch knows a backend by; imports torch."""
    return backend_row(name).own_name if is_own(name) else name


def require_available(name: str) -> None:
    """Refuse a backend that neither this torch nor an extra provides; imports torch."""
    row = backend_row(name)
    if is_own(name):
        if find_spec(row.own_name) is None:
            raise MissingExtraError.of(f"backend {row.name!r} with this torch", row.extra)
    elif not _torch_has(row):
        raise WorldError(
            f"the installed torch has no backend {row.name!r}", code="world.backend-not-available", fix=row.missing
        )


def backend_runtime(name: str) -> BackendRuntime | None:
    """Return what this process must start before a group of the backend, started; None where torch does it all."""
    if not is_own(name):
        return None
    runtime: BackendRuntime = import_module(backend_row(name).runtime_module).runtime()
    return runtime


def try_library(name: str) -> None:
    """Load and end the library of a backend of ours in this process, which can have it only once."""
    import_module(backend_row(name).runtime_module).try_library()


def _torch_has(row: CollectiveBackend) -> bool:
    if not row.is_in_torch:
        return True
    return bool(getattr(import_module("torch.distributed"), row.is_in_torch)())
