"""What is planned: a published model by name, or the model of a Job, in the precision of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import PlanError
from shardwise.job import optimizers
from shardwise.planner.cost.memory import ADAMW, SGD, OptimizerShape
from shardwise.planner.model.forms import Model
from shardwise.planner.search.batches import usual_batch
from shardwise.planner.settle import Device, choose_precision
from shardwise.plans.plan import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.plans.plan import DType, Plan


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with what else a question needs of its training."""

    model: Model
    batch_size: int
    batch_source: str
    precision: Precision
    precision_source: str
    optimizer: OptimizerShape = ADAMW
    accepts: Callable[[Plan], None]
    """Raises InputError for plans that `train` would refuse."""


def published_subject(
    name: str,
    cluster: Cluster,
    *,
    accepts: Callable[[Plan], None],
    batch_size: int | None = None,
    length: int | None = None,
    precision: DType | None = None,
    lora: int | None = None,
) -> Subject:
    """Return a published model; what is None is what it was published with. `accepts` raises for untrainable plans."""
    from shardwise.planner.model.published import published

    held, why = _precision(cluster, precision)
    if lora is not None and lora < 1:
        raise PlanError(
            f"LoRA rank {lora} adapts nothing", code="job.lora-rank-invalid", fix="use 1 or more, such as 16"
        )
    plain, gathered = (
        published(name, compute=held.compute, gathered=gathered, length=length, lora=lora or 0)
        for gathered in (False, True)
    )
    model = Model(plain=plain, gathered=gathered)
    usual = usual_batch(name, model.plain.tokens_per_sample, cluster.num_devices, lora=lora is not None)
    return Subject(
        model=model,
        batch_size=batch_size or usual,
        batch_source="--batch-size" if batch_size else "usual for this model",
        precision=held,
        precision_source=why,
        accepts=accepts,
    )


def job_subject(
    job: Job,
    cluster: Cluster,
    describe: Callable[[Job, DType], Model],
    *,
    accepts: Callable[[Plan], None],
    batch_size: int | None = None,
    precision: DType | None = None,
) -> Subject:
    """Return the model of a job, as `describe` tells it."""
    held, why = _precision(cluster, precision)
    return Subject(
        model=describe(job, held.compute),
        batch_size=batch_size or job.batch_size,
        batch_source="--batch-size" if batch_size else "the job's",
        precision=held,
        precision_source=why,
        optimizer=optimizer_shape(job.optimizer),
        accepts=accepts,
    )


def optimizer_shape(factory: object) -> OptimizerShape:
    """Return what an optimizer keeps; one that is not ours is taken for AdamW, which keeps most."""
    if isinstance(factory, optimizers.SGD):
        return OptimizerShape(name="sgd", states=1.0) if factory.momentum else SGD
    return ADAMW


def _precision(cluster: Cluster, asked: DType | None) -> tuple[Precision, str]:
    device = cluster.device
    if asked == "fp64":
        return Precision(parameter=asked, compute=asked, reduce=asked, optimizer=asked), "--precision"
    if asked is not None:
        return Precision(compute=asked), "--precision"
    chosen = Device(kind="cpu" if device.kind == "cpu" else "cuda", has_bf16=device.has_bf16, name=device.name)
    return choose_precision(chosen)
