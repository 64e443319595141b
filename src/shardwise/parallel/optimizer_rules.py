"""Which optimizers a plan can run: found by trying, since a class does not say whether it looks at whole tensors.

An update that treats every element by itself (Adam, SGD) gives the same numbers on a shard as on the whole parameter.
One that looks at the whole tensor (Adafactor's row means, Muon's orthogonalization) does so only as far as DTensor's
operators bring the shards together for it, in the same arithmetic. So a copy of the job's own optimizer takes a few
steps on small tensors, whole and sharded as the parameters are: where the results differ, or the operators are not
there, the plan is refused by the optimizer's name. This reaches any user's optimizer.
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
    from collections.abc import Sequence

    from torch.optim import Optimizer

_LARGEST = 16
"""Elements along a dimension of a trial tensor: smaller parameters are tried in their own shape."""
_PER_GROUP = 4
_STEPS = 3
_ROUNDINGS = 100
"""Rounding errors of its dtype by which an update may differ: sums over shards have another order."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose `step` cannot be called once after backward, with dense gradients."""
    kind = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise JobError(
            f"optimizer {kind} evaluates the loss several times in a step, through a closure",
            fix="use an optimizer that steps once on given gradients",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise JobError(f"optimizer {kind} takes sparse gradients, and gradients are dense here", fix="use Adam")


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
        expected = _try(optimizer, [[_whole(each) for each in group] for group in samples])
    except Exception:  # noqa: BLE001 - it wants more than parameters with gradients, so nothing can be learnt this way
        return
    finally:
        torch.set_rng_state(state)
    kind = type(optimizer).__name__
    fix = "use a plan that keeps parameters whole (ddp, pp), or an optimizer that treats every element by itself"
    try:
        found = _try(optimizer, [[_sharded(each) for each in group] for group in samples])
    except Exception as error:  # noqa: BLE001 - whatever torch lacks for shards
        reason = str(error).strip().splitlines()[0]
        raise JobError(f"optimizer {kind} cannot update sharded parameters ({reason})", fix=fix) from None
    finally:
        torch.set_rng_state(state)
    if any(_differ(update, whole) for update, whole in zip(found, expected, strict=True)):
        raise JobError(f"optimizer {kind} gives other updates on shards than on whole parameters", fix=fix)


def _samples(parameters: Sequence[DTensor]) -> list[DTensor]:
    """Return one parameter of each number of dimensions and placement."""
    found: dict[Any, DTensor] = {}
    for parameter in parameters:
        found.setdefault((parameter.ndim, tuple(parameter.placements)), parameter)
    return list(found.values())[:_PER_GROUP]


def _try(optimizer: Optimizer, groups: list[list[nn.Parameter]]) -> list[Tensor]:
    """Step a copy of `optimizer` over `groups` and return by how much each parameter moved."""
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    members = zip(optimizer.param_groups, groups, strict=True)
    trial.param_groups = [{**group, "params": parameters} for group, parameters in members if parameters]
    trial.state = defaultdict(dict)
    trial._optimizer_step_pre_hooks = OrderedDict()
    trial._optimizer_step_post_hooks = OrderedDict()
    parameters = [each for group in groups for each in group]
    before = [each.detach().clone() for each in parameters]
    for number in range(_STEPS):
        for parameter in parameters:
            parameter.grad = _values(parameter, number)
        trial.step()
    return [each.detach() - first for each, first in zip(parameters, before, strict=True)]


def _whole(parameter: DTensor) -> nn.Parameter:
    shape = [min(size, _LARGEST) for size in parameter.shape]
    device = parameter.to_local().device
    return nn.Parameter(_draw(shape, _STEPS).to(device, parameter.dtype))


def _sharded(parameter: DTensor) -> nn.Parameter:
    whole = _whole(parameter).detach()
    return nn.Parameter(_placed(whole, parameter))


def _placed(whole: Tensor, like: DTensor) -> DTensor:
    placements = [Shard(each.dim) if each.is_shard() else Replicate() for each in like.placements]  # type: ignore[attr-defined]
    return distribute_tensor(whole, like.device_mesh, placements, src_data_rank=None)


def _values(parameter: nn.Parameter, number: int) -> Tensor:
    """Return a gradient, the same on every rank and for both forms of a parameter."""
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    whole = _draw(list(parameter.shape), number).to(device, parameter.dtype)
    return _placed(whole, parameter) if isinstance(parameter, DTensor) else whole


def _draw(shape: list[int], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _differ(update: Tensor, whole: Tensor) -> bool:
    """Whether this rank's shard of an update is not that of the update of the whole parameter."""
    if not isinstance(update, DTensor):
        return True
    found, expected = update.to_local(), _placed(whole, update).to_local()
    if not expected.numel():
        return False
    allowed = _ROUNDINGS * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    return not float((found - expected).abs().max()) <= allowed  # also true of NaN
