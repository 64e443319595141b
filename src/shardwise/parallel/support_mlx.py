"""Which plans MLX can train; what it cannot do, or would do otherwise than asked, is refused, naming the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.plans import Plan

_TORCH = "give the job a torch model"
_AXES = {
    "pp": "has no pipeline",
    "cp": "cuts no sequences",
    "tp": "cuts no weights",
    "shard": "shards neither optimizer nor weights",
}


def check_mlx(plan: Plan) -> None:
    """Refuse a plan for engine mlx that would train wrongly or not at all."""
    for axis, words in _AXES.items():
        if getattr(plan.layout, axis) > 1:
            raise PlanError(
                f"plan {plan.layout} uses axis {axis}, and engine mlx {words}",
                code="support.mlx-axis",
                fix="use --plan ddp",
            )
    _check_precision(plan)
    default = type(plan)()
    for name, words in _FIELDS.items():
        if getattr(plan, name) != getattr(default, name):
            raise PlanError(
                f"plan {name} = {getattr(plan, name)!r} is not for engine mlx: {words}",
                code="support.mlx-option",
                fix=_leave(name),
            )
    for name in ("parameters", "optimizer"):
        if getattr(plan.offload, name) != "none":
            raise PlanError(
                f"plan offload.{name} = {getattr(plan.offload, name)!r} is not for engine mlx, whose CPU and GPU share"
                " one memory",
                code="support.mlx-option",
                fix=_leave(f"offload.{name}"),
            )
    for name in ("compression", "find_unused_parameters", "static_graph", "broadcast_buffers", "sync_every"):
        value = getattr(plan.communication, name)
        if value != getattr(default.communication, name):
            raise PlanError(
                f"plan communication.{name} = {value!r} is not for engine mlx, which sums whole gradients in one go",
                code="support.mlx-option",
                fix=_leave(f"communication.{name}"),
            )


_FIELDS = {
    "gradient_sync": "it sums gradients once a step",
    "recompute": "wrap blocks without dropout in mx.checkpoint instead",
    "compile": "its step is always compiled",
    "capture": "it has no CUDA graphs",
    "fused_loss": "its loss sees whole outputs",
}


def _check_precision(plan: Plan) -> None:
    precision = plan.precision
    held = {precision.parameter, precision.reduce, precision.optimizer}
    if precision.compute == "fp16":
        raise PlanError(
            "plan computes in fp16, for which engine mlx scales no loss",
            code="support.mlx-fp16",
            fix="use precision bf16 or fp32",
        )
    if held not in ({"fp32"}, {"fp64"}):
        raise PlanError(
            f"plan holds {precision}, and engine mlx holds all in one dtype",
            code="support.mlx-precision",
            fix="hold parameters, gradients and optimizer in fp32",
        )
    if (held == {"fp64"}) != (precision.compute == "fp64"):
        raise PlanError(
            f"plan computes in {precision.compute} on {precision.parameter} weights",
            code="support.fp64-mix",
            fix="set every precision to fp64",
        )


def _leave(name: str) -> str:
    return f"leave {name} at its default, or {_TORCH}"
