"""fp64 that stays fp64: models that cast to fp32 inside would hide differences below 1e-7, or make some."""

from __future__ import annotations

from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CASTING: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "to"),
    (torch.Tensor, "type"),
    (torch.Tensor, "softmax"),
    (torch, "softmax"),
    (functional, "softmax"),
    (functional, "log_softmax"),
)
"""What models cast by, under the name `dtype` or without: fp64's smallest number, a mask, is -inf in a fp32 softmax."""


@contextmanager
def true_double() -> Iterator[None]:
    """Let casts of fp64 tensors to fp32 (`.float()`, `.to(torch.float32)`) do nothing, in this whole process.

    Patched on the class: a mode of torch would not reach the forward that recomputation runs within backward.
    """
    plain = [(owner, name, getattr(owner, name)) for owner, name in ((torch.Tensor, "float"), *_CASTING)]
    for owner, name, function in plain:
        setattr(owner, name, _kept_float(function) if name == "float" else _kept(function))
    try:
        yield
    finally:
        for owner, name, function in plain:
            setattr(owner, name, function)


def _kept_float(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def kept(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self if self.dtype == torch.float64 else function(self, *args, **kwargs)

    return kept


def _kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ask a function for fp64 where it is asked to make fp32 of it."""

    @wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input")
        if getattr(given, "dtype", None) == torch.float64:
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            kwargs = {key: torch.float64 if each is torch.float32 else each for key, each in kwargs.items()}
        return function(*args, **kwargs)

    return kept
