"""Sharded parameters: FSDP2, one unit per repeated block, settled by the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.errors import JobError, some_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shardwise.plans import Plan

LOWER = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, **LOWER}
"""Words of a plan -> dtypes."""


def shard_unit(module: nn.Module, plan: Plan, mesh: DeviceMesh, *, keep: bool = False) -> None:
    """Cut the parameters of one unit that are not yet cut; called on every rank of `mesh`, inner units first.

    On a mesh of two axes the first replicates and the second shards (HSDP). With `keep` they stay gathered from
    forward to backward; of the root unit, which backward needs first, that costs no memory.
    """
    options: dict[str, Any] = {}
    if plan.offload.parameters == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    precision = plan.precision
    if precision.compute in LOWER or precision.reduce != precision.parameter:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=LOWER.get(precision.compute), reduce_dtype=DTYPES[precision.reduce]
        )
    # ZeRO-2 keeps gathered parameters until backward is done; ZeRO-3 frees them after each use.
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=plan.zero == 3 and not keep,
        ignored_params=set(unshardable(module)),
        **options,
    )
    sharded: FSDPModule = module  # type: ignore[assignment]
    # The loss is divided by the global count already: gradients are summed, never averaged.
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def unshardable(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 cannot shard, which stay replicated: scalars, and those without elements."""
    return [parameter for parameter in module.parameters() if parameter.ndim == 0 or parameter.numel() == 0]


def check_sharded(module: nn.Module, plan: Plan, *, by_step: bool = True) -> None:
    """Refuse scalars, which FSDP2 cannot shard, where nobody would sum their gradients: with tp, and outside a step."""
    names = [name for name, parameter in module.named_parameters() if parameter.ndim == 0]
    if plan.zero < 2 or not names or (by_step and plan.layout.tp == 1):
        return
    why = "which tp has made DTensors already" if by_step else "and a loop of your own does not sum their gradients"
    raise JobError(
        f"FSDP2 does not shard scalar parameters ({some_of(names)}), {why}",
        code="support.fsdp-scalar-parameter",
        fix="give them one dimension" + (", or use tp without sharding" if by_step else ", or use build_step"),
    )


def set_prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Gather `depth` blocks ahead of use, forward and backward; 1 is what FSDP2 does by itself."""
    if depth == 1:
        return
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for order, prefetch in (
        (units, FSDPModule.set_modules_to_forward_prefetch),
        (units[::-1], FSDPModule.set_modules_to_backward_prefetch),
    ):
        for position, unit in enumerate(order):
            prefetch(unit, order[position + 1 : position + 1 + depth])
