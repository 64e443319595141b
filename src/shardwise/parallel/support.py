"""Which plans can be applied today; asked before any process starts, so no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.plan import Plan


def require_supported(plan: Plan) -> None:
    """Refuse a plan with parts that are settled in form but not built yet, naming the first."""
    default = type(plan)()
    axes = [axis for axis in ("pp", "shard", "cp", "tp") if getattr(plan.layout, axis) > 1]
    if axes:
        raise PlanError(f"plan {plan.layout} uses axis {axes[0]}, which is not built yet", fix="use --plan ddp")
    for name in ("engine", "recompute", "compile", "capture", "offload", "pipeline"):
        if getattr(plan, name) != getattr(default, name):
            raise PlanError(f"plan {name} = {getattr(plan, name)!r} is not built yet", fix="leave it at its default")
    if plan.communication.compression != "none":
        raise PlanError(
            f"plan compression = {plan.communication.compression!r} is not built yet", fix='use compression = "none"'
        )
    if plan.communication.static_graph and plan.accumulation > 1 and plan.gradient_sync == "last":
        raise PlanError(
            "plan has static_graph with accumulation, and DDP cannot hold a static graph back",
            fix='set gradient_sync = "every", or leave static_graph off',
        )
    held = {plan.precision.parameter, plan.precision.optimizer, plan.precision.reduce}
    if held not in ({"fp32"}, {"fp64"}):
        raise PlanError(
            f"plan holds {plan.precision}", fix="hold parameters, gradients and optimizer all in fp32, or all in fp64"
        )
    if held == {"fp64"} and plan.precision.compute != "fp64":
        raise PlanError(f"plan computes in {plan.precision.compute} on fp64 weights", fix="compute in fp64 as well")
    if held == {"fp32"} and plan.precision.compute == "fp64":
        raise PlanError("plan computes in fp64 on fp32 weights", fix="set every precision to fp64")
