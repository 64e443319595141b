"""Wiring: a Job whose model is an MLX module, a Plan and a World become a Step."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from shardwise.engines.mlx.arrays import foreign_batch_norms, form_of, share_batch_norms
from shardwise.engines.mlx.functions import Forward, Gradient, norm_of, sum_over, update_by
from shardwise.engines.mlx.holding import Trained
from shardwise.engines.mlx.ring import join_group
from shardwise.engines.mlx.step import Functions, MlxStep
from shardwise.engines.mlx.weights import make_groups, read_weights, share_weights
from shardwise.errors import JobError, some_of
from shardwise.job.generators import seed_generators

if TYPE_CHECKING:
    from shardwise.dist import World
    from shardwise.engines.mlx.arrays import MlxBatchNorm
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.build import BuildContext

_DTYPES = {"fp64": mx.float64, "fp32": mx.float32, "bf16": mx.bfloat16}


def build_mlx_step(job: Job, plan: Plan, world: World, context: BuildContext) -> MlxStep:
    """Make the Step that trains `job` under `plan` with MLX; called on every rank, communicates."""
    around = context.step_context(job, plan, world, fill=False)
    note = context.note
    group = join_group(world, note=note)
    model = _make_model(job, plan)
    norms = _norm_batches(model, group if plan.batch_norm == "sync" else None)
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
    still: set[str] = set()
    functions = Functions(
        forward=forward,
        gradient=Gradient(job.loss, forward, norms, note),
        total=sum_over(group) if group is not None else None,
        norm=mx.compile(norm_of),
        move=update_by(model, form, optimizer, job.clip_norm, still),
        still=still,
    )
    step = MlxStep(job, trained, functions, around, note)
    step.seed(job.seed + 1 + plan.layout.draw_index(world.rank))
    return step


def _norm_batches(model: nn.Module, group: mx.distributed.Group | None) -> list[MlxBatchNorm]:
    """Make batch norms share their statistics over `group`; those that cannot are refused."""
    foreign = foreign_batch_norms(model)
    if foreign and group is not None:
        raise JobError(
            f"custom batch norm classes cannot be synchronized over ranks: {some_of(foreign)}",
            code="support.batch-norm-class",
            fix="use mlx.nn.BatchNorm itself, or --set batch_norm=local",
        )
    return share_batch_norms(model, group)


def _make_model(job: Job, plan: Plan) -> nn.Module:
    seed_generators(job.seed)
    mx.random.seed(job.seed)
    model: object = job.model()
    if not isinstance(model, nn.Module):
        kind = type(model)
        raise JobError(
            f"Job.model made a {kind.__module__}.{kind.__qualname__}, and the job's engine is mlx",
            code="job.model-not-of-engine",
            fix='return an mlx.nn.Module, or leave engine="mlx" out of the Job',
        )
    lower = [name for name, array in tree_flatten(model.parameters()) if array.dtype in (mx.bfloat16, mx.float16)]
    if lower:
        raise JobError(
            f"the model holds {some_of(lower)} in 16 bits, and the plan holds weights in {plan.precision.parameter}",
            code="model.trained-dtype-mismatch",
            fix="build it in fp32, and --set precision.compute=bf16 to compute in 16 bits",
        )
    if plan.precision.parameter == "fp64":
        model.set_dtype(mx.float64)
    mx.eval(model.parameters())
    return model
