"""Rates of float8 and of grouped matrix products, on devices and versions of torch that have kernels for them.

A float8 layer multiplies its forward pass with fast accumulation and both gradients with an exact one, as torchao does,
so that the measured points contain the difference. Grouped products are those of experts: one kernel multiplies the
rows of each expert with its weights. What is not supported is skipped with a reason, which the calibration keeps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from shardwise.hardware.calibration import GroupedPoint, MatmulPoint
from shardwise.hardware.probe import FLOAT8_CAPABILITY
from shardwise.measurement.timing import time_calls
from shardwise.torch_private.dispatch import has_scaled_product, scaled_product

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

GROUPED_CAPABILITY = (8, 0)
"""CUDA compute capability that torch's grouped products require."""
_ALIGNED = 16
"""Divisor of all sizes of a float8 product."""


def why_not_float8(device: torch.device) -> str:
    """Return the reason why float8 products cannot be measured on a device; empty if they can."""
    reason = _too_old(device, FLOAT8_CAPABILITY)
    if not reason and not has_scaled_product():
        return f"torch {torch.__version__} has no float8 product"
    return reason


def why_not_grouped(device: torch.device) -> str:
    """Return the reason why grouped products cannot be measured on a device; empty if they can."""
    reason = _too_old(device, GROUPED_CAPABILITY)
    if not reason and not hasattr(functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped product"
    return reason


def _too_old(device: torch.device, capability: tuple[int, int]) -> str:
    if device.type != "cuda":
        return f"requires a CUDA device, got {device.type}"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return f"requires compute capability {capability[0]}.{capability[1]}, got {found[0]}.{found[1]}"
    return ""


def float8_points(
    layers: Iterable[tuple[int, int, int]], device: torch.device, *, budget_s: float
) -> list[MatmulPoint]:
    """Time linear layers (rows, inner, columns) in float8: forward, and both products of backward."""
    points = []
    for rows, inner, columns in layers:
        if any(size % _ALIGNED for size in (rows, inner, columns)):
            continue
        flops = 2.0 * rows * inner * columns
        # (m, n, k) -> whether it accumulates fast: output, gradient of the input, gradient of the weight.
        products = {(rows, columns, inner): True, (rows, inner, columns): False, (inner, columns, rows): False}
        for (m, n, k), is_fast in products.items():
            a, b = _float8(m, k, device), _float8(n, k, device).t()
            call = partial(scaled_product, a, b, is_fast=is_fast)
            seconds = time_calls(call, device, budget_s=budget_s).median_s
            points.append(MatmulPoint(m=m, n=n, k=k, dtype="fp8", flops=flops / seconds))
    return points


def _float8(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(torch.float8_e4m3fn)


def grouped_points(
    experts: Iterable[tuple[int, int, int, int]], device: torch.device, *, budget_s: float
) -> list[GroupedPoint]:
    """Time grouped bf16 products of (groups, rows of all groups, inner, columns), with equal groups."""
    points = []
    for groups, rows, inner, columns in experts:
        a = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
        weights = torch.randn(groups, columns, inner, dtype=torch.bfloat16, device=device).transpose(-2, -1)
        ends = torch.arange(1, groups + 1, dtype=torch.int32, device=device) * (rows // groups)
        multiply: Any = functional.grouped_mm
        seconds = time_calls(partial(multiply, a, weights, offs=ends), device, budget_s=budget_s).median_s
        flops = 2.0 * rows * inner * columns / seconds
        points.append(GroupedPoint(groups=groups, m=rows, n=columns, k=inner, dtype="bf16", flops=flops))
    return points
