"""Recompute: blocks that keep little of their forward pass and run it again in backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.parallel.batch_norm import batch_norms
from shardwise.parallel.keyed_masks import BlockMasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from shardwise.parallel.batch_norm import BatchNorm

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
"""Operators whose results are dear to make: "selective" keeps these and makes norms, activations and sums anew."""


def recompute_block(block: nn.Module, *, selective: bool) -> None:
    """Have `block` forget its activations after forward; everything, or all but the results of dear operators."""
    # The block's own forward is replaced, not the block: names of parameters stay as they are.
    contexts = partial(_contexts, BlockMasks(block), list(batch_norms(block)), selective=selective)
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _contexts(masks: BlockMasks, norms: list[BatchNorm], *, selective: bool) -> Contexts:
    """Return what surrounds forward, and what surrounds its repetition; called when forward begins."""
    first, again = create_selective_checkpoint_contexts(_policy) if selective else (nullcontext(), nullcontext())
    # Wrapped even when there is nothing to put back: what `again` keeps is let go when it ends, not with the graph.
    return first, _repeating(again, norms, masks.replay())


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:  # noqa: ARG001 - torch's signature
    kept = getattr(operator, "overloadpacket", None) in _kept_operators()
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _kept_operators() -> set[Any]:
    return {getattr(torch.ops.aten, name) for name in _KEPT if hasattr(torch.ops.aten, name)}


@contextmanager
def _repeating(
    inner: AbstractContextManager[Any], norms: Iterable[BatchNorm], masks: AbstractContextManager[None]
) -> Iterator[None]:
    with _without_tracking(norms), masks, inner:  # what the first copies is no operator of the block
        yield


@contextmanager
def _without_tracking(norms: Iterable[BatchNorm]) -> Iterator[None]:
    """Leave running statistics alone: the first pass has moved them."""
    norms = list(norms)
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    for norm in norms:
        norm.tracks = False
    try:
        yield
    finally:
        for norm in norms:
            norm.tracks = True
        for buffer, before in kept:
            buffer.data.copy_(before)  # by .data: backward, which has seen it, must not think it changed
