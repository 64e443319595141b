"""What is planned: a published model or the model of a Job; and plan = auto for the machine at hand."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.engines.engine import engine_named
from shardwise.environment import cache_directory
from shardwise.errors import PlanError, ShardwiseError
from shardwise.hardware.calibration import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.job import optimizers
from shardwise.parallel.support import require_supported
from shardwise.planner.cost.memory import ADAMW, SGD, OptimizerShape
from shardwise.planner.model.decoder_parts import published
from shardwise.planner.model.forms import Model
from shardwise.planner.search.search import Question, search
from shardwise.planner.settle import LocalDevice, choose_precision
from shardwise.plans.plan import Precision
from shardwise.units import format_gb

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.plans.plan import DType, Plan


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with what else the search needs of its training."""

    model: Model
    batch_size: int
    batch_source: str
    precision: Precision
    precision_source: str
    optimizer: OptimizerShape = ADAMW
    accepts: Callable[[Plan], None]
    """Raises InputError for plans that `train` would refuse."""

    def question(self, cluster: Cluster) -> Question:
        """Return what to search on a cluster."""
        return Question(
            model=self.model,
            cluster=cluster,
            calibration=calibration_for(cluster.node),
            batch_size=self.batch_size,
            precision=self.precision,
            optimizer=self.optimizer,
            accepts=self.accepts,
        )


def published_subject(
    name: str,
    cluster: Cluster,
    *,
    accepts: Callable[[Plan], None] = require_supported,
    batch_size: int | None = None,
    length: int | None = None,
    precision: DType | None = None,
    lora: int | None = None,
) -> Subject:
    """Return a published model; what is None is what it was published with. `accepts` raises for untrainable plans."""
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


def describe_job(job: Job, compute: DType) -> Model:
    """Return the model of a job as planning sees it, computed in `compute`: traced once, then read from the cache."""
    from shardwise.planner.trace.trace import described  # imports torch, which published models do not need

    return described(job, compute, cache_directory() / "models")


def job_rules(job: Job) -> Callable[[Plan], None]:
    """Return the check that `train` makes of a plan for this job; the model is built once, for the first plan."""

    @functools.cache
    def rules() -> Callable[[Plan], None]:
        from shardwise.training.preflight import ModelRules  # imports torch

        return ModelRules(job)

    def check(plan: Plan) -> None:
        rules()(plan)

    return check


def job_subject(
    job: Job,
    cluster: Cluster,
    describe: Callable[[Job, DType], Model] = describe_job,
    *,
    accepts: Callable[[Plan], None] | None = None,
    batch_size: int | None = None,
    precision: DType | None = None,
    owner: str = "the job",
) -> Subject:
    """Return the model of a job; `accepts` None takes the rules of `train`; `owner` is what messages call the job."""
    fix = "shardwise train it, with --nproc 2 for two replicas"
    engine_named(job.engine).require_torch_model(owner, "plan predicts torch modules", fix=fix)
    held, why = _precision(cluster, precision)
    return Subject(
        model=describe(job, held.compute),
        batch_size=batch_size or job.batch_size,
        batch_source="--batch-size" if batch_size else "the job's",
        precision=held,
        precision_source=why,
        optimizer=optimizer_shape(job.optimizer),
        accepts=accepts or job_rules(job),
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
    chosen = LocalDevice(kind="cpu" if device.kind == "cpu" else "cuda", has_bf16=device.has_bf16, name=device.name)
    return choose_precision(chosen)


# The plan "auto" for a job on the machine at hand: searched on GPUs, the simplest on a CPU.


def _machines(world_size: int) -> Cluster:
    """Return this machine, or so many like it."""
    here = this_machine()
    if world_size > here.num_devices and world_size % here.num_devices == 0:
        return dataclasses.replace(here, num_devices=world_size)
    return this_machine(world_size)


def search_plan(job: Job, world_size: int) -> tuple[Plan | None, str]:
    """Return the best plan for a job on GPUs of machines like this one and why; None, and why, where none was found."""
    try:
        cluster = _machines(world_size)
        subject = job_subject(job, cluster)
    except ShardwiseError as error:
        return None, f"could not be searched ({error.fact})"
    answer = search(subject.question(cluster))
    if answer.best is None:
        return None, "that fits was not found (shardwise plan shows the numbers)"
    best, device = answer.best, cluster.device
    why = (
        f"auto: {best.family} of {answer.num_plans} plans, {format_gb(best.memory.total)} of"
        f" {format_gb(device.memory_bytes)}, {best.time.seconds:.3g} s a step predicted"
    )
    sources = dict.fromkeys(("layout", "zero", "recompute", "micro_batch", "accumulation", "fused_loss"), why)
    return dataclasses.replace(best.plan, sources={**sources, "precision": subject.precision_source}), why


# Global batches of published models when the user names none: what they were trained with, in samples per step.


TOKENS = {
    "gpt2": 2**19,  # Brown et al. 2020, table 2.1: half a million tokens for models of this size
    "llama3-405b": 2**24,  # Llama team 2024: 4M tokens at first, 16M for most of the training
    "llama": 2**22,  # Touvron et al. 2023: 4M tokens
    "byt5": 2**20,  # Xue et al. 2022: 2^20 tokens
    "t5": 2**16,  # Raffel et al. 2020: 128 sequences of 512 tokens
}
"""Beginning of a model's name -> tokens per step; the first that matches."""
SAMPLES_PER_DEVICE = 32
"""Where samples are not sequences: Goyal et al. 2017 trained ResNet-50 with 32 images a GPU."""
FINE_TUNING = 128
"""Samples per step with LoRA: Hu et al. 2021 used 128 for GPT-3."""


def usual_batch(name: str, tokens_per_sample: int | None, num_devices: int, *, lora: bool) -> int:
    """Return the global batch of a published model, filled up so that all devices can share it evenly."""
    if tokens_per_sample is None:
        return SAMPLES_PER_DEVICE * num_devices
    tokens = next((tokens for start, tokens in TOKENS.items() if name.startswith(start)), TOKENS["llama"])
    samples = FINE_TUNING if lora else max(1, tokens // tokens_per_sample)
    # More devices than samples leave some to tensor and pipeline parallelism, by powers of two.
    shared = num_devices if num_devices <= samples else num_devices // (num_devices & -num_devices)
    return math.ceil(samples / shared) * shared
