"""Initial weights and optimizers of a model in MLX, under torch's names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
import torch.distributed as dist
from mlx import optimizers
from mlx.utils import tree_flatten, tree_unflatten

from shardwise.checkpoint.convert.mlx import is_mlx, read_as_saved
from shardwise.engines.mlx.adapters import adapt_optimizer
from shardwise.engines.mlx.arrays import to_torch
from shardwise.errors import JobError
from shardwise.parallel.weights import open_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mlx import nn
    from torch import Tensor

    from shardwise.engines.mlx.arrays import ArrayForm, Arrays
    from shardwise.job.optimizers import OptimizerFactory


class Origin(NamedTuple):
    """Where first values came from."""

    words: str
    num_batches: int = 0
    """That batch norms had seen then."""


def read_weights(path: Path, model: nn.Module, form: ArrayForm) -> Origin:
    """Put the values of a state dict, torch's or MLX's own, into the model; on every rank."""
    values: Mapping[str, Tensor]
    if is_mlx(path):
        values, layout = read_as_saved(path), dataclasses.replace(form, orders={})
    else:
        values, layout = open_weights(path), form
    known = {name: name for name in (*form.parameters, *form.statistics)} | dict(form.tied)
    others = set(values) - set(known) - set(form.counts)
    extra = sorted(name for name in others if not _is_second_name(name, values, known))
    saved = {known[name]: values[name] for name in values if name in known}
    missing = sorted(set(known.values()) - set(saved))
    if missing or extra:
        raise JobError(
            f"Job.weights {path} lacks {missing} and has extra {extra}",
            code="model.weights-keys-mismatch",
            fix="name the state dict of this model",
        )
    _write(model, layout, saved, path)
    return Origin(f"read from {path}", max((int(values[name]) for name in form.counts if name in values), default=0))


def _is_second_name(name: str, values: Mapping[str, Tensor], known: Mapping[str, str]) -> bool:
    """Whether this is a tensor that the model knows by another name: torch names what is tied twice."""
    tensor = values[name]
    others = (values[other] for other in values if other in known)
    return any(other.data_ptr() == tensor.data_ptr() and other.shape == tensor.shape for other in others)


def share_weights(model: nn.Module, form: ArrayForm) -> Origin:
    """Communicate over the world to give every rank the values of rank 0."""
    arrays = form.read(model, (*form.parameters, *form.statistics))
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return Origin("built by the model")
    values = {name: form.to_torch(name, array).clone() for name, array in arrays.items()}
    for value in values.values():
        dist.broadcast(value, src=0)
    _write(model, form, values)
    return Origin("built on every rank, with the values of rank 0")


def _write(model: nn.Module, form: ArrayForm, values: dict[str, Tensor], path: Path | None = None) -> None:
    held = form.read(model, values)
    arrays = {}
    for name, value in values.items():
        array = form.to_mlx(name, value.contiguous())
        if array.shape != held[name].shape:
            ours = list(form.to_torch(name, held[name]).shape)
            raise JobError(
                f"Job.weights {path} does not load ({name} is {list(value.shape)}, the model's {ours})",
                code="model.weights-shape-mismatch",
                fix="name the state dict of this model",
            )
        arrays[name] = array.astype(held[name].dtype)
    form.write(model, arrays)


# MLX's optimizers as parameter groups: their rates, and their states under torch's names.


_KEYS = (
    (optimizers.Adam, {"m": "exp_avg", "v": "exp_avg_sq"}),
    (optimizers.SGD, {"v": "momentum_buffer"}),
)
"""What torch calls the states of a parameter; other optimizers keep MLX's names."""
STEP = "step"
_SETTINGS = (int, float, str, tuple, list)


@dataclass(frozen=True)
class MlxGroup:
    """One of MLX's optimizers and the parameters that it moves."""

    optimizer: optimizers.Optimizer
    names: tuple[str, ...]

    @property
    def keys(self) -> Mapping[str, str]:
        """Torch's name for each state of a parameter that has another."""
        return next((keys for kind, keys in _KEYS if isinstance(self.optimizer, kind)), {})

    @property
    def counts(self) -> bool:
        """Whether torch counts steps for each parameter: for plain descent it does not."""
        return not isinstance(self.optimizer, optimizers.SGD)

    @property
    def settings(self) -> dict[str, Any]:
        """Its numbers and words, as torch's parameter groups have them."""
        own = vars(self.optimizer).items()
        plain = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in own
            if not key.startswith("_") and isinstance(value, _SETTINGS)
        }
        rate = np.float32(self.optimizer.learning_rate.item())  # printed and read again, 0.001 is what was meant
        return {"lr": float(str(rate)), **plain}


def make_groups(
    factory: OptimizerFactory, form: ArrayForm, arrays: Arrays
) -> tuple[optimizers.Optimizer, list[MlxGroup]]:
    """Return the job's optimizer with its states made, and its groups; what it must not be is refused."""
    optimizer = adapt_optimizer(factory)([(name, arrays[name]) for name in form.trained])
    if not isinstance(optimizer, optimizers.Optimizer):
        raise JobError(
            f"Job.optimizer made a {type(optimizer).__name__} for an MLX model",
            code="optimizer.not-mlx",
            fix="use sw.adamw or sw.sgd, or return one of mlx.optimizers",
        )
    optimizer.init(tree_unflatten([(name, arrays[name]) for name in form.trained]))
    groups = [MlxGroup(*pair) for pair in _members(optimizer, form.trained, arrays) if pair[1]]
    for group in groups:
        _refuse_own_rates(group.optimizer)
    return optimizer, groups


def _refuse_own_rates(optimizer: optimizers.Optimizer) -> None:
    # MLX has no other place that says so; Adafactor takes no rate, or does not use it, while its steps are relative.
    scheduled, relative = optimizer._schedulers, getattr(optimizer, "relative_step", False)  # noqa: SLF001
    if scheduled or relative or "learning_rate" not in optimizer.state:
        raise JobError(
            f"the optimizer {type(optimizer).__name__} brings a schedule of its own",
            code="optimizer.own-schedule",
            fix=f"give it a number{' and relative_step=False' if relative else ''},"
            " and the schedule to the job: schedule=sw.schedules.Cosine()",
        )


def _members(
    optimizer: Any, names: Sequence[str], arrays: Arrays
) -> list[tuple[optimizers.Optimizer, tuple[str, ...]]]:
    if not isinstance(optimizer, optimizers.MultiOptimizer):
        return [(optimizer, tuple(names))]
    taken: list[list[str]] = [[] for _ in optimizer.optimizers]
    for name in names:
        place = next(place for place, takes in enumerate(optimizer.filters) if takes(name, arrays[name]))
        taken[place].append(name)
    return [(each, tuple(its)) for each, its in zip(optimizer.optimizers, taken, strict=True)]


def set_rates(groups: Sequence[MlxGroup], rates: Sequence[float], dtype: mx.Dtype) -> None:
    """Set each group's learning rate."""
    for group, rate in zip(groups, rates, strict=True):
        group.optimizer.state["learning_rate"] = mx.array(rate, dtype=dtype)


def read_states(groups: Sequence[MlxGroup], form: ArrayForm) -> dict[str, Tensor]:
    """Return the states of all parameters as torch has them, PARAMETER/KEY, to be read only."""
    found: dict[str, Tensor] = {}
    for group in groups:
        for name, key, array in _own(group):
            found[f"{name}/{group.keys.get(key, key)}"] = form.to_torch(name, array)
        if group.counts:
            count = to_torch(group.optimizer.step.astype(mx.float32))
            found.update({f"{name}/{STEP}": count for name in group.names})
    return found


def write_states(groups: Sequence[MlxGroup], form: ArrayForm, states: Mapping[str, Tensor]) -> None:
    """Take over states that were read by `read_states`, or by torch; those that are not there stay."""
    for group in groups:
        flat = []
        for name, key, _ in _own(group):
            given = states.get(f"{name}/{group.keys.get(key, key)}")
            if given is not None:
                flat.append((f"{name}.{key}", form.to_mlx(name, given)))
        counts = {float(states[full]) for name in group.names if (full := f"{name}/{STEP}") in states}
        if len(counts) > 1:
            raise JobError(
                f"the checkpoint's parameters were moved {sorted(counts)} times, and MLX counts for all at once",
                code="checkpoint.optimizer-steps-differ",
                fix="go on with engine torch, or --resume never",
            )
        if counts and group.counts:
            flat.append((STEP, mx.array(int(counts.pop()), dtype=mx.uint64)))
        assign(group.optimizer.state, tree_unflatten(flat) if flat else {})


def assign(held: Any, given: Any) -> None:
    """Put the leaves of `given` into the same places of `held`, which stays the same object: functions hold it."""
    for key, value in given.items() if isinstance(given, dict) else enumerate(given):
        if isinstance(value, mx.array):
            held[key] = value
        elif isinstance(value, dict | list):
            assign(held[key], value)


def _own(group: MlxGroup) -> list[tuple[str, str, mx.array]]:
    """Return (parameter, key, array) for each state that a parameter has."""
    members = set(group.names)
    split = [(*full.rpartition("."), array) for full, array in tree_flatten(group.optimizer.state)]
    return [(name, key, array) for name, _, key, array in split if name in members]
