"""Initial weights and optimizer states of an MLX model, with PyTorch parameter names."""

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
from shardwise.engines.mlx.arrays import to_torch
from shardwise.engines.mlx.functions import adapt_optimizer
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
    """The source of the initial weights."""

    description: str
    num_batches: int = 0
    """Batches that batch norms had processed when the weights were saved."""


def read_weights(path: Path, model: nn.Module, form: ArrayForm) -> Origin:
    """Load a state dict of torch or MLX into the model; call on every rank."""
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
            f"Job.weights {path} does not match the model: missing keys {missing}, unexpected keys {extra}",
            code="model.weights-keys-mismatch",
            fix="set Job.weights to a state dict of this model",
        )
    _write(model, layout, saved, path)
    return Origin(f"read from {path}", max((int(values[name]) for name in form.counts if name in values), default=0))


def _is_second_name(name: str, values: Mapping[str, Tensor], known: Mapping[str, str]) -> bool:
    """Return whether a tensor has another name that the model knows: torch saves tied parameters under each name."""
    tensor = values[name]
    others = (values[other] for other in values if other in known)
    return any(other.data_ptr() == tensor.data_ptr() and other.shape == tensor.shape for other in others)


def share_weights(model: nn.Module, form: ArrayForm) -> Origin:
    """Broadcast rank 0's weights and statistics to all ranks; communicates over the world."""
    arrays = form.read(model, (*form.parameters, *form.statistics))
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return Origin("built by the model")
    values = {name: form.to_torch(name, array).clone() for name, array in arrays.items()}
    for value in values.values():
        dist.broadcast(value, src=0)
    _write(model, form, values)
    return Origin("built on every rank, with the values of rank 0")


def _write(model: nn.Module, form: ArrayForm, values: dict[str, Tensor], path: Path | None = None) -> None:
    current = form.read(model, values)
    arrays = {}
    for name, value in values.items():
        array = form.to_mlx(name, value.contiguous())
        if array.shape != current[name].shape:
            expected = list(form.to_torch(name, current[name]).shape)
            raise JobError(
                f"Job.weights {path}: {name} must have shape {expected}, got {list(value.shape)}",
                code="model.weights-shape-mismatch",
                fix="set Job.weights to a state dict of this model",
            )
        arrays[name] = array.astype(current[name].dtype)
    form.write(model, arrays)


# MLX's optimizers as parameter groups: their learning rates, and their states with PyTorch parameter names.


_KEYS = (
    (optimizers.Adam, {"m": "exp_avg", "v": "exp_avg_sq"}),
    (optimizers.SGD, {"v": "momentum_buffer"}),
)
"""Torch's names for optimizer states; states of other optimizers keep MLX's names."""
STEP = "step"
_SETTINGS = (int, float, str, tuple, list)


@dataclass(frozen=True)
class MlxGroup:
    """An MLX optimizer and the parameters that it updates."""

    optimizer: optimizers.Optimizer
    names: tuple[str, ...]

    @property
    def keys(self) -> Mapping[str, str]:
        """Torch's names for this optimizer's states, by MLX's names."""
        return next((keys for kind, keys in _KEYS if isinstance(self.optimizer, kind)), {})

    @property
    def counts(self) -> bool:
        """Whether torch's optimizer counts steps for each parameter; SGD does not."""
        return not isinstance(self.optimizer, optimizers.SGD)

    @property
    def settings(self) -> dict[str, Any]:
        """Hyperparameters of the optimizer, as in torch's parameter groups."""
        rate = np.float32(self.optimizer.learning_rate.item())  # printed as fp32 and parsed again, 0.001 stays 0.001
        settings: dict[str, Any] = {"lr": float(str(rate))}
        for key, value in vars(self.optimizer).items():
            if not key.startswith("_") and isinstance(value, _SETTINGS):
                settings[key] = tuple(value) if isinstance(value, list) else value
        return settings


def make_groups(
    factory: OptimizerFactory, form: ArrayForm, arrays: Arrays
) -> tuple[optimizers.Optimizer, list[MlxGroup]]:
    """Return the job's optimizer with initialized states, and its groups; raise if engine mlx cannot use it."""
    optimizer = adapt_optimizer(factory)([(name, arrays[name]) for name in form.trained])
    if not isinstance(optimizer, optimizers.Optimizer):
        raise JobError(
            f"Job.optimizer must return an MLX optimizer for an MLX model, got {type(optimizer).__name__}",
            code="optimizer.not-mlx",
            fix="use sw.adamw or sw.sgd, or return an optimizer of mlx.optimizers",
        )
    optimizer.init(tree_unflatten([(name, arrays[name]) for name in form.trained]))
    groups = [MlxGroup(*pair) for pair in _members(optimizer, form.trained, arrays) if pair[1]]
    for group in groups:
        _require_constant_rate(group.optimizer)
    return optimizer, groups


def _require_constant_rate(optimizer: optimizers.Optimizer) -> None:
    # MLX has no public name for its schedulers. Adafactor ignores its learning rate while relative_step is set.
    scheduled, relative = optimizer._schedulers, getattr(optimizer, "relative_step", False)  # noqa: SLF001
    if scheduled or relative or "learning_rate" not in optimizer.state:
        raise JobError(
            f"optimizer {type(optimizer).__name__} has its own learning rate schedule",
            code="optimizer.own-schedule",
            fix=f"pass a number as its learning rate{' and relative_step=False' if relative else ''},"
            " and set the schedule in the job: schedule=sw.schedules.Cosine()",
        )


def _members(
    optimizer: Any, names: Sequence[str], arrays: Arrays
) -> list[tuple[optimizers.Optimizer, tuple[str, ...]]]:
    if not isinstance(optimizer, optimizers.MultiOptimizer):
        return [(optimizer, tuple(names))]
    members: list[list[str]] = [[] for _ in optimizer.optimizers]
    for name in names:
        index = next(index for index, accepts in enumerate(optimizer.filters) if accepts(name, arrays[name]))
        members[index].append(name)
    return [(each, tuple(its)) for each, its in zip(optimizer.optimizers, members, strict=True)]


def set_rates(groups: Sequence[MlxGroup], rates: Sequence[float], dtype: mx.Dtype) -> None:
    """Set each group's learning rate."""
    for group, rate in zip(groups, rates, strict=True):
        group.optimizer.state["learning_rate"] = mx.array(rate, dtype=dtype)


def read_states(groups: Sequence[MlxGroup], form: ArrayForm) -> dict[str, Tensor]:
    """Return the optimizer states as read-only tensors with PyTorch parameter names, PARAMETER/KEY."""
    found: dict[str, Tensor] = {}
    for group in groups:
        for name, key, array in _states(group):
            found[f"{name}/{group.keys.get(key, key)}"] = form.to_torch(name, array)
        if group.counts:
            count = to_torch(group.optimizer.step.astype(mx.float32))
            found.update({f"{name}/{STEP}": count for name in group.names})
    return found


def write_states(groups: Sequence[MlxGroup], form: ArrayForm, states: Mapping[str, Tensor]) -> None:
    """Load states of `read_states` or of a torch optimizer; missing states keep their values."""
    for group in groups:
        flat = []
        for name, key, _ in _states(group):
            saved = states.get(f"{name}/{group.keys.get(key, key)}")
            if saved is not None:
                flat.append((f"{name}.{key}", form.to_mlx(name, saved)))
        counts = {float(states[full]) for name in group.names if (full := f"{name}/{STEP}") in states}
        if len(counts) > 1:
            raise JobError(
                f"the checkpoint has step counts {sorted(counts)} in a parameter group, but MLX has one per group",
                code="checkpoint.optimizer-steps-differ",
                fix="resume with engine torch, or pass --resume never",
            )
        if counts and group.counts:
            flat.append((STEP, mx.array(int(counts.pop()), dtype=mx.uint64)))
        assign(group.optimizer.state, tree_unflatten(flat) if flat else {})


def assign(tree: Any, values: Any) -> None:
    """Copy the leaves of `values` into `tree` in place: compiled functions keep references to `tree`."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, mx.array):
            tree[key] = value
        elif isinstance(value, dict | list):
            assign(tree[key], value)


def _states(group: MlxGroup) -> list[tuple[str, str, mx.array]]:
    """Return (parameter, key, array) for each optimizer state of a parameter."""
    members = set(group.names)
    split = [(*full.rpartition("."), array) for full, array in tree_flatten(group.optimizer.state)]
    return [(name, key, array) for name, _, key, array in split if name in members]
