"""The ring in which MLX sums gradients: addresses found, tried out and told to it, so that any launcher will do."""

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
"""How long a neighbour may take to answer; MLX itself would try for half a minute and then name a number."""
_HEAD_START_S = 0.1
"""The last rank connects before it listens. Where it comes before rank 0 listens, MLX waits for a whole second."""


@dataclass(frozen=True)
class Endpoint:
    """Where one connection of a rank is taken."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Ring = tuple[tuple[Endpoint, ...], ...]
"""By rank, where it takes the connections of the rank before it: one, or several at once."""


def join_group(world: World, *, note: Callable[[str], None] = lambda _: None) -> mx.distributed.Group | None:
    """Communicate over the world to join MLX's group of all its ranks, called on every rank; None for one process.

    The hosts of MLX_HOSTFILE are taken where it is set; else each rank takes a free port at the address by which the
    others reach it. A host that cannot be reached is refused on every rank within seconds. MLX keeps one ring for as
    long as a process lives: joining again gives the same one. In a world of backend mpi it is MLX's group over MPI,
    where MLX was let to start that; `note` is told where it was not.
    """
    if world.size == 1:
        return None
    group = _over_mpi(world, note) or _joined()
    if group is None:
        with ExitStack() as held:
            ring = _given_ring(world) or _found_ring(world, held)
            _try_out(world, ring)
            group = _connect(world, ring)
    if (group.rank(), group.size()) != (world.rank, world.size):
        raise WorldError(
            f"this process is rank {group.rank()} of {group.size()} in a ring of MLX, and rank {world.rank} of"
            f" {world.size} in its world",
            code="world.mlx-ring-stale",
            fix="start a fresh process: MLX keeps a ring for as long as one lives",
        )
    return group


def parse_hosts(text: str, world_size: int) -> Ring:
    """Read the ring from JSON as MLX takes it: by rank a list of "address:port"; anything else is refused."""
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, list | str) for host in hosts):
        raise WorldError(
            "is no JSON list of hosts",
            code="env.mlx-hostfile-syntax",
            fix='write [["10.0.0.1:5000"], ["10.0.0.2:5000"]], by rank',
        )
    ring = tuple(tuple(map(_parse, [host] if isinstance(host, str) else host)) for host in hosts)
    if len(ring) != world_size:
        raise WorldError(
            f"names {len(ring)} hosts for {world_size} ranks",
            code="env.mlx-hostfile-size",
            fix="name one for each rank",
        )
    if len({len(endpoints) for endpoints in ring}) > 1 or not ring[0]:
        raise WorldError(
            "gives ranks different numbers of addresses",
            code="env.mlx-hostfile-unequal",
            fix="give each rank as many as the others",
        )
    return ring


def _parse(text: object) -> Endpoint:
    host, colon, port = str(text).partition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise WorldError(
            f"has {text!r}, which is no address and port",
            code="env.mlx-hostfile-address",
            fix="write it as 10.0.0.1:5000",
        )
    return Endpoint(host, int(port))


def _over_mpi(world: World, note: Callable[[str], None]) -> mx.distributed.Group | None:
    """Return MLX's group over MPI where every rank has it; communicates over the world."""
    if world.backend != "mpi":
        return None
    group = mpi_group()
    fits = group is not None and (group.rank(), group.size()) == (world.rank, world.size)
    if all(world.gather(fits)):
        return group
    note(
        "gradients go over MLX's ring, not over MPI: MLX starts Open MPI by itself, before a world does, as shardwise"
        " train under mpirun lets it"
    )
    return None


def _joined() -> mx.distributed.Group | None:
    """Return the ring that this process is in already; without variables MLX begins none."""
    with _told({}):
        try:
            return mx.distributed.init(strict=True, backend="ring")
        except RuntimeError:
            return None


def _given_ring(world: World) -> Ring | None:
    """Return the ring that the user wrote down; communicates over the world."""

    def read() -> Ring | None:
        given = variables("MLX_")
        rank, path = given.get("MLX_RANK", str(world.rank)), given.get("MLX_HOSTFILE")
        if rank != str(world.rank):
            raise WorldError(
                f"MLX_RANK={rank} on rank {world.rank}",
                code="env.mlx-rank-mismatch",
                fix="unset MLX_RANK: the launcher says it",
            )
        if path is None:
            return None
        try:
            return parse_hosts(Path(path).read_text(), world.size)
        except (OSError, UnicodeError) as error:
            words = getattr(error, "strerror", None) or "no text"
            raise WorldError(
                f"MLX_HOSTFILE {path} cannot be read on rank {world.rank}: {words}",
                code="env.mlx-hostfile-read-failed",
                fix=_OWN,
            ) from error
        except WorldError as error:
            raise WorldError(f"MLX_HOSTFILE {path} {error.fact}", code=error.code, fix=error.fix) from error

    rings = _on_all(world, read)
    different = next((rank for rank, ring in enumerate(rings) if ring != rings[0]), None)
    if different is not None:
        raise WorldError(
            f"MLX_HOSTFILE says another ring on rank {different} than on rank 0",
            code="env.mlx-hostfiles-differ",
            fix=_OWN,
        )
    return rings[0]


_OWN = "give every rank the same file, or unset MLX_HOSTFILE: addresses are found without it"


def _found_ring(world: World, held: ExitStack) -> Ring:
    """Take a free port on every rank; communicates over the world. Ports stay taken until `held` ends."""
    reached = _LOOPBACK
    if world.num_nodes > 1:
        # Node 0 is where the ranks met; its own address is the one by which it reaches the others.
        others = _on_all(world, lambda: _address_towards(_store_host(world)) if world.node else None)
        first = next(address for address in others if address is not None)
        reached = _on_all(world, lambda: others[world.rank] or _address_towards(first))[world.rank]

    def take() -> Endpoint:
        reserved = held.enter_context(_bound(Endpoint(reached, 0), world.rank))
        return Endpoint(reached, reserved.getsockname()[1])

    return tuple((endpoint,) for endpoint in _on_all(world, take))


def _store_host(world: World) -> str:
    """Return the host of the store that the ranks met in; a file has none, and then it is this host's own name."""
    return str(getattr(innermost_store(world.store), "host", "") or socket.gethostname())


def _address_towards(host: str) -> str:
    """Return the address of this machine from which it would talk to `host`; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect((host, 9))  # any port: nothing is sent
        except OSError as error:
            raise WorldError(
                f"{socket.gethostname()} has no IPv4 way to {host} ({error.strerror}), and MLX's ring takes no other",
                code="world.mlx-no-route",
                fix="name addresses in MLX_HOSTFILE",
            ) from error
        return str(asking.getsockname()[0])


def _try_out(world: World, ring: Ring) -> None:
    """Have every rank reach the next one by plain sockets, else refuse on all; communicates over the world.

    MLX would name neither rank nor address, and the rank before the broken place would wait in it for ever.
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
                    words = error.strerror or f"no answer in {_REACH_S:g} s"
                    raise WorldError(
                        f"rank {world.rank} on {world.host} cannot reach rank {following} at {endpoint} for MLX's"
                        f" ring: {words}",
                        code="world.mlx-peer-unreachable",
                        fix="open this way between the hosts, or name other addresses in MLX_HOSTFILE",
                    ) from error

        _on_all(world, listen)
        _on_all(world, reach)
    world.barrier()  # who connects to MLX must not find one of these listening


def _connect(world: World, ring: Ring) -> mx.distributed.Group:
    """Let MLX join its ring; communicates over it."""
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        hosts = Path(folder, "hosts.json")
        hosts.write_text(json.dumps([[str(endpoint) for endpoint in endpoints] for endpoints in ring]))
        if world.rank == world.size - 1:
            time.sleep(_HEAD_START_S)
        with _told({"MLX_RANK": str(world.rank), "MLX_HOSTFILE": str(hosts)}):
            try:
                return mx.distributed.init(strict=True, backend="ring")
            except RuntimeError as error:
                raise WorldError(
                    f"rank {world.rank} could not join MLX's ring: {str(error).splitlines()[0]}",
                    code="world.mlx-ring-failed",
                    fix="see what the ranks beside it say",
                ) from error


def _bound(endpoint: Endpoint, rank: int) -> socket.socket:
    """Return a socket at `endpoint`; MLX's own can be bound there as well, and nobody else's."""
    taken = socket.socket()
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind((endpoint.host, endpoint.port))
    except OSError as error:
        taken.close()
        raise WorldError(
            f"rank {rank} on {socket.gethostname()} cannot listen at {endpoint} for MLX's ring: {error.strerror}",
            code="world.mlx-listen-failed",
            fix="name an address of that host and a free port in MLX_HOSTFILE, or unset it",
        ) from error
    return taken


def _on_all(world: World, work: Callable[[], T]) -> Sequence[T]:
    """Return what each rank's work gave; what one of them could not do is refused on all. Communicates."""
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
def _told(variables_of_ring: Mapping[str, str]) -> Iterator[None]:
    """Let MLX, which reads the environment alone, find these variables of a ring and no others."""
    before = variables("")
    others = {name: value for name, value in before.items() if name not in ("MLX_RANK", "MLX_HOSTFILE")}
    adopt({**others, **variables_of_ring})
    try:
        yield
    finally:
        adopt(before)


# MPI under MLX, which insists on starting it: so it comes first, and mpi4py finds it started.


_ALL_THREADS = "3"
"""MPI_THREAD_MULTIPLE: MLX asks for one thread, and Open MPI lets this variable ask for more."""


@cache
def mpi_group() -> mx.distributed.Group | None:
    """Start MPI through MLX, on every rank and before the world, and return MLX's group of all ranks.

    None where MPI was started by another, where MLX finds no Open MPI (it knows no other), or where mpirun started
    none but this rank. There is one MPI in a process: later calls return what the first did.
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
    """Return mpi4py's module MPI with MPI not started by it; None without mpi4py or a library."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError):
        return None
    return MPI


def _library() -> dict[str, str]:
    """Name the library that mpi4py has loaded, so that there are not two; Linux tells, elsewhere MLX looks itself."""
    if not sys.platform.startswith("linux"):
        return {}
    lines = Path("/proc/self/maps").read_text().splitlines()
    path = next((line.split()[-1] for line in lines if "/libmpi.so" in line), None)
    return {} if path is None else {"MLX_MPI_LIBNAME": path}
