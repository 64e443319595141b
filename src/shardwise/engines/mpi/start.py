"""Worlds that MPI started: how their ranks meet over it, their groups, and an end that never waits for the dead."""

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

from shardwise.dist.stores import HashStore, TCPStore
from shardwise.engines.mpi.group import MpiGroup
from shardwise.engines.mpi.progress import MpiProgress
from shardwise.engines.mpi.types import GROUP_NAME, load_mpi
from shardwise.environment import MPI_STARTERS, Identity
from shardwise.errors import ShardwiseError, WorldError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.dist.stores import Store

_PATIENCE_S = 2.0
"""What the other ranks get to end by themselves, and to say why, after this one failed."""
_CONNECT_S = 3.0
_CARD_BYTES = 1024
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class _RankCard:
    """What a rank tells all others as they meet."""

    rank: int
    host: str
    addresses: tuple[str, ...] = ()
    port: int = 0


class Runtime:
    """MPI in this process: its communicator of the world, and who carries on what is under way."""

    rendezvous = "mpi"
    """What `World.init_method` says of ranks that were told of their store over MPI."""

    def __init__(self) -> None:
        self.mpi = load_mpi()
        self.progress = MpiProgress(self.mpi)
        self._meeting: Any = None
        self._farewell: Any = None
        self._worlds: dict[tuple[int, ...], Any] = {}
        """Communicators by the ranks that MPI's processes were given, in MPI's order."""
        self._world: Any = None
        self._exit_code = 0
        self._has_joined = False
        if GROUP_NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(GROUP_NAME, self._make_group, extended_api=True, devices=["cpu"])

    def identity(self, found: Identity) -> Identity:
        """Return `found`, or what MPI itself says where no launcher left variables."""
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
        """Communicate over MPI, called on every rank: make the world's communicator, and a store if `needs_store`."""
        self._require_all(identity)
        self._exit_code, self.progress.is_broken = 0, False
        if not self._has_joined:
            self._has_joined = True
            atexit.register(self._leave)
        try:
            return self._meet(identity, limit_s, needs_store=needs_store)
        except BaseException as error:
            self.fail(error)
            raise

    def _meet(self, identity: Identity, limit_s: float, *, needs_store: bool) -> Store | None:
        if self._farewell is None:
            self._meeting = self._duplicate(self.mpi.COMM_WORLD, limit_s)
            self._farewell = self._duplicate(self.mpi.COMM_WORLD, limit_s)
        store, card = _open_store(identity) if needs_store else (None, _RankCard(identity.rank, socket.gethostname()))
        cards = self._exchange(self._meeting, card, limit_s)
        self._world = self._ordered(self._meeting, tuple(shown.rank for shown in cards))
        if needs_store and store is None:
            store = _reach_store(identity, next(shown for shown in cards if shown.rank == 0), limit_s)
        if store is not None:
            store.set_timeout(timedelta(seconds=limit_s))
        return store

    def _require_all(self, identity: Identity) -> None:
        """Refuse a world that MPI counts otherwise."""
        size, count = identity.world_size, self.mpi.COMM_WORLD.size
        if count == size:
            return
        if count == 1 and identity.source in MPI_STARTERS:
            library = " ".join(self.mpi.Get_library_version().split(",")[0].splitlines()[0].split())
            raise WorldError(
                f"mpirun started {size} ranks, and is of another MPI than mpi4py's library, {library}",
                code="world.mpi-library-mismatch",
                fix=f"use the mpirun of {library}, or set MPI4PY_LIBMPI to the libmpi.so of this mpirun",
            )
        raise WorldError(
            f"backend 'mpi' was asked by a world of {size} ranks, and MPI counts {count}",
            code="world.mpi-size-mismatch",
            fix=f"start it with mpirun -n {size} {rerun_command(sys.argv)}",
        )

    def fail(self, error: BaseException) -> None:
        """Note that this rank failed: at its end it takes the others with it if they do not end by themselves."""
        self._exit_code = _exit_code(error)
        self.progress.is_broken = self._exit_code != 0

    def _duplicate(self, comm: Any, limit_s: float) -> Any:
        with self.progress.turn:
            copy, request = comm.Idup()
        self._finish(request, limit_s)
        return copy

    def _exchange(self, comm: Any, card: _RankCard, limit_s: float) -> list[_RankCard]:
        words = "\n".join([str(card.rank), card.host, str(card.port), *card.addresses])
        mine = bytearray(words.encode()[:_CARD_BYTES].ljust(_CARD_BYTES, b"\0"))
        every = bytearray(_CARD_BYTES * comm.size)
        with self.progress.turn:
            request = comm.Iallgather(mine, every)
        self._finish(request, limit_s)
        return [_read_card(every[i * _CARD_BYTES : (i + 1) * _CARD_BYTES]) for i in range(comm.size)]

    def _finish(self, request: Any, limit_s: float) -> None:
        start = time.monotonic()
        while not self._test(request):
            if time.monotonic() - start > limit_s:
                raise WorldError(
                    f"after {limit_s:g} s not every one of {self.mpi.COMM_WORLD.size} ranks has come to"
                    " world(backend='mpi')",
                    code="rendezvous.timeout",
                    fix="call it on every rank that mpirun starts",
                )
            time.sleep(0.0002)

    def _test(self, request: Any) -> bool:
        with self.progress.turn:
            return bool(request.Test())

    def _ordered(self, comm: Any, ranks: tuple[int, ...]) -> Any:
        """Return a communicator in which every process has the rank that it was given."""
        if ranks == tuple(range(comm.size)):
            return comm
        if sorted(ranks) != list(range(comm.size)):
            raise WorldError(
                f"the ranks of MPI's processes were given as {list(ranks)}",
                code="world.mpi-ranks-invalid",
                fix=f"give each of 0 to {comm.size - 1} once",
            )
        if ranks not in self._worlds:
            self._worlds[ranks] = _select(comm, [ranks.index(rank) for rank in range(comm.size)])
        return self._worlds[ranks]

    def _make_group(self, options: Any, _: Any) -> MpiGroup:
        """Communicate among the members of a new group: what torch calls to make one."""
        if self._world is None:
            raise WorldError(
                f"torch's process group was started as {GROUP_NAME!r} without its world",
                code="world.mpi-without-world",
                fix="call sw.world(backend='mpi') instead of init_process_group",
            )
        ranks = list(options.global_ranks_in_group)
        if not ranks:
            comm = self._duplicate(self._world, options.timeout.total_seconds())
        else:
            _gather_members(options.store, options.group_rank, ranks, options.timeout)
            tag = zlib.crc32(str(options.group_id).encode()) % 2**15  # every MPI has as many tags
            with self.progress.turn:
                comm = _select(self._world, ranks, tag)
        return MpiGroup(self.progress, comm, options.store, options.timeout)

    def _leave(self) -> None:
        """End the whole job where this rank failed and others wait for it; MPI would wait for them, for ever."""
        has_stopped = self.progress.stop()
        uncaught = getattr(sys, "last_value", None)
        code = self._exit_code if uncaught is None else _exit_code(uncaught)
        if code == 0 or self.mpi.Is_finalized():
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        if not (has_stopped and self._farewell is not None and self._all_leave()):
            self.mpi.COMM_WORLD.Abort(code)

    def _all_leave(self) -> bool:
        """Return whether all other ranks come to their end soon."""
        request, end = self._farewell.Ibarrier(), time.monotonic() + _PATIENCE_S
        while time.monotonic() < end:
            if self._test(request):
                return True
            time.sleep(0.001)
        return False


@cache
def runtime() -> Runtime:
    """Return MPI in this process, started at the first call; there is never a second one."""
    return Runtime()


def try_library() -> None:
    """Start and finalize MPI in this process."""
    load_mpi().Finalize()


def _select(comm: Any, ranks: list[int], tag: int = 0) -> Any:
    """Communicate among `ranks` of `comm` to make a communicator of them, in this order."""
    every = comm.Get_group()
    some = every.Incl(ranks)
    made = comm.Create_group(some, tag)
    some.Free()
    every.Free()
    return made


def _gather_members(store: Store, group_rank: int, ranks: list[int], timeout: timedelta) -> None:
    """Communicate through `store` until all members of a new group are here: making it in MPI has no time limit."""
    store.set(f"mpi/{group_rank}", "")
    if store.add("mpi/members", 1) == len(ranks):
        store.set("mpi/all", "")
    try:
        store.wait(["mpi/all"], timeout)
    except RuntimeError as error:
        missing = [rank for at, rank in enumerate(ranks) if not store.check([f"mpi/{at}"])]
        raise dist.DistBackendError(
            f"ranks {missing} have not come to make the group of ranks {ranks} within {timeout.total_seconds():g} s"
        ) from error


def _open_store(identity: Identity) -> tuple[Store | None, _RankCard]:
    """Return rank 0's store, None on others, and what to tell all; it listens on loopback alone where it can."""
    host = socket.gethostname()
    if identity.rank != 0:
        return None, _RankCard(identity.rank, host)
    if identity.world_size == 1:
        return HashStore(), _RankCard(0, host)
    one_node = identity.local_world_size == identity.world_size
    listener = socket.create_server((_LOOPBACK if one_node else "", 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK, port, identity.world_size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, _RankCard(0, host, (_LOOPBACK,) if one_node else _own_addresses(host), port)


def _own_addresses(host: str) -> tuple[str, ...]:
    """Return by what other machines may reach this one, the likeliest first."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        outward.connect(("192.0.2.1", 9))  # sends nothing; an address for documentation, routed as any other
        found.append(outward.getsockname()[0])
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]
    return tuple(dict.fromkeys([*(address for address in found if not address.startswith("127.")), host]))


def _reach_store(identity: Identity, main: _RankCard, limit_s: float) -> Store:
    """Communicate with rank 0's store by the first of its addresses that answers."""
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
        f"rank {identity.rank} on {socket.gethostname()} reaches rank 0 on {main.host} at none of"
        f" {', '.join(main.addresses)}, port {main.port}",
        code="rendezvous.unreachable",
        fix="let the machines reach each other, or pass init_method='tcp://host:port'",
    )


def _read_card(data: bytearray) -> _RankCard:
    rank, host, port, *addresses = bytes(data).rstrip(b"\0").decode().split("\n")
    return _RankCard(int(rank), host, tuple(addresses), int(port))


def _exit_code(error: BaseException) -> int:
    """Return with which code a process ends that does not catch `error`."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, ShardwiseError) else 1


def rerun_command(argv: Sequence[str]) -> str:
    """Return in short how a program of these arguments is started: `shardwise train ...`, `python train.py`."""
    program = Path(argv[0])
    if argv[0] in ("", "-c"):
        return "python train.py"
    if program.name == "__main__.py":
        words = ["python", "-m", program.parent.name, *argv[1:2]]
    elif program.suffix == ".py":
        words = ["python", argv[0]]
    else:
        words = [program.name, *argv[1:2]]
    is_whole = words[-1] == argv[-1]
    return " ".join(words if is_whole else [*words, "..."])
