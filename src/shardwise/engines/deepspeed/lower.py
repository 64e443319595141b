"""Compute below fp32 on parameters that DeepSpeed holds in that dtype."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.data.rows import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn


def compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Have `module` take its input to `dtype` and give its output in fp32, in which the loss is then summed.

    DeepSpeed ends an autocast that begins outside of it, so this one begins inside: buffers stay in fp32, and what
    they are multiplied with must come down again.
    """
    module.forward = partial(_forward, module.forward, dtype, device_type)


def _forward(inner: Callable[..., Any], dtype: torch.dtype, device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype):
        args, kwargs = map_tensors(partial(_to, dtype), args), map_tensors(partial(_to, dtype), kwargs)
        output = inner(*args, **kwargs)
    return map_tensors(partial(_to, torch.float32), output)


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
