"""Latency, bandwidth and correctness of messages between every pair of ranks."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.dist import world as open_world
from shardwise.dist.world import running_group
from shardwise.errors import InputError
from shardwise.hardware.probe import available_memory
from shardwise.measurement.comm.collectives import WAYS
from shardwise.measurement.p2p_verdict import find_slow
from shardwise.measurement.report import rank_device
from shardwise.measurement.timing import Timing, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from shardwise.dist import World
    from shardwise.measurement.comm.collectives import Way

WINDOW = 4
"""Large messages that are sent before the target replies, so that several can be in flight."""
_LEAST_BLOCK_S = 2e-5
"""Minimum duration of a timed block; reading the clock costs a hundredth of it. Blocks are short, because on a busy
machine only a short block runs undisturbed."""
_MOST_TURNS = 100
_LEAST_BLOCKS, _MOST_BLOCKS = 3, 500
_MOST_REPEATS = 2
"""Maximum number of repeated measurements of slow pairs; they stop once the same pairs are slow again."""
_MOST_S, _LEAST_S = 0.1, 0.002
"""Maximum and minimum seconds of one measurement of one pair."""


@dataclass(frozen=True, kw_only=True)
class PairSettings:
    """Settings of the measurement of all pairs of ranks."""

    ways: tuple[str, ...] = tuple(WAYS)
    small_bytes: int = 8
    """Size of the message for the latency."""
    large_bytes: int | None = None
    """Size of each message for the bandwidth; None: 1 MiB between CPUs, 16 MiB between GPUs."""
    together: bool = False
    """Whether disjoint pairs are measured at the same time, which shows contention between them."""
    budget_s: float = 20.0
    """Approximate duration; every measurement has at least three repeats."""
    device: str | None = None
    backend: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Host, node and device of a rank."""

    host: str
    node: int
    device: str


@dataclass(frozen=True, kw_only=True)
class PairTiming:
    """Latency and bandwidth of messages from one rank to another."""

    way: str
    source: int
    target: int
    latency: Timing
    """Half a round trip that the source starts."""
    transfer: Timing
    """A window of large messages in one direction, and one byte back."""
    bytes_per_s: float
    """Bandwidth of the fastest transfer, since disturbance only adds time."""
    wrong: int = 0
    """Number of received bytes that differ from the sent bytes."""


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Timings of all ordered pairs of ranks, with every point-to-point method."""

    places: tuple[RankPlace, ...]
    """By rank."""
    backend: str
    spec: PairSettings
    timings: tuple[PairTiming, ...]

    @property
    def latencies(self) -> dict[tuple[int, int], float]:
        """(source, target) -> seconds of a small message with the fastest method."""
        return {pair: min(cell.latency.min_s for cell in cells) for pair, cells in self._links().items()}

    @property
    def rates(self) -> dict[tuple[int, int], float]:
        """(source, target) -> bytes per second of large messages with the fastest method."""
        return {pair: max(cell.bytes_per_s for cell in cells) for pair, cells in self._links().items()}

    def _links(self) -> dict[tuple[int, int], list[PairTiming]]:
        links: dict[tuple[int, int], list[PairTiming]] = {}
        for cell in self.timings:
            links.setdefault((cell.source, cell.target), []).append(cell)
        return links


def measure_pairs(spec: PairSettings) -> Pairs:
    """Open a world and return the timings of all pairs. Communicates over the world; call on every rank."""
    with open_world(device=rank_device(spec.device, spec.backend), backend=spec.backend) as world:
        return measure_world(world, spec)


def measure_world(world: World, spec: PairSettings) -> Pairs:
    """Measure all pairs, then measure slow pairs again. Communicates over the world; call on every rank.

    The faster measurement of a pair counts, so that a disturbed measurement is not reported as a slow link.
    """
    if world.size < 2:
        raise InputError(
            "bench p2p needs at least 2 ranks, got 1",
            code="bench.too-few-ranks",
            fix="pass --nproc 2, or start 2 ranks with torchrun",
        )
    if spec.large_bytes is None:
        spec = replace(spec, large_bytes=(16 if world.device.type == "cuda" else 1) << 20)
    bench = _PairBench.of(world, spec)
    places = tuple(world.gather(RankPlace(host=world.host, node=world.node, device=str(world.device))))
    rounds = tournament(world.size) if spec.together else [[pair] for pair in every_pair(world.size)]
    pairs = Pairs(places=places, backend=world.backend, spec=spec, timings=_measure(bench, rounds, spec.ways))
    suspects: set[tuple[int, int]] = set()
    for _ in range(_MOST_REPEATS):
        before, suspects = suspects, {pair for link in find_slow(pairs) for pair in link.pairs}
        if not suspects or suspects == before:
            break
        again = _measure(bench, [games for games in rounds if suspects & set(games)], spec.ways)
        pairs = replace(pairs, timings=tuple(_better(pairs.timings, again)))
    return pairs


def every_pair(size: int) -> list[tuple[int, int]]:
    """Return all ordered pairs of ranks."""
    return list(itertools.permutations(range(size), 2))


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Return rounds of disjoint pairs that contain every ordered pair once, as in a round-robin tournament."""
    seats: list[int | None] = [*range(size), *([None] if size % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        games = [(one, other) for one, other in facing if one is not None and other is not None]
        rounds += [games, [(other, one) for one, other in games]]
        seats = [seats[0], seats[-1], *seats[1:-1]]  # all but the first move by one seat
    return rounds


def _better(first: tuple[PairTiming, ...], again: tuple[PairTiming, ...]) -> list[PairTiming]:
    """Merge two measurements of each pair: the faster times, and the larger number of wrong bytes."""
    second = {(cell.way, cell.source, cell.target): cell for cell in again}
    found = []
    for cell in first:
        other = second.get((cell.way, cell.source, cell.target), cell)
        faster = max(cell, other, key=lambda it: it.bytes_per_s)
        found.append(
            replace(
                cell,
                latency=min(cell.latency, other.latency, key=lambda it: it.min_s),
                transfer=faster.transfer,
                bytes_per_s=faster.bytes_per_s,
                wrong=max(cell.wrong, other.wrong),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class _PairBench:
    """The state of a measurement on one rank; all pairs use the same tensors."""

    world: World
    group: dist.ProcessGroup
    budget_s: float
    """Seconds of one measurement of one pair."""
    small: Tensor
    """The sent and the received small message."""
    large: Tensor
    """The sent and the received large messages, a row for each message of the window."""

    @classmethod
    def of(cls, world: World, spec: PairSettings) -> _PairBench:
        """Check memory and allocate the messages. Communicates over the world; call on every rank."""
        large_bytes = spec.large_bytes or 1
        _check_memory(world, large_bytes)
        rounds = world.size * (world.size - 1) / (world.size // 2 if spec.together else 1)
        share = spec.budget_s / (2 * rounds * len(spec.ways))
        large = torch.empty(2, WINDOW, large_bytes, dtype=torch.uint8, device=world.device)
        large[0] = pattern(world.rank, large[0].numel(), world.device).view_as(large[0])
        small = torch.empty(2, spec.small_bytes, dtype=torch.uint8, device=world.device)
        small[0] = pattern(world.rank, spec.small_bytes, world.device)
        return cls(
            world=world,
            group=running_group(),
            budget_s=max(_LEAST_S, min(_MOST_S, share)),
            small=small,
            large=large,
        )

    def send_numbers(self, peer: int, *numbers: int) -> None:
        """Send two integers to a peer; communicates over the host group."""
        dist.send(torch.tensor([*numbers, 0, 0][:2]), peer, group=self.world.host_group)

    def receive_numbers(self, peer: int) -> tuple[int, int]:
        """Receive two integers from a peer; communicates over the host group."""
        received = torch.zeros(2, dtype=torch.int64)
        dist.recv(received, peer, group=self.world.host_group)
        return int(received[0]), int(received[1])


def pattern(rank: int, numel: int, device: torch.device) -> Tensor:
    """Return the bytes that a rank sends, which differ between ranks and between successive messages."""
    period = torch.arange(251, dtype=torch.uint8, device=device) + rank % 251  # a prime, so that rows differ
    return period.repeat(numel // 251 + 1)[:numel]


def _check_memory(world: World, large_bytes: int) -> None:
    """Raise InputError if the messages do not fit in memory. Communicates over the world; call on every rank."""
    on_gpu = world.device.type == "cuda"
    free = torch.cuda.mem_get_info(world.device)[0] if on_gpu else available_memory()
    free = min(world.gather(free // world.local_size))  # assumes that all ranks of a node share one memory
    # Sent and received messages, and twice that during the comparison.
    needed = 4 * WINDOW * large_bytes
    if free < needed:
        raise InputError(
            f"{WINDOW} messages of {large_bytes:,} bytes need {needed:,} bytes of memory on each rank,"
            f" but only {max(0, free):,} are free",
            code="bench.not-enough-memory",
            fix=f"use --size {max(1, (free // (8 * WINDOW)) >> 20)}MiB",
        )


def _measure(bench: _PairBench, rounds: list[list[tuple[int, int]]], ways: tuple[str, ...]) -> tuple[PairTiming, ...]:
    """Return the timings of all rounds, equal on all ranks. Communicates over the world; call on every rank."""
    sent: list[PairTiming] = []
    wrong: dict[tuple[str, int, int], int] = {}
    me = bench.world.rank
    for name in ways:
        way = WAYS[name].on(bench.world)
        for pairs in rounds:
            dist.barrier(group=bench.world.host_group)
            for source, target in pairs:
                if me == source:
                    sent.append(_lead(bench, way, name, target))
                elif me == target:
                    wrong[name, source, target] = _follow(bench, way, source)
    found = bench.world.gather((sent, wrong))
    arrived = {key: count for _, counts in found for key, count in counts.items()}
    cells = [cell for cells, _ in found for cell in cells]
    return tuple(
        replace(cell, wrong=cell.wrong + arrived[cell.way, cell.source, cell.target])
        for cell in sorted(cells, key=lambda it: (ways.index(it.way), it.source, it.target))
    )


def _lead(bench: _PairBench, way: Way, name: str, target: int) -> PairTiming:
    """Time small and large messages as the source of a pair; communicates with the target."""
    out, back = ([message] for message in bench.small)
    window, reply = list(bench.large[0]), [torch.zeros_like(out[0][:1])]

    def ping() -> None:
        way.push(out, target, bench.group)
        way.pull(back, target, bench.group)

    def stream() -> None:
        way.push(window, target, bench.group)
        way.pull(reply, target, bench.group)

    echo = _time_turns(bench, ping, target, clear=back[0])
    wrong = _differing(back[0], bench.world.rank)
    transfer = _time_turns(bench, stream, target, clear=reply[0])
    return PairTiming(
        way=name,
        source=bench.world.rank,
        target=target,
        latency=Timing.of([seconds / 2 for seconds in echo]),
        transfer=Timing.of(transfer),
        bytes_per_s=bench.large[0].numel() / min(transfer),
        wrong=wrong,
    )


def _follow(bench: _PairBench, way: Way, source: int) -> int:
    """Reply as the target of a pair and return the number of wrong bytes; communicates with the source."""
    echo, received = [bench.small[1]], list(bench.large[1])
    reply = [received[-1][-1:]]  # a received byte, so that the reply is sent after its arrival

    def ping() -> None:
        way.pull(echo, source, bench.group)
        way.push(echo, source, bench.group)

    def stream() -> None:
        way.pull(received, source, bench.group)
        way.push(reply, source, bench.group)

    _take_turns(bench, ping, source, clear=echo[0])
    _take_turns(bench, stream, source, clear=bench.large[1])
    return _differing(bench.large[1], source)


def _time_turns(bench: _PairBench, turn: Callable[[], None], target: int, *, clear: Tensor) -> list[float]:
    """Run blocks of turns and return the seconds per turn of each block; communicates with the target.

    The receive buffer is cleared before the last block, so that the comparison checks that block.
    """
    turn()
    once_s = max(_seconds(bench, turn, 1), 1e-7)
    inner = max(1, min(_MOST_TURNS, round(_LEAST_BLOCK_S / once_s)))
    blocks: list[float] = []
    began, is_last = time.perf_counter(), False
    while not is_last:
        spent_s = time.perf_counter() - began
        is_last = len(blocks) >= _LEAST_BLOCKS - 1 and (spent_s > bench.budget_s or len(blocks) == _MOST_BLOCKS - 1)
        bench.send_numbers(target, inner, is_last)
        if is_last:
            clear.zero_()
        bench.receive_numbers(target)
        blocks.append(_seconds(bench, turn, inner) / inner)
    return blocks


def _take_turns(bench: _PairBench, turn: Callable[[], None], source: int, *, clear: Tensor) -> None:
    """Run the number of turns that the source announces; communicates with the source."""
    turn()
    turn()
    is_last = 0
    while not is_last:
        inner, is_last = bench.receive_numbers(source)
        if is_last:
            clear.zero_()
        wait_for(bench.world.device)
        bench.send_numbers(source)
        for _ in range(inner):
            turn()
    wait_for(bench.world.device)


def _seconds(bench: _PairBench, turn: Callable[[], None], times: int) -> float:
    wait_for(bench.world.device)
    began = time.perf_counter()
    for _ in range(times):
        turn()
    wait_for(bench.world.device)
    return time.perf_counter() - began


def _differing(messages: Tensor, rank: int) -> int:
    return int((messages.flatten() != pattern(rank, messages.numel(), messages.device)).sum())
