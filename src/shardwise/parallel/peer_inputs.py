"""Inputs of model-parallel peers: ranks that hold one model together must be fed one batch.

Tensor-parallel ranks add up partial results of the same rows. With different rows, or different labels, each of them
trains on a mixture and their replicated parameters drift apart, with no error. The first passes are compared on all
peers at once, so that every one of them refuses.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from shardwise.errors import JobError
from shardwise.recorder.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

CHECKED_PASSES = 3
"""Peers that read different streams differ in the first batch; a few more find those that part after it."""

_CLOSE = 1e-3
"""Gradients of peers may differ by the order of a sum, those of different labels differ by themselves."""


def refuse_different(what: str, mine: Any, group: dist.ProcessGroup, *, code: str, fix: str) -> None:
    """Raise on every rank of `group` if `mine` is not equal on all of them; communicates over it, on the host."""
    (first, value), *rest = gathered(mine, group)
    refuse_peers([rank for rank, theirs in rest if theirs != value], f"{what} than rank {first}", code=code, fix=fix)


def refuse_peers(ranks: list[int], what: str, *, code: str, fix: str) -> None:
    """Raise if there are such ranks; called with the same ones on all of their peers."""
    if ranks:
        named = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
        raise JobError(f"{named} fed {what}, and they hold one model together", code=code, fix=fix)


def gathered(mine: Any, group: dist.ProcessGroup) -> list[tuple[int, Any]]:
    """Return what every rank of `group` hands in, with its rank; communicates over it, on the host."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return list(zip(dist.get_process_group_ranks(group), values, strict=True))


def watch_inputs(module: nn.Module, group: dist.ProcessGroup, after_backward: Callable[[], None]) -> None:
    """Compare what `module` is called with, and the gradients of what it returns, over `group` in the first passes.

    For tensor parallelism in a loop of one's own, where nothing else knows the batch; forward and backward of these
    passes communicate over the group, on the host. `after_backward` is called when the first backward ends.
    """
    passes: Counter[bool] = Counter()
    waiting = [after_backward]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
        passes[module.training] += 1
        if passes[module.training] > CHECKED_PASSES:
            return
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        forms = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in given]
        refuse_different("another input", (forms, fingerprints(given)), group, code="data.peer-inputs-differ", fix=_FIX)

    def compare(gradient: Tensor) -> None:
        _compare_gradient(gradient, group)
        while waiting:
            torch.autograd.Variable._execution_engine.queue_callback(waiting.pop())  # noqa: SLF001 - as FSDP2 does

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        if passes[module.training] > CHECKED_PASSES:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(compare)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


_FIX = (
    "feed tensor-parallel ranks the same batch: read samples by plan.layout.data_index(world.rank), or use build_step"
)


def _compare_gradient(gradient: Tensor, group: dist.ProcessGroup) -> None:
    """Refuse gradients of an output that differ: peers computed their losses from different labels."""
    rows = gradient.detach().double()
    norms = rows.flatten(1).norm(dim=1) if rows.ndim > 1 else rows.flatten().abs()
    (first, value), *rest = gathered(norms.cpu(), group)
    others = [rank for rank, theirs in rest if not _is_close(value, theirs)]
    refuse_peers(others, f"other labels or another loss than rank {first}", code="data.peer-labels-differ", fix=_FIX)


def _is_close(first: Tensor, other: Tensor) -> bool:
    if first.shape != other.shape:
        return False
    scale = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, other, rtol=0.0, atol=_CLOSE * scale, equal_nan=True)
