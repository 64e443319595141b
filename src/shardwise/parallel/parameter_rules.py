"""Checks of the parameters, optimizers and dtypes that a plan supports, and the attributes of parameters.

Sharding replaces parameters: FSDP2 and tensor parallelism put DTensors into the module, and with ZeRO-1 or offload the
optimizer sees shards. Attributes that users set (`_no_weight_decay`, `lr_scale`) are copied to the new object. Gradient
hooks would not run, a subclass of Parameter would be lost, and a second reference to the old object, such as in a plain
list, would refer to a weight that is not trained. Plans that replace parameters raise JobError for these three cases.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.engines.engine import engine_named
from shardwise.errors import JobError, some_of
from shardwise.parallel.sharded import DTYPES
from shardwise.parallel.skeleton import second_references
from shardwise.plans.pipeline import SCHEDULES
from shardwise.torch_private.dispatch import (
    BatchNormBase,
    drop_step_hooks,
    has_accumulation_hooks,
    has_gradient_hooks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

    from shardwise.plans import Plan


Attributes = dict[str, dict[str, Any]]
"""Parameter name -> attributes of the parameter."""


def check_parameters(module: nn.Module, plan: Plan, references: Iterable[tuple[str, str]] | None = None) -> None:
    """Raise JobError for parameters with hooks, classes or references that the plan would lose.

    `references` contains the (parameter, attribute) pairs of `second_references`, found before the parameters were
    moved to the meta device. If None, `module` is searched for them. Call before applying the plan.
    """
    is_replaced = plan.zero >= 2 or plan.layout.tp > 1 or engine_named(plan.engine).replaces_parameters
    # These schedules compute weight gradients separately with torch.autograd.grad, which does not run parameter hooks.
    splits_backward = plan.layout.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward
    is_hidden = is_replaced or plan.zero == 1 or plan.offload.optimizer != "none"
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter) and (is_replaced or splits_backward):
            raise _unsupported(
                f"{_name(plan)} does not run gradient hooks, but parameter {name} has one",
                code="support.parameter-gradient-hook",
            )
        if has_accumulation_hooks(parameter) and plan.layout.world_size > 1:
            raise _unsupported(
                f"parameter {name} has a post-accumulate-grad hook, which runs before gradients are summed over ranks",
                code="support.parameter-early-hook",
            )
        if type(parameter) is not nn.Parameter and is_hidden:
            kind = type(parameter).__name__
            raise _unsupported(
                f"{_name(plan)} replaces Parameter subclasses, but parameter {name} is a {kind}",
                code="support.parameter-subclass",
            )
    if is_replaced or plan.layout.pp > 1:
        if references is None:
            references = second_references(module)
        for name, attribute in references:
            raise _unsupported(
                f"{_name(plan)} replaces parameters, but {attribute} also refers to {name} and would not be trained",
                code="support.parameter-second-reference",
            )


def check_dense(module: nn.Module) -> None:
    """Raise JobError for complex parameters and sparse gradients, which the training step does not support."""
    for name, parameter in module.named_parameters():
        if parameter.is_complex():
            raise JobError(
                f"complex parameters are not supported, but {name} is {parameter.dtype}",
                code="model.complex-parameter",
                fix="store real numbers (torch.view_as_real) and call torch.view_as_complex in forward",
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise JobError(
                f"sparse gradients are not supported, but {name or 'the model'} has sparse=True",
                code="model.sparse-gradients",
                fix="set sparse=False",
            )


def attributes_of(module: nn.Module) -> Attributes:
    """Return the attributes that users set on parameters, keyed by parameter name."""
    return {name: dict(vars(parameter)) for name, parameter in module.named_parameters() if vars(parameter)}


def restore_attributes(module: nn.Module, attributes: Attributes) -> None:
    """Set attributes on the parameters with the same names, without overwriting existing attributes."""
    for name, parameter in module.named_parameters():
        copy_attributes(attributes.get(name, {}), parameter)


def copy_attributes(attributes: dict[str, Any], parameter: nn.Parameter) -> None:
    """Set attributes on a parameter, without overwriting existing attributes."""
    own = vars(parameter)
    for key, value in attributes.items():
        own.setdefault(key, value)


def _name(plan: Plan) -> str:
    if engine_named(plan.engine).replaces_parameters:
        return f"engine {plan.engine}"
    zero = ""
    if plan.zero:
        zero = f" with zero = {plan.zero}"
    return f"plan {plan.layout}{zero}"


def _unsupported(fact: str, *, code: str) -> JobError:
    return JobError(fact, code=code, fix="pass --plan ddp, or change the model")


# Trainable parameters, and those without a gradient in the first step on each rank.


def trainable_of(
    named: Iterable[tuple[str, nn.Parameter]], *, owner: str = "the model"
) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that require gradients; raise JobError if `owner` has no such parameter."""
    found = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if not found:
        raise JobError(
            f"{owner} has no trainable parameter",
            code="model.no-trainable-parameter",
            fix="set requires_grad=True on at least one parameter",
        )
    return found


def reject_sparse(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise JobError for sparse gradients, because the training step sums, checks and clips dense gradients."""
    for name, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise JobError(
                f"sparse gradients are not supported, but {name} has a sparse gradient",
                code="model.sparse-gradients",
                fix="set sparse=False",
            )


def without_gradient(
    named: Iterable[tuple[str, nn.Parameter]],
    group: dist.ProcessGroup | None,
    has_gradient: Callable[[nn.Parameter], bool],
) -> dict[int, list[str]]:
    """Return rank of `group` -> names of its trainable parameters without a gradient; communicates over `group`."""
    mine = sorted(name for name, parameter in named if parameter.requires_grad and not has_gradient(parameter))
    everyone = [mine]
    if group is not None and dist.get_backend(group) != "fake":
        everyone = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, mine, group=group)
    return {rank: names for rank, names in enumerate(everyone) if names}


# Trial of an optimizer on shards. A class does not declare whether it reads full tensors, so a trial decides.
#
# An elementwise update (Adam, SGD) computes the same values on a shard as on the full parameter. An optimizer that
# reads the full tensor (row means of Adafactor, orthogonalization of Muon) does so only if DTensor's operators gather
# the shards. Therefore a copy of the job's optimizer runs a few steps on small tensors, full and sharded. If the
# results differ or an operator is missing, the plan is rejected with the optimizer's name. This covers custom
# optimizers. The trial is in fp64: vectorized kernels round the ends of a tensor differently than its middle, and in
# fp32 this difference is as large as a small update.


_LARGEST = 16
"""Maximum size of each dimension of a trial tensor; smaller parameters keep their shape."""
_PER_GROUP = 4
_STEPS = 3
_ROUNDINGS = 1000
"""Number of rounding errors by which a trial weight of magnitude 1 may differ, because sums are reordered."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise JobError for an optimizer whose `step` cannot be called once after backward with dense gradients."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"optimizer {kind} requires a closure that evaluates the loss several times per step",
            code="optimizer.needs-closure",
            fix="use an optimizer whose step() needs no closure, such as torch.optim.AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise JobError(
            f"optimizer {kind} requires sparse gradients, which are not supported",
            code="optimizer.sparse-gradients",
            fix="use torch.optim.Adam",
        )


def check_sharded_updates(optimizer: Optimizer) -> None:
    """Raise JobError if an optimizer updates shards differently than full parameters; call on every rank.

    Communicates over the meshes of sharded parameters if the optimizer's operators do. Each rank checks its own shards.
    """
    likes = [_distinct(group["params"]) for group in optimizer.param_groups]
    if not any(likes):
        return
    state = torch.get_rng_state()
    try:
        expected = _try(optimizer, likes, lambda full, _: full)
    except Exception:  # noqa: BLE001 - the step needs more than parameters and gradients: the trial is inconclusive
        return
    finally:
        torch.set_rng_state(state)
    kind = type(optimizer).__name__
    fix = "use a plan that does not shard parameters (ddp, pp), or an optimizer with elementwise updates"
    try:
        found = _try(optimizer, likes, _sharded_like)
    except Exception as error:  # noqa: BLE001 - DTensor raises various errors for unsupported operators
        reason = str(error).strip().splitlines()[0]
        raise JobError(
            f"optimizer {kind} cannot update sharded parameters ({reason})",
            code="optimizer.sharded-update-failed",
            fix=fix,
        ) from None
    finally:
        torch.set_rng_state(state)
    flat = list(chain.from_iterable(likes))
    if any(map(_differ, found, expected, flat)):
        raise JobError(
            f"optimizer {kind} computes different updates on shards than on full parameters",
            code="optimizer.sharded-update-differs",
            fix=fix,
        )


def trial_shape(parameter: Tensor) -> list[int]:
    """Return the shape of the small tensor on which the optimizer is tried for `parameter`."""
    return [min(size, _LARGEST) for size in parameter.shape]


def _distinct(parameters: Sequence[Tensor]) -> list[DTensor]:
    """Return one sharded parameter for each number of dimensions and placement."""
    found: dict[Any, DTensor] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            found.setdefault((parameter.ndim, tuple(parameter.placements)), parameter)
    return list(found.values())[:_PER_GROUP]


def _try(optimizer: Optimizer, likes: list[list[DTensor]], place: Callable[[Tensor, DTensor], Tensor]) -> list[Tensor]:
    """Run steps of a copy of `optimizer` on trial tensors placed like `likes`, and return their total updates."""
    groups: list[list[nn.Parameter]] = []
    for group in likes:
        initial = [place(_random_like(each, _STEPS), each) for each in group]
        groups.append(list(map(nn.Parameter, initial)))
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    trial.param_groups = []
    for settings, members in zip(optimizer.param_groups, groups, strict=True):
        if members:
            trial.param_groups.append({**settings, "params": members})
    trial.state = defaultdict(dict)
    drop_step_hooks(trial)
    step = type(trial).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined] # without global hooks, which count training steps
    flat = list(chain.from_iterable(likes))
    parameters = list(chain.from_iterable(groups))
    before = [each.detach().clone() for each in parameters]
    for number in range(_STEPS):
        for parameter, like in zip(parameters, flat, strict=True):
            parameter.grad = place(_random_like(like, number), like)
        step(trial)
    return [each.detach() - first for each, first in zip(parameters, before, strict=True)]


def _sharded_like(full: Tensor, like: DTensor) -> DTensor:
    """Return `full` as a DTensor with the mesh and placements of `like`; this mesh has this rank's coordinate.

    The mesh of an operator's result may come from DTensor's cache, filled in the parent process before the fork.
    """
    placements = [Shard(each.dim) if each.is_shard() else Replicate() for each in like.placements]  # type: ignore[attr-defined]
    return distribute_tensor(full, like.device_mesh, placements, src_data_rank=None)


def _random_like(like: DTensor, seed: int) -> Tensor:
    """Return a small random tensor with the trial shape of `like`, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    sample = torch.randn(trial_shape(like), generator=generator, dtype=torch.float64)
    return sample.to(like.to_local().device)


def _differ(update: Tensor, full: Tensor, like: DTensor) -> bool:
    """Return whether this rank's shard of an update differs from the shard of the full parameter's update."""
    if not isinstance(update, DTensor):
        return True
    found, expected = update.to_local(), _sharded_like(full, like).to_local()
    if not expected.numel():
        return False
    allowed = _ROUNDINGS * torch.finfo(full.dtype).eps * (1 + float(full.abs().max()))
    return not float((found - expected).abs().max()) <= allowed  # also true for NaN


# Checks of parameter dtypes before sharding.


def check_dtypes(module: nn.Module, plan: Plan, *, adapted: bool) -> None:
    """Raise JobError for parameter dtypes that FSDP2 or adapters do not support.

    With adapters or FSDP2, trained parameters must have the plan's parameter dtype. Frozen parameters with adapters
    may also have the compute dtype.
    """
    stored, computed = DTYPES[plan.precision.parameter], DTYPES[plan.precision.activations]
    named = list(module.named_parameters())
    if stored == torch.bfloat16:
        _check_bf16(module, adapted=adapted)
    trained = other_dtypes([(name, weight) for name, weight in named if weight.requires_grad], stored)
    frozen = other_dtypes(named, stored, computed)
    if trained and (adapted or (plan.zero >= 2 and engine_named(plan.engine).uses_fsdp)):
        raise JobError(
            f"trained parameters must be {plan.precision.parameter}, got {some_of(trained)}",
            code="model.trained-dtype-mismatch",
            fix=f"freeze them, or convert them to {plan.precision.parameter}, for example with model.float()",
        )
    if frozen and adapted:
        raise JobError(
            f"parameters of a model with adapters must be {plan.precision.parameter} or {plan.precision.compute}, got"
            f" {some_of(frozen)}",
            code="model.frozen-dtype-mismatch",
            fix=f"convert the model to {plan.precision.parameter}, or pass --set precision=bf16 for a bf16 model",
        )


def _check_bf16(module: nn.Module, *, adapted: bool) -> None:
    norms = [name for name, part in module.named_modules() if isinstance(part, BatchNormBase)]
    if norms:
        raise JobError(
            f"bf16 parameters are not supported with batch norms ({some_of(norms)}), whose statistics are fp32",
            code="support.bf16-batch-norm",
            fix="set precision.parameter = fp32",
        )
    if adapted:
        raise JobError(
            "precision.parameter = bf16 is not supported with adapters, which are trained in fp32",
            code="support.bf16-adapters",
            fix="set precision.parameter = fp32, and return a bf16 model from Job.model for frozen bf16 weights",
        )


def other_dtypes(named: Iterable[tuple[str, Tensor]], *dtypes: torch.dtype) -> list[str]:
    """Return the floating-point parameters that have none of the dtypes, as NAME (DTYPE)."""
    found = []
    for name, weight in named:
        if weight.is_floating_point() and weight.dtype not in dtypes:
            found.append(f"{name} ({str(weight.dtype).removeprefix('torch.')})")
    return found


def note_dtypes(module: nn.Module, plan: Plan, note: Callable[[str], None]) -> None:
    """Report the parameters of a model that was built in another dtype than the plan's parameter dtype."""
    stored = plan.precision.parameter
    others = other_dtypes(module.named_parameters(), DTYPES[stored])
    if others:
        note(
            f"the plan has {stored} parameters, but Job.model returns {some_of(others)}, which stay in that dtype with"
            f" their gradients and optimizer states: return model.float() for fp32 weights, and pass --set"
            " precision=bf16 to compute in bf16"
        )
