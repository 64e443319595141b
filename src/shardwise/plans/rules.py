"""Which techniques of torch a plan uses for gradients and gathered weights; one answer for training and the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.plans.plan import Plan

FLOAT8_MULTIPLE = 16
"""Both dimensions of a weight's shard and the tokens of a micro-batch must be multiples of this number: float8 kernels
require it of the columns and the inner dimension of a product, which is the tokens for a weight gradient."""
FLOAT8_LEAST_WIDTH = {"tensorwise": 1024, "rowwise": 2048}
"""Smallest dimension of a weight in float8, by recipe, on a machine that was not measured: on an H200, whole steps were
slower at width 768 and faster at 2048 (rowwise: 5 % faster), and the limits between them are a judgement."""


def uses_ddp(plan: Plan) -> bool:
    """Return whether DDP reduces gradients in buckets during backward.

    It does with replicated parameters, without pp and tp, if replicas synchronize in every step. Gradients that are
    accumulated in fp32 are summed after the last backward instead.
    """
    layout = plan.layout.folded
    is_plain = plan.zero < 2 and layout.dp > 1 and layout.pp == layout.tp == 1
    return is_plain and plan.communication.sync_every == 1 and not accumulates_in_fp32(plan)


def accumulates_in_fp32(plan: Plan) -> bool:
    """Return whether backward accumulates gradients of bf16 parameters in fp32, which DDP does not support.

    With zero = 2 and 3, FSDP2 accumulates in the dtype of the reduction, or with gradient_sync = every in the dtype of
    the parameters.
    """
    return plan.precision.parameter == "bf16" and plan.accumulation > 1 and plan.zero < 2


def compiles_head(plan: Plan) -> bool:
    """Return whether FSDP2 keeps the root unit gathered until backward, to compile the output head with the loss.

    Training does so if only the loss reads the logits.
    """
    layout = plan.layout
    is_plain = layout.tp == layout.pp == layout.cp == 1 and not plan.fused_loss
    return plan.compile == "blocks" and plan.zero >= 2 and is_plain


def compiles_model(plan: Plan) -> bool:
    """Return whether the forward pass of blocks and the loss are compiled together, for the one rank of a plan."""
    return plan.compile == "model" and plan.layout.world_size == 1 and not plan.fused_loss


_ALIGNED = 8
"""Matrix products in 16 bits run at less than half speed with rows that are no multiple of this number."""
_PADDED_TO = 64
_LEAST_PADDED = 64 * _PADDED_TO
"""Size below which padding could add more than 1.6 % to the logits."""


def padded_vocabulary(size: int) -> int:
    """Return the size to which a compiled graph of output head and token loss pads a vocabulary; mostly `size`."""
    if size % _ALIGNED == 0 or size < _LEAST_PADDED:
        return size
    return -(-size // _PADDED_TO) * _PADDED_TO


def is_exact_in_graph(plan: Plan) -> bool:
    """Return whether a CUDA graph computes the numbers of a plain step: fused optimizers read its rates in fp32."""
    return plan.precision.parameter != "fp64"


def gathers_float8(plan: Plan) -> bool:
    """Return whether ranks gather float8 weights in 8 bits; otherwise FSDP2 gathers them in bf16.

    Not with tp, whose scales span a second group of ranks, nor with the rowwise recipe, whose backward pass needs the
    scales of columns, nor with offloaded parameters, which FSDP2 copies to tensors without the extension.
    """
    if plan.precision.compute != "float8":
        return False
    is_sharded = plan.zero >= 2 and plan.layout.folded.shard > 1
    return (
        is_sharded and plan.float8.recipe == "tensorwise" and plan.layout.tp == 1 and plan.offload.parameters == "none"
    )


def is_float8_size(*sizes: int) -> bool:
    """Return whether float8 kernels support dimensions of these sizes: of a weight's shard, or a number of tokens."""
    return all(size % FLOAT8_MULTIPLE == 0 for size in sizes)


def gains_from_float8(rows: int, columns: int, least_width: int) -> bool:
    """Return whether a plan that names no layers computes a weight's shard of this size in float8.

    `least_width` is FLOAT8_LEAST_WIDTH of the recipe, or the measured width of the machine.
    """
    return is_float8_size(rows, columns) and min(rows, columns) >= least_width
