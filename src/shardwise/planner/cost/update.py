"""Time between the last backward pass and the next step: reductions, gradient norm, update, offload and gathers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.planner.cost.memory import NS_BYTES
from shardwise.plans.rules import uses_ddp
from shardwise.units import ELEMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.hardware.calibration import Calibration
    from shardwise.planner.cost.memory import OptimizerShape
    from shardwise.planner.cost.stage_costs import Wires
    from shardwise.planner.cost.stages import StageParts
    from shardwise.planner.model.shape import Weight
    from shardwise.plans.plan import Plan

OUTER_PASSES = 14
"""Reads and writes of every parameter when replicas synchronize: anchor, delta, outer optimizer, parameters."""
PAGEABLE = 0.24
"""Rate of a copy between a device and pageable host memory, as a fraction of pinned memory's: 13 of 55 GB/s on an
H200."""
HOST_ADD = 3
"""Reads and writes of each gradient that the host adds to those of earlier micro-batches."""


def after_backward(
    trained: float, plan: Plan, calibration: Calibration, wires: Wires, optimizer: OptimizerShape
) -> dict[str, float]:
    """Return seconds after the last backward pass by part; `trained` is the rank's parameters before sharding."""
    layout, precision = plan.layout.folded, plan.precision
    bandwidth = calibration.memory_bandwidth.value
    width, element = ELEMENT_BYTES[precision.reduce], ELEMENT_BYTES[precision.parameter]
    mine = trained / layout.shard
    parts = {"update": element * (trained if plan.zero < 2 else mine) / bandwidth}  # the norm reads every gradient
    touched = _touched(plan, optimizer) * mine
    if plan.offload.optimizer == "cpu":
        parts["update"] += touched / calibration.host_optimizer_bandwidth.value
        parts["offload"] = _offload(mine, plan, calibration)
    else:
        parts["update"] += touched / calibration.optimizer_bandwidth.value
    # Tensors are copied into each bucket and back.
    if plan.zero < 2 and layout.dp > 1 and plan.communication.sync_every == 1 and not uses_ddp(plan):
        parts["sum"] = wires.in_buckets("all_reduce", width * trained, layout, "replicate", "shard")
        parts["sum"] += 4 * width * trained / bandwidth
    if plan.zero == 1:
        parts["collect"] = wires.in_buckets("all_gather", element * trained, layout, "shard")
        parts["collect"] += 4 * element * trained / bandwidth
    every = plan.communication.sync_every
    if every > 1:
        moved = element * (mine if plan.zero >= 2 else trained)
        parts["meet"] = wires.in_buckets("all_reduce", moved, layout, "replicate") / every
        parts["update"] += OUTER_PASSES * moved / bandwidth / every
    return parts


def _touched(plan: Plan, optimizer: OptimizerShape) -> float:
    """Return the bytes that the update reads and writes for each parameter.

    It reads gradients, and reads and writes moments and parameters; masters are read in place of the latter.
    """
    precision = plan.precision
    element = ELEMENT_BYTES[precision.parameter]
    touched = 3 * element + 2 * optimizer.states * ELEMENT_BYTES[precision.optimizer]
    if precision.has_masters:
        touched += 2 * ELEMENT_BYTES[precision.master] - element
    return touched


def _offload(mine: float, plan: Plan, calibration: Calibration) -> float:
    """Return the seconds of copies that block the host, and of its additions, on a rank with `mine` parameters.

    Offloaded parameters are pinned, and their copies overlap with compute; but FSDP2 waits for a gradient that it adds
    to those of earlier micro-batches. If only the optimizer is offloaded, gradients and parameters are copied from and
    to pageable memory.
    """
    size = ELEMENT_BYTES[plan.precision.parameter] * mine
    if plan.offload.parameters != "cpu":
        return size / PAGEABLE * (1 / calibration.to_host.value + 1 / calibration.from_host.value)
    added = plan.accumulation - 1 if plan.gradient_sync == "every" else 0
    return added * size * (1 / calibration.to_host.value + HOST_ADD / calibration.host_optimizer_bandwidth.value)


# Muon: the Newton-Schulz iterations of whole matrices, and the exchange of their shards.


def orthogonalization(
    optimizer: OptimizerShape, stages: Sequence[StageParts], plan: Plan, calibration: Calibration, wires: Wires
) -> dict[str, float]:
    """Return seconds of Muon's Newton-Schulz iterations on the busiest rank, and of the exchange of shards.

    The ranks that shard matrices share them evenly.
    """
    layout = plan.layout.folded
    sharing = layout.shard if plan.zero else 1
    compute, sent = [0.0] * layout.pp, [0.0] * layout.pp
    for stage in stages if optimizer.matrices else ():
        for part, count in stage.parts:
            for weight in (each for each in part.weights if each.name in optimizer.matrices):
                tp = layout.tp if weight.split else 1
                compute[stage.rank] += count * _newton_schulz(optimizer, weight, calibration) / (sharing * tp)
                sent[stage.rank] += count * NS_BYTES * weight.numel / (sharing * tp)
    parts = {"update": max(compute)}
    if sharing > 1 and any(sent):
        parts["collect"] = 2 * wires.in_buckets("all_to_all", max(sent), layout, "shard")
    return parts


def _newton_schulz(optimizer: OptimizerShape, weight: Weight, calibration: Calibration) -> float:
    """Return the seconds of the iterations of one matrix: products n n m, n n n and n n m for n <= m, in bf16.

    A fused weight counts as one matrix, which takes longer than its parts.
    """
    n, m = sorted((weight.rows, weight.numel // weight.rows))
    flops = optimizer.ns_steps * (4.0 * n * n * m + 2.0 * n**3)
    return flops / calibration.matmul(n, n, m, "bf16").value
