"""How much of what a device can multiply a step makes use of."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

from shardwise.bench.timing import time_calls
from shardwise.parallel.sharded import DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.bench.step import StepMeasurement
    from shardwise.planner.model.shape import ModelShape, Part
    from shardwise.plans.plan import DType

_WIDTHS = {"cuda": 8192, "cpu": 512}
"""Of the square product: wide enough that a device reaches its rate, small enough for a fraction of a second."""


def matmul_rate(device: torch.device, compute: DType) -> float:
    """Time a large square product; returns multiplications and additions per second.

    In fp32 as torch is set now, in full or in tf32. Called on every rank at once, ranks that share a device share it.
    """
    width = _WIDTHS[device.type] // (2 if compute == "fp64" else 1)  # many GPUs have few units for fp64
    x, y = (torch.randn(width, width, device=device).to(DTYPES[compute]) for _ in range(2))
    return 2.0 * width**3 / time_calls(lambda: x @ y, device, budget_s=0.1).median_s


def training_flops(shape: ModelShape) -> float:
    """Return the multiplications and additions that one sample needs, forward and backward; recomputing is no need."""
    return sum(part.count * _part_flops(part) for part in shape.parts)


def _part_flops(part: Part) -> float:
    """Each product asks for one more in backward for its input, and one for its weight unless that is frozen."""
    trained = sum(weight.numel for weight in part.weights if weight.trained) / max(1, part.numel)
    products = sum(item.flops for item in part.work.matmuls)
    return (2 + trained) * products + 3 * sum(item.flops for item in part.work.attentions)


def utilisation(found: Sequence[StepMeasurement], flops_per_sample: float) -> float:
    """Return the share of the matmul rate, measured beside the steps, that the whole world's work came to.

    `found` is of all ranks, or of the one rank of a fake world.
    """
    rate = statistics.mean(measured.matmul_flops for measured in found) * found[0].world_size
    return min(measured.samples_per_s for measured in found) * flops_per_sample / rate
