"""The step in MLX: our samples, denominator and rates; its arrays, gradients, ring and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from shardwise.engines.mlx import waits
from shardwise.engines.mlx.arrays import to_torch
from shardwise.engines.mlx.holding import MlxState
from shardwise.engines.mlx.weights import set_rates
from shardwise.errors import some_of
from shardwise.training.step.first_step_checks import refuse_uncounted
from shardwise.training.step.step import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.engines.mlx.functions import Forward, Gradient, Gradients
    from shardwise.engines.mlx.holding import Trained
    from shardwise.job import Job, Metric
    from shardwise.training.step.step import StepContext


@dataclass(frozen=True, kw_only=True)
class Functions:
    """What is computed in a step."""

    forward: Forward
    gradient: Gradient
    total: Callable[[Gradients], Gradients] | None
    """Sums over the ranks; None for one process."""
    norm: Callable[[Gradients], mx.array]
    move: Callable[[Gradients, mx.array], None]
    still: set[str]
    """Parameters that `move` leaves alone without a gradient, if they are here before it is first called."""


class MlxStep(MlxState):
    """One optimizer step of an MLX model; its update is computed while the host prepares what comes next."""

    def __init__(
        self, job: Job, trained: Trained, functions: Functions, around: StepContext, note: Callable[[str], None]
    ) -> None:
        super().__init__(trained)
        self.feed, self.length, self.mark = around.feed, around.length, around.mark
        self.source = around.source
        self.number = around.first_step
        self.base_rates = [group.settings["lr"] for group in trained.groups]
        self._functions = functions
        self._rate_factor = job.schedule
        self._before_update = around.before_update
        self._reduce_loss = around.reduce_loss
        self._note: Callable[[str], None] | None = note

    def __call__(self, batch: StepBatch) -> StepReport:
        """Train on one global batch; communicates over the ring, on every rank."""
        rate = self._set_rates()
        self.mark("forward", self.number)
        # The sum over all real rows of all ranks, divided by the one denominator of the global batch, is the mean one
        # process would compute.
        total, gradients = self._accumulate(batch, 1.0 / (batch.denominator or 1))
        self._num_batches += len(batch.micro_batches)
        if self._note is not None:
            self._find_unreached(batch, gradients, self._note)
            self._note = None
        if self._before_update is not None:
            self._gradients = gradients
            self._before_update()
            gradients, self._gradients = self._gradients, []
        norm = self._functions.norm(gradients)
        self.mark("backward", self.number)  # until here all was only written down
        waits.begin(self.number, total, norm, mx.random.state)
        # Without this wait MLX would have to choose between old and new values of every array: measured, a third of
        # an update more.
        waits.finish(self.number, norm)
        if not batch.denominator:
            refuse_uncounted(to_torch(total))
        self.mark("optimizer", self.number)
        grad_norm = to_torch(norm)
        is_finite = bool(grad_norm.isfinite())
        if is_finite:
            self._functions.move(gradients, norm)
        mx.async_eval(self.model.state, self.optimizer.state)  # type: ignore[no-untyped-call]
        loss_sum = to_torch(total)
        report = StepReport(
            self.number,
            batch.cursor,
            loss_sum,
            batch.samples,
            batch.denominator,
            rate,
            grad_norm,
            0.0 if is_finite else 1.0,
            None if self._reduce_loss is None else self._reduce_loss.begin(loss_sum, batch.denominator),
        )
        self.number += 1
        self.mark("data", self.number)
        return report

    def _set_rates(self) -> float:
        """Set the learning rates of this step; returns the first group's."""
        factor = self._rate_factor(self.number, self.length.num_steps)
        rates = [base * factor for base in self.base_rates]
        set_rates(self._groups, rates, self._dtype)
        return float(rates[0])

    def _accumulate(self, batch: StepBatch, weight: float) -> tuple[mx.array, Gradients]:
        """Return the loss sum of all micro-batches, and the gradients of it times `weight`, over the ranks.

        The loss is of this rank. Communicates.
        """
        factor = mx.array(weight, dtype=self._dtype)
        gradients: Gradients = []
        losses = []
        for micro_batch in batch.micro_batches:
            loss, gradients = self._functions.gradient(micro_batch, factor, gradients)
            losses.append(loss)
            if len(batch.micro_batches) > 1:
                # Begun now: built up, the activations of all micro-batches might be held at once.
                mx.async_eval(loss, gradients)  # type: ignore[no-untyped-call]
        if self._functions.total is not None:
            gradients = self._functions.total(gradients)
        return (losses[0] if len(losses) == 1 else mx.stack(losses).sum()), gradients

    def _find_unreached(self, batch: StepBatch, gradients: Gradients, note: Callable[[str], None]) -> None:
        """Find in the first step, by its summed gradients, the parameters that no rank's loss depends on; communicates.

        MLX gives them zeros, where torch gives nothing: weight decay would move them all the same.
        """
        if all(bool(mx.any(array)) for array in gradients):
            return
        restore = self.snapshot()
        _, poisoned = self._accumulate(batch, math.nan)  # once more, times NaN, which reaches whatever a loss reaches
        named = zip(self._form.trained, poisoned, strict=True)
        names = [name for name, array in named if not bool(mx.isnan(array).any())]
        restore()
        self._functions.still.update(names)
        if names:
            note(f"parameters without gradient in the first step stay as they are until they get one: {some_of(names)}")

    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return sum and count of each measure over the real rows, without training."""
        if not micro_batch.rows:
            return {}
        output, batch = self._functions.forward.evaluate(micro_batch)
        found: dict[str, float] = {}
        for name, measure in measures.items():
            found[name] = float(measure.sum_of(output, batch))
            found[f"{name}/count"] = measure.count_of(micro_batch.batch, micro_batch.rows)
        return found
