"""One list of gradients on all data-parallel ranks of FSDP2, also where ranks use different parameters.

FSDP2 packs the gradients that a rank has into one buffer and sums the buffers. Where ranks use different parameters of
a unit (the experts of a mixture), it would add the gradient of one parameter to that of another, or wait for bytes that
nobody sends. The invariant kept here: every rank reduces every trainable parameter of a unit, zeros for one that it did
not use. A parameter that no rank used has no gradient afterwards, as in one process, so the optimizer passes it over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn


class ReducedList:
    """Completes the gradients of every FSDP2 unit of a model before they are reduced."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup | None, *, by_itself: bool = False) -> None:
        """`group` joins on the host the ranks that sum gradients; None for one rank.

        With `by_itself` every backward that reduces ends with `finish`, for a loop that does not call it.
        """
        self._group = group
        self._by_itself = by_itself
        self._is_queued = False
        self._members: list[Any] = []
        """FSDP2's records of all trainable parameters, in the same order on every rank."""
        self._used: set[int] = set()
        """Ids of sharded parameters that this rank had a gradient for."""
        self._filled: set[int] = set()
        """Ids of those that got zeros, and had no gradient from an earlier micro-batch."""
        for unit in _units(model):
            self._members += _trainable(unit)
            unit.post_backward = partial(self._reduce, unit, unit.post_backward)

    def _reduce(self, unit: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Run FSDP2's reduction of one unit, of the whole list where it reduces at all."""
        if unit.reduce_grads:
            self._complete(unit)
            if self._by_itself and not self._is_queued:
                # Runs after the callback that FSDP2 has queued already, which reduces what is left.
                torch.autograd.Variable._execution_engine.queue_callback(self.finish)  # noqa: SLF001
                self._is_queued = True
        post_backward(*unused)

    def _complete(self, unit: Any) -> None:
        """Give every trainable parameter of a unit a gradient, all of them in one dtype."""
        members = [member for member in _trainable(unit) if hasattr(member, "_unsharded_param")]
        for member in members:
            member.accumulate_unsharded_grad_if_needed()
        # Micro-batches that were not reduced left their gradients in the dtype of the reduction.
        are_accumulated = any(member.unsharded_accumulated_grad is not None for member in members)
        for member in members:
            whole = member._unsharded_param  # noqa: SLF001 - without a look at its state: it may be resharded already
            if member.unsharded_accumulated_grad is not None or whole.grad is not None:
                self._used.add(id(member.sharded_param))
            else:
                whole.grad = torch.zeros_like(whole)
                if member.sharded_param.grad is None:
                    self._filled.add(id(member.sharded_param))
            if are_accumulated:
                member.to_accumulated_grad_if_needed()

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Whether this rank used a sharded parameter since the last `finish`."""
        return id(parameter) in self._used

    def finish(self) -> None:
        """Take zeros back where no rank used a parameter; communicates, on every rank after a step's backward."""
        used = torch.tensor([id(member.sharded_param) in self._used for member in self._members], dtype=torch.uint8)
        if self._group is not None:
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        for member, is_used in zip(self._members, used.tolist(), strict=True):
            if not is_used and id(member.sharded_param) in self._filled:
                member.sharded_param.grad = None
        self._is_queued = False
        self._used.clear()
        self._filled.clear()


def _units(model: nn.Module) -> Iterator[Any]:
    """Yield FSDP2's groups of parameters that are reduced together."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()  # noqa: SLF001 - no public way to what a unit reduces
            groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one or none
            found = [state._fsdp_param_group] if groups is None else groups  # noqa: SLF001
            yield from (each for each in found if each is not None)


def _trainable(unit: Any) -> list[Any]:
    return [member for member in unit.fsdp_params if member.sharded_param.requires_grad]
