"""Checks of supported plans, which run before any process starts, so this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import PlanError
from shardwise.hardware.probe import package_version
from shardwise.planner.cost.stages import uses_ddp
from shardwise.plans.pipeline import check_pipeline

if TYPE_CHECKING:
    from shardwise.plans import Plan


__all__ = ["check_native", "uses_ddp"]


def check_native(plan: Plan) -> None:
    """Raise if torch's wrappers would not train this plan correctly."""
    _check_unbuilt(plan)
    _check_precision(plan)
    _check_sharding(plan)
    _check_communication(plan)
    _check_forms(plan)
    _check_compile(plan)
    check_rounds(plan)
    check_pipeline(plan)


def _check_unbuilt(plan: Plan) -> None:
    if "nvme" in (plan.offload.parameters, plan.offload.optimizer):
        raise PlanError(
            "engine torch does not support offload to nvme",
            code="support.nvme-offload",
            fix='use "cpu", or --set engine=deepspeed',
        )


def _check_precision(plan: Plan) -> None:
    stored = {plan.precision.parameter, plan.precision.optimizer}
    reduce = {plan.precision.reduce}
    if stored not in ({"fp32"}, {"fp64"}) or (reduce != stored and (reduce != {"bf16"} or plan.zero < 2)):
        raise PlanError(
            f"unsupported precision: {plan.precision}",
            code="support.precision-mix",
            fix="store parameters, gradients and optimizer in fp32 or fp64; only zero 2 and 3 may reduce in bf16",
        )
    if stored == {"fp64"} and (plan.precision.compute != "fp64" or reduce != stored):
        raise PlanError(
            f"fp64 parameters need fp64 compute, got {plan.precision.compute}",
            code="support.fp64-mix",
            fix='compute in fp64 (precision.compute = "fp64")',
        )
    if stored == {"fp32"} and plan.precision.compute == "fp64":
        raise PlanError(
            "fp64 compute is not supported with fp32 parameters",
            code="support.fp64-mix",
            fix="set every precision to fp64",
        )


def _check_sharding(plan: Plan) -> None:
    if plan.offload.parameters == "cpu" and plan.zero < 2:
        raise PlanError(
            f"offload of parameters needs zero = 2 or 3, got zero = {plan.zero}",
            code="support.offload-whole-parameters",
            fix="use zero3, or offload the optimizer only",
        )
    if plan.offload.parameters == "cpu" and plan.offload.optimizer != "cpu":
        raise PlanError(
            "offload of parameters needs offload of the optimizer, which runs on their device",
            code="support.offload-without-optimizer",
            fix='set offload.optimizer = "cpu" too',
        )
    if plan.zero == 1 and plan.layout.tp > 1:
        raise PlanError(
            f"zero = 1 is not supported with tp, got plan {plan.layout}",
            code="support.zero1-with-tp",
            fix="use zero = 2",
        )
    if plan.communication.prefetch < 1:
        raise PlanError(
            f"communication.prefetch must be at least 1, got {plan.communication.prefetch}",
            code="plan.prefetch-too-small",
            fix="set it to 1 or more blocks",
        )


def _check_communication(plan: Plan) -> None:
    options = plan.communication
    if options.compression != "none" and not uses_ddp(plan):
        raise PlanError(
            f"compression = {options.compression!r} needs DDP, but plan {plan.layout} with zero = {plan.zero} does not"
            " use it",
            code="support.compression-without-ddp",
            fix='use --plan ddp or zero1, or compression = "none"',
        )
    if options.static_graph and plan.accumulation > 1 and plan.gradient_sync == "last":
        raise PlanError(
            "static_graph is not supported with gradient accumulation, because DDP cannot defer its reduction",
            code="support.static-graph-accumulation",
            fix='set gradient_sync = "every", or static_graph = false',
        )
    if options.find_unused_parameters and plan.fused_loss and uses_ddp(plan):
        raise PlanError(
            "find_unused_parameters is not supported with fused_loss, whose use of the head DDP does not detect",
            code="support.unused-parameters-fused-loss",
            fix="disable one of them",
        )


def _check_forms(plan: Plan) -> None:
    """Reject combinations of step and sequence options that are not supported."""
    if plan.layout.cp > 1 and plan.layout.pp > 1:
        raise PlanError(
            f"cp is not supported with pp, got plan {plan.layout}",
            code="support.cp-with-pipeline",
            fix="use cp with shard, replicate or tp, or pp without cp",
        )
    if plan.capture == "step" and plan.layout.pp > 1:
        raise PlanError(
            f"capture = 'step' is not supported with pp, got plan {plan.layout}",
            code="support.capture-with-pipeline",
            fix='use capture = "none", or a plan without pp',
        )
    if plan.sequence_parallel and plan.layout.tp == 1:
        raise PlanError(
            "sequence_parallel needs tp of at least 2, got tp = 1",
            code="plan.sequence-parallel-without-tp",
            fix="use tp 2 or more, or sequence_parallel = false",
        )


def _check_compile(plan: Plan) -> None:
    """Reject compiled tensor-parallel blocks on torch versions that compute wrong gradients for them."""
    if plan.compile == "none" or plan.layout.tp == 1:
        return
    version = package_version("torch")
    # AOTAutograd of 2.11: the first loss is correct, the second is 28 % off. 2.12 is untested.
    if version.startswith(("2.11.", "2.12.")):
        raise PlanError(
            f"torch {version} computes wrong gradients for compiled tensor-parallel blocks",
            code="support.compiled-tensor-parallel",
            fix="use --set compile=none, or install torch 2.13",
        )


# Which plans support replicas that train independently between syncs.


def check_rounds(plan: Plan) -> None:
    """Reject a plan with sync_every > 1 that has no replicas, or an option that is incompatible with it."""
    every = plan.communication.sync_every
    if every == 1:
        return
    if plan.layout.replicate == 1:
        raise PlanError(
            f"sync_every = {every} needs replicas, got replicate = 1",
            code="plan.sync-every-without-replicas",
            fix="use --plan ddp or hsdp, or sync_every = 1",
        )
    for option in _incompatible(plan):
        if option.is_used:
            raise PlanError(
                f"sync_every = {every} is not supported with {option.name}",
                code="support.sync-every-option",
                fix=f"{option.fix}, or sync_every = 1",
            )


class _Option(NamedTuple):
    """An option that is incompatible with sync_every: whether the plan uses it, its name, and the fix."""

    is_used: bool
    name: str
    fix: str


def _incompatible(plan: Plan) -> list[_Option]:
    layout, other = plan.layout, "use --plan ddp or hsdp"
    options = [
        _Option(getattr(layout, axis) > 1, f"{axis} = {getattr(layout, axis)}", other) for axis in ("pp", "cp", "tp")
    ]
    options += [
        _Option(plan.zero == 1, "zero = 1", other),
        _Option(
            plan.precision.compute == "fp16",
            "fp16, whose loss scale would differ between replicas",
            'use precision.compute = "bf16" or "fp32"',
        ),
        _Option(
            "cpu" in (plan.offload.parameters, plan.offload.optimizer),
            "offload",
            'use offload.parameters = "none" and offload.optimizer = "none"',
        ),
        _Option(plan.capture != "none", f"capture = {plan.capture!r}", 'use capture = "none"'),
    ]
    for name in ("static_graph", "find_unused_parameters", "broadcast_buffers"):
        is_used = getattr(plan.communication, name)
        options.append(_Option(is_used, f"{name}, an option of DDP", f"use {name} = false"))
    return options
