"""Checks that engine torch supports a plan; they run before any rank starts, so this module does not import torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

from shardwise.errors import JobError, MissingExtraError, PlanError
from shardwise.hardware.probe import BF16_CAPABILITY, FLOAT8_CAPABILITY, package_version
from shardwise.plans.pipeline import check_pipeline
from shardwise.plans.rules import FLOAT8_MULTIPLE, accumulates_in_fp32, is_float8_size, uses_ddp

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardwise.plans import Plan


def check_native(plan: Plan) -> None:
    """Raise PlanError if engine torch does not support the plan."""
    _check_nvme(plan)
    _check_precision(plan)
    _check_sharding(plan)
    _check_communication(plan)
    _check_forms(plan)
    _check_compile(plan)
    check_rounds(plan)
    check_pipeline(plan)
    _check_float8(plan)  # last: plan ignores that a library is missing on this machine, but no rule


def check_device(plan: Plan, name: str, capability: tuple[int, ...]) -> None:
    """Raise PlanError if a GPU of this CUDA compute capability does not compute in the plan's precisions."""
    precision = plan.precision
    found = ".".join(map(str, capability))
    if precision.compute == "float8" and capability < FLOAT8_CAPABILITY:
        raise PlanError(
            f"float8 requires CUDA compute capability 8.9 or higher, but {name} has {found}",
            code="support.float8-device",
            fix=f"pass --set precision={'fp16' if capability < BF16_CAPABILITY else 'bf16'}",
        )
    if "bf16" in {precision.compute, precision.parameter, precision.optimizer} and capability < BF16_CAPABILITY:
        raise PlanError(
            f"bf16 requires CUDA compute capability 8.0 or higher, but {name} has {found}",
            code="support.bf16-device",
            fix="pass --set precision=fp16, and do not set precision.parameter or precision.optimizer to bf16",
        )


def _check_nvme(plan: Plan) -> None:
    if "nvme" in (plan.offload.parameters, plan.offload.optimizer):
        raise PlanError(
            "engine torch does not support offload to nvme",
            code="support.nvme-offload",
            fix='set the offload to "cpu", or pass --set engine=deepspeed',
        )


def _check_precision(plan: Plan) -> None:
    precision = plan.precision
    if precision.parameter == "bf16":
        _check_bf16_parameters(plan)
        return
    low_states = precision.optimizer in {"bf16", "int8"}
    stored = {precision.parameter} if low_states else {precision.parameter, precision.optimizer}
    reduce = {precision.reduce}
    if stored not in ({"fp32"}, {"fp64"}) or (reduce != stored and (reduce != {"bf16"} or plan.zero < 2)):
        raise PlanError(
            f"engine torch does not support precision ({precision}) with zero = {plan.zero}",
            code="support.precision-mix",
            fix="set precision.parameter, optimizer and reduce to fp32 or fp64 (reduce may be bf16 with zero = 2 or 3)",
        )
    _check_mixed_optimizer(plan)
    if stored == {"fp64"} and (precision.compute != "fp64" or reduce != stored):
        raise PlanError(
            f"fp64 parameters require fp64 compute and reduce, got precision ({precision})",
            code="support.fp64-mix",
            fix='set precision.compute = "fp64" and precision.reduce = "fp64"',
        )
    if stored == {"fp32"} and precision.compute == "fp64":
        raise PlanError(
            "fp64 compute is not supported with fp32 parameters",
            code="support.fp64-mix",
            fix="set every precision to fp64, or precision.compute to fp32",
        )


def _check_bf16_parameters(plan: Plan) -> None:
    """Raise PlanError for bf16 parameters in a plan that would lose precision elsewhere or does not support them."""
    precision = plan.precision
    if precision.activations != "bf16" or precision.optimizer == "fp64":
        raise PlanError(
            f"bf16 parameters require compute in bf16 or float8, got precision ({precision})",
            code="support.precision-mix",
            fix='set precision.compute = "bf16", or precision.parameter = "fp32"',
        )
    if accumulates_in_fp32(plan):
        _check_summed(plan)
    elif plan.zero < 2 and plan.layout.folded.dp > 1 and precision.reduce != "bf16":
        raise PlanError(
            f"zero = {plan.zero} reduces gradients of bf16 parameters in bf16, got reduce = {precision.reduce}",
            code="support.bf16-reduce",
            fix='set precision.reduce = "bf16", or pass --plan zero2 or zero3, which reduce in fp32',
        )
    _check_mixed_optimizer(plan)


def _check_summed(plan: Plan) -> None:
    """Raise PlanError for options of DDP if gradients are accumulated in fp32 and summed without DDP."""
    options = plan.communication
    used = {
        f"compression = {options.compression!r}": options.compression != "none",
        "broadcast_buffers": options.broadcast_buffers,
        "static_graph": options.static_graph,
    }
    for name, is_used in used.items():
        if is_used and plan.layout.folded.dp > 1:
            raise PlanError(
                f"{name} requires DDP, which cannot accumulate gradients of bf16 parameters over {plan.accumulation}"
                " micro-batches in fp32",
                code="support.bf16-accumulation",
                fix="remove the option, set accumulation = 1, or use fp32 parameters",
            )


def _check_mixed_optimizer(plan: Plan) -> None:
    if not plan.precision.needs_mixed_optimizer:
        return
    options = {
        "offload": plan.offload.optimizer != "none",
        f"sync_every = {plan.communication.sync_every}": plan.communication.sync_every > 1,
    }
    for name, is_used in options.items():
        if is_used:
            raise PlanError(
                f"precision ({plan.precision}) is not supported with {name}",
                code="support.mixed-optimizer-option",
                fix='set precision.parameter = "fp32" and precision.optimizer = "fp32"',
            )


def _check_float8(plan: Plan) -> None:
    options = {"compute = float8": plan.precision.compute, "optimizer = int8": plan.precision.optimizer}
    for name, dtype in options.items():
        if dtype in {"float8", "int8"} and find_spec("torchao") is None:
            raise MissingExtraError.of(f"precision.{name}", "float8")


def no_float8_layer(sizes: Collection[tuple[int, int]], least: int) -> JobError:
    """Return the error for a model whose linear layers, with shards of these sizes, gain nothing from float8."""
    smallest = min((min(size) for size in sizes), default=0)
    return JobError(
        f"float8 needs linear layers whose shards have at least {least} rows and columns, multiples of"
        f" {FLOAT8_MULTIPLE}, but the narrowest of {len(sizes)} has {smallest}",
        code="support.float8-no-layer",
        fix="pass --set precision=bf16, name layers in float8.modules, or use a plan with less tp",
    )


def check_float8_tokens(plan: Plan, name: str, number: int) -> None:
    """Raise PlanError if float8 kernels do not support the tokens that a layer receives in a micro-batch."""
    if not is_float8_size(number // plan.layout.cp):
        raise PlanError(
            f"float8 requires a multiple of {FLOAT8_MULTIPLE} tokens per micro-batch, but {name} receives"
            f" {number // plan.layout.cp} with micro_batch = {plan.micro_batch}",
            code="support.float8-tokens",
            fix="change micro_batch, pad sequences to a multiple of 16, or pass --set precision=bf16",
        )


def _check_sharding(plan: Plan) -> None:
    if plan.offload.parameters == "cpu" and plan.zero < 2:
        raise PlanError(
            f"offload of parameters requires zero = 2 or 3, got zero = {plan.zero}",
            code="support.offload-whole-parameters",
            fix="pass --plan zero3, or offload only the optimizer",
        )
    if plan.offload.parameters == "cpu" and plan.offload.optimizer != "cpu":
        raise PlanError(
            f"offload of parameters requires offload of the optimizer, got {plan.offload.optimizer!r}",
            code="support.offload-without-optimizer",
            fix='set offload.optimizer = "cpu"',
        )
    if plan.zero == 1 and plan.layout.tp > 1:
        raise PlanError(
            f"zero = 1 is not supported with tp, got plan {plan.layout}",
            code="support.zero1-with-tp",
            fix="set zero = 2",
        )
    if plan.communication.prefetch < 1:
        raise PlanError(
            f"communication.prefetch must be at least 1, got {plan.communication.prefetch}",
            code="plan.prefetch-too-small",
            fix="set communication.prefetch = 1",
        )


def _check_communication(plan: Plan) -> None:
    options = plan.communication
    if options.compression != "none" and not uses_ddp(plan):
        raise PlanError(
            f"compression = {options.compression!r} requires DDP, but plan {plan.layout} with zero = {plan.zero} does"
            " not use DDP",
            code="support.compression-without-ddp",
            fix='pass --plan ddp or --plan zero1, or set communication.compression = "none"',
        )
    if options.static_graph and plan.accumulation > 1 and plan.gradient_sync == "last":
        raise PlanError(
            "static_graph is not supported with gradient accumulation, because DDP cannot defer its reduction",
            code="support.static-graph-accumulation",
            fix='set gradient_sync = "every" or communication.static_graph = false',
        )
    if options.find_unused_parameters and plan.fused_loss and uses_ddp(plan):
        raise PlanError(
            "find_unused_parameters is not supported with fused_loss, whose use of the head DDP does not detect",
            code="support.unused-parameters-fused-loss",
            fix="set communication.find_unused_parameters = false or fused_loss = false",
        )


def _check_forms(plan: Plan) -> None:
    """Raise PlanError for unsupported combinations of cp, capture, recompute_blocks and sequence_parallel."""
    if plan.recompute_blocks and plan.recompute == "none":
        raise PlanError(
            f'recompute_blocks = {plan.recompute_blocks} has no effect with recompute = "none"',
            code="plan.recompute-blocks-unused",
            fix='set recompute = "full" or "selective", or recompute_blocks = 0',
        )
    if plan.layout.cp > 1 and plan.layout.pp > 1:
        raise PlanError(
            f"cp is not supported with pp, got plan {plan.layout}",
            code="support.cp-with-pipeline",
            fix="combine cp with shard, replicate or tp, or use pp without cp",
        )
    if plan.capture == "step" and plan.layout.pp > 1:
        raise PlanError(
            f"capture = 'step' is not supported with pp, got plan {plan.layout}",
            code="support.capture-with-pipeline",
            fix='set capture = "none", or use a plan without pp',
        )
    if plan.sequence_parallel and plan.layout.tp == 1:
        raise PlanError(
            "sequence_parallel requires tp of at least 2, got tp = 1",
            code="plan.sequence-parallel-without-tp",
            fix="use tp 2 or more, or set sequence_parallel = false",
        )


def _check_compile(plan: Plan) -> None:
    """Raise PlanError for compiled tensor-parallel blocks if this torch version computes wrong gradients for them."""
    if plan.compile == "none" or plan.layout.tp == 1:
        return
    version = package_version("torch")
    # AOTAutograd of 2.11: the first loss is correct, the second is 28 % off. 2.12 is untested.
    if version.startswith(("2.11.", "2.12.")):
        raise PlanError(
            f"torch {version} computes wrong gradients for compiled tensor-parallel blocks",
            code="support.compiled-tensor-parallel",
            fix="pass --set compile=none, or install torch 2.13",
        )


# Support of sync_every, with which replicas train independently between synchronizations.


def check_rounds(plan: Plan) -> None:
    """Raise PlanError if a plan with sync_every > 1 has no replicas or uses an incompatible option."""
    every = plan.communication.sync_every
    if every == 1:
        return
    if plan.layout.replicate == 1:
        raise PlanError(
            f"sync_every = {every} requires at least 2 replicas, got replicate = 1",
            code="plan.sync-every-without-replicas",
            fix="pass --plan ddp or --plan hsdp, or set sync_every = 1",
        )
    for option in _incompatible(plan):
        if option.is_used:
            raise PlanError(
                f"sync_every = {every} is not supported with {option.name}",
                code="support.sync-every-option",
                fix=f"{option.fix}, or set sync_every = 1",
            )


class _Option(NamedTuple):
    """An option that is incompatible with sync_every: whether the plan uses it, its name, and the fix."""

    is_used: bool
    name: str
    fix: str


def _incompatible(plan: Plan) -> list[_Option]:
    layout, other = plan.layout, "pass --plan ddp or --plan hsdp"
    options = [
        _Option(getattr(layout, axis) > 1, f"{axis} = {getattr(layout, axis)}", other) for axis in ("pp", "cp", "tp")
    ]
    options += [
        _Option(plan.zero == 1, "zero = 1", other),
        _Option(
            plan.precision.compute == "fp16",
            "fp16, whose loss scale would differ between replicas",
            'set precision.compute = "bf16" or "fp32"',
        ),
        _Option(
            "cpu" in (plan.offload.parameters, plan.offload.optimizer),
            "offload",
            'set offload.parameters = "none" and offload.optimizer = "none"',
        ),
        _Option(plan.capture != "none", f"capture = {plan.capture!r}", 'set capture = "none"'),
    ]
    for name in ("static_graph", "find_unused_parameters", "broadcast_buffers"):
        is_used = getattr(plan.communication, name)
        options.append(_Option(is_used, f"{name}, an option of DDP", f"set communication.{name} = false"))
    return options
