"""Prepares a job for `verify`: a few steps, no random masks, and optionally a smaller model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn
from torch.utils.data import IterableDataset, Subset

from shardwise.engines.engine import engine_named
from shardwise.errors import InputError, JobError
from shardwise.job import Job, JobReference, load_job
from shardwise.models import Decoder
from shardwise.planner.settle import split_settings
from shardwise.torch_private.dispatch import DropoutBase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.job import Lora
    from shardwise.parity.spec import VerifySpec

_MOST_LAYERS = 8
"""Largest number of layers of a shrunk model, sufficient for four pipeline ranks with two stages each."""
_HEAD_WIDTH = 8
_MOST_GROUPS = 4
"""Largest number of key and value heads of a shrunk model, sufficient for four tensor-parallel ranks."""


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """Changes that every rank applies to the job before training."""

    source: JobReference | Job
    """The reference from which the job is loaded, or a Job, which forked ranks inherit."""
    steps: int
    shrink: bool = False
    dropout: bool = False
    """Whether dropout stays on, to compare its masks."""
    tensor_rules: dict[str, str] | None = None
    """Tensor-parallel rules that replace those of the job."""


def prepare_job(preparation: Preparation) -> Job:
    """Load the job and prepare it for `verify`; call on every rank."""
    job = source_job(preparation.source)
    return dataclasses.replace(
        job,
        model=PreparedModel(job, preparation),
        data=PreparedData(job, preparation.steps),
        steps=preparation.steps,
        epochs=None,
        tokens=None,
        on_step=None,
        on_evaluate=None,
        evaluate_every=None,
        evaluate_at_start=False,
        weights=None if preparation.shrink else job.weights,
        tensor_rules=preparation.tensor_rules or job.tensor_rules,
        lora=_prepare_lora(job, preparation),
    )


def source_job(source: JobReference | Job) -> Job:
    """Return the job as the user defined it."""
    return source if isinstance(source, Job) else load_job(source)


def job_source(spec: VerifySpec, job: Job | None) -> tuple[JobReference | Job, dict[str, str]]:
    """Return the source of the job with its settings applied, and the remaining settings, which are plan fields."""
    if job is None:
        return split_settings(spec.job, spec.settings)
    if spec.settings:
        raise InputError(
            f"set={list(spec.settings)} requires a job file, but the job is a Job object",
            code="verify.settings-of-job-object",
            fix="call dataclasses.replace(job, ...), or use plans such as ddp+KEY=VALUE",
        )
    return job, {}


def job_name(source: JobReference | Job) -> str:
    """Return the name of a job in reports."""
    return "job" if isinstance(source, Job) else source.name


class PreparedData:
    """The job's data, limited so that the last step but one is partial and the evaluation ends with a partial batch.

    A partial step has an odd number of rows if possible, so that errors in counts, padding and empty ranks show. The
    partial step ends the epoch. The full step after it, the first of the next epoch, shows whether optimizer,
    statistics, normalizer and data position are still correct. With two steps, the last is partial; a single step is
    full. A stream, or a dataset that ends earlier, is unchanged.
    """

    def __init__(self, job: Job, steps: int) -> None:
        self._make = job.data
        self._batch_size = job.batch_size
        self._steps = steps

    def __call__(self, split: str) -> Any:
        """Return the first samples of a split, or None if the job does not have it."""
        dataset = self._make(split)
        if dataset is None or isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            return dataset
        full_steps = 1 if split != "train" else self._full_steps
        wanted = full_steps * self._batch_size + self._short_rows
        return Subset(dataset, range(wanted)) if full_steps and wanted < len(dataset) else dataset

    @property
    def _full_steps(self) -> int:
        """Number of full steps of an epoch."""
        return self._steps - 2 if self._steps > 2 else self._steps - 1

    @property
    def _short_rows(self) -> int:
        """Rows of the partial step: slightly more than half a batch, and odd if possible."""
        half = self._batch_size // 2
        return min(half + 1 - half % 2, max(1, self._batch_size - 1))


class PreparedModel:
    """Builds the model for `verify`; `silenced` is True if a dropout of the model or its adapters was set to 0."""

    def __init__(self, job: Job, preparation: Preparation) -> None:
        self._make = job.model
        self._engine = engine_named(job.engine)
        self._shrinks = preparation.shrink
        self._silences = not preparation.dropout and job.masks == "drawn"
        self.silenced = self._silences and job.lora is not None and job.lora.dropout > 0

    def __call__(self) -> nn.Module:
        """Return a new model; its dropout is set to 0 unless the preparation keeps dropout on."""
        made = shrunk(self._make) if self._shrinks else self._make()
        if self._silences:
            for module, name in dropouts(made):
                setattr(module, name, 0.0)
                self.silenced = True
            self._engine.silence_dropout(made)
        plain_experts(made)
        return made


def _prepare_lora(job: Job, preparation: Preparation) -> Lora | None:
    """Return the job's LoRA options without random masks; a shrunk model starts from new adapters."""
    if job.lora is None:
        return None
    keeps_dropout = preparation.dropout or job.masks == "keyed"
    return dataclasses.replace(
        job.lora,
        dropout=job.lora.dropout if keeps_dropout else 0.0,
        weights=None if preparation.shrink else job.lora.weights,
    )


def dropouts(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield (owner, attribute) of every dropout probability, in modules and transformers configs."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        owners[id(module)] = module
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            owners.setdefault(id(config), config)
    for owner in owners.values():
        for name, value in list(vars(owner).items()):
            named = "drop" in name or (name == "p" and isinstance(owner, DropoutBase))
            if named and isinstance(value, float) and value > 0:
                yield owner, name


def plain_experts(model: nn.Module) -> None:
    """Make transformers' mixtures of experts multiply one expert at a time, because grouped matmuls lack fp64."""
    for part in model.modules():
        if getattr(getattr(part, "config", None), "_experts_implementation", None) == "grouped_mm":
            part.config._experts_implementation = "eager"  # type: ignore[union-attr]  # noqa: SLF001 - as from_config sets it


def shrunk(make: Any) -> nn.Module:
    """Return a new model of the same structure with smaller width and depth, built from its config."""
    with torch.device("meta"):
        large = make()
    config = getattr(large, "config", None)
    if isinstance(large, Decoder):
        return Decoder(_small_decoder(large.config))
    if hasattr(config, "to_dict") and hasattr(config, "num_hidden_layers") and hasattr(config, "hidden_size"):
        return type(large)(_small_transformer(config))  # type: ignore[no-any-return]
    raise JobError(
        f"--shrink requires sw.models.decoder or a transformers model with a config, got {type(large).__name__}",
        code="verify.shrink-unsupported",
        fix="remove --shrink, or use a small model in the job",
    )


def _small_decoder(config: Any) -> Any:
    groups = min(config.kv_heads, _MOST_GROUPS)
    heads = config.num_heads // config.kv_heads * groups
    return dataclasses.replace(
        config,
        num_layers=min(config.num_layers, _MOST_LAYERS),
        num_heads=heads,
        num_kv_heads=groups,
        width=heads * _HEAD_WIDTH,
        mlp_width=max(1, config.hidden_width // config.width) * heads * _HEAD_WIDTH,
    )


def _small_transformer(config: Any) -> Any:
    """Return a transformers config with reduced sizes; sets only existing fields, through the attribute map."""
    small = type(config)(**config.to_dict())
    per_group = config.num_attention_heads // (
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    )
    groups = min(config.num_attention_heads // per_group, _MOST_GROUPS)
    heads = groups * per_group
    width = heads * _HEAD_WIDTH
    values = {
        "num_hidden_layers": min(config.num_hidden_layers, _MOST_LAYERS),
        "num_decoder_layers": min(getattr(config, "num_decoder_layers", None) or _MOST_LAYERS, _MOST_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "hidden_size": width,
        "head_dim": _HEAD_WIDTH,
        "d_kv": _HEAD_WIDTH,
        "intermediate_size": 2 * width,
        "d_ff": 2 * width,
        "n_inner": 2 * width,
    }
    for name, value in values.items():
        if getattr(config, name, None) is not None:
            setattr(small, name, value)
    return small
