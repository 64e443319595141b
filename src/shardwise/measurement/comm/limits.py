"""Limits of a sweep: the bandwidth that links allow, and the memory that its buffers take."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
_PIECE = 1 << 20
_PATIENCE_S = 10.0
"""For a connection: a network that lets gloo through by one port only must not delay the rest."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The most that one rank's link can be expected to carry, in bytes per second of one direction."""

    link: str
    shared: float
    """While all ranks send at once, as in all_reduce."""
    alone: float
    """While one rank sends to one other: what a root may hope for."""
    words: str
    """Where the numbers are from."""
    is_measured: bool


def find_ceiling(world: World, ranks: tuple[int, ...]) -> Ceiling | None:
    """Communicate over the world, called on every rank: what a group of `ranks` can expect; None where nobody knows.

    Nothing travels in a group of one, and how MPI's messages travel is not known. The catalogue knows the links of
    GPUs that each have one rank; the others are measured: every rank of the world streams to the next by TCP.
    """
    if len(ranks) == 1 or backend_row(world.backend).chooses_transport:
        return None  # MPI takes what its library finds, memory or a fast fabric: plain TCP is not its ceiling
    if world.backend == "nccl":
        return _listed(world, ranks)
    rates = tcp_rates(world)
    if rates is None:
        return None
    shared, alone = rates
    words = f"measured in this run: {shared / 1e9:.2f} GB/s a rank while all send, {alone / 1e9:.2f} GB/s alone"
    return Ceiling(link="plain TCP", shared=shared, alone=alone, words=words, is_measured=True)


def _listed(world: World, ranks: tuple[int, ...]) -> Ceiling | None:
    try:
        node = this_machine().node
    except HardwareError:
        return None
    inside = all(rank // world.local_size == ranks[0] // world.local_size for rank in ranks)
    link = node.inside if inside else node.outside
    words = f"listed: what collectives reach of {link.bandwidth / 1e9:.0f} GB/s on the label"
    return Ceiling(link=link.name, shared=link.reached, alone=link.reached, words=words, is_measured=False)


def higher(one: Ceiling | None, other: Ceiling | None) -> Ceiling | None:
    """Return the better of two looks at the same links."""
    return max((found for found in (one, other) if found), key=lambda found: found.shared, default=None)


def tcp_rates(world: World) -> tuple[float, float] | None:
    """Communicate over the world and by sockets of its own, called on every rank of at least two.

    Return bytes per second of the slowest rank while each streams to the next, and of the first rank while it alone
    does; best of a few trials. None where some rank cannot be reached.
    """
    with contextlib.ExitStack() as ends:
        pair = _neighbours(world, ends)
        if not all(world.gather(pair is not None)) or pair is None:
            return None
        shared = [_stream(world, *pair, senders=range(world.size)) for _ in range(TRIALS)]
        alone = [_stream(world, *pair, senders=range(1)) for _ in range(TRIALS)]
        found = world.gather((shared, alone))
    slowest = [min(max(trial) for trial in zip(*trials, strict=True)) for trials in zip(*found, strict=True)]
    return STREAMED / slowest[0], STREAMED / min(slowest)  # alone a link carries at least as much


def _neighbours(world: World, ends: contextlib.ExitStack) -> tuple[socket.socket, socket.socket] | None:
    """Communicate over the world: return connections to the next rank and from the one before, None without them."""
    address = _own_address(world)
    listener = ends.enter_context(socket.create_server((address, 0)))
    listener.settimeout(_PATIENCE_S)
    places = world.gather((address, listener.getsockname()[1]))
    try:
        onward = socket.create_connection(places[(world.rank + 1) % world.size], timeout=_PATIENCE_S)
        ends.enter_context(onward)
        inward, _ = listener.accept()
    except OSError:
        return None  # the others must be notified
    return onward, ends.enter_context(inward)


def _stream(world: World, onward: socket.socket, inward: socket.socket, *, senders: range) -> float:
    """Communicate over the world: let some ranks send to the next; return the seconds until all has come here."""
    buffer, left = bytearray(_PIECE), STREAMED if (world.rank - 1) % world.size in senders else 0
    sender = threading.Thread(target=onward.sendall, args=(bytes(STREAMED),))
    world.barrier()
    began = time.perf_counter()
    if world.rank in senders:
        sender.start()
    while left:
        left -= inward.recv_into(buffer, min(left, _PIECE)) or left  # nothing: the other end is gone
    seconds = time.perf_counter() - began
    if world.rank in senders:
        sender.join()
    return seconds


def _own_address(world: World) -> str:
    """Return where other ranks reach this one: the address on the way to the first rank."""
    first = identify().master_addr
    if world.num_nodes == 1 or not first:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((first, 9))  # sends nothing: UDP only chooses the way
        return str(probe.getsockname()[0])


# Whether what a sweep allocates fits: refused before anything is, naming the size and what is free.


_STAGED = 2
"""What gloo holds in host memory of tensors on a GPU: a copy of what is sent and one of what is received."""


def needed_bytes(spec: SweepSettings, ranks: int) -> int:
    """Return the most that one rank allocates at once, in groups of so many."""
    return max(buffer_bytes(name, spec.sizes[-1], ranks) for name in spec.collectives)


def check_room(spec: SweepSettings, *, ranks: int, sharing: int, free: int, where: str) -> None:
    """Refuse sizes for which `sharing` ranks, in groups of `ranks`, need more than is free."""
    need = needed_bytes(spec, ranks) * sharing
    if need <= free:
        return
    fits = [size for size in spec.sizes if size * need // spec.sizes[-1] <= free]
    raise InputError(
        f"size {write_size(spec.sizes[-1])} needs {need / 2**30:.1f} GiB for {sharing} ranks, and {where} has"
        f" {free / 2**30:.1f} GiB free",
        code="bench.not-enough-memory",
        fix=f"use --sizes up to {write_size(fits[-1])}" if fits else "use smaller --sizes",
    )


def require_room(spec: SweepSettings, world: World, kinds: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    """Refuse what does not fit on this rank's host or GPU, before anything is allocated; does not communicate."""
    ranks = min(len(groups[0]) for groups in kinds.values())
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        import torch

        sharing = -(-world.local_size // torch.cuda.device_count())
        free = torch.cuda.mem_get_info(world.device)[0]
        check_room(spec, ranks=ranks, sharing=sharing, free=free, where=str(world.device))
    if not on_gpu or world.backend == "gloo":
        free = available_memory() // (_STAGED if on_gpu else 1)
        check_room(spec, ranks=ranks, sharing=world.local_size, free=free, where=f"host {world.host}")
