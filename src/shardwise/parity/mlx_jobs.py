"""What verify does to models of MLX, and to the batches that their losses see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from shardwise.engines.mlx.arrays import to_torch

if TYPE_CHECKING:
    from collections.abc import Callable


def silence_dropout(model: nn.Module) -> None:
    """Have every dropout layer of MLX drop nothing."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d | nn.Dropout3d):
            module._p_1 = 1.0  # noqa: SLF001 - the share that is kept, which MLX has under no other name


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether any module normalises by the statistics of a batch."""
    return any(isinstance(module, nn.BatchNorm) for module in model.modules())


def seeing(look: Callable[[Any], None], total: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the loss `total` with a look at each batch, as tensors; no function is compiled in this process any more.

    A compiled function runs its Python once, so that a look inside it would see one batch of many.
    """
    mx.disable_compile()

    def looked_at(output: Any, batch: Any) -> Any:
        look(_as_tensors(batch))
        return total(output, batch)

    return looked_at


def _as_tensors(value: Any) -> Any:
    if isinstance(value, mx.array):
        return to_torch(value)
    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    return [_as_tensors(item) for item in value] if isinstance(value, list | tuple) else value
