"""The plain step: forward, backward, gradient sync and update of a model that is whole on every rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.data.rows import cut_output, cut_rows
from shardwise.parallel.batch_norm import batch_norms
from shardwise.step.step import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.data.feed import Feed, MicroBatch, StepBatch
    from shardwise.job import Job
    from shardwise.parallel.gradsync import GradSync
    from shardwise.step.length import Length
    from shardwise.step.update import Update


_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Autocast:
    """Lower precision around forward and loss only: around more, its cache would keep stale weights."""

    device_type: str
    dtype: torch.dtype | None

    def __call__(self) -> AbstractContextManager[Any]:
        """Enter around one forward pass and its loss."""
        if self.dtype is None:
            return _NOTHING
        return torch.autocast(self.device_type, self.dtype)


class PlainStep:
    """One optimizer step: micro-batches accumulate, gradients are summed over readers, the optimizer moves."""

    def __init__(
        self,
        job: Job,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        feed: Feed,
        sync: GradSync,
        update: Update,
        autocast: Autocast,
        readers: int,
        length: Length,
        after_first_backward: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.feed = feed
        self.length = length
        self.number = 0
        self._loss = job.loss
        self._forward = job.forward
        self._schedule = job.schedule
        self._sync = sync
        self._update = update
        self.autocast = autocast
        self._readers = readers
        self._after_first_backward = after_first_backward
        self._batch_norms = batch_norms(model)
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._weight = 0.0
        self._gradient: Tensor | None = None
        self.base_rates = [group["lr"] for group in optimizer.param_groups]

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; communicates through the gradient sync, on every rank."""
        self._set_rate(self.number)
        # DDP averages over readers; times their number that is a sum, and the sum over all real rows divided by the
        # one denominator of the global batch is the mean one process would compute.
        weight = self._readers / max(1, batch.denominator)
        total = self._accumulate(batch.micro_batches, weight)
        update = self._update(self.optimizer)
        for parameter in self._parameters:
            parameter.grad = None  # 15 us a step less than optimizer.zero_grad, which does the same
        number, self.number = self.number, self.number + 1
        rate = self.optimizer.param_groups[0]["lr"]
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, rate, *update)

    def _accumulate(self, micro_batches: list[MicroBatch], weight: float) -> Tensor:
        """Add up the gradients of all micro-batches and, over ranks, of all readers; returns the loss sum."""
        # In the first step nothing communicates during backward: a parameter without gradient would leave DDP's
        # bucket waiting for it, and every other rank with it, before anybody could say its name.
        check = self._after_first_backward
        keep_back = self._sync.accumulate if check is None else self._sync.hold
        *first, last = micro_batches
        sums = []
        for micro_batch in first:
            with keep_back():
                sums.append(self._backward(micro_batch, weight))
        with keep_back() if check is not None else _NOTHING:
            sums.append(self._backward(last, weight))
        if check is not None:
            check()
            self._after_first_backward = None
            self._sync.finish()
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _backward(self, micro_batch: MicroBatch, weight: float) -> Tensor:
        """Forward, loss and backward of one micro-batch; returns its loss sum over real rows."""
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        for norm in self._batch_norms:
            norm.rows = None if rows == filled else (rows, filled)
        with self.autocast():
            output = self._forward(self.model, batch)
            if rows < filled and self._loss.by_row:
                output, batch = cut_output(output, rows, filled), cut_rows(batch, rows, filled)
            loss: Tensor = self._loss.sum(output, batch)
        if not rows:
            loss = loss * 0  # a spare row took part so that this rank issues its collectives; it counts for nothing
        if weight != self._weight:
            self._weight, self._gradient = weight, torch.full_like(loss, weight)
        # The weight goes in as the gradient of the loss: 20 us a step less than a product, forward and backward.
        self._update.scale(loss).backward(self._gradient)
        return loss.detach()

    def _set_rate(self, number: int) -> None:
        factor = self._schedule(number, self.length.num_steps)
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * factor
