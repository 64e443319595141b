"""The table of collective backends: availability in torch, supported devices, launcher and required library.

Torch provides gloo, nccl, ucc and fake. If torch was built without MPI, shardwise uses its own process group over
mpi4py. Its module is imported only when a world with backend mpi starts, so other ranks do not import mpi4py. Backends
outside the table (plugins, pairs such as cpu:gloo,cuda:nccl) have a row of default values.

This module does not import torch, since the launcher's process uses it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from shardwise.errors import MissingExtraError, WorldError

if TYPE_CHECKING:
    from shardwise.dist.rendezvous import Store
    from shardwise.environment import Identity


@dataclass(frozen=True, kw_only=True)
class CollectiveBackend:
    """Properties of one collective backend."""

    name: str
    is_in_torch: str = ""
    """The function of torch.distributed that returns whether torch was built with the backend; "" for plugins."""
    missing: str = ""
    """The fix to report if torch was built without the backend."""
    default_device: str | None = None
    """The only device type that the backend supports; None if it supports several."""
    starts_by_mpirun: bool = False
    """Whether mpirun starts the ranks, instead of a fork."""
    is_rare: bool = False
    """Whether few machines provide the backend, so that callers check for it before they start ranks."""
    carries_host_values: bool = False
    """Whether its groups also communicate small tensors in host memory; otherwise a separate gloo group does."""
    chooses_transport: bool = False
    """Whether its library selects the transport, shared memory or a fabric, so that no single link limits it."""
    own_name: str = ""
    """The name under which torch registers shardwise's own process group: the name of the library that it uses."""
    extra: str = ""
    """The extra of shardwise that installs the library."""
    runtime_module: str = ""
    """The module that defines `runtime()` and `try_library()`."""


class BackendRuntime(Protocol):
    """The runtime of a library that a process starts before it creates shardwise's own process group."""

    rendezvous: str
    """The value of `World.init_method` for ranks that joined through this runtime."""

    def identity(self, found: Identity) -> Identity:
        """Return `found`, or this rank's identity according to the library if no launcher set variables."""

    def join(self, identity: Identity, limit_s: float, *, needs_store: bool) -> Store | None:
        """Join the world and return a store if `needs_store`. Communicates; call on every rank."""

    def fail(self, error: BaseException) -> None:
        """Record that this rank failed."""


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
        missing="build torch with USE_UCC=1, because published wheels do not include UCC",
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
    """Return the row of a backend by its name in plans or in torch; default values for an unknown name."""
    key = (name or "").lower()
    return _BY_NAME.get(key) or _BY_OWN_NAME.get(key) or CollectiveBackend(name=key)


def is_own(name: str) -> bool:
    """Return whether shardwise's own process group implements this backend; imports torch."""
    row = backend_row(name)
    return bool(row.own_name) and not _torch_has(row)


def torch_name(name: str) -> str:
    """Return the name under which torch registers a backend; imports torch."""
    return backend_row(name).own_name if is_own(name) else name


def require_available(name: str) -> None:
    """Raise an InputError if neither the installed torch nor an extra provides the backend; imports torch."""
    row = backend_row(name)
    if is_own(name):
        if find_spec(row.own_name) is None:
            raise MissingExtraError.of(f"backend {row.name!r} with this torch", row.extra)
    elif not _torch_has(row):
        raise WorldError(
            f"torch was built without backend {row.name!r}", code="world.backend-not-available", fix=row.missing
        )


def backend_runtime(name: str) -> BackendRuntime | None:
    """Start and return the runtime that a group of the backend needs; None if torch alone creates the group."""
    if not is_own(name):
        return None
    runtime: BackendRuntime = import_module(backend_row(name).runtime_module).runtime()
    return runtime


def try_library(name: str) -> None:
    """Initialize and finalize the library of shardwise's own backend; a process can do this only once."""
    import_module(backend_row(name).runtime_module).try_library()


def _torch_has(row: CollectiveBackend) -> bool:
    if not row.is_in_torch:
        return True
    return bool(getattr(import_module("torch.distributed"), row.is_in_torch)())
