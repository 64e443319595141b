"""Times repeated calls on a device, and measures the rates of operators and collectives for calibration."""

from __future__ import annotations

import math
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise.hardware.calibration import AttentionPoint, Figure, MatmulPoint, measured
from shardwise.measurement.comm.collectives import MAKERS, CollectiveSpec, prepare, wait_for_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from shardwise.measurement.comm.collectives import Collective

_LEAST_SAMPLE_S = 1e-4
"""Shorter work is repeated within one sample, since clocks and events cost about a microsecond."""
_FILLER = 8192
"""Width of the matrix product, of over a millisecond, that keeps a GPU busy while the host queues the timed calls."""
_MOST_QUEUED = 50
"""Maximum number of calls that the host queues while the GPU computes the filler product."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Statistics of the seconds of one call over repeats."""

    median_s: float
    min_s: float
    p99_s: float
    spread: float
    """Half the interquartile range, as a fraction of the median."""
    repeats: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the statistics of at least one sample."""
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
    """Wait until `device` has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_calls(call: Callable[[], object], device: torch.device, *, budget_s: float = 0.1, most: int = 30) -> Timing:
    """Time `call` in about `budget_s` seconds: on a GPU its kernels back to back, on a CPU by the host's clock."""
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
        filler @ filler  # so that the host is ahead and no timed kernel waits for its launch
        first.record()
        for _ in range(inner):
            call()
        last.record()
        pairs.append((first, last))
        torch.cuda.synchronize(device)
    return [first.elapsed_time(last) / 1e3 for first, last in pairs]


# Timing of collectives on the slowest rank, in blocks of calls between barriers.


COLLECTIVES = tuple(MAKERS)
"""Names that can be timed: the collectives of `bench comm`, and `send`, whose time is half a round trip."""
_LEAST_BLOCK_S = 4e-3
"""Minimum duration of a block: ranks leave a barrier up to 0.1 ms apart, which must not affect the result."""
_FEW, _FEW_S = 4, 0.1
"""Minimum number of calls per block, and the seconds beyond which it does not apply: a rank that finishes early starts
the next call early, so successive calls take less time than single ones."""
_SHORT_S = 5e-3
"""A first call shorter than this is repeated, since a single call may have been disturbed."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTiming:
    """The time of one collective of one group on its slowest rank."""

    name: str
    num_bytes: int
    """Size of the whole tensor: the gathered or scattered tensor, one rank's input of all_to_all; 0 for barrier."""
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
    """Time a collective in about `budget_s` seconds. Communicates over `group`; call on all its ranks.

    The time of `send` is half a round trip between the first two ranks of the group. Sizes are rounded down to whole
    elements on every rank, at least 1.
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
    """Time a collective on several groups at the same time. Communicates over `together`; call on all its ranks.

    `together` contains all groups. A sample is the mean time of a call in a block on the slowest rank; there are at
    least three samples.
    """
    device, call = collective.device, collective.call
    call()
    once_s = slowest([time_block(call, 1, device)], together, device)[0]
    if once_s < _SHORT_S:
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
    """Return the number of calls per block if one call takes `once_s` seconds."""
    least = _FEW if _FEW * once_s <= _FEW_S else 1
    return max(least, min(1000, round(_LEAST_BLOCK_S / once_s)))


def time_block(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the seconds of `times` calls, with the device synchronized before and after."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        call()
    wait_for(device)
    return time.perf_counter() - began


def slowest(seconds: list[float], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the element-wise maximum over the ranks. Communicates over `group`; call on all its ranks."""
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    found: list[float] = largest.tolist()
    return found


DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LEAST_UNCERTAINTY = 0.03
"""Minimum uncertainty of a rate that is measured within seconds: a rate varies by this much between minutes."""
ADAMW_BYTES = 28
"""Bytes per fp32 parameter: reads of parameter, gradient and two states, writes of all but the gradient."""
_HEADS = 16


def matmul_points(
    layers: Iterable[tuple[int, int, int]], dtype: str, device: torch.device, *, budget_s: float
) -> list[MatmulPoint]:
    """Time linear layers (rows, inner, columns) in forward and both products of backward, each in `budget_s`.

    Layers are timed in ascending order of size, until one call takes twice `budget_s`.
    """
    points: list[MatmulPoint] = []
    with _float32_as(dtype):
        for rows, inner, columns in sorted(layers, key=lambda layer: layer[0] * layer[1] * layer[2]):
            flops = 2.0 * rows * inner * columns
            if points and flops / points[-1].flops > 2 * budget_s:
                break
            x, weight, gradient = (
                torch.randn(shape, dtype=DTYPES[dtype], device=device)
                for shape in ((rows, inner), (columns, inner), (rows, columns))
            )
            products = {
                (rows, columns, inner): partial(torch.matmul, x, weight.t()),
                (rows, inner, columns): partial(torch.matmul, gradient, weight),
                (inner, columns, rows): partial(torch.matmul, gradient.t(), x),
            }
            for (m, n, k), call in products.items():
                seconds = time_calls(call, device, budget_s=budget_s).median_s
                points.append(MatmulPoint(m=m, n=n, k=k, dtype=dtype, flops=flops / seconds))
    return points


@contextmanager
def _float32_as(dtype: str) -> Iterator[None]:
    """Compute float32 products in tf32 or in full precision inside of this context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention_points(
    shapes: Iterable[tuple[int, int]], dtype: str, device: torch.device, *, tokens: int, budget_s: float
) -> list[AttentionPoint]:
    """Time causal attention of (sequence length, head dim), forward and backward, in batches of about `tokens`."""
    points = []
    for length, width in shapes:
        batch = max(1, tokens // length)
        query, key, value = (
            torch.randn(batch, length, _HEADS, width, dtype=DTYPES[dtype], device=device)
            .transpose(1, 2)
            .requires_grad_()
            for _ in range(3)
        )

        def forward(q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        output = forward()
        gradient = torch.randn_like(output)

        def backward(
            inputs: Sequence[Tensor] = (query, key, value), y: Tensor = output, g: Tensor = gradient
        ) -> object:
            return torch.autograd.grad(y, inputs, g, retain_graph=True)

        half = batch * _HEADS * length**2 * width / 2
        rates = [
            count * half / time_calls(call, device, budget_s=budget_s).median_s
            for count, call in ((4, forward), (10, backward))
        ]
        points.append(AttentionPoint(length=length, head_dim=width, dtype=dtype, forward=rates[0], backward=rates[1]))
    return points


def memory_bandwidth(numels: Iterable[int], device: torch.device, *, low: torch.dtype, budget_s: float) -> Figure:
    """Return the bytes per second of memory-bound forward operators of transformers: sums, gates, casts, norms."""
    moved, seconds, rates = 0.0, 0.0, []
    for numel in numels:
        wide = torch.randn(numel // 1024, 1024, device=device)
        x, y = wide.to(low), wide.to(low)
        size, ones = low.itemsize, torch.ones(1024, dtype=low, device=device)
        calls: list[tuple[int, Callable[[], object]]] = [
            (3 * size, partial(torch.add, x, y)),
            (3 * size, partial(torch.mul, x, y)),
            (8, partial(torch.mul, wide, 0.5)),
            (2 * size, partial(functional.silu, x)),
            (2 * size, partial(functional.layer_norm, x, (1024,), ones, ones)),
        ]
        if low is not torch.float32:
            calls.append((4 + size, partial(wide.to, low)))
        for num_bytes, call in calls:
            taken = time_calls(call, device, budget_s=budget_s).median_s
            moved, seconds = moved + num_bytes * numel, seconds + taken
            rates.append(num_bytes * numel / taken)
    mean = moved / seconds
    return measured(mean, _uncertainty([(rate - mean) / mean for rate in rates]))


def _uncertainty(deviations: Sequence[float]) -> float:
    """Return the root mean square of relative deviations, but at least the minimum uncertainty."""
    return max(LEAST_UNCERTAINTY, math.sqrt(sum(d * d for d in deviations) / len(deviations)))


def kernel_seconds(device: torch.device, *, budget_s: float) -> Figure:
    """Return the seconds of the smallest kernel on the device."""
    one = torch.ones(1, device=device)
    timing = time_calls(lambda: one.add_(1.0), device, budget_s=budget_s, most=200)
    return measured(timing.median_s, max(LEAST_UNCERTAINTY, timing.spread))


def operator_seconds(device: torch.device, *, repeats: int = 20) -> Figure:
    """Return the host seconds to launch one operator, from forward and backward of a tiny network."""
    depth, width = 40, 16
    layers = torch.nn.Sequential(
        *(part for _ in range(depth) for part in (torch.nn.Linear(width, width, bias=False), torch.nn.SiLU()))
    ).to(device)
    x = torch.randn(4, width, device=device, requires_grad=True)
    operators = depth * (2 + 3)  # product and activation; in backward two products and the activation's
    samples = []
    for _ in range(repeats):
        wait_for(device)
        began = time.perf_counter()
        loss = layers(x).sum()
        loss.backward()
        samples.append((time.perf_counter() - began) / operators)
        layers.zero_grad()
    ordered = sorted(samples)
    middle = ordered[len(ordered) // 2]
    return measured(middle, max(LEAST_UNCERTAINTY, (ordered[3 * len(ordered) // 4] - ordered[0]) / middle / 2))


def optimizer_bandwidth(num_parameters: int, device: torch.device, *, budget_s: float) -> Figure:
    """Return the bytes per second of a fused AdamW step over fp32 tensors of a million elements each."""
    tensor = 1 << 20
    parameters = [torch.nn.Parameter(torch.randn(tensor, device=device)) for _ in range(num_parameters // tensor)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    timing = time_calls(optimizer.step, device, budget_s=budget_s)
    moved = ADAMW_BYTES * tensor * len(parameters)
    return measured(moved / timing.median_s, max(LEAST_UNCERTAINTY, timing.spread))


def copy_bandwidths(device: torch.device, *, budget_s: float) -> tuple[Figure, Figure]:
    """Return the bytes per second of pinned 256 MiB copies to the host and from the host."""
    on_device = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    on_host = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    calls: tuple[Callable[[], object], ...] = (
        lambda: on_host.copy_(on_device, non_blocking=True),
        lambda: on_device.copy_(on_host, non_blocking=True),
    )
    timings = [time_calls(call, device, budget_s=budget_s) for call in calls]
    to_host, from_host = (
        measured((1 << 28) / timing.median_s, max(LEAST_UNCERTAINTY, timing.spread)) for timing in timings
    )
    return to_host, from_host
