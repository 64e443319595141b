"""Optimizer state that is not a tensor: an int `step` beside the moments, a setting that the optimizer adapts.

torch's optimizers keep tensors alone, but any `torch.optim.Optimizer` may keep Python values in `state[parameter]`
(older Adam variants count steps in an int) or change its `param_groups` while it trains (Prodigy's `d`, schedule-free's
`k`). Both are part of the training's state: a resumed run without them continues with other updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from shardwise.errors import JobError, some_of
from shardwise.training.user_state import plain_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shardwise.parallel.optimizer import Optimized

_SET_EACH_STEP = {"params", "lr"}
"""Keys of a parameter group that are not state: the members, and the rate that the job's schedule sets."""


def plain_states(optimized: Optimized) -> dict[str, Any]:
    """Return the optimizer's Python values as PARAMETER/KEY, and as #GROUP/KEY what changed in a parameter group.

    A value that JSON would not return as it is, and one that belongs to no parameter of the model, is refused by name.
    """
    optimizer: Any = optimized.optimizer
    if not isinstance(optimizer, Optimizer):
        return {}  # another engine's, which keeps arrays alone
    names = {id(parameter): name for name, parameter in optimized.named}
    found: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        name = names.get(id(parameter))
        if values and name is None:
            raise JobError(
                f"optimizer {optimized.kind} keeps {some_of(values)} for a tensor that is not a parameter of the model",
                code="optimizer.state-foreign-tensor",
                fix="keep its state as tensors, or train with --set engine=torch",
            )
        found |= {f"{name}/{key}": value for key, value in values.items()}
    for number, (group, first) in enumerate(zip(optimizer.param_groups, optimized.first_settings, strict=True)):
        found |= {f"#{number}/{key}": value for key, value in group.items() if _has_changed(key, value, first)}
    return {name: plain_value(value, (f"state {name} of optimizer {optimized.kind}",)) for name, value in found.items()}


def merge_plain_states(everyone: Iterable[Mapping[str, Any]], kind: str) -> dict[str, Any]:
    """Return the values of all ranks as one dict; refuses a value that ranks disagree on."""
    merged: dict[str, Any] = {}
    for values in everyone:
        for name, value in values.items():
            if merged.setdefault(name, value) != value:
                raise JobError(
                    f"optimizer {kind} keeps {name} as {merged[name]} on one rank and {value} on another",
                    code="optimizer.state-ranks-differ",
                    fix="use a plan that keeps parameters whole (ddp), or keep the value as a tensor",
                )
    return merged


def restore_plain_states(optimized: Optimized, values: Mapping[str, Any]) -> None:
    """Put the values of `plain_states` back into the optimizer; names of other ranks' parameters are left out."""
    parameters = dict(optimized.named)
    groups: Sequence[dict[str, Any]] = optimized.param_groups
    for full, value in values.items():
        name, _, key = full.rpartition("/")
        if name.startswith("#"):
            number = int(name[1:])
            if number < len(groups):
                groups[number][key] = value
        elif name in parameters:
            optimized.optimizer.state[parameters[name]][key] = value


def _has_changed(key: str, value: Any, first: Mapping[str, Any]) -> bool:
    if key in _SET_EACH_STEP or isinstance(value, Tensor):
        return False
    return bool(key not in first or first[key] != value)
