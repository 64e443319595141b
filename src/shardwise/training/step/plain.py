"""The base class of torch steps, and the step of plans without pipeline parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from shardwise.data.rows import drop_padding_rows, settle_marks
from shardwise.job import Loss
from shardwise.parallel.batch_norm import batch_norms
from shardwise.parallel.collectives import unwrap
from shardwise.parallel.counter_dropout import CounterMasks
from shardwise.parallel.fused_loss import deferred_in_evaluation, deferring_heads, with_logits
from shardwise.parallel.sharded import naming_outside_use
from shardwise.training.step.compiled import CompileWatch, HeadRegion, compiled_region, sum_by_rows, uncompiled_probe
from shardwise.training.step.first_step_checks import ROW_SUMS, OutputRows, check_counted, loss_check
from shardwise.training.step.module_step import LocalState, ModuleStep, make_states, states_of
from shardwise.training.step.step import NOTHING, StepReport

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Job, Metric
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import StepParts


_PROBED_ROWS = 2
"""Number of rows in the forward pass that checks the loss before a compiled region runs."""


# The base class: the components of a step, its learning rate, and the update at its end.


class OptimizerStep(ModuleStep):
    """The base of torch steps: sets learning rates and applies the update; subclasses compute the gradients."""

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
        self._is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        self._heads = deferring_heads(model)
        self._loss_check = loss_check(job.loss, parts.note)
        self._output_rows = OutputRows()
        kind = parts.source.plan.compile
        self._compile_watch = None if kind == "none" else CompileWatch(kind, parts.note)

    @property
    def num_parameters(self) -> int:
        """Number of elements of the parameters of which this rank owns a shard, counted at full size."""
        return sum(parameter.numel() for _, parameter in self.named_parameters())

    def local_state(self) -> LocalState:
        """Return this rank's parameters, buffers and optimizer states, without communication."""
        values = {name: parameter.detach() for name, parameter in self.named_parameters()} | self.optimized.masters
        update = {**self.update.state(), **self._sync.state()}
        return LocalState(values, states_of(self.optimized), self.saved_buffers(), update)

    def load_targets(self, saved: Forms) -> LocalState:
        """Return the trained tensors to load a checkpoint into, with the optimizer states of `saved` allocated."""
        make_states(self.optimized, saved)
        return self.local_state()

    def gradients(self) -> dict[str, Tensor]:
        """Return the reduced gradients of a step before the update uses them, without communication."""
        return {name: each.grad for name, each in self.named_parameters() if each.grad is not None}

    def _keyed(self, module: nn.Module, micro_batch: MicroBatch) -> AbstractContextManager[None]:
        """Return the context in which counter-based dropout of `module` uses the sample indices of this micro-batch."""
        if self._masks is None:
            return NOTHING
        keys = None if micro_batch.positions is None else micro_batch.positions.keys()
        return self._masks.of(unwrap(module), keys, micro_batch.filled)

    def _deferred(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass in evaluation that does not materialize the logits of a fused loss."""
        if not self._heads:
            return NOTHING
        return deferred_in_evaluation(self._heads)

    def _check_loss(self, output: Any, batch: Any, micro_batch: MicroBatch) -> None:
        """Check the loss of the first micro-batches, without padding rows, until one check is conclusive."""
        if self._loss_check is not None and self._loss_check(output, batch, micro_batch):
            self._loss_check = None
        if micro_batch.rows == micro_batch.filled:
            self._output_rows.observe(output, micro_batch.rows)

    def _begin(self) -> None:
        """Set the learning rates of this step from the schedule."""
        if self._compile_watch is not None:
            self._compile_watch.begin()
        factor = self._rate_factor(self.number, self.length.num_steps)
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * factor
        self._rate = self.base_rates[0] * factor

    def _end(self, batch: StepBatch, total: Tensor) -> StepReport:
        """Update the parameters and return the report; call on every rank. `total` is this rank's loss sum."""
        if not batch.denominator:
            check_counted(total)
        self._loss_check = None
        if self._before_update is not None:
            self._before_update()
        self.mark("optimizer", self.number)
        update = self.update(self.optimizer)
        for parameter in self._parameters:
            parameter.grad = None  # 15 us per step faster than optimizer.zero_grad
        if not self._reports_loss:
            total = torch.zeros_like(total)  # multiplying by 0 would turn an infinite loss into NaN
        number, self.number = self.number, self.number + 1
        if self._compile_watch is not None:
            self._compile_watch.end(number)
        self._sync.finish_step(self.number)
        self.mark("data", self.number)
        reduced = None
        if self._reduce_loss is not None:
            reduced = self._reduce_loss.begin(total, batch.denominator)
        return StepReport(number, batch.cursor, total, batch.samples, batch.denominator, self._rate, *update, reduced)


def measured(
    output: Any, batch: Any, rows: int, measures: Mapping[str, Metric], *, whole: Any = None
) -> dict[str, float]:
    """Return the sum and count of each measure; deferred logits are materialized if a metric reads them.

    Under context parallelism `batch` contains this rank's tokens, and `whole` all tokens, which are counted.
    """
    whole = batch if whole is None else whole
    metric_output = None
    if not all(isinstance(measure, Loss) for measure in measures.values()):
        metric_output = with_logits(output)
    found: dict[str, float] = {}
    for name, measure in measures.items():
        if isinstance(measure, Loss):
            found[name] = float(measure.sum_of(output, batch if measure.by_row else whole))
        else:
            found[name] = float(measure.sum_of(metric_output, batch))
        found[f"{name}/count"] = measure.count_of(whole, rows)
    return found


class PlainStep(OptimizerStep):
    """One optimizer step without a pipeline: accumulate micro-batches, reduce gradients over dp ranks, update."""

    def __init__(self, job: Job, model: nn.Module, parts: StepParts) -> None:
        super().__init__(job, model, parts)
        self._trained = model
        """The module that forward calls in training."""
        self._loss = job.loss
        self._forward = job.forward
        self._region = compiled_region(job, unwrap(model), parts.source.plan, parts.note, head=parts.head)
        self._weight: float | None = None
        self._gradient: Tensor | None = None

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch. Communicates through the gradient sync; call on every rank."""
        self._begin()
        for check in self._batch_checks:
            check(batch)
        # The loss sum over all rows of all ranks, divided by the normalizer of the global batch, is the mean that one
        # process would compute.
        weight = self._sync.gain / (batch.denominator or 1)
        return self._end(batch, self._accumulate(batch.micro_batches, weight))

    def _accumulate(self, micro_batches: list[MicroBatch], weight: float | Tensor) -> Tensor:
        """Accumulate the gradients of all micro-batches and reduce them over dp ranks; return the loss sum."""
        # In the first step backward does not communicate: a parameter without a gradient would block its DDP bucket on
        # every rank before the check could name the parameter.
        check = self._after_first_backward
        *first, last = micro_batches
        sums = []
        for micro_batch in first:
            with self._sync.accumulate() if check is None else self._sync.no_sync(is_last=False):
                sums.append(self._backward(micro_batch, weight))
        with NOTHING if check is None else self._sync.no_sync(is_last=True):
            sums.append(self._backward(last, weight))
        if check is not None:
            check(sums)
            self._after_first_backward = None
            self._sync.finish_deferred()
        self._sync.finish()
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _backward(self, micro_batch: MicroBatch, weight: float | Tensor) -> Tensor:
        """Run forward, loss and backward of one micro-batch; return its loss sum without padding rows."""
        self.mark("forward", self.number)
        rows, filled = micro_batch.rows, micro_batch.filled
        for norm in self._batch_norms:
            norm.rows = None if rows == filled else (rows, filled)
        naming = naming_outside_use(self.model) if self._is_sharded else NOTHING  # 4 us per step, only for FSDP2
        with self._autocast(), naming:
            loss = self._loss_sum(micro_batch) if rows < filled else self._full_loss_sum(micro_batch)
        self.mark("backward", self.number)
        if not rows:
            loss = loss * 0  # padding only: this rank runs the model so that it issues its collectives
        self._backpropagate(loss, weight)
        return loss.detach()

    def _full_loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss sum of a micro-batch without padding rows; the compiled region, if any, computes it."""
        region = self._region
        if region is None:
            return self._loss_sum(micro_batch)
        batch = micro_batch.batch
        if self._loss_check is None:
            return region(self._trained, batch, micro_batch.unsharded)
        # An eager loss of all rows may need more memory than the plan: it makes several copies of the logits in fp32.
        if not region.is_whole:
            return region.checked(
                self._trained, batch, micro_batch.unsharded, lambda output: self._check_loss(output, batch, micro_batch)
            )
        probed = micro_batch.first(_PROBED_ROWS)  # the whole region returns no output to check
        if probed is None:
            return self._loss_sum(micro_batch)
        with uncompiled_probe(self._trained):
            self._loss_sum(probed)
        return region(self._trained, batch, micro_batch.unsharded)

    def _loss_sum(self, micro_batch: MicroBatch) -> Tensor:
        """Return the loss sum of a micro-batch without padding rows; checks the loss of the first micro-batches.

        The logits, which are gigabytes for a large vocabulary, are freed on return.
        """
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        is_short = rows < filled and self._loss.by_row
        tracking = self._output_rows.tracking(batch) if is_short else NOTHING
        with self._keyed(self._trained, micro_batch), tracking:
            output = self._forward(self._trained, batch)
        if is_short:
            output = self._output_rows.drop_padding(output, rows, filled)
            batch = drop_padding_rows(batch, rows, filled, micro_batch.marks)
        # A model that returns a mean normalizes over whole sequences, also if this rank has a slice of them.
        loss: Tensor | None = None
        if is_short and self._region is not None and self._region.is_compiled and self._loss in ROW_SUMS:
            loss = sum_by_rows(self._loss, output, batch, settle_marks(micro_batch.marks, batch, rows))
        if loss is None:
            loss = self._loss.sum_of(output, batch if self._loss.by_row else micro_batch.unsharded)
        if self._loss_check is not None:
            self._check_loss(output, batch, micro_batch)
        return loss

    def _backpropagate(self, loss: Tensor, weight: float | Tensor) -> None:
        """Back-propagate a loss sum with its weight; for a CUDA graph, the weight is a tensor at a fixed address."""
        if isinstance(weight, torch.Tensor):
            self._weight, self._gradient = None, weight.to(loss.dtype)
        elif weight != self._weight:
            self._weight, self._gradient = weight, torch.full_like(loss, weight)
        # The weight is passed as the gradient of the loss: 20 us per step faster than a multiplication.
        self.update.scale(loss).backward(self._gradient)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their names in the user's module."""
        return unwrap(self.model).named_parameters()

    @torch.no_grad()
    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return the sum and count of each measure without padding rows; call on every model-parallel rank."""
        batch, rows, filled = micro_batch.batch, micro_batch.rows, micro_batch.filled
        whole = micro_batch.unsharded
        model = unwrap(self.model)
        found: dict[str, float] = {}
        with self._autocast(), self._deferred():
            output = self._forward(model, batch)
            if rows and rows < filled:
                output = self._output_rows.drop_padding(output, rows, filled)
                batch = drop_padding_rows(batch, rows, filled, micro_batch.marks)
                whole = drop_padding_rows(whole, rows, filled, micro_batch.marks)
            if rows:
                found = measured(output, batch, rows, measures, whole=whole)
        if (self._heads or isinstance(self._region, HeadRegion)) and isinstance(model, FSDPModule):
            model.reshard()  # the root unit stays unsharded after forward, and there is no backward to reshard it
        return found
