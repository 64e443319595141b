"""The first values of a model in MLX: read from a file by every rank, or those of rank 0."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from shardwise.checkpoint.convert.mlx import is_mlx, read_as_saved
from shardwise.errors import JobError
from shardwise.parallel.weight_files import open_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mlx import nn
    from torch import Tensor

    from shardwise.engines.mlx.form import Form


class Origin(NamedTuple):
    """Where first values came from."""

    words: str
    num_batches: int = 0
    """That batch norms had seen then."""


def read_weights(path: Path, model: nn.Module, form: Form) -> Origin:
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


def share_weights(model: nn.Module, form: Form) -> Origin:
    """Communicate over the world to give every rank the values of rank 0."""
    arrays = form.read(model, (*form.parameters, *form.statistics))
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return Origin("built by the model")
    values = {name: form.to_torch(name, array).clone() for name, array in arrays.items()}
    for value in values.values():
        dist.broadcast(value, src=0)
    _write(model, form, values)
    return Origin("built on every rank, with the values of rank 0")


def _write(model: nn.Module, form: Form, values: dict[str, Tensor], path: Path | None = None) -> None:
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
