"""The options of `plan`, and their checks before anything is predicted."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from shardwise.errors import InputError
from shardwise.planner.asked import read_header
from shardwise.planner.next_step import read_tokens
from shardwise.spec import Option, PositiveInt, Spec, argument, option
from shardwise.units import MIB, format_gb, read_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwise.hardware.machine import Cluster

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

LARGEST_BATCH = 2**20
"""Samples per step above which a search takes minutes; a larger number is usually that of tokens."""


class PlanSpec(Spec, frozen=True, kw_only=True):
    """Options of `shardwise plan`: a model, a cluster and a batch size."""

    model: Annotated[str | None, argument("MODEL|CONFIG.json|JOB.py[:NAME]|PLAN.toml")] = None
    """A published model, a transformers config.json or its folder, the file of a job, or a plan file of --out."""
    cluster: str = "this"
    """Cluster such as 8xH100, 2xp4d.24xlarge or 4x8xA100-40GB; `this` is this machine, `2xthis` two of its GPUs, or two
    ranks on its CPU."""
    batch_size: PositiveInt | None = None
    """Samples per step over all devices."""
    length: PositiveInt | None = None
    """Tokens per sample of a published model."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    """Compute dtype."""
    plan: str = "auto"
    """Predict this plan and compare it with the recommended one: a preset (fsdp), a product of axes (pp2.shard2.tp2) or
    a .toml file."""
    settings: Annotated[tuple[str, ...], option("--set", metavar="KEY=VALUE")] = ()
    """Override a field of the plan or of the job, as in train."""
    compile: Annotated[Literal["none", "blocks", "model"] | None, Option(bare="blocks")] = None
    """Predict the plan compiled: blocks (also without a value) or model, as --set compile=VALUE."""
    max_memory: Annotated[str | None, option(metavar="SIZE")] = None
    """Limit the memory of each device, such as 60GB."""
    max_gpus: PositiveInt | None = None
    """Use at most this many GPUs of the cluster: the fewest that are as fast as any number."""
    tokens: Annotated[str | int | float | None, option(metavar="COUNT")] = None
    """Tokens of the whole training, such as 300B or 1T, whose days and GPU-hours are reported."""
    price: Annotated[PositiveFloat | None, option(metavar="PER_GPU_HOUR")] = None
    """Price of a GPU for one hour, to report the cost of the training."""
    engine: Literal["torch", "deepspeed"] = "torch"
    """Engine; with deepspeed, the planner also predicts DeepSpeed's ZeRO stages and offloads, and chooses one."""
    lora: Annotated[PositiveInt | None, option("--lora", metavar="RANK")] = None
    """Fine-tune a published model with LoRA adapters."""
    catalogue: Path | None = None
    """TOML file with your own devices, links and nodes."""
    history: bool = True
    """Correct predictions by your own runs on the same devices; --no-history uses predictions alone."""
    every: Annotated[bool, option("--all")] = False
    """List every plan that was predicted."""

    @property
    def is_job(self) -> bool:
        """Whether the model is the file of a job."""
        return self.model is not None and re.search(r"\.py(:\w*)?$", self.model) is not None


# Checks of the options: a plan file in place of a model, limits, and contradictions.


def of_plan_file(spec: PlanSpec) -> PlanSpec:
    """Return the spec with the model and the cluster that the comments of a plan file name."""
    path = spec.model or ""
    if spec.plan != "auto":
        raise InputError(
            f"--plan {spec.plan} cannot be combined with the plan file {path}",
            code="cli.options-conflict",
            fix=f"use shardwise plan MODEL --plan {path}, or remove --plan",
        )
    found = read_header(Path(path))
    if "model" not in found:
        raise InputError(
            f"{path} does not name its model",
            code="plan.file-without-model",
            fix=f"use shardwise plan MODEL --plan {path}, or add --to-deepspeed FILE to convert it",
        )
    numbers: dict[str, Any] = {}
    for name in ("length", "lora"):
        if getattr(spec, name) is None and name in found:  # the Spec refuses a value that is not a number
            numbers[name] = int(found[name]) if found[name].isdigit() else found[name]
    cluster = found.get("cluster", spec.cluster) if spec.cluster == "this" else spec.cluster
    return spec.replace(model=found["model"], plan=path, cluster=cluster, **numbers)


def check_options(spec: PlanSpec, cluster: Cluster, *, is_job: bool) -> float:
    """Return the limit of --max-memory in bytes; raises InputError for options that contradict each other."""
    for name, value in (("--length", spec.length), ("--lora", spec.lora)):
        if is_job and value is not None:
            raise InputError(
                f"{name} is valid for published models only, but {spec.model or 'the job'} is a job",
                code="cli.option-not-applicable",
                fix="remove the option, and change the job file",
            )
    if spec.max_gpus is not None and spec.max_gpus > cluster.num_devices:
        raise InputError(
            f"--max-gpus {spec.max_gpus} exceeds the {cluster.num_devices} devices of --cluster {spec.cluster}",
            code="cli.options-conflict",
            fix="use a larger --cluster, or a smaller --max-gpus",
        )
    if spec.plan != "auto" and (spec.max_gpus is not None or spec.engine != "torch"):
        other = f"--max-gpus {spec.max_gpus}" if spec.max_gpus is not None else f"--engine {spec.engine}"
        raise InputError(
            f"--plan {spec.plan} cannot be combined with {other}, which chooses the plan",
            code="cli.options-conflict",
            fix="remove one of the two",
        )
    if spec.max_memory is None:
        return float("inf")
    return _max_bytes(spec.max_memory, cluster)


def check_engine_settings(spec: PlanSpec, settings: Mapping[str, str]) -> None:
    """Raise InputError if fields of a plan are set for an engine whose own configurations are searched."""
    if spec.engine != PlanSpec().engine and settings:
        raise InputError(
            f"--engine {spec.engine} searches configurations of its own, without --set {next(iter(settings))}",
            code="cli.options-conflict",
            fix=f"use --plan NAME --set engine={spec.engine}, or --plan with a file that --out wrote",
        )


def check_batch(batch_size: int) -> None:
    """Raise InputError for a batch that no training has, whose many micro-batches no search could visit."""
    if batch_size > LARGEST_BATCH:
        raise InputError(
            f"a batch of {batch_size:,} samples exceeds the largest that plan searches, {LARGEST_BATCH:,}",
            code="plan.batch-too-large",
            fix="use a smaller batch size, which counts samples and not tokens",
        )


def check_length(spec: PlanSpec, tokens_per_sample: int | None, num_steps: int | None) -> None:
    """Raise InputError if --length, --tokens or --price do not apply to the model or the job."""
    if spec.length is not None and tokens_per_sample is None:
        raise InputError(
            f"--length {spec.length} is the number of tokens per sample, but {spec.model} has no sequences",
            code="cli.option-not-applicable",
            fix="remove --length",
        )
    if spec.tokens is not None:
        read_tokens(spec.tokens)
        if tokens_per_sample is None:
            raise InputError(
                f"--tokens {spec.tokens} requires a model of sequences, but the samples of this model have no tokens",
                code="plan.tokens-without-sequences",
                fix="remove --tokens",
            )
    if spec.price is not None and math.isinf(spec.price):
        raise InputError(
            f"--price {spec.price:g} is not the price of a GPU-hour",
            code="plan.price-invalid",
            fix="write a positive number, such as 2.5",
        )
    if spec.price is not None and spec.tokens is None and num_steps is None:
        raise InputError(
            f"--price {spec.price:g} requires the length of the training",
            code="cli.option-not-applicable",
            fix="add --tokens, such as --tokens 1T",
        )


def _max_bytes(text: str, cluster: Cluster) -> float:
    device = cluster.device
    try:
        limit = read_size(text)
    except InputError as error:
        raise InputError(
            f"--max-memory: {error.fact}", code="plan.max-memory-invalid", fix="write a size such as 60GB or 64GiB"
        ) from None
    if not 100 * MIB <= limit <= device.memory_bytes:
        raise InputError(
            f"--max-memory {text} must be from 100 MiB to the {format_gb(device.memory_bytes)} of a {device.name}",
            code="plan.max-memory-invalid",
            fix="write a size such as 60GB or 64GiB",
        )
    return float(limit)
