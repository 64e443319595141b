"""Timing repeated calls on the device's own clock, and collectives by their slowest rank."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardwise.measurement.comm.collectives import MAKERS, CollectiveSpec, prepare, wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shardwise.measurement.comm.collectives import Collective


_LEAST_SAMPLE_S = 1e-4
"""Shorter work is repeated within one sample: clocks and events cost about a microsecond."""
_FILLER = 8192
"""Width of the matrix product that keeps a GPU busy while the host queues what is timed: over a millisecond."""
_MOST_QUEUED = 50
"""Calls that the host can queue behind the filler."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one call, over repeats."""

    median_s: float
    min_s: float
    p99_s: float
    spread: float
    """Half the distance of the quartiles, as a fraction of the median."""
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Sum up samples, at least one."""
        ordered = sorted(samples)
        low, middle, high = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else ordered * 3
        return cls(
            median_s=middle,
            min_s=ordered[0],
            p99_s=ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            spread=(high - low) / 2 / middle if middle else 0.0,
            repeats=len(ordered),
        )


def wait_for(device: torch.device) -> None:
    """Return when `device` has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], object], device: torch.device, *, budget_s: float = 0.1, most: int = 30) -> Timing:
    """Time `call` within about `budget_s` seconds: on a GPU its kernels back to back, elsewhere by the host's clock."""
    call()
    wait_for(device)
    began = time.perf_counter()
    call()
    wait_for(device)
    once_s = max(time.perf_counter() - began, 1e-7)
    inner = max(1, min(_MOST_QUEUED, round(_LEAST_SAMPLE_S / once_s)))
    repeats = max(3, min(most, round(budget_s / (inner * once_s))))
    measure = _on_gpu if device.type == "cuda" else _on_host
    return Timing.of([seconds / inner for seconds in measure(call, device, inner, repeats)])


def _on_host(call: Callable[[], object], _: torch.device, inner: int, repeats: int) -> list[float]:
    samples = []
    for _number in range(repeats):
        began = time.perf_counter()
        for _again in range(inner):
            call()
        samples.append(time.perf_counter() - began)
    return samples


def _on_gpu(call: Callable[[], object], device: torch.device, inner: int, repeats: int) -> list[float]:
    filler = torch.ones(_FILLER, _FILLER, dtype=torch.float16, device=device)
    pairs = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        filler @ filler  # so that the host is ahead and no kernel waits to be launched
        first.record()
        for _ in range(inner):
            call()
        last.record()
        pairs.append((first, last))
        torch.cuda.synchronize(device)
    return [first.elapsed_time(last) / 1e3 for first, last in pairs]


# Timed collectives: how long the slowest rank takes, in blocks of calls between barriers.


COLLECTIVES = tuple(MAKERS)
"""All that can be timed: what `bench comm` shows, and `send`, of which half a round trip counts."""
_LEAST_BLOCK_S = 4e-3
"""Calls are timed in blocks of at least this long: ranks leave a barrier up to 0.1 ms apart, which must not show."""
_FEW, _FEW_S = 4, 0.1
"""And of this many calls, if they take no longer than that: a rank that is done early begins the next call early, so
that calls in a row take less than single ones do."""
_QUICK_S = 5e-3
"""A first call shorter than this is tried again, since one call may have met anything."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """One collective on one group: what the slowest rank took."""

    name: str
    num_bytes: int
    """Of the whole tensor: what is gathered, what is scattered, one rank's input of all_to_all; 0 for barrier."""
    dtype: str
    ranks: int
    timing: Timing


def measure_collective(
    name: str,
    num_bytes: int,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    budget_s: float = 0.1,
    most: int = 30,
) -> CollectiveTiming:
    """Communicate over `group`, called on all its ranks, to time a collective in about `budget_s` seconds.

    `send` goes from the group's first rank to its second and back, and half of that is its time. Sizes are rounded
    down to whole elements on every rank, but never to none.
    """
    collective = prepare(CollectiveSpec(name=name, num_bytes=num_bytes, dtype=dtype), group, device)
    return CollectiveTiming(
        name=name,
        num_bytes=collective.size_bytes,
        dtype=str(dtype).removeprefix("torch."),
        ranks=collective.ranks,
        timing=time_collective(collective, group, budget_s=budget_s, most=most),
    )


def time_collective(collective: Collective, together: dist.ProcessGroup, *, budget_s: float, most: int = 30) -> Timing:
    """Communicate over `together`, called on all its ranks, to time a collective on each of their groups at once.

    A sample is the mean call of a block on the slowest rank of all; there are at least three.
    """
    device, call = collective.device, collective.call
    call()
    once_s = slowest([time_block(call, 1, device)], together, device)[0]
    if once_s < _QUICK_S:
        once_s = statistics.median(slowest([time_block(call, 1, device) for _ in range(3)], together, device))
    inner = calls_in_block(once_s)
    repeats = max(3, min(most, round(budget_s / (inner * once_s))))
    blocks = []
    for _ in range(repeats):
        wait_for_all(together, device)
        blocks.append(time_block(call, inner, device) / inner)
    share = 0.5 if collective.spec.name == "send" else 1.0
    return Timing.of([share * seconds for seconds in slowest(blocks, together, device)])


def calls_in_block(once_s: float) -> int:
    """Return how many calls of so many seconds make a block."""
    return max(min(1000, round(_LEAST_BLOCK_S / once_s)), _FEW if _FEW * once_s <= _FEW_S else 1)


def time_block(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of so many calls, from an idle device to an idle device."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait_for(device)
    return time.perf_counter() - began


def slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Communicate over `group`, called on all its ranks: return the largest value of each place among them."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    found: list[float] = largest.tolist()
    return found
