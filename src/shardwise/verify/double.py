"""fp64 that stays fp64: models that cast to fp32 inside would hide differences below 1e-7, or make some."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


@contextmanager
def true_double() -> Iterator[None]:
    """Let casts of fp64 tensors to fp32 (`.float()`, `.to(torch.float32)`) do nothing, in this whole process.

    Patched on the class: a mode of torch would not reach the forward that recomputation runs within backward.
    """
    to_float, to = torch.Tensor.float, torch.Tensor.to

    def kept_float(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == torch.float64 else to_float(self, *args, **kwargs)

    def kept_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return to(self, *args, **kwargs)

    torch.Tensor.float = kept_float  # type: ignore[method-assign, assignment]
    torch.Tensor.to = kept_to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.float = to_float  # type: ignore[method-assign]
        torch.Tensor.to = to  # type: ignore[method-assign]
