"""The plain step: forward, backward, gradient sync and update of a model that is whole on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.data.rows import cut_rows
from shardwise.parallel.collectives import unwrap
from shardwise.parallel.sharded import naming_outside_use
from shardwise.training.step.optimizer_step import OptimizerStep, measured
from shardwise.training.step.step import NOTHING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, nn

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job, Metric
    from shardwise.training.step.step import StepParts, StepReport


class PlainStep(OptimizerStep):
    """One optimizer step: micro-batches accumulate, gradients are summed over readers, the optimizer moves."""

    def __init__(self, job: Job, model: nn.Module, parts: StepParts) -> None:
        super().__init__(job, model, parts)
        self._trained = model
        """What forward calls in training."""
        self._loss = job.loss
        self._forward = job.forward
        self._weight: float | None = None
        self._gradient: Tensor | None = None

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; communicates through the gradient sync, on every rank."""
        self._begin()
        for check in self._batch_checks:
            check(batch)
        # The sum over all real rows of all readers, divided by the one denominator of the global batch, is the mean
        # one process would compute.
        weight = self._sync.gain / (batch.denominator or 1)
        return self._end(batch, self._accumulate(batch.micro_batches, weight))

    def _accumulate(self, micro_batches: list[MicroBatch], weight: float | Tensor) -> Tensor:
        """Add up the gradients of all micro-batches and, over ranks, of all readers; returns the loss sum."""
        # In the first step nothing communicates during backward: a parameter without gradient would leave DDP's
        # bucket waiting for it, and every other rank with it, before anybody could say its name.
        check = self._after_first_backward
        keep_back = self._sync.accumulate if check is None else self._sync.no_sync
        *first, last = micro_batches
        sums = []
        for micro_batch in first:
            with keep_back():
                sums.append(self._backward(micro_batch, weight))
        with keep_back() if check is not None else NOTHING:
            sums.append(self._backward(last, weight))
        if check is not None:
            check(sums)
            self._after_first_backward = None
            self._sync.finish_held()
        self._sync.finish()
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _backward(self, micro_batch: MicroBatch, weight: float | Tensor) -> Tensor:
        """Forward, loss and backward of one micro-batch; returns its loss sum over real rows."""
        self.mark("forward", self.number)
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        for norm in self._batch_norms:
            norm.rows = None if rows == filled else (rows, filled)
        is_short = rows < filled and self._loss.by_row
        with self._autocast():
            watching = self._output_rows.watching(batch) if is_short else NOTHING
            with self._keyed(self._trained, micro_batch), watching, naming_outside_use(self.model):
                output = self._forward(self._trained, batch)
            if is_short:
                output = self._output_rows.cut(output, rows, filled)
                batch = cut_rows(batch, rows, filled, micro_batch.marks)
            # A model's own mean counts what it counts on whole sequences, also where this rank has a slice of them.
            loss: Tensor = self._loss.sum_of(output, batch if self._loss.by_row else micro_batch.uncut)
            if self._loss_check is not None:
                self._look_at_loss(output, batch, micro_batch)
        self.mark("backward", self.number)
        del output  # backward does not need it, and the logits of a large vocabulary are gigabytes
        if not rows:
            loss = loss * 0  # a spare row took part so that this rank issues its collectives; it counts for nothing
        self._pass_back(loss, weight)
        return loss.detach()

    def _pass_back(self, loss: Tensor, weight: float | Tensor) -> None:
        """Back-propagate a loss sum with its weight; a tensor is one that changes in its place."""
        if isinstance(weight, torch.Tensor):
            self._weight, self._gradient = None, weight.to(loss.dtype)
        elif weight != self._weight:
            self._weight, self._gradient = weight, torch.full_like(loss, weight)
        # The weight goes in as the gradient of the loss: 20 us a step less than a product, forward and backward.
        self.update.scale(loss).backward(self._gradient)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield what this rank holds of the model, under the names of the user's own module."""
        return unwrap(self.model).named_parameters()

    @torch.no_grad()
    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return sum and count of each measure over the real rows, without training; on every rank of a model."""
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        whole = micro_batch.uncut
        model = unwrap(self.model)
        found: dict[str, float] = {}
        with self._autocast(), self._deferred():
            output = self._forward(model, batch)
            if rows and rows < filled:
                output = self._output_rows.cut(output, rows, filled)
                batch, whole = (cut_rows(each, rows, filled, micro_batch.marks) for each in (batch, whole))
            if rows:
                found = measured(output, batch, rows, measures, whole=whole)
        if self._heads and isinstance(model, FSDPModule):
            model.reshard()  # backward would, where a root unit stays whole after forward for it
        return found
