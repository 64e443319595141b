"""Tensors of torch as arrays of MLX and back, at the engine's door."""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

_WIDE = {torch.float64: mx.float64}
"""What MLX would narrow unless told not to."""


def to_mlx(tensor: Tensor, floating: mx.Dtype | None = None) -> mx.array:
    """Return a copy of a tensor on the host as an array, 2 us for a small one.

    It has the same dtype, or `floating` where that is given and the tensor is of floating-point numbers: MLX would take
    the wider of two dtypes for all that comes after, and has no float64 on a GPU.
    """
    if tensor.dtype == torch.bfloat16:  # numpy has none
        array = mx.array(tensor.detach().view(torch.int16).numpy()).view(mx.bfloat16)
        return array if floating is None else array.astype(floating)
    wanted = floating if tensor.is_floating_point() else None
    return mx.array(tensor.detach().numpy(), dtype=wanted or _WIDE.get(tensor.dtype))


def to_torch(array: mx.array) -> Tensor:
    """Return an array as a tensor on the same memory, to be read only; waits until it is computed."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16), copy=False)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array, copy=False))
