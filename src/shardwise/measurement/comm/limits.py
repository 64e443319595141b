"""Limits of a sweep: the bandwidth of the links, and the memory of its buffers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING

import msgspec

from shardwise.engines.backends import backend_row
from shardwise.environment import identify
from shardwise.errors import HardwareError, InputError
from shardwise.hardware.cluster import this_machine
from shardwise.hardware.probe import available_memory
from shardwise.measurement.comm.spec import buffer_bytes
from shardwise.units import write_size

if TYPE_CHECKING:
    from shardwise.dist import World
    from shardwise.measurement.comm.spec import SweepSettings


STREAMED = 32 << 20
"""Bytes that every rank sends to the next in one trial."""
TRIALS = 5
_CHUNK = 1 << 20
_CONNECT_TIMEOUT_S = 10.0
"""Timeout of a connection; it is short, since a firewall may block ports other than those of gloo."""


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The expected maximum bandwidth of one rank's link, in bytes per second in one direction."""

    link: str
    shared: float
    """Bandwidth while all ranks send at the same time, as in all_reduce."""
    alone: float
    """Bandwidth while a single rank sends, as in broadcast."""
    source: str = msgspec.field(name="words")
    """How the bandwidth was obtained; the JSON key is `words`."""
    is_measured: bool


def find_ceiling(world: World, ranks: tuple[int, ...]) -> Ceiling | None:
    """Return the bandwidth ceiling of a group, or None if unknown. Communicates over the world; call on every rank.

    The ceiling is unknown for a group of one rank and for MPI. For NCCL it is the bandwidth of the GPU links in the
    catalogue; for other backends it is measured: every rank of the world streams to the next by TCP.
    """
    if len(ranks) == 1 or backend_row(world.backend).chooses_transport:
        return None  # MPI chooses shared memory or a fast fabric, for which plain TCP is not the ceiling
    if world.backend == "nccl":
        return _listed(world, ranks)
    rates = tcp_rates(world)
    if rates is None:
        return None
    shared, alone = rates
    source = f"measured in this run: {shared / 1e9:.2f} GB/s per rank while all send, {alone / 1e9:.2f} GB/s alone"
    return Ceiling(link="plain TCP", shared=shared, alone=alone, source=source, is_measured=True)


def _listed(world: World, ranks: tuple[int, ...]) -> Ceiling | None:
    try:
        node = this_machine().node
    except HardwareError:
        return None
    inside = all(rank // world.local_size == ranks[0] // world.local_size for rank in ranks)
    link = node.inside if inside else node.outside
    source = f"catalogue: reachable by collectives out of {link.bandwidth / 1e9:.0f} GB/s nominal"
    return Ceiling(link=link.name, shared=link.reached, alone=link.reached, source=source, is_measured=False)


def higher(one: Ceiling | None, other: Ceiling | None) -> Ceiling | None:
    """Return the ceiling with the higher bandwidth; None if both are None."""
    found = [ceiling for ceiling in (one, other) if ceiling is not None]
    return max(found, key=lambda ceiling: ceiling.shared, default=None)


def tcp_rates(world: World) -> tuple[float, float] | None:
    """Measure TCP bandwidth between neighbouring ranks. Communicates over the world; call on every rank.

    Return bytes per second of the slowest rank while each rank streams to the next, and of rank 0 while only rank 0
    sends; the best of a few trials. Return None if a connection fails.
    """
    with contextlib.ExitStack() as ends:
        pair = _neighbours(world, ends)
        if not all(world.gather(pair is not None)) or pair is None:
            return None
        shared = [_stream(world, *pair, senders=range(world.size)) for _ in range(TRIALS)]
        alone = [_stream(world, *pair, senders=range(1)) for _ in range(TRIALS)]
        found = world.gather((shared, alone))
    shared_s = _best_trial([rank_shared for rank_shared, _ in found])
    alone_s = _best_trial([rank_alone for _, rank_alone in found])
    return STREAMED / shared_s, STREAMED / min(shared_s, alone_s)  # a single stream is at least as fast


def _best_trial(seconds: list[list[float]]) -> float:
    """Return the seconds of the slowest rank in the fastest trial; `seconds` is indexed by rank, then by trial."""
    slowest: list[float] = [max(trial) for trial in zip(*seconds, strict=True)]
    return min(slowest)


def _neighbours(world: World, ends: contextlib.ExitStack) -> tuple[socket.socket, socket.socket] | None:
    """Return sockets to the next and from the previous rank, or None on failure; communicates over the world."""
    address = _own_address(world)
    listener = ends.enter_context(socket.create_server((address, 0)))
    listener.settimeout(_CONNECT_TIMEOUT_S)
    addresses = world.gather((address, listener.getsockname()[1]))
    try:
        to_next = socket.create_connection(addresses[(world.rank + 1) % world.size], timeout=_CONNECT_TIMEOUT_S)
        ends.enter_context(to_next)
        from_previous, _ = listener.accept()
    except OSError:
        return None  # not an exception, since the other ranks wait for this result
    return to_next, ends.enter_context(from_previous)


def _stream(world: World, to_next: socket.socket, from_previous: socket.socket, *, senders: range) -> float:
    """Return the seconds in which this rank receives its stream from `senders`; communicates over the world."""
    buffer = bytearray(_CHUNK)
    left = STREAMED if (world.rank - 1) % world.size in senders else 0
    sender = threading.Thread(target=to_next.sendall, args=(bytes(STREAMED),))
    world.barrier()
    began = time.perf_counter()
    if world.rank in senders:
        sender.start()
    while left:
        left -= from_previous.recv_into(buffer, min(left, _CHUNK)) or left  # 0 bytes: the sender has closed
    seconds = time.perf_counter() - began
    if world.rank in senders:
        sender.join()
    return seconds


def _own_address(world: World) -> str:
    """Return the address at which other ranks reach this one: that of the interface that routes to rank 0."""
    first = identify().master_addr
    if world.num_nodes == 1 or not first:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, 9))  # sends nothing: for UDP this only chooses the route
        return str(probe.getsockname()[0])


# The memory of a sweep, which is checked before anything is allocated.


_STAGED = 2
"""Copies of GPU tensors that gloo makes in host memory: one for sending and one for receiving."""


def needed_bytes(spec: SweepSettings, ranks: int) -> int:
    """Return the maximum bytes that one rank of a group of `ranks` allocates at the same time."""
    return max(buffer_bytes(name, spec.sizes[-1], ranks) for name in spec.collectives)


def check_memory(spec: SweepSettings, *, ranks: int, sharing: int, free: int, where: str) -> None:
    """Raise InputError if `sharing` ranks, in groups of `ranks`, need more than `free` bytes of memory."""
    need = needed_bytes(spec, ranks) * sharing
    if need <= free:
        return
    fits = [size for size in spec.sizes if size * need // spec.sizes[-1] <= free]
    raise InputError(
        f"size {write_size(spec.sizes[-1])} needs {need / 2**30:.1f} GiB for {sharing} ranks, but {where} has only"
        f" {free / 2**30:.1f} GiB free",
        code="bench.not-enough-memory",
        fix=f"use --sizes up to {write_size(fits[-1])}" if fits else "use smaller --sizes",
    )


def require_memory(spec: SweepSettings, world: World, kinds: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """Raise InputError if the sizes do not fit into host or GPU memory of this rank; does not communicate."""
    ranks = min(len(groups[0]) for groups in kinds.values())
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        import torch

        sharing = -(-world.local_size // torch.cuda.device_count())
        free = torch.cuda.mem_get_info(world.device)[0]
        check_memory(spec, ranks=ranks, sharing=sharing, free=free, where=str(world.device))
    if not on_gpu or world.backend == "gloo":
        free = available_memory() // (_STAGED if on_gpu else 1)
        check_memory(spec, ranks=ranks, sharing=world.local_size, free=free, where=f"host {world.host}")
