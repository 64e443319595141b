"""What every kind of step has in common: the parts it is built from, its learning rate, and the update that ends it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.job import Loss
from shardwise.parallel.batch_norm import batch_norms
from shardwise.parallel.collectives import unwrap
from shardwise.parallel.counter_dropout import CounterMasks
from shardwise.parallel.fused_loss import deferred_in_evaluation, deferring_heads, with_logits
from shardwise.training.step.first_step_checks import LossCheck, OutputRows, refuse_uncounted
from shardwise.training.step.module_step import Held, ModuleStep, make_states, states_of
from shardwise.training.step.step import NOTHING, StepReport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job, Metric
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import StepParts


class OptimizerStep(ModuleStep):
    """A step's parts, and its beginning and end; what lies between, the gradients, is the kind's own."""

    def __init__(self, job: Job, model: nn.Module, parts: StepParts) -> None:
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
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, self._rate, *update)


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
