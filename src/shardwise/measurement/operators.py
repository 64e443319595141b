"""Rates of the operators that training is made of: matrix products, attention, memory-bound ones, the optimizer."""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from shardwise.hardware.calibration import AttentionPoint, Figure, MatmulPoint, measured
from shardwise.measurement.timing import time_calls, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LEAST_UNCERTAINTY = 0.03
"""Of a rate measured once in seconds: the next minute differs by as much."""
ADAMW_BYTES = 28
"""Per fp32 parameter: parameter, gradient and two states read, all but the gradient written."""
_HEADS = 16


def matmul_points(
    layers: Iterable[tuple[int, int, int]], dtype: str, device: torch.device, *, budget_s: float
) -> list[MatmulPoint]:
    """Time linear layers (rows, inner, columns) forward and both products of their backward, each in `budget_s`.

    Layers are taken smallest first, up to those whose one call takes twice `budget_s`.
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
    """Have float32 products in tf32, or in full."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention_points(
    shapes: Iterable[tuple[int, int]], dtype: str, device: torch.device, *, tokens: int, budget_s: float
) -> list[AttentionPoint]:
    """Time causal attention over (length, head width), forward and backward; batches of about `tokens` tokens."""
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
    """Time what transformers do between products: sums, gates, casts, norms, forward; bytes per second over all."""
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
    """Root mean square of relative deviations, but never less than a minute changes."""
    return max(LEAST_UNCERTAINTY, math.sqrt(sum(d * d for d in deviations) / len(deviations)))


def kernel_seconds(device: torch.device, *, budget_s: float) -> Figure:
    """Time the smallest kernel on the device."""
    one = torch.ones(1, device=device)
    timing = time_calls(lambda: one.add_(1.0), device, budget_s=budget_s, most=200)
    return measured(timing.median_s, max(LEAST_UNCERTAINTY, timing.spread))


def operator_seconds(device: torch.device, *, repeats: int = 20) -> Figure:
    """Time the host as it issues tiny operators of a small network, forward and backward; per operator."""
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
    """Time a fused AdamW step over fp32 tensors of a million numbers each; bytes moved per second."""
    tensor = 1 << 20
    parameters = [torch.nn.Parameter(torch.randn(tensor, device=device)) for _ in range(num_parameters // tensor)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    timing = time_calls(optimizer.step, device, budget_s=budget_s)
    moved = ADAMW_BYTES * tensor * len(parameters)
    return measured(moved / timing.median_s, max(LEAST_UNCERTAINTY, timing.spread))


def copy_bandwidths(device: torch.device, *, budget_s: float) -> tuple[Figure, Figure]:
    """Time pinned copies of 256 MiB to the host and from it; bytes per second each."""
    there = torch.ones(1 << 28, dtype=torch.uint8, device=device)
    here = torch.ones(1 << 28, dtype=torch.uint8, pin_memory=True)
    calls: tuple[Callable[[], object], ...] = (
        lambda: here.copy_(there, non_blocking=True),
        lambda: there.copy_(here, non_blocking=True),
    )
    timings = [time_calls(call, device, budget_s=budget_s) for call in calls]
    to_host, from_host = (
        measured((1 << 28) / timing.median_s, max(LEAST_UNCERTAINTY, timing.spread)) for timing in timings
    )
    return to_host, from_host
