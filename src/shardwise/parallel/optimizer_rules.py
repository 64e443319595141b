"""Which optimizers a plan can run: found by trying, since a class does not say whether it looks at whole tensors.

An update that treats every element by itself (Adam, SGD) gives the same numbers on a shard as on the whole parameter.
One that looks at the whole tensor (Adafactor's row means, Muon's orthogonalization) does so only as far as DTensor's
operators bring the shards together for it, in the same arithmetic. So a copy of the job's own optimizer takes a few
steps on small tensors, whole and sharded as the parameters are: where the results differ, or the operators are not
there, the plan is refused by the optimizer's name. This reaches any user's optimizer. The trial is in fp64: vectorized
kernels round the ends of a tensor otherwise than its middle, and in fp32 that is as large as a small update.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardwise.errors import JobError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

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

    Communicates as far as the optimizer's own operators do, over the meshes of sharded parameters; each rank looks at
    its own shards.
    """
    sharded = [[each for each in group["params"] if isinstance(each, DTensor)] for group in optimizer.param_groups]
    if not any(sharded):
        return
    samples = [_samples(parameters) for parameters in sharded]
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


def _samples(parameters: Sequence[DTensor]) -> list[DTensor]:
    """Return one parameter of each number of dimensions and placement."""
    found: dict[Any, DTensor] = {}
    for parameter in parameters:
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
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    likes = [each for group in samples for each in group]
    parameters = [each for group in groups for each in group]
    before = [each.detach().clone() for each in parameters]
    for number in range(_STEPS):
        for parameter, like in zip(parameters, likes, strict=True):
            parameter.grad = place(_draw(like, number), like)
        trial.step()
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
