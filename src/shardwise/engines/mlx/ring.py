"""Joins MLX's communication ring over the ranks of a world.

MLX reads the addresses of its ring from a file and connects without useful errors. So ranks agree on addresses over the
existing world, test every connection with plain sockets, and only then call `mx.distributed.init`: any launcher works,
and an unreachable host is named on every rank within seconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mlx.core as mx

from shardwise.environment import adopt, variables
from shardwise.errors import WorldError
from shardwise.torch_private.distributed import innermost_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardwise.dist import World


T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_REACH_S = 5.0
"""Timeout of a connection to the next rank; MLX retries for half a minute and reports only an error number."""
_HEAD_START_S = 0.1
"""Delay of the last rank, which connects before it listens: if rank 0 does not listen yet, MLX waits a whole second."""


@dataclass(frozen=True)
class Endpoint:
    """An address at which a rank accepts one connection."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Ring = tuple[tuple[Endpoint, ...], ...]
"""For each rank, one or several endpoints at which it accepts connections from the previous rank."""


def join_group(world: World, *, note: Callable[[str], None] = lambda _: None) -> mx.distributed.Group | None:
    """Return MLX's group of all ranks, None for one process. Communicates over the world; call on every rank.

    The addresses come from MLX_HOSTFILE if it is set; otherwise each rank uses a free port on an address that other
    ranks can reach. Raises on every rank if a host is unreachable. MLX keeps one ring per process: a second call
    returns the same group. With backend mpi, the group communicates over MPI if MLX could initialize MPI; if not,
    `note` is called with a message and the ring is used.
    """
    if world.size == 1:
        return None
    group = _over_mpi(world, note) or _joined()
    if group is None:
        with ExitStack() as ports:
            ring = _hostfile_ring(world) or _free_ring(world, ports)
            _test_connections(world, ring)
            group = _connect(world, ring)
    if (group.rank(), group.size()) != (world.rank, world.size):
        raise WorldError(
            f"this process is rank {group.rank()} of {group.size()} in MLX's ring, but rank {world.rank} of"
            f" {world.size} in its world",
            code="world.mlx-ring-stale",
            fix="start a new process, because MLX has one ring per process",
        )
    return group


def parse_hosts(text: str, world_size: int) -> Ring:
    """Parse the JSON of MLX_HOSTFILE: by rank, an "address:port" or a list of them."""
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, list | str) for host in hosts):
        raise WorldError(
            "the hostfile must contain a JSON list of hosts",
            code="env.mlx-hostfile-syntax",
            fix='write [["10.0.0.1:5000"], ["10.0.0.2:5000"]], by rank',
        )
    endpoints_of = []
    for host in hosts:
        addresses = [host] if isinstance(host, str) else host
        endpoints_of.append(tuple(map(_parse, addresses)))
    ring = tuple(endpoints_of)
    if len(ring) != world_size:
        raise WorldError(
            f"the hostfile must list one host for each of {world_size} ranks, got {len(ring)}",
            code="env.mlx-hostfile-size",
            fix="list one host per rank",
        )
    if len({len(endpoints) for endpoints in ring}) > 1 or not ring[0]:
        raise WorldError(
            "the hostfile must list the same number of addresses, at least 1, for every rank",
            code="env.mlx-hostfile-unequal",
            fix="list one address per rank",
        )
    return ring


def _parse(text: object) -> Endpoint:
    host, colon, port = str(text).partition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise WorldError(
            f"hostfile entries must be ADDRESS:PORT, got {text!r}",
            code="env.mlx-hostfile-address",
            fix="write 10.0.0.1:5000",
        )
    return Endpoint(host, int(port))


def _over_mpi(world: World, note: Callable[[str], None]) -> mx.distributed.Group | None:
    """Return MLX's group over MPI if every rank has it, else None; communicates over the world."""
    if world.backend != "mpi":
        return None
    group = mpi_group()
    fits = group is not None and (group.rank(), group.size()) == (world.rank, world.size)
    if all(world.gather(fits)):
        return group
    note(
        "gradients are reduced over MLX's ring, not over MPI: MLX must initialize Open MPI before the world starts, as"
        " `shardwise train` under mpirun does"
    )
    return None


def _joined() -> mx.distributed.Group | None:
    """Return the ring that this process has joined before, else None; without its variables MLX creates no ring."""
    with _ring_variables({}):
        try:
            return mx.distributed.init(strict=True, backend="ring")
        except RuntimeError:
            return None


def _hostfile_ring(world: World) -> Ring | None:
    """Return the ring of MLX_HOSTFILE, None if it is not set; communicates over the world."""

    def read() -> Ring | None:
        given = variables("MLX_")
        rank, path = given.get("MLX_RANK", str(world.rank)), given.get("MLX_HOSTFILE")
        if rank != str(world.rank):
            raise WorldError(
                f"MLX_RANK={rank} does not match the launcher's rank {world.rank}",
                code="env.mlx-rank-mismatch",
                fix="unset MLX_RANK, because the launcher sets the rank",
            )
        if path is None:
            return None
        try:
            return parse_hosts(Path(path).read_text(), world.size)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or "not a text file"
            raise WorldError(
                f"MLX_HOSTFILE {path} cannot be read on rank {world.rank}: {reason}",
                code="env.mlx-hostfile-read-failed",
                fix=_HOSTFILE_FIX,
            ) from error
        except WorldError as error:
            raise WorldError(f"MLX_HOSTFILE {path}: {error.fact}", code=error.code, fix=error.fix) from error

    rings = _on_all(world, read)
    different = next((rank for rank, ring in enumerate(rings) if ring != rings[0]), None)
    if different is not None:
        raise WorldError(
            f"MLX_HOSTFILE differs between rank {different} and rank 0",
            code="env.mlx-hostfiles-differ",
            fix=_HOSTFILE_FIX,
        )
    return rings[0]


_HOSTFILE_FIX = "set MLX_HOSTFILE to the same file on every rank, or unset it to use addresses that shardwise finds"


def _free_ring(world: World, ports: ExitStack) -> Ring:
    """Reserve a free port on every rank, until `ports` closes; communicates over the world."""
    own_address = _LOOPBACK
    if world.num_nodes > 1:
        # Other nodes use the address of their route to the store on node 0, node 0 that of its route to one of them.
        others = _on_all(world, lambda: _address_towards(_store_host(world)) if world.node else None)
        first = next(address for address in others if address is not None)
        own_address = _on_all(world, lambda: others[world.rank] or _address_towards(first))[world.rank]

    def reserve() -> Endpoint:
        reserved = ports.enter_context(_bound(Endpoint(own_address, 0), world.rank))
        return Endpoint(own_address, reserved.getsockname()[1])

    return tuple((endpoint,) for endpoint in _on_all(world, reserve))


def _store_host(world: World) -> str:
    """Return the host of the world's store; this host's name for a store without one, such as a file."""
    return str(getattr(innermost_store(world.store), "host", "") or socket.gethostname())


def _address_towards(host: str) -> str:
    """Return this machine's source address for packets to `host`; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # any port: connecting a UDP socket sends nothing
        except OSError as error:
            raise WorldError(
                f"{socket.gethostname()} has no IPv4 route to {host} ({error.strerror}), which MLX's ring needs",
                code="world.mlx-no-route",
                fix="set MLX_HOSTFILE to a file with one address per rank",
            ) from error
        return str(probe.getsockname()[0])


def _test_connections(world: World, ring: Ring) -> None:
    """Connect every rank to the next with plain sockets; raise on all ranks if one fails. Communicates over the world.

    MLX itself would report neither rank nor address, and the rank before the failed connection would hang.
    """
    with ExitStack() as listening:

        def listen() -> None:
            for endpoint in ring[world.rank]:
                listening.enter_context(_bound(endpoint, world.rank)).listen()

        def reach() -> None:
            following = (world.rank + 1) % world.size
            for endpoint in ring[following]:
                try:
                    socket.create_connection((endpoint.host, endpoint.port), timeout=_REACH_S).close()
                except OSError as error:
                    reason = error.strerror or f"no response within {_REACH_S:g} s"
                    raise WorldError(
                        f"rank {world.rank} on {world.host} cannot reach rank {following} at {endpoint} for MLX's"
                        f" ring: {reason}",
                        code="world.mlx-peer-unreachable",
                        fix="allow this connection between the hosts, or set other addresses in MLX_HOSTFILE",
                    ) from error

        _on_all(world, listen)
        _on_all(world, reach)
    world.barrier()  # all test sockets are closed before any rank connects to MLX's


def _connect(world: World, ring: Ring) -> mx.distributed.Group:
    """Join MLX's ring and return its group; communicates over the ring."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([[str(endpoint) for endpoint in endpoints] for endpoints in ring]))
        if world.rank == world.size - 1:
            time.sleep(_HEAD_START_S)
        with _ring_variables({"MLX_RANK": str(world.rank), "MLX_HOSTFILE": str(hosts)}):
            try:
                return mx.distributed.init(strict=True, backend="ring")
            except RuntimeError as error:
                raise WorldError(
                    f"rank {world.rank} could not join MLX's ring: {str(error).splitlines()[0]}",
                    code="world.mlx-ring-failed",
                    fix="check the errors of the neighbouring ranks",
                ) from error


def _bound(endpoint: Endpoint, rank: int) -> socket.socket:
    """Return a socket bound to `endpoint`; MLX can bind the same port, other users' processes cannot."""
    bound = socket.socket()
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((endpoint.host, endpoint.port))
    except OSError as error:
        bound.close()
        raise WorldError(
            f"rank {rank} on {socket.gethostname()} cannot listen at {endpoint} for MLX's ring: {error.strerror}",
            code="world.mlx-listen-failed",
            fix="set an address of that host and a free port in MLX_HOSTFILE, or unset it",
        ) from error
    return bound


def _on_all(world: World, work: Callable[[], T]) -> Sequence[T]:
    """Return the results of `work` by rank; a WorldError of one rank is raised on all. Communicates over the world."""
    mine: T | WorldError
    try:
        mine = work()
    except WorldError as error:
        mine = error
    results = world.gather(mine)
    for result in results:
        if isinstance(result, WorldError):
            raise result
    return results


@contextlib.contextmanager
def _ring_variables(ring_variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables of MLX's ring and unset all others; MLX does not accept them as arguments."""
    before = variables("")
    others = {name: value for name, value in before.items() if name not in ("MLX_RANK", "MLX_HOSTFILE")}
    adopt({**others, **ring_variables})
    try:
        yield
    finally:
        adopt(before)


# MPI under MLX. MLX only uses an MPI that it initialized, so MLX initializes it, and mpi4py then uses it.


_ALL_THREADS = "3"
"""MPI_THREAD_MULTIPLE: MLX requests a single thread, and Open MPI lets this variable raise the level."""


@cache
def mpi_group() -> mx.distributed.Group | None:
    """Initialize MPI through MLX and return MLX's group of all ranks; call on every rank before the world starts.

    Returns None if MPI is already initialized, if MLX finds no Open MPI (it supports no other), or if mpirun started
    this rank alone. A process initializes MPI once: later calls return the first result.
    """
    mpi = _mpi4py()
    if mpi is not None and mpi.Is_initialized():
        return None
    before = variables("")
    adopt({"OMPI_MPI_THREAD_LEVEL": _ALL_THREADS, **_library(), **before})
    try:
        return mx.distributed.init(strict=True, backend="mpi")
    except RuntimeError:
        return None
    finally:
        adopt(before)


def _mpi4py() -> Any:
    """Return mpi4py's module MPI without initializing MPI; None if mpi4py or the MPI library is missing."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        return None
    return MPI


def _library() -> dict[str, str]:
    """Return the variable that makes MLX load mpi4py's MPI library; only Linux lists loaded libraries."""
    if not sys.platform.startswith("linux"):
        return {}
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in lines if "/libmpi.so" in line), None)
    return {} if path is None else {"MLX_MPI_LIBNAME": path}
