"""Starts worlds over MPI: rendezvous of the ranks, process groups, and an exit that never waits for failed ranks.

MPI_Finalize waits for all ranks. A failed rank therefore gives the others a short time to exit as well; if they do
not, it aborts the whole job.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import sys
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.dist.rendezvous import HashStore, TCPStore
from shardwise.engines.mpi.group import MpiGroup
from shardwise.engines.mpi.progress import MpiProgress
from shardwise.engines.mpi.types import GROUP_NAME, load_mpi
from shardwise.environment import MPI_STARTERS, Identity
from shardwise.errors import ShardwiseError, WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.dist.rendezvous import Store

_EXIT_TIMEOUT_S = 2.0
"""Seconds for the other ranks to exit by themselves, and to report their errors, after this rank failed."""
_CONNECT_S = 3.0
_ADDRESS_BYTES = 1024
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class _RankAddress:
    """A rank's host and, for rank 0, the addresses of its store; exchanged between all ranks at the rendezvous."""

    rank: int
    host: str
    addresses: tuple[str, ...] = ()
    port: int = 0


class Runtime:
    """MPI in this process: its communicators and the progress of its pending operations."""

    rendezvous = "mpi"
    """The value of `World.init_method` for ranks that exchanged the store's address over MPI."""

    def __init__(self) -> None:
        self.mpi = load_mpi()
        self.progress = MpiProgress(self.mpi)
        self._join_comm: Any = None
        self._exit_comm: Any = None
        self._worlds: dict[tuple[int, ...], Any] = {}
        """Communicators of worlds, by the ranks that the launcher assigned to MPI's processes, in MPI's order."""
        self._world: Any = None
        self._exit_code = 0
        self._has_joined = False
        if GROUP_NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(GROUP_NAME, self._make_group, extended_api=True, devices=["cpu"])

    def identity(self, found: Identity) -> Identity:
        """Return `found`, or the identity according to MPI if no launcher set variables."""
        comm = self.mpi.COMM_WORLD
        if found.source != "alone" or comm.size == 1:
            return found
        local = comm.Split_type(self.mpi.COMM_TYPE_SHARED)
        rank, size = local.rank, local.size
        local.Free()
        return Identity(
            rank=comm.rank, world_size=comm.size, local_rank=rank, local_world_size=size, source="mpi",
            node_rank=comm.rank // size, num_nodes=-(-comm.size // size),
        )  # fmt: skip

    def join(self, identity: Identity, limit_s: float, *, needs_store: bool) -> Store | None:
        """Create the world's communicator, and a store if `needs_store`. Communicates over MPI; call on every rank."""
        self._require_all(identity)
        self._exit_code, self.progress.is_broken = 0, False
        if not self._has_joined:
            self._has_joined = True
            atexit.register(self._on_exit)
        try:
            return self._rendezvous(identity, limit_s, needs_store=needs_store)
        except BaseException as error:
            self.fail(error)
            raise

    def _rendezvous(self, identity: Identity, limit_s: float, *, needs_store: bool) -> Store | None:
        if self._exit_comm is None:
            self._join_comm = self._duplicate(self.mpi.COMM_WORLD, limit_s)
            self._exit_comm = self._duplicate(self.mpi.COMM_WORLD, limit_s)
        store, own = None, _RankAddress(identity.rank, socket.gethostname())
        if needs_store:
            store, own = _open_store(identity)
        addresses = self._exchange(self._join_comm, own, limit_s)
        self._world = self._ordered(self._join_comm, tuple(each.rank for each in addresses))
        if needs_store and store is None:
            rank_zero = next(each for each in addresses if each.rank == 0)
            store = _connect_store(identity, rank_zero, limit_s)
        if store is not None:
            store.set_timeout(timedelta(seconds=limit_s))
        return store

    def _require_all(self, identity: Identity) -> None:
        """Raise WorldError if the number of MPI ranks differs from the world size."""
        size, count = identity.world_size, self.mpi.COMM_WORLD.size
        if count == size:
            return
        if count == 1 and identity.source in MPI_STARTERS:
            library = " ".join(self.mpi.Get_library_version().split(",")[0].splitlines()[0].split())
            raise WorldError(
                f"the mpirun that started {size} ranks does not belong to the MPI library of mpi4py, {library}",
                code="world.mpi-library-mismatch",
                fix=f"use the mpirun of {library}, or set MPI4PY_LIBMPI to the libmpi.so of this mpirun",
            )
        raise WorldError(
            f"the world has {size} ranks, but MPI has {count}",
            code="world.mpi-size-mismatch",
            fix=f"run mpirun -n {size} {rerun_command(sys.argv)}",
        )

    def fail(self, error: BaseException) -> None:
        """Record that this rank failed: at exit it aborts other ranks that do not exit by themselves."""
        self._exit_code = _exit_code(error)
        self.progress.is_broken = self._exit_code != 0

    def _duplicate(self, comm: Any, limit_s: float) -> Any:
        with self.progress.lock:
            copy, request = comm.Idup()
        self._finish(request, limit_s)
        return copy

    def _exchange(self, comm: Any, own: _RankAddress, limit_s: float) -> list[_RankAddress]:
        text = "\n".join([str(own.rank), own.host, str(own.port), *own.addresses])
        sent = bytearray(text.encode()[:_ADDRESS_BYTES].ljust(_ADDRESS_BYTES, b"\0"))
        received = bytearray(_ADDRESS_BYTES * comm.size)
        with self.progress.lock:
            request = comm.Iallgather(sent, received)
        self._finish(request, limit_s)
        starts = range(0, len(received), _ADDRESS_BYTES)
        return [_parse_address(received[start : start + _ADDRESS_BYTES]) for start in starts]

    def _finish(self, request: Any, limit_s: float) -> None:
        start = time.monotonic()
        while not self._test(request):
            if time.monotonic() - start > limit_s:
                raise WorldError(
                    f"not all of {self.mpi.COMM_WORLD.size} ranks have called world(backend='mpi') within"
                    f" {limit_s:g} s",
                    code="rendezvous.timeout",
                    fix="call world(backend='mpi') on every rank that mpirun starts",
                )
            time.sleep(0.0002)

    def _test(self, request: Any) -> bool:
        with self.progress.lock:
            return bool(request.Test())

    def _ordered(self, comm: Any, ranks: tuple[int, ...]) -> Any:
        """Return a communicator in which every process has the rank that the launcher assigned."""
        if ranks == tuple(range(comm.size)):
            return comm
        if sorted(ranks) != list(range(comm.size)):
            raise WorldError(
                f"the ranks of MPI processes must be 0 to {comm.size - 1} without duplicates, got {list(ranks)}",
                code="world.mpi-ranks-invalid",
                fix=f"assign each rank from 0 to {comm.size - 1} to one process",
            )
        if ranks not in self._worlds:
            self._worlds[ranks] = _sub_communicator(comm, [ranks.index(rank) for rank in range(comm.size)])
        return self._worlds[ranks]

    def _make_group(self, options: Any, _: Any) -> MpiGroup:
        """Create a process group, called by torch; communicates over the members of the new group."""
        if self._world is None:
            raise WorldError(
                f"the process group {GROUP_NAME!r} was started without a world",
                code="world.mpi-without-world",
                fix="call sw.world(backend='mpi') instead of init_process_group",
            )
        ranks = list(options.global_ranks_in_group)
        if not ranks:
            comm = self._duplicate(self._world, options.timeout.total_seconds())
        else:
            _wait_for_members(options.store, options.group_rank, ranks, options.timeout)
            tag = zlib.crc32(str(options.group_id).encode()) % 2**15  # the number of tags that MPI guarantees
            with self.progress.lock:
                comm = _sub_communicator(self._world, ranks, tag)
        return MpiGroup(self.progress, comm, options.store, options.timeout)

    def _on_exit(self) -> None:
        """Abort the job if this rank failed while other ranks wait for it: MPI_Finalize would wait without limit."""
        has_stopped = self.progress.stop()
        uncaught = getattr(sys, "last_value", None)
        code = self._exit_code if uncaught is None else _exit_code(uncaught)
        if code == 0 or self.mpi.Is_finalized():
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if not (has_stopped and self._exit_comm is not None and self._all_exit()):
            self.mpi.COMM_WORLD.Abort(code)

    def _all_exit(self) -> bool:
        """Return whether all other ranks exit within the timeout."""
        request, end = self._exit_comm.Ibarrier(), time.monotonic() + _EXIT_TIMEOUT_S
        while time.monotonic() < end:
            if self._test(request):
                return True
            time.sleep(0.001)
        return False


@cache
def runtime() -> Runtime:
    """Return the MPI runtime of this process, initialized at the first call."""
    return Runtime()


def try_library() -> None:
    """Initialize and finalize MPI in this process."""
    load_mpi().Finalize()


def _sub_communicator(comm: Any, ranks: list[int], tag: int = 0) -> Any:
    """Return a communicator of `ranks` of `comm`, in this order; communicates over these ranks."""
    whole = comm.Get_group()
    group = whole.Incl(ranks)
    made = comm.Create_group(group, tag)
    group.Free()
    whole.Free()
    return made


def _wait_for_members(store: Store, group_rank: int, ranks: list[int], timeout: timedelta) -> None:
    """Wait until all members of a new group are ready; communicates over `store`, because MPI has no timeout."""
    store.set(f"mpi/{group_rank}", "")
    if store.add("mpi/members", 1) == len(ranks):
        store.set("mpi/all", "")
    try:
        store.wait(["mpi/all"], timeout)
    except RuntimeError as error:
        missing = [rank for at, rank in enumerate(ranks) if not store.check([f"mpi/{at}"])]
        raise dist.DistBackendError(
            f"ranks {missing} have not joined the group of ranks {ranks} within {timeout.total_seconds():g} s"
        ) from error


def _open_store(identity: Identity) -> tuple[Store | None, _RankAddress]:
    """Return the store on rank 0, else None, and this rank's address; on one node the store listens on loopback."""
    host = socket.gethostname()
    if identity.rank != 0:
        return None, _RankAddress(identity.rank, host)
    if identity.world_size == 1:
        return HashStore(), _RankAddress(0, host)
    one_node = identity.local_world_size == identity.world_size
    listener = socket.create_server((_LOOPBACK if one_node else "", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK, port, identity.world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, _RankAddress(0, host, (_LOOPBACK,) if one_node else _own_addresses(host), port)


def _own_addresses(host: str) -> tuple[str, ...]:
    """Return the addresses and the name of this host, the most likely to be reachable first."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address reserved for documentation; connecting a UDP socket sends nothing
        found.append(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]
    remote = [address for address in found if not address.startswith("127.")]
    return tuple(dict.fromkeys([*remote, host]))


def _connect_store(identity: Identity, main: _RankAddress, limit_s: float) -> Store:
    """Return a client of rank 0's store at the first of its addresses that accepts a connection."""
    for address in main.addresses:
        try:
            socket.create_connection((address, main.port), timeout=min(_CONNECT_S, limit_s)).close()
        except OSError:
            continue
        return TCPStore(
            address, main.port, identity.world_size, is_master=False, timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
        )  # fmt: skip
    raise WorldError(
        f"rank {identity.rank} on {socket.gethostname()} cannot reach rank 0 on {main.host} at"
        f" {', '.join(main.addresses)}, port {main.port}",
        code="rendezvous.unreachable",
        fix="allow connections between the hosts, or pass init_method='tcp://host:port'",
    )


def _parse_address(data: bytearray) -> _RankAddress:
    rank, host, port, *addresses = bytes(data).rstrip(b"\0").decode().split("\n")
    return _RankAddress(int(rank), host, tuple(addresses), int(port))


def _exit_code(error: BaseException) -> int:
    """Return the exit code of a process that does not catch `error`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, ShardwiseError) else 1


def rerun_command(argv: Sequence[str]) -> str:
    """Return a short form of this program's command line, such as `shardwise train ...` or `python train.py`."""
    program = Path(argv[0])
    if argv[0] in ("", "-c"):
        return "python train.py"
    if program.name == "__main__.py":
        command = ["python", "-m", program.parent.name, *argv[1:2]]
    elif program.suffix == ".py":
        command = ["python", argv[0]]
    else:
        command = [program.name, *argv[1:2]]
    if command[-1] != argv[-1]:
        command.append("...")
    return " ".join(command)
