"""Batches as trees of tensors: cut, fill and move their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from shardwise.errors import DataError, JobError


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `fn` to every tensor in nested dicts, lists, tuples and dataclasses; leave the rest alone."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(fn, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: map_tensors(fn, item) for name, item in fields.items()})
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of a tree, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, value)
    return found


def others(value: Any) -> list[Any]:
    """Every leaf of a tree that is neither a tensor nor None, in order."""
    if value is None or isinstance(value, torch.Tensor):
        return []
    if isinstance(value, Mapping):
        items = list(value.values())
    elif isinstance(value, list | tuple):
        items = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return [value]
    return [leaf for item in items for leaf in others(item)]


def num_rows(batch: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor that has one."""
    for tensor in tensors(batch):
        if tensor.ndim:
            return int(tensor.shape[0])
    raise DataError(f"a batch of type {type(batch).__name__} holds no tensor", fix="collate samples into tensors")


def cut_rows(value: Any, rows: int, filled: int) -> Any:
    """Keep the first `rows` of every tensor that has `filled` rows."""
    return map_tensors(lambda tensor: tensor[:rows] if _has_rows(tensor, filled) else tensor, value)


def cut_output(output: Any, rows: int, filled: int) -> Any:
    """Keep the first `rows` of a model's output; refuse one in which filler rows cannot be told from real ones."""
    if not any(_has_rows(tensor, filled) for tensor in tensors(output)):
        raise JobError(
            f"a short step was filled to {filled} rows, and the model's output has no tensor with as many",
            fix="return tensors of shape [rows, ...], or give Loss(..., by_row=False)",
        )
    return cut_rows(output, rows, filled)


def fill_rows(value: Any, rows: int, filled: int) -> Any:
    """Repeat the `rows` of every tensor until there are `filled`."""
    order = torch.arange(filled) % rows
    return map_tensors(lambda tensor: tensor[order] if _has_rows(tensor, rows) else tensor, value)


def move(value: Any, device: torch.device, float_dtype: torch.dtype | None = None) -> Any:
    """Move every tensor to `device` without waiting; floating-point ones also to `float_dtype` if given."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        dtype = float_dtype if tensor.is_floating_point() else None
        return tensor.to(device, dtype, non_blocking=True)

    return map_tensors(moved, value)


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.ndim > 0 and tensor.shape[0] == rows
