"""Batches as trees of tensors: cut, fill and move their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def map_tensors(fn: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `fn` to every tensor in nested dicts, lists, tuples and named tuples; leave the rest alone."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(fn, item) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(mapped)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(fn, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(fn, item) for item in value)
    return value


def cut_rows(value: Any, rows: int, filled: int) -> Any:
    """Keep the first `rows` of every tensor that has `filled` rows."""
    return map_tensors(lambda tensor: tensor[:rows] if _has_rows(tensor, filled) else tensor, value)


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
