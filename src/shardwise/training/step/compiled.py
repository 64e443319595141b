"""The compiled region of a step: forward and loss in one graph, or the loss alone behind compiled blocks.

An eager loss reads and writes the logits in fp32 several times. In one graph inductor fuses the casts, the softmax and
the gradient of the logits, and pads a vocabulary whose size is slow for matrix products: GPT-2 124M trains 1.7 times as
fast as with compiled blocks on an H200. Hooks of DDP, FSDP and tensor parallelism must stay outside a graph, so only
the loss is compiled there. The invariant: the region computes `Loss.sum_of(forward(model, batch), batch)`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.parallel.recompute import find_blocks
from shardwise.torch_private.distributed import compile_errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from shardwise.job import Job
    from shardwise.plans import Plan


def compiled_region(job: Job, model: nn.Module, plan: Plan, note: Callable[[str], None]) -> CompiledRegion | None:
    """Return the compiled region of a plan without pipeline stages; None if nothing or only blocks are compiled.

    `note` receives the reason if torch cannot compile the region.
    """
    if plan.compile == "none" or plan.fused_loss or job.masks == "keyed":
        return None  # a fused loss computes logits chunk by chunk in kernels of its own
    is_whole = plan.layout.world_size == 1 and (plan.compile == "model" or not find_blocks(model))
    return CompiledRegion(job, note, kind=plan.compile, is_whole=is_whole)


class CompiledRegion:
    """Computes the loss sum of a full micro-batch in one compiled graph, or eagerly if torch cannot compile it."""

    def __init__(self, job: Job, note: Callable[[str], None], *, kind: str, is_whole: bool) -> None:
        """Create the region of `compile = kind`; `is_whole` includes the forward pass, else only the loss."""
        self._job = job
        self._note = note
        self._kind = kind
        self.is_whole = is_whole
        function = self._loss_sum if is_whole else job.loss.sum_of
        self._compiled: Callable[..., Tensor] | None = torch.compile(function)

    def __call__(self, model: nn.Module, batch: Any, whole_batch: Any) -> Tensor:
        """Return the loss sum of `batch`; under context parallelism, `whole_batch` has all tokens of its rows."""
        loss_batch = batch if self._job.loss.by_row else whole_batch
        arguments: tuple[Any, ...] = (model, batch, loss_batch)
        if not self.is_whole:
            arguments = (self._job.forward(model, batch), loss_batch)
        if self._compiled is not None:
            try:
                return self._compiled(*arguments)
            except compile_errors() as error:
                self._compiled = None
                reason = str(error).strip().splitlines()[0]
                what = "the model and its loss run" if self.is_whole else "the loss runs"
                self._note(f"compile = {self._kind}: {what} eagerly, because torch.compile failed: {reason}")
        if not self.is_whole:
            return self._job.loss.sum_of(*arguments)  # type: ignore[no-any-return]
        with torch.compiler.set_stance("force_eager"):  # the model that the region contains fails to compile as well
            return self._loss_sum(*arguments)

    def _loss_sum(self, model: nn.Module, batch: Any, loss_batch: Any) -> Tensor:
        return self._job.loss.sum_of(self._job.forward(model, batch), loss_batch)  # type: ignore[no-any-return]


@contextmanager
def uncompiled_probe(model: nn.Module) -> Iterator[None]:
    """Run a forward pass in this context eagerly and without gradients, and restore buffers and generators after it."""
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield
        for buffer, value in buffers:
            buffer.copy_(value)
