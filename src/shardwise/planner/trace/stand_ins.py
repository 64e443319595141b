"""Stand-ins for the parts of a model that a traced pass leaves out: outlines of their tensors, and autograd nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.torch_private.dispatch import tree_flatten, tree_leaves, tree_unflatten


@dataclass(frozen=True)
class Outline:
    """What a stand-in knows of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


def outline_of(leaf: Any) -> Any:
    """Return the outline of a tensor, and anything else as it is."""
    return Outline(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _empty(outline: Outline) -> Tensor:
    return torch.empty(outline.shape, dtype=outline.dtype, device="meta")


class _SkippedBlock(torch.autograd.Function):
    """Returns empty results in place of a block; their gradients reach the inputs."""

    @staticmethod
    def forward(ctx: Any, outlines: list[Outline], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        made = tuple(_empty(outline) for outline in outlines)
        ctx.mark_non_differentiable(
            *(value for value, outline in zip(made, outlines, strict=True) if not outline.trained)
        )
        return made

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.empty_like(value) for value in ctx.saved_tensors)


def skip_block(outlines: Any, inputs: Any) -> Any:
    """Return empty results of a block for its inputs; `outlines` are those of the results of an equal block."""
    leaves, form = tree_flatten(outlines)
    results = [leaf for leaf in leaves if isinstance(leaf, Outline)]
    made = iter(_SkippedBlock.apply(results, *trained_in(inputs)))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(made) if isinstance(leaf, Outline) else leaf for leaf in leaves], form)


class _NextPart(torch.autograd.Function):
    """Stands for the next part: reads the results of a part, and returns their gradients without keeping them."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> Tensor:
        ctx.outlines = [outline_of(result) for result in results]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(_empty(outline) for outline in ctx.outlines)


def receive(result: Any) -> Tensor | None:
    """Return a tensor whose backward is that of a part; None if the part and all modules before it are frozen."""
    outputs = trained_in(result)
    received: Tensor | None = _NextPart.apply(*outputs) if outputs else None  # type: ignore[no-untyped-call]
    return received


def trained_in(result: Any) -> list[Tensor]:
    """Return the tensors in a nested value that get a gradient."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
