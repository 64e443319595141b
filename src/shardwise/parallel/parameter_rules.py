"""Which parameters, optimizers and dtypes a plan can run, and what users attach to parameters.

Sharding replaces a parameter by another object: FSDP2 and tensor parallelism put a DTensor into the module, ZeRO-1 and
offload show the optimizer a piece. Attributes (`_no_weight_decay`, `lr_scale`) are copied to the new object. A gradient
hook would never run on it, a subclass of Parameter would be gone, and a second reference to the old object (in a plain
list) would leave forward with a weight that nobody trains: a plan that replaces parameters refuses those.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
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
from shardwise.torch_private.dispatch import has_accumulation_hooks, has_gradient_hooks
from shardwise.torch_private.modules import drop_step_hooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

    from shardwise.plans import Plan


Attributes = dict[str, dict[str, Any]]
"""Attributes of parameters by the parameter's name."""


def check_parameters(module: nn.Module, plan: Plan, references: Iterable[tuple[str, str]] | None = None) -> None:
    """Refuse parameters with something attached that the plan would lose; `module` is not yet under the plan.

    `references` are the (parameter, attribute) pairs of a model whose parameters were moved to the meta device, which
    cannot be found in it any more; without them they are looked up.
    """
    is_replaced = plan.zero >= 2 or plan.layout.tp > 1 or engine_named(plan.engine).replaces_parameters
    # Such schedules compute gradients of weights apart, by torch.autograd.grad, which runs no hook of a parameter.
    splits_backward = plan.layout.pp > 1 and SCHEDULES[plan.pipeline.schedule].splits_backward
    is_hidden = is_replaced or plan.zero == 1 or plan.offload.optimizer != "none"
    for name, parameter in module.named_parameters():
        if has_gradient_hooks(parameter) and (is_replaced or splits_backward):
            raise _refusal(
                f"{name} has a gradient hook, which {_name(plan)} would never run",
                code="support.parameter-gradient-hook",
            )
        if has_accumulation_hooks(parameter) and plan.layout.world_size > 1:
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
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
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
    if engine_named(plan.engine).replaces_parameters:
        return f"engine {plan.engine}"
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
            fix="set requires_grad=True on at least one",
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


# Which optimizers a plan can run: found by trying, since a class does not declare whether it reads whole tensors.
#
# An update that treats every element by itself (Adam, SGD) gives the same numbers on a shard as on the whole
# parameter. One that reads the whole tensor (Adafactor's row means, Muon's orthogonalization) does so only as
# far as DTensor's operators bring the shards together for it, in the same arithmetic. So a copy of the job's own
# optimizer takes a few steps on small tensors, whole and sharded as the parameters are: where the results differ,
# or the operators are not there, the plan is refused by the optimizer's name. This reaches any user's optimizer.
# The trial is in fp64: vectorized kernels round the ends of a tensor otherwise than its middle, and in fp32 that is
# as large as a small update.


_LARGEST = 16
"""Elements along a dimension of a trial tensor: smaller parameters are tried in their own shape."""
_PER_GROUP = 4
_STEPS = 3
_ROUNDINGS = 1000
"""Rounding errors by which a trial weight, of a size about 1, may differ: sums over shards have another order."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose `step` cannot be called once after backward, with dense gradients."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"optimizer {kind} evaluates the loss several times in a step, through a closure",
            code="optimizer.needs-closure",
            fix="use an optimizer that steps once on given gradients",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise JobError(
            f"optimizer {kind} takes sparse gradients, and gradients are dense here",
            code="optimizer.sparse-gradients",
            fix="use Adam",
        )


def check_sharded_updates(optimizer: Optimizer) -> None:
    """Refuse an optimizer that gives other updates on shards than on whole parameters; called on every rank.

    Communicates as far as the optimizer's own operators do, over the meshes of sharded parameters; each rank tries
    its own shards.
    """
    samples = [_samples(group["params"]) for group in optimizer.param_groups]
    if not any(samples):
        return
    state = torch.get_rng_state()
    try:
        expected = _try(optimizer, samples, lambda whole, _: whole)
    except Exception:  # noqa: BLE001 - it wants more than parameters with gradients, so nothing can be learnt this way
        return
    finally:
        torch.set_rng_state(state)
    kind = type(optimizer).__name__
    fix = "use a plan that keeps parameters whole (ddp, pp), or an optimizer that treats every element by itself"
    try:
        found = _try(optimizer, samples, _placed)
    except Exception as error:  # noqa: BLE001 - whatever torch lacks for shards
        reason = str(error).strip().splitlines()[0]
        raise JobError(
            f"optimizer {kind} cannot update sharded parameters ({reason})",
            code="optimizer.sharded-update-failed",
            fix=fix,
        ) from None
    finally:
        torch.set_rng_state(state)
    likes = [each for group in samples for each in group]
    if any(map(_differ, found, expected, likes)):
        raise JobError(
            f"optimizer {kind} gives other updates on shards than on whole parameters",
            code="optimizer.sharded-update-differs",
            fix=fix,
        )


def trial_shape(parameter: Tensor) -> list[int]:
    """Return the shape of a trial tensor in the place of `parameter`."""
    return [min(size, _LARGEST) for size in parameter.shape]


def _samples(parameters: Sequence[Tensor]) -> list[DTensor]:
    """Return one sharded parameter of each number of dimensions and placement."""
    found: dict[Any, DTensor] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            found.setdefault((parameter.ndim, tuple(parameter.placements)), parameter)
    return list(found.values())[:_PER_GROUP]


def _try(
    optimizer: Optimizer, samples: list[list[DTensor]], place: Callable[[Tensor, DTensor], Tensor]
) -> list[Tensor]:
    """Step a copy of `optimizer` over trial tensors, each placed as its sample, and return by how much each moved."""
    groups = [[nn.Parameter(place(_draw(each, _STEPS), each)) for each in group] for group in samples]
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    members = zip(optimizer.param_groups, groups, strict=True)
    trial.param_groups = [{**group, "params": parameters} for group, parameters in members if parameters]
    trial.state = defaultdict(dict)
    drop_step_hooks(trial)
    step = type(trial).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined] # without global hooks, which count steps of the training
    likes = [each for group in samples for each in group]
    parameters = [each for group in groups for each in group]
    before = [each.detach().clone() for each in parameters]
    for number in range(_STEPS):
        for parameter, like in zip(parameters, likes, strict=True):
            parameter.grad = place(_draw(like, number), like)
        step(trial)
    return [each.detach() - first for each, first in zip(parameters, before, strict=True)]


def _placed(whole: Tensor, like: DTensor) -> DTensor:
    """Return `whole` sharded as `like`, whose own mesh knows this rank's coordinates.

    The mesh of a result may be an equal one out of DTensor's cache, made in the process that this one was forked from.
    """
    placements = [Shard(each.dim) if each.is_shard() else Replicate() for each in like.placements]  # type: ignore[attr-defined]
    return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)


def _draw(like: DTensor, seed: int) -> Tensor:
    """Return numbers for a small tensor in the place of `like`, the same on every rank."""
    drawn = torch.randn(trial_shape(like), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.to(like.to_local().device)


def _differ(update: Tensor, whole: Tensor, like: DTensor) -> bool:
    """Whether this rank's shard of an update is not that of the update of the whole parameter."""
    if not isinstance(update, DTensor):
        return True
    found, expected = update.to_local(), _placed(whole, like).to_local()
    if not expected.numel():
        return False
    allowed = _ROUNDINGS * torch.finfo(whole.dtype).eps * (1 + float(whole.abs().max()))
    return not float((found - expected).abs().max()) <= allowed  # also true of NaN


# Which dtypes of weights a plan can have: mixes that no wrapper takes are refused by name, before any is wrapped.


def check_dtypes(module: nn.Module, plan: Plan, *, adapted: bool) -> None:
    """Refuse weights that no wrapper takes together, by name, before any is wrapped.

    What is trained must be in the dtype of the plan's parameters, wherever that is relied on: beside adapters
    and in FSDP2. Weights frozen beside adapters may also be in the dtype that the plan computes in.
    """
    stored, computed = DTYPES[plan.precision.parameter], DTYPES[plan.precision.compute]
    named = [(name, weight) for name, weight in module.named_parameters() if weight.is_floating_point()]
    trained = [f"{name} ({_dtype_name(each)})" for name, each in named if each.requires_grad and each.dtype != stored]
    if trained and (adapted or (plan.zero >= 2 and engine_named(plan.engine).uses_fsdp)):
        raise JobError(
            f"{some_of(trained)} with requires_grad, where the plan trains parameters in {plan.precision.parameter}",
            code="model.trained-dtype-mismatch",
            fix=f"freeze them, or make them {plan.precision.parameter}, as by model.float()",
        )
    frozen = [f"{name} ({_dtype_name(each)})" for name, each in named if each.dtype not in {stored, computed}]
    if frozen and adapted:
        raise JobError(
            f"{some_of(frozen)} beside adapters, where the plan's parameters are {plan.precision.parameter}"
            f" and computes in {plan.precision.compute}",
            code="model.frozen-dtype-mismatch",
            fix=f"make the model {plan.precision.parameter}, or --set precision=bf16 for a bf16 one",
        )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
