"""The model that a search plans for, published or of a Job, and the search of `--plan auto` on this machine."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.engines.engine import engine_named, require_supported
from shardwise.environment import cache_directory
from shardwise.errors import PlanError, ShardwiseError
from shardwise.hardware.calibration import calibration_for
from shardwise.hardware.cluster import this_machine
from shardwise.job import optimizers
from shardwise.parallel.support import check_float8_tokens, no_float8_layer
from shardwise.planner.cost.compute import float8_least_width, linear_sizes
from shardwise.planner.cost.memory import ADAMW, SGD, OptimizerShape
from shardwise.planner.model.decoder_parts import published
from shardwise.planner.model.forms import Model
from shardwise.planner.model_config import is_config, read_decoder
from shardwise.planner.search.choices import family_of
from shardwise.planner.search.question import FixedFields, Question
from shardwise.planner.search.search import search
from shardwise.plans.rules import FLOAT8_MULTIPLE, gains_from_float8
from shardwise.plans.sections import Precision
from shardwise.units import format_gb

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.hardware.calibration import Calibration
    from shardwise.hardware.machine import Cluster
    from shardwise.job import Job
    from shardwise.planner.model.shape import ModelShape
    from shardwise.plans.plan import Plan
    from shardwise.plans.sections import DType


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model with the batch size, precision and optimizer of its training."""

    model: Model
    batch_size: int
    batch_source: str
    precision: Precision
    precision_source: str
    optimizer: OptimizerShape = ADAMW
    accepts: Callable[[Plan], None]
    """Raises InputError for plans that `train` would reject."""
    describe: Callable[[DType], Model]
    """Describes the same model for another compute dtype."""
    num_steps: int | None = None
    """Optimizer steps of the training; None if unknown."""

    @property
    def precision_text(self) -> str:
        """The dtypes of the training, with that of frozen weights if the model has adapters."""
        weights = [weight for part in self.model.plain.parts for weight in part.weights]
        if not any(weight.narrow and not weight.trained for weight in weights):
            return str(self.precision)
        return f"frozen weights {self.precision.activations} · trained {self.precision}"

    def question(self, cluster: Cluster, max_bytes: float = math.inf, fixed: FixedFields | None = None) -> Question:
        """Return the input of the search for the best plans on a cluster, with at most `max_bytes` per device.

        The caller passes the fixed precision to `in_precision`.
        """
        fixed = fixed or FixedFields()
        return Question(
            model=self.model,
            cluster=cluster,
            calibration=calibration_for(cluster.node),
            batch_size=self.batch_size,
            precision=self.precision,
            optimizer=self.optimizer,
            compile="blocks" if fixed.has("compile") and fixed.plan.compile != "none" else "none",
            fixed=fixed,
            accepts=self.accepts,
            max_bytes=max_bytes,
        )

    def in_precision(self, precision: Precision) -> Subject:
        """Return the same model in the precision of a plan."""
        if precision == self.precision:
            return self
        model = self.model
        if precision.activations != self.precision.activations:
            model = self.describe(precision.activations)
        return dataclasses.replace(self, model=model, precision=precision, precision_source="the plan's")


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
    """Return the subject of a published model or a config.json; None is the default of the model's publication.

    `accepts` raises for plans that cannot be trained.
    """
    chosen, why = _precision(cluster, precision)
    if lora is not None and lora < 1:
        raise PlanError(
            f"the LoRA rank must be positive, got {lora}",
            code="job.lora-rank-invalid",
            fix="use 1 or more, such as 16",
        )
    describe = _describer(name, length, lora or 0)
    model = describe(chosen.activations)
    usual = usual_batch(name, model.plain.tokens_per_sample, cluster.num_devices, lora=lora is not None)
    source = "as Llama was trained" if is_config(name) else "usual for this model"
    return Subject(
        model=model,
        batch_size=batch_size or usual,
        batch_source="--batch-size" if batch_size else source,
        precision=chosen,
        precision_source=why,
        accepts=functools.partial(_published_rules, accepts, model.plain, calibration_for(cluster.node)),
        describe=describe,
    )


def _published_rules(accepts: Callable[[Plan], None], shape: ModelShape, calibration: Calibration, plan: Plan) -> None:
    """Raise InputError if `train` would reject a plan for a model of this shape in float8: `Float8Rules` for a job."""
    accepts(plan)
    if plan.precision.compute != "float8" or plan.float8.modules:
        return
    least = float8_least_width(calibration, plan.float8.recipe)
    sizes = _linear_sizes(shape, plan)
    if not any(gains_from_float8(*size, least) for size in sizes.values()):
        numbers = {part.name: part.count for part in shape.parts}
        every = [size for (part, _), size in sizes.items() for _ in range(numbers[part])]
        raise no_float8_layer(every, max(least, FLOAT8_MULTIPLE))
    if plan.float8.recipe != "rowwise" and shape.tokens_per_sample is not None:
        name = next(name for (_, name), size in sizes.items() if gains_from_float8(*size, least))
        check_float8_tokens(plan, name.removesuffix(".weight"), plan.micro_batch * shape.tokens_per_sample)


def _linear_sizes(shape: ModelShape, plan: Plan) -> dict[tuple[str, str], tuple[int, int]]:
    """Return rows and columns of the shards of linear layers that may be in float8, by part and weight."""
    sizes: dict[tuple[str, str], tuple[int, int]] = {}
    for part in shape.parts if shape.tokens_per_sample is not None else ():  # images: products are convolutions
        if part.kind == "block" or (part.kind == "last" and plan.float8.head):
            for name, size in linear_sizes(part, plan.layout.tp).items():
                sizes[part.name, name] = size
    return sizes


def _describer(name: str, length: int | None, lora: int) -> Callable[[DType], Model]:
    """Return the function that describes a published model, or the decoder of a config.json, for a compute dtype."""
    if is_config(name):
        decoder = read_decoder(name)
        shape = functools.partial(decoder.shape, length=decoder.length(length), lora=lora)
    elif "/" in name:  # a name of the Hugging Face hub, or a folder
        raise PlanError(
            f"{name} is neither a published model nor a folder",
            code="model.unknown-name",
            fix="download its config.json, and pass the path of that file",
        )
    else:
        shape = functools.partial(published, name, length=length, lora=lora)

    def describe(compute: DType) -> Model:
        return Model(plain=shape(compute=compute, gathered=False), gathered=shape(compute=compute, gathered=True))

    return describe


def describe_job(job: Job, compute: DType) -> Model:
    """Return the description of a job's model trained in `compute`: traced once, then read from the cache."""
    from shardwise.planner.trace.trace import described  # imports torch, which published models do not need

    return described(job, compute, cache_directory() / "models")


def job_rules(job: Job) -> Callable[[Plan], None]:
    """Return the check of `train` for plans of this job; it builds the model once, for the first plan."""

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
    """Return the model of a job; with `accepts` None, the rules of `train` apply; messages name the job `owner`."""
    fix = "run shardwise train, with --nproc 2 for two replicas"
    engine_named(job.engine).require_torch_model(owner, "plan predicts torch modules", fix=fix)
    chosen, why = _precision(cluster, precision)
    model = describe(job, chosen.activations)
    return Subject(
        model=model,
        batch_size=batch_size or job.batch_size,
        batch_source="--batch-size" if batch_size else "the job's",
        precision=chosen,
        precision_source=why,
        optimizer=optimizer_shape(job),
        accepts=accepts or job_rules(job),
        describe=functools.partial(describe, job),
        num_steps=_num_steps(job, batch_size or job.batch_size, model.plain.tokens_per_sample),
    )


def _num_steps(job: Job, batch_size: int, tokens_per_sample: int | None) -> int | None:
    """Return the optimizer steps of a job; None if its length is in epochs, since its data are not read."""
    if job.tokens is not None and tokens_per_sample is not None:
        return math.ceil(job.tokens / (batch_size * tokens_per_sample))
    return job.steps


def optimizer_shape(job: Job) -> OptimizerShape:
    """Return the shape of an optimizer's state; an unknown optimizer counts as AdamW, which has the most state."""
    factory = job.optimizer
    if isinstance(factory, optimizers.SGD):
        return OptimizerShape(name="sgd", states=1.0) if factory.momentum else SGD
    if isinstance(factory, optimizers.Muon):
        from shardwise.parallel.muon_matrices import job_matrices  # imports torch

        return OptimizerShape(name="muon", matrices=frozenset(job_matrices(job, factory)), ns_steps=factory.ns_steps)
    return ADAMW


def _precision(cluster: Cluster, requested: DType | None) -> tuple[Precision, str]:
    device = cluster.device
    if requested == "fp64":
        precision = Precision(parameter=requested, compute=requested, reduce=requested, optimizer=requested)
        return precision, "--precision"
    if requested == "bf16" and device.kind != "cpu" and not device.has_bf16:
        raise PlanError(
            f"--precision bf16 is not supported by {device.name}, which lacks bf16",
            code="support.bf16-device",
            fix="use --precision fp16",
        )
    if requested is not None:
        return Precision(compute=requested), "--precision"
    return choose_precision(device.name, is_cpu=device.kind == "cpu", has_bf16=device.has_bf16)


def choose_precision(device: str, *, is_cpu: bool, has_bf16: bool) -> tuple[Precision, str]:
    """Return the dtypes for a device and why: fp32 on a CPU, else bf16 if supported, else fp16 with loss scaling."""
    if is_cpu:
        return Precision(compute="fp32"), f"auto: {device} computes in fp32"
    if has_bf16:
        return Precision(compute="bf16"), f"auto: {device} has bf16"
    return Precision(compute="fp16"), f"auto: {device} lacks bf16, so fp16 with loss scaling"


# The plan "auto" of a job on this machine: searched on GPUs, the simplest on a CPU.


def _machines(world_size: int) -> Cluster:
    """Return this machine, or a cluster of enough equal machines for `world_size` GPUs; ranks on a CPU share it."""
    here = this_machine()
    is_cpu = here.device.kind == "cpu"
    if not is_cpu and world_size > here.num_devices and world_size % here.num_devices == 0:
        return dataclasses.replace(here, num_devices=world_size)
    return this_machine(world_size)


def job_question(job: Job, world_size: int, fixed: FixedFields | None = None) -> tuple[Subject, Question]:
    """Return the model of a job and the input of its search on machines like this one, with the fixed fields."""
    cluster = _machines(world_size)
    subject, fixed = job_subject(job, cluster), fixed or FixedFields()
    if fixed.has("precision"):
        subject = subject.in_precision(fixed.plan.precision)
    return subject, subject.question(cluster, fixed=fixed)


def search_plan(job: Job, fixed: FixedFields, world_size: int) -> tuple[Plan | None, str]:
    """Return the best plan with the fixed fields for a job on the GPUs of this type of machine, or None, and why."""
    try:
        subject, question = job_question(job, world_size, fixed)
    except ShardwiseError as error:
        return None, f"could not be searched ({error.fact})"
    answer = search(question)
    if answer.best is None:
        return None, "that fits was not found (shardwise plan shows the numbers)"
    from shardwise.planner.search.speed import best_with_speed_options, gains_of_memory_options  # imports torch

    device = question.cluster.device
    plan = best_with_speed_options(job, question, answer.best.plan)
    seconds = question.time_model().predict(question.model.for_plan(plan), plan).seconds
    why = (
        f"auto: {family_of(plan)} of {answer.num_plans} plans, {format_gb(question.memory_of(plan).total)} of"
        f" {format_gb(device.memory_bytes)}, {seconds:.3g} s a step predicted"
    )
    sources = {**dict.fromkeys(("layout", "zero"), why), **gains_of_memory_options(question, plan)}
    sources |= {"precision": subject.precision_source, **plan.sources}
    return dataclasses.replace(plan, sources=sources), why


# Default global batch sizes of published models: those of their own training, in samples per step.


TOKENS = {
    "gpt2": 2**19,  # Brown et al. 2020, table 2.1: half a million tokens for models of this size
    "llama3-405b": 2**24,  # Llama team 2024: 4M tokens at first, 16M for most of the training
    "llama": 2**22,  # Touvron et al. 2023: 4M tokens
    "byt5": 2**20,  # Xue et al. 2022: 2^20 tokens
    "t5": 2**16,  # Raffel et al. 2020: 128 sequences of 512 tokens
}
"""Tokens per step by the prefix of a model's name; the first match counts."""
SAMPLES_PER_DEVICE = 32
"""Samples per device if they are not sequences: Goyal et al. 2017 trained ResNet-50 with 32 images per GPU."""
FINE_TUNING = 128
"""Samples per step with LoRA: Hu et al. 2021 used 128 for GPT-3."""


def usual_batch(name: str, tokens_per_sample: int | None, num_devices: int, *, lora: bool) -> int:
    """Return the global batch size of a published model, rounded up so that it divides evenly over the devices."""
    if tokens_per_sample is None:
        return SAMPLES_PER_DEVICE * num_devices
    tokens = next((tokens for start, tokens in TOKENS.items() if name.startswith(start)), TOKENS["llama"])
    samples = FINE_TUNING if lora else max(1, tokens // tokens_per_sample)
    # With more devices than samples, powers of two are left to tensor and pipeline parallelism.
    shared = num_devices if num_devices <= samples else num_devices // (num_devices & -num_devices)
    return math.ceil(samples / shared) * shared
