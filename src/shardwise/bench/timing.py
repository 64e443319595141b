"""Timing a piece of work: repeated after a warm-up, on the device's own clock where it has one."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
