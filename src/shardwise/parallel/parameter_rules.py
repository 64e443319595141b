"""What users attach to parameters: attributes go along into every plan, the rest is kept or refused by name.

Sharding replaces a parameter by another object: FSDP2 and tensor parallelism put a DTensor into the module, ZeRO-1 and
offload show the optimizer a piece. Attributes (`_no_weight_decay`, `lr_scale`) are copied to the new object. A gradient
hook would never run on it, a subclass of Parameter would be gone, and a second reference to the old object (in a plain
list) would leave forward with a weight that nobody trains: a plan that replaces parameters refuses those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from shardwise.errors import JobError
from shardwise.parallel.skeleton import accumulation_hooks, has_hooks, second_references
from shardwise.plans.pipeline import SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.plans import Plan


Attributes = dict[str, dict[str, Any]]
"""Attributes of parameters by the parameter's name."""


def check_parameters(module: nn.Module, plan: Plan, references: Iterable[tuple[str, str]] | None = None) -> None:
    """Refuse parameters with something attached that the plan would lose; `module` is not yet under the plan.

    `references` are the (parameter, attribute) pairs of a model whose parameters were moved to the meta device, which
    cannot be found in it any more; without them they are looked up.
    """
    is_replaced = plan.zero >= 2 or plan.layout.tp > 1 or plan.engine == "deepspeed"
    # Such schedules compute gradients of weights apart, by torch.autograd.grad, which runs no hook of a parameter.
    splits_backward = plan.layout.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward
    is_hidden = is_replaced or plan.zero == 1 or plan.offload.optimizer != "none"
    for name, parameter in module.named_parameters():
        if has_hooks(parameter) and (is_replaced or splits_backward):
            raise _refusal(
                f"{name} has a gradient hook, which {_name(plan)} would never run",
                code="support.parameter-gradient-hook",
            )
        if accumulation_hooks(parameter) and plan.layout.world_size > 1:
            raise _refusal(
                f"{name} has a hook that runs before its gradient is summed over ranks",
                code="support.parameter-early-hook",
            )
        if type(parameter) is not nn.Parameter and is_hidden:
            kind = type(parameter).__name__
            raise _refusal(
                f"{name} is a {kind}, and {_name(plan)} would make a plain Parameter of it",
                code="support.parameter-subclass",
            )
    if is_replaced or plan.layout.pp > 1:
        for name, place in second_references(module) if references is None else references:
            raise _refusal(
                f"{name} is also kept in the attribute {place}, where {_name(plan)} would leave a weight that is not"
                " trained",
                code="support.parameter-second-reference",
            )


def check_dense(module: nn.Module) -> None:
    """Refuse complex parameters and layers with sparse gradients, which no step here can clip, sum or check."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise JobError(
                f"{name} is {parameter.dtype}, and complex parameters are not trained here",
                code="model.complex-parameter",
                fix="keep it as real numbers (torch.view_as_real) and use torch.view_as_complex in forward",
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise JobError(
                f"{name} has sparse = True, and gradients are dense here",
                code="model.sparse-gradients",
                fix="use sparse=False",
            )


def attributes_of(module: nn.Module) -> Attributes:
    """Return what users set on parameters, by name."""
    return {name: dict(vars(parameter)) for name, parameter in module.named_parameters() if vars(parameter)}


def restore_attributes(module: nn.Module, attributes: Attributes) -> None:
    """Set attributes on the parameters of these names that lack them."""
    for name, parameter in module.named_parameters():
        copy_attributes(attributes.get(name, {}), parameter)


def copy_attributes(attributes: dict[str, Any], parameter: nn.Parameter) -> None:
    """Set attributes that the parameter lacks."""
    own = vars(parameter)
    own.update({key: value for key, value in attributes.items() if key not in own})


def _name(plan: Plan) -> str:
    if plan.engine == "deepspeed":
        return "engine deepspeed"
    return f"plan {plan.layout} with zero = {plan.zero}" if plan.zero else f"plan {plan.layout}"


def _refusal(fact: str, *, code: str) -> JobError:
    return JobError(fact, code=code, fix="use --plan ddp, or change the model")


# Which parameters are trained, and the gradient probe: which of them got no gradient in the first step, by rank.


def trainable_of(
    named: Iterable[tuple[str, nn.Parameter]], *, owner: str = "the model"
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients; an `owner` without one is refused."""
    found = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not found:
        raise JobError(
            f"{owner} has no trainable parameter",
            code="model.no-trainable-parameter",
            fix="leave some with requires_grad=True",
        )
    return found


def refuse_sparse(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse a gradient that is sparse: steps sum, check and clip dense ones."""
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise JobError(
                f"{name} has a sparse gradient, and gradients are dense here",
                code="model.sparse-gradients",
                fix="use sparse=False",
            )


def without_gradient(
    named: Iterable[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup | None,
    has_gradient: Callable[[nn.Parameter], bool],
) -> dict[int, list[str]]:
    """Return trainable parameters that have no gradient, by rank of `group`; communicates over it."""
    mine = sorted(name for name, parameter in named if parameter.requires_grad and not has_gradient(parameter))
    if group is None or dist.get_backend(group) == "fake":
        return {0: mine} if mine else {}
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    return {rank: names for rank, names in enumerate(everyone) if names}
