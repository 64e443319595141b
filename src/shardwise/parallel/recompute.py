"""Activation checkpointing, and the repeated blocks to which recompute, compile and FSDP2 are applied."""

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
from shardwise.torch_private.dynamo import omit_checkpoint_warning

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
"""Expensive operators, whose results "selective" saves; norms, activations and sums are recomputed."""


def recompute_block(block: nn.Module, *, selective: bool) -> None:
    """Apply activation checkpointing to `block`; `selective` saves the results of expensive operators."""
    forward = block.forward
    masks, norms = BlockDropout(block), list(batch_norms(block))
    eager_contexts = partial(_contexts, masks, norms, selective=selective)
    omit_checkpoint_warning()  # gradients are right with in-place operators, too
    graph_contexts = partial(create_selective_checkpoint_contexts, _policy)
    has_state = bool(norms) or masks.is_needed

    # torch.compile traces a checkpoint only if a function that it compiles calls it with contexts of torch's own. It
    # would leave a block whose forward is `checkpoint` itself to the eager kernels, without a message.
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if has_state or not torch.compiler.is_compiling():
            return checkpoint(forward, *args, use_reentrant=False, context_fn=eager_contexts, **kwargs)
        if selective:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=graph_contexts, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    # Replacing the block's forward instead of the block preserves the names of parameters.
    block.forward = checkpointed


def _contexts(masks: BlockDropout, norms: list[BatchNorm], *, selective: bool) -> Contexts:
    """Return the contexts of the forward pass and of its recomputation; called when forward starts."""
    first: AbstractContextManager[Any] = nullcontext()
    again: AbstractContextManager[Any] = nullcontext()
    if selective:
        first, again = create_selective_checkpoint_contexts(_policy)
    # A generator context releases the tensors of `again` when it ends, not when the graph is freed.
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
    with _without_tracking(norms), masks, inner:  # the copies of _without_tracking are not operators of the block
        yield


@contextmanager
def _without_tracking(norms: Iterable[BatchNorm]) -> Iterator[None]:
    """Return a context that preserves the running statistics, which the first forward pass has updated."""
    norms = list(norms)
    kept = []
    for norm in norms:
        kept += [(buffer, buffer.clone()) for buffer in norm.buffers()]
        norm.tracks = False
    try:
        yield
    finally:
        for norm in norms:
            norm.tracks = True
        for buffer, before in kept:
            buffer.data.copy_(before)  # .data bypasses version counters: autograd has saved the buffer


# The repeated blocks of a model, which are recomputed, compiled and sharded as units.


_LISTS = (nn.ModuleList, nn.Sequential)


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated blocks by name, in module order; empty if the model has none.

    A block is a ModuleList entry, or one of several modules of the same class in a Sequential, that has parameters and
    submodules. A single Linear is too small for a collective. A module without forward (a ModuleDict) only groups
    modules, so its children are searched for blocks.
    """
    blocks: dict[str, nn.Module] = {}
    _collect(module, "", blocks)
    return blocks


def recomputed_blocks(module: nn.Module, number: int) -> list[nn.Module]:
    """Return the first `number` blocks of a model or a pipeline stage, all for 0; the model itself if it has none."""
    blocks = list(find_blocks(module).values()) or [module]
    return blocks[:number] if number else blocks


def block_of(name: str, blocks: Iterable[str]) -> str:
    """Return the name of the block that contains the parameter or module `name`; "" if it is in no block."""
    return next((block for block in blocks if name.startswith(f"{block}.")), "")


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
    # A Linear with an adapter has children, but is still small.
    is_called = getattr(type(module), "forward", nn.Module.forward) is not nn.Module.forward
    is_small = isinstance(module, (*_LISTS, nn.Linear))
    return has_children and is_called and not is_small and next(module.parameters(), None) is not None
