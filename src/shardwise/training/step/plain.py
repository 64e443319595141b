"""What every kind of step has in common, and the plain step: a model that is whole on every data-parallel rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.data.rows import cut_rows
from shardwise.job import Loss
from shardwise.parallel.batch_norm import batch_norms
from shardwise.parallel.collectives import unwrap
from shardwise.parallel.counter_dropout import CounterMasks
from shardwise.parallel.fused_loss import deferred_in_evaluation, deferring_heads, with_logits
from shardwise.parallel.sharded import naming_outside_use
from shardwise.training.step.first_step_checks import LossCheck, OutputRows, refuse_uncounted
from shardwise.training.step.module_step import Held, ModuleStep, make_states, states_of
from shardwise.training.step.step import NOTHING, StepReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job, Metric
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import StepParts


# What every kind of step has in common: the parts it is built from, its learning rate, and the update that ends it.


class OptimizerStep(ModuleStep):
    """A step's parts, and its beginning and end; what lies between, the gradients, is the kind's own."""

    def __init__(self, job: Job, model: nn.Module, parts: StepParts) -> None:
        self.source = parts.source
        self.model = model
        self.optimizer = parts.optimized.optimizer
        self.optimized = parts.optimized
        self.update = parts.update
        self.feed = parts.feed
        self.length = parts.length
        self.origin = parts.origin
        self.number = parts.first_step
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self._rate = self.base_rates[0]
        self.mark = parts.mark
        self._rate_factor = job.schedule
        self._reports_loss = parts.reports_loss
        self._reduce_loss = parts.reduce_loss
        self._autocast = parts.autocast
        self._sync = parts.sync
        self._after_first_backward = parts.after_first_backward
        self._before_update = parts.before_update
        self._batch_checks = parts.batch_checks
        self._batch_norms = batch_norms(model)
        self._masks = CounterMasks(model, parts.autocast.device_type) if job.masks == "keyed" else None
        self._parameters = list(model.parameters())
        self._heads = deferring_heads(model)
        self._loss_check: LossCheck | None = LossCheck(job.loss, parts.note)
        self._output_rows = OutputRows()

    @property
    def num_parameters(self) -> int:
        """Elements of the parameters that this rank has a part in, a cut one as a whole."""
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    def held(self) -> Held:
        """Return the values and optimizer states of this rank; no communication."""
        values = {name: parameter.detach() for name, parameter in self.named_parameters()}
        update = {**self.update.state(), **self._sync.state()}
        return Held(values, states_of(self.optimized), self.saved_buffers(), update)

    def room(self, saved: Forms) -> Held:
        """Return tensors to be filled, with the optimizer states in `saved`: those that are trained."""
        make_states(self.optimized, saved)
        return self.held()

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of a step while they are summed and not yet used; no communication."""
        return {name: each.grad for name, each in self.named_parameters() if each.grad is not None}

    def _keyed(self, module: nn.Module, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Surround a forward pass of `module`: keyed masks are those of this micro-batch."""
        if self._masks is None:
            return NOTHING
        keys = None if micro_batch.places is None else micro_batch.places.keys()
        return self._masks.of(unwrap(module), keys, micro_batch.filled)

    def _deferred(self) -> AbstractContextManager[None]:
        """Surround a forward pass in evaluation: logits that training never holds whole are not made there either."""
        return deferred_in_evaluation(self._heads) if self._heads else NOTHING

    def _look_at_loss(self, output: Any, batch: Any, micro_batch: MicroBatch) -> None:
        """Check the loss of the first micro-batches, without padding rows, until one had enough to see."""
        if self._loss_check is not None and self._loss_check(output, batch, micro_batch):
            self._loss_check = None
        if micro_batch.rows == micro_batch.filled:
            self._output_rows.look(output, micro_batch.rows)

    def _begin(self) -> None:
        """Set the learning rates of this step."""
        factor = self._rate_factor(self.number, self.length.num_steps)
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * factor
        self._rate = self.base_rates[0] * factor

    def _end(self, batch: StepBatch, total: Tensor) -> StepReport:
        """Move the parameters by their summed gradients and report, on every rank; `total` is this rank's loss sum."""
        if not batch.denominator:
            refuse_uncounted(total)
        self._loss_check = None
        if self._before_update is not None:
            self._before_update()
        self.mark("optimizer", self.number)
        update = self.update(self.optimizer)
        for parameter in self._parameters:
            parameter.grad = None  # 15 us a step less than optimizer.zero_grad, which does the same
        if not self._reports_loss:
            total = torch.zeros_like(total)  # a product would make NaN of an infinite loss
        number, self.number = self.number, self.number + 1
        self._sync.finish_step(self.number)
        self.mark("data", self.number)
        reduced = None if self._reduce_loss is None else self._reduce_loss.begin(total, batch.denominator)
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, self._rate, *update, reduced)


def measured(
    output: Any, batch: Any, rows: int, measures: Mapping[str, Metric], *, whole: Any = None
) -> dict[str, float]:
    """Return sum and count of each measure; logits that were deferred are made where a metric reads them.

    `whole` is the batch with all of its tokens, which are counted, where `batch` is a slice of them.
    """
    whole = batch if whole is None else whole
    others = with_logits(output) if not all(isinstance(measure, Loss) for measure in measures.values()) else None
    found: dict[str, float] = {}
    for name, measure in measures.items():
        if isinstance(measure, Loss):
            found[name] = float(measure.sum_of(output, batch if measure.by_row else whole))
        else:
            found[name] = float(measure.sum_of(others, batch))
        found[f"{name}/count"] = measure.count_of(whole, rows)
    return found


class PlainStep(OptimizerStep):
    """One optimizer step: micro-batches accumulate, gradients are summed over data-parallel ranks, then the update."""

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
        # The sum over all real rows of all ranks, divided by the one normalizer of the global batch, is the mean
        # one process would compute.
        weight = self._sync.gain / (batch.denominator or 1)
        return self._end(batch, self._accumulate(batch.micro_batches, weight))

    def _accumulate(self, micro_batches: list[MicroBatch], weight: float | Tensor) -> Tensor:
        """Add up the gradients of all micro-batches and of all data-parallel ranks; returns the loss sum."""
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
        """Yield the name, as in the user's module, and parameter of all layers on this rank's stages."""
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
