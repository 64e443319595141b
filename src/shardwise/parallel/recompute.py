"""Recompute (activation checkpointing), and the repeated blocks that it, compile and FSDP2 take as units."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.parallel.batch_norm import batch_norms
from shardwise.parallel.counter_dropout import BlockDropout

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
"""Operators with expensive results: "selective" keeps these and recomputes norms, activations and sums."""


def recompute_block(block: nn.Module, *, selective: bool) -> None:
    """Have `block` forget its activations after forward; everything, or all but the results of expensive operators."""
    # The block's own forward is replaced, not the block: names of parameters stay as they are.
    contexts = partial(_contexts, BlockDropout(block), list(batch_norms(block)), selective=selective)
    block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


def _contexts(masks: BlockDropout, norms: list[BatchNorm], *, selective: bool) -> Contexts:
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


# The repeated blocks of a model: what is recomputed, compiled and sharded as one unit.


_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by name, in the order of the module; a model may have none.

    A block is an entry of a ModuleList, or one of several of a class in a Sequential, that has parameters and
    submodules: a single Linear is too small to be worth a collective. A module without a forward (a ModuleDict)
    only groups modules that others call: the blocks are in it.
    """
    blocks: dict[str, nn.Module] = {}
    _collect(module, "", blocks)
    return blocks


def _collect(module: nn.Module, prefix: str, blocks: dict[str, nn.Module]) -> None:
    kinds = Counter(type(child) for child in module.children())
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        repeats = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and kinds[type(child)] > 1)
        if repeats and _is_block(child):
            blocks.setdefault(path, child)
        else:
            _collect(child, f"{path}.", blocks)


def _is_block(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    # A Linear with an adapter has children, and is as small as without.
    is_called = getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward
    is_small = isinstance(module, (*_LISTS, nn.Linear))
    return has_children and is_called and not is_small and next(module.parameters(), None) is not None
