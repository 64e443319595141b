"""Builds and runs the optimizer step of an MLX model.

shardwise provides batches, the loss normalizer and learning rates; MLX computes gradients, sums them over its own group
of ranks and updates the model. MLX is lazy: a step only builds a graph until `begin` starts its evaluation, and the
update is computed while the host prepares the next batch.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from shardwise.data.packed_batches import packed_batch
from shardwise.engines.mlx.arrays import foreign_batch_norms, form_of, share_batch_norms, to_torch
from shardwise.engines.mlx.functions import Forward, Gradient, norm_of, sum_over, update_by
from shardwise.engines.mlx.ring import join_group
from shardwise.engines.mlx.state import MlxState, Trained
from shardwise.engines.mlx.weights import make_groups, read_weights, set_rates, share_weights
from shardwise.errors import JobError, some_of
from shardwise.job.generators import seed_generators
from shardwise.runs.calls import GroupKey, Operation, pack
from shardwise.training.loading import check_tokens, config_vocabulary
from shardwise.training.step.first_step_checks import check_counted
from shardwise.training.step.step import StepReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.dist import World
    from shardwise.engines.mlx.arrays import MlxBatchNorm
    from shardwise.engines.mlx.functions import Gradients
    from shardwise.job import Job, Metric
    from shardwise.plans import Plan
    from shardwise.runs.calls import CallRing
    from shardwise.training.build import BuildContext
    from shardwise.training.step.step import StepContext

_DTYPES = {"fp64": mx.float64, "fp32": mx.float32, "bf16": mx.bfloat16}


def build_mlx_step(job: Job, plan: Plan, world: World, context: BuildContext) -> MlxStep:
    """Build the Step that trains `job` under `plan` with MLX. Communicates over the world; call on every rank."""
    around = context.step_context(job, plan, world, fill=False)
    note = context.note
    group = join_group(world, note=note)
    model = _make_model(job, plan)
    check_tokens(job, around.feed, _vocabulary_of(model), world, note)
    norms = _synchronize_batch_norms(model, group if plan.batch_norm == "sync" else None)
    form = form_of(model)
    origin = read_weights(Path(job.weights), model, form) if job.weights is not None else share_weights(model, form)
    low = _DTYPES[plan.precision.compute] if plan.precision.compute != plan.precision.parameter else None
    forward = Forward(job, model, form, low)
    optimizer, groups = make_groups(job.optimizer, form, form.read(model, form.trained))
    trained = Trained(
        model=model,
        form=form,
        optimizer=optimizer,
        groups=groups,
        norms=norms,
        dtype=_DTYPES[plan.precision.parameter],
        origin=origin,
    )
    unused: set[str] = set()
    functions = Functions(
        forward=forward,
        gradient=Gradient(job.loss, forward, norms, note),
        total=sum_over(group) if group is not None else None,
        norm=mx.compile(norm_of),
        update=update_by(model, form, optimizer, job.clip_norm, unused),
        unused=unused,
    )
    step = MlxStep(job, trained, functions, around, note)
    step.seed(job.seed + 1 + plan.layout.draw_index(world.rank))
    return step


def _synchronize_batch_norms(model: nn.Module, group: mx.distributed.Group | None) -> list[MlxBatchNorm]:
    """Make batch norms compute their statistics over `group`; raise if a custom class cannot."""
    foreign = foreign_batch_norms(model)
    if foreign and group is not None:
        raise JobError(
            f"custom batch norm classes cannot be synchronized over ranks: {some_of(foreign)}",
            code="support.batch-norm-class",
            fix="use mlx.nn.BatchNorm, or pass --set batch_norm=local",
        )
    return share_batch_norms(model, group)


def _make_model(job: Job, plan: Plan) -> nn.Module:
    """Return the job's model, evaluated, in the plan's parameter dtype; raise if it is no MLX module or is 16-bit."""
    seed_generators(job.seed)
    mx.random.seed(job.seed)
    model: object = job.model()
    if not isinstance(model, nn.Module):
        kind = type(model)
        raise JobError(
            f"Job.model returned a {kind.__module__}.{kind.__qualname__}, but the job's engine is mlx",
            code="job.model-not-of-engine",
            fix='return an mlx.nn.Module, or remove engine="mlx" from the Job',
        )
    lower = [name for name, array in tree_flatten(model.parameters()) if array.dtype in (mx.bfloat16, mx.float16)]
    if lower:
        raise JobError(
            f"parameters must be {plan.precision.parameter} as in the plan, got 16-bit parameters {some_of(lower)}",
            code="model.trained-dtype-mismatch",
            fix="build the model in fp32, and pass --set precision.compute=bf16 to compute in 16 bits",
        )
    if plan.precision.parameter == "fp64":
        model.set_dtype(mx.float64)
    mx.eval(model.parameters())
    return model


@dataclass(frozen=True, kw_only=True)
class Functions:
    """The functions that a step calls, most of them compiled."""

    forward: Forward
    gradient: Gradient
    total: Callable[[Gradients], Gradients] | None
    """Sums gradients over ranks; None for one process."""
    norm: Callable[[Gradients], mx.array]
    update: Callable[[Gradients, mx.array], None]
    unused: set[str]
    """Parameters that `update` skips while their gradient is zero; read when `update` is first called."""


class MlxStep(MlxState):
    """One optimizer step of an MLX model; the update is computed while the host prepares the next batch."""

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
        """Train on one global batch. Communicates over MLX's group; call on every rank."""
        if self._note is not None:
            _refuse_packed_rows(batch)
        rate = self._set_rates()
        self.mark("forward", self.number)
        # The sum over the real rows of all ranks, divided by the loss normalizer of the global batch, is the mean that
        # one process would compute.
        total, gradients = self._accumulate(batch, 1.0 / (batch.denominator or 1))
        self._num_batches += len(batch.micro_batches)
        if self._note is not None:
            self._find_unused(batch, gradients, self._note)
            self._note = None
        if self._before_update is not None:
            self._gradients = gradients
            self._before_update()
            gradients, self._gradients = self._gradients, []
        norm = self._functions.norm(gradients)
        self.mark("backward", self.number)  # so far MLX has only built the graph
        begin(self.number, total, norm, mx.random.state)
        # Without this wait MLX keeps old and new values of every array alive: an update measured one third slower.
        finish(self.number, norm)
        if not batch.denominator:
            check_counted(to_torch(total))
        self.mark("optimizer", self.number)
        grad_norm = to_torch(norm)
        is_finite = bool(grad_norm.isfinite())
        if is_finite:
            self._functions.update(gradients, norm)
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
        """Set the learning rates of this step; return the rate of the first group."""
        factor = self._rate_factor(self.number, self.length.num_steps)
        rates = [base * factor for base in self.base_rates]
        set_rates(self._groups, rates, self._dtype)
        return float(rates[0])

    def _accumulate(self, batch: StepBatch, weight: float) -> tuple[mx.array, Gradients]:
        """Return this rank's loss sum and the gradients of the weighted loss, summed over ranks.

        Communicates over MLX's group.
        """
        factor = mx.array(weight, dtype=self._dtype)
        gradients: Gradients = []
        losses = []
        for micro_batch in batch.micro_batches:
            loss, gradients = self._functions.gradient(micro_batch, factor, gradients)
            losses.append(loss)
            if len(batch.micro_batches) > 1:
                # Evaluated per micro-batch: one graph could keep the activations of all micro-batches in memory.
                mx.async_eval(loss, gradients)  # type: ignore[no-untyped-call]
        if self._functions.total is not None:
            gradients = self._functions.total(gradients)
        return (losses[0] if len(losses) == 1 else mx.stack(losses).sum()), gradients

    def _find_unused(self, batch: StepBatch, gradients: Gradients, note: Callable[[str], None]) -> None:
        """Find, in the first step, the parameters that no rank's loss depends on; communicates over MLX's group.

        MLX returns zero gradients for them, where torch returns None: weight decay would still change them.
        """
        if all(bool(mx.any(array)) for array in gradients):
            return
        restore = self.snapshot()
        _, poisoned = self._accumulate(batch, math.nan)  # NaN reaches every parameter that the loss depends on
        named = zip(self._form.trained, poisoned, strict=True)
        names = [name for name, array in named if not bool(mx.isnan(array).any())]
        restore()
        self._functions.unused.update(names)
        if names:
            note(f"parameters without a gradient are not updated until they have one: {some_of(names)}")

    def measure(self, micro_batch: MicroBatch, measures: Mapping[str, Metric]) -> dict[str, float]:
        """Return the sum and count of each metric over the rows that are not padding, without updating the model."""
        if not micro_batch.rows:
            return {}
        output, batch = self._functions.forward.evaluate(micro_batch)
        found: dict[str, float] = {}
        for name, measure in measures.items():
            found[name] = float(measure.sum_of(output, batch))
            found[f"{name}/count"] = measure.count_of(micro_batch.batch, micro_batch.rows)
        return found


def _vocabulary_of(model: nn.Module) -> int | None:
    """Return the vocabulary size of a model's config, else the size of its largest embedding; None without both."""
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    largest = max((len(module.weight) for module in embeddings), default=None)
    return config_vocabulary(model) or largest


def _refuse_packed_rows(batch: StepBatch) -> None:
    """Raise JobError for packed rows: nothing checks that an MLX model keeps their documents apart."""
    packed = packed_batch(batch.micro_batches[0].batch)
    if packed is not None and packed.has_documents:
        raise JobError(
            "engine mlx does not train on packed rows, since nothing checks that documents do not influence each other",
            code="support.mlx-packed",
            fix="set packed=False in sw.datasets.tokens, or use a torch model",
        )


# Evaluation of a step's sums over ranks. `record` replaces both functions in this module, so `__call__` finds the
# recorded ones when it looks them up.


def begin(step: int, *arrays: Any) -> None:  # noqa: ARG001 - the recorder reads the step
    """Start the evaluation of arrays or trees of arrays without waiting; communicates over MLX's group."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]


def finish(step: int, array: mx.array) -> None:  # noqa: ARG001 - the recorder reads the step
    """Wait until an array of a step is computed; communicates over MLX's group if it is a sum over ranks."""
    mx.eval(array)


_STEP = Operation("the sums of step", "", "", "")


def record(ring: CallRing, world_size: int) -> None:
    """Record each step as one collective of all ranks, since MLX's sums use no torch process group.

    Wraps `begin` and `finish` of this module; a world of one rank is not recorded.
    """
    if world_size == 1:
        return
    module: Any = sys.modules[__name__]
    what = pack(ring.intern(GroupKey("mlx", 0, tuple(range(world_size)))), ring.intern(_STEP), 0)
    pending: dict[int, int] = {}
    begin, finish = module.begin, module.finish

    @functools.wraps(begin)
    def recorded_begin(step: int, *arrays: Any) -> None:
        number = pending[step] = ring.issue(step + 1, what)
        begin(step, *arrays)
        ring.release(number)

    @functools.wraps(finish)
    def recorded_finish(step: int, array: Any) -> None:
        number = pending.pop(step, None)
        if number is None:
            finish(step, array)
            return
        ring.wait(number)
        finish(step, array)
        ring.leave(number)  # not reached if the call raised: the record then shows where the rank failed

    module.begin, module.finish = recorded_begin, recorded_finish
