"""MLX arrays in a job: told from torch tensors without importing MLX, and the cross entropy that the losses use."""

from __future__ import annotations

from typing import Any


def is_mlx_array(value: object) -> bool:
    """Whether a value is an MLX array; 0.1 us, and imports nothing."""
    return type(value).__module__ == "mlx.core"


def cross_entropy_sum(logits: Any, targets: Any, ignore: int) -> Any:
    """Return the sum over all targets but those of value `ignore`; logits [..., classes], in fp32 at least, as torch's.

    Where nothing is left the sum is 0.
    """
    import mlx.core as mx
    from mlx import nn

    if logits.dtype in {mx.bfloat16, mx.float16}:
        logits = logits.astype(mx.float32)
    counts = targets != ignore
    losses = nn.losses.cross_entropy(logits, mx.where(counts, targets, 0))
    return mx.where(counts, losses, 0).sum()


def nan_to_num(array: Any) -> Any:
    """Return an array with 0 for NaN, as the method of that name of a tensor does."""
    import mlx.core as mx

    return mx.nan_to_num(array)
