"""The data loader of a data-parallel rank, the training length in steps, evaluation, and the export of weights."""

from __future__ import annotations

import copy
import math
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from shardwise.checkpoint.convert.hugging_face import write_adapters
from shardwise.checkpoint.disk import no_results, remove_atomically, run_collectively
from shardwise.data.corpus import Corpus
from shardwise.data.corpus_loader import CorpusLoader
from shardwise.data.cursor import Slices
from shardwise.data.feed import MicroBatch
from shardwise.data.loaders import IndexLoader, StreamLoader, StreamShare, dataset_length, dataset_of
from shardwise.data.rows import Collated, CountedCollate, TokenShard, fill_rows, move
from shardwise.errors import DataError, JobError, PlanError
from shardwise.job.generators import untouched_generators
from shardwise.job.lora import is_adapter
from shardwise.parallel.collectives import full_values, stages_of
from shardwise.runs.directory import write_error
from shardwise.training.step.module_step import adapter_facts, gather_objects, user_class, user_module, whole_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO

    from torch import Tensor

    from shardwise.data.corpus import CorpusPosition
    from shardwise.data.feed import StepLoader
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.training.step.step import Step


# The loader of one data-parallel rank, and the length of a training in optimizer steps.


@dataclass(frozen=True, kw_only=True)
class RankLoader:
    """The data-parallel rank for which a loader reads samples, and the step at which the loader starts."""

    dp_rank: int
    """Index of the data-parallel rank."""
    group: dist.ProcessGroup | None
    """Host process group of the data-parallel ranks; None if there is only one."""
    first_step: int
    on_gpu: bool
    position: CorpusPosition | None = None
    """Position of a corpus at `first_step`, from a checkpoint."""


def token_shard(job: Job, plan: Plan, world: World, metrics: Mapping[str, Metric] | None = None) -> TokenShard | None:
    """Return the function that slices this rank's tokens from a batch; None without context parallelism."""
    if plan.layout.cp == 1:
        return None
    index = plan.layout.coordinate(world.rank).cp
    return TokenShard(index=index, size=plan.layout.cp, loss=job.loss, metrics=metrics or {})


def make_loader(job: Job, plan: Plan, where: RankLoader) -> tuple[StepLoader, Length]:
    """Return the loader of the job's training data and the length of the whole training."""
    dataset = dataset_of(job, "train")
    if dataset is None:
        raise DataError(
            "Job.data('train') returned None, expected a dataset",
            code="data.no-train-split",
            fix="return a dataset for split 'train' from Job.data",
        )
    if isinstance(dataset, Corpus):
        return _corpus_loader(dataset, job, plan, where)
    if isinstance(dataset, IterableDataset):
        length = training_length(job, dataset, None, sync_every=plan.communication.sync_every)
        stream = StreamLoader(
            dataset,
            dp_rank=where.dp_rank,
            dp_size=plan.layout.dp,
            micro_batch=plan.micro_batch,
            accumulation=plan.accumulation,
            first_step=where.first_step,
            num_steps=length.num_steps,
            seed=job.seed,
            group=where.group,
            collate=job.collate,
            num_workers=job.num_workers,
        )
        return stream, length
    slices = Slices(
        batch_size=job.batch_size,
        accumulation=plan.accumulation,
        dp_rank=where.dp_rank,
        dp_size=plan.layout.dp,
        length=dataset_length(dataset),
    )
    length = training_length(job, dataset, slices.steps_per_epoch, sync_every=plan.communication.sync_every)
    loader = IndexLoader(
        dataset,
        slices,
        seed=job.seed,
        first_step=where.first_step,
        num_steps=length.num_steps,
        collate=job.collate,
        num_workers=job.num_workers,
        pin_memory=where.on_gpu,
    )
    return loader, length


def is_packed(job: Job) -> bool:
    """Return whether the job trains on packed rows of a corpus."""
    dataset = dataset_of(job, "train")
    return isinstance(dataset, Corpus) and bool(dataset.packed)


def _corpus_loader(corpus: Corpus, job: Job, plan: Plan, where: RankLoader) -> tuple[StepLoader, Length]:
    if corpus.packed and plan.layout.cp > 1:
        raise PlanError(
            f"cp={plan.layout.cp} does not support packed rows, whose documents have attention masks of their own",
            code="support.cp-packed",
            fix="set cp=1, or packed=False in the corpus",
        )
    length = training_length(job, corpus, None, sync_every=plan.communication.sync_every)
    slices = Slices(
        batch_size=job.batch_size,
        accumulation=plan.accumulation,
        dp_rank=where.dp_rank,
        dp_size=plan.layout.dp,
        length=length.num_steps * job.batch_size,
    )
    loader = CorpusLoader(
        corpus,
        slices,
        seed=job.seed,
        first_step=where.first_step,
        num_steps=length.num_steps,
        position=where.position,
        num_workers=job.num_workers,
        pin_memory=where.on_gpu,
    )
    return loader, length


# The length of a training: epochs, steps or tokens, converted to optimizer steps before the first step.


@dataclass(frozen=True, kw_only=True)
class Length:
    """The number of optimizer steps of a training and of one epoch."""

    num_steps: int
    steps_per_epoch: int | None
    """None for an IterableDataset."""
    source: str
    sync_every: int = 1
    """Steps between synchronizations of the replicas."""

    def syncs_after(self, number: int) -> bool:
        """Return whether replicas synchronize after `number` steps: every `sync_every` steps and at epoch ends.

        Steps are counted within the epoch, so only the last round of an epoch is shorter.
        """
        step_in_epoch = number % (self.steps_per_epoch or self.num_steps)
        return step_in_epoch % self.sync_every == 0 or number == self.num_steps

    def is_due(self, number: int, every: int) -> bool:
        """Return whether an action with the interval `every` is due after `number` steps; False if either is 0.

        An interval that ends between two synchronizations of the replicas is due at the next synchronization.
        """
        if not every or not number or not self.syncs_after(number):
            return False
        last = next(before for before in range(number - 1, -1, -1) if self.syncs_after(before))
        return number // every > last // every

    def ends_epoch(self, number: int) -> bool:
        """Return whether step `number`, counted from 0, is the last step of its epoch."""
        return self.steps_per_epoch is not None and (number + 1) % self.steps_per_epoch == 0


def training_length(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None, *, sync_every: int = 1) -> Length:
    """Compute the training length; `steps_per_epoch` is None for an IterableDataset, which requires Job.steps."""
    num_steps, source = _count_steps(job, dataset, steps_per_epoch)
    return Length(num_steps=num_steps, steps_per_epoch=steps_per_epoch, source=source, sync_every=sync_every)


def _count_steps(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None) -> tuple[int, str]:
    if job.steps is not None:
        return job.steps, "steps of the job"
    if isinstance(dataset, Corpus) and job.tokens is not None:
        per_step = job.batch_size * dataset.length
        num_steps = -(-job.tokens // per_step)
        return num_steps, f"{job.tokens} tokens / {per_step} tokens per step"
    if isinstance(dataset, Corpus):
        raise JobError(
            "a corpus has sources with epochs of their own, so epochs= cannot be used",
            code="data.corpus-without-steps",
            fix="set steps= or tokens= in the job",
        )
    if steps_per_epoch is None:
        raise JobError(
            "an IterableDataset has no known number of samples, so epochs= and tokens= cannot be used",
            code="data.stream-without-steps",
            fix="set steps= in the job",
        )
    if job.epochs is not None:
        return job.epochs * steps_per_epoch, f"{job.epochs} epochs x {steps_per_epoch} steps"
    per_sample = job.loss.count_of((job.collate or default_collate)([dataset[0]]), 1)
    if not per_sample:
        raise JobError(
            "the first sample contains no counted tokens, so tokens= cannot be converted to steps",
            code="data.sample-without-tokens",
            fix="set steps= in the job",
        )
    source = f"{job.tokens} tokens / ({per_sample} in the first sample x batch_size {job.batch_size})"
    return math.ceil((job.tokens or 0) / (per_sample * job.batch_size)), source


def evaluate(step: Step, dataset: Dataset[Any] | None = None) -> dict[str, float]:
    """Return the loss and the metrics over a dataset, each sample counted once; call on every rank.

    `dataset` defaults to the test split of the job; returns {} if the job has none. Communicates over the world.
    """
    job, plan, world = step.source
    if dataset is None:
        dataset = dataset_of(job, "test")
    if dataset is None:
        return {}
    return evaluate_batches(step, evaluation_batches(job, plan, world, dataset))


def evaluate_batches(step: Step, micro_batches: Iterator[MicroBatch]) -> dict[str, float]:
    """Return the loss and the metrics over all ranks' batches. Communicates over the world; call on every rank."""
    job, plan, world = step.source
    measures = {"loss": job.loss, **job.metrics}
    sums: dict[str, float] = {}
    for name in measures:
        sums[name] = sums[f"{name}/count"] = 0.0
    reports = plan.layout.reports_loss(world.rank)
    counts = reports and plan.layout.coordinate(world.rank).cp == 0  # cp ranks add partial sums, but share one count
    with untouched_generators(), step.evaluating(world.axis_group(plan.layout, ("replicate", "shard"))):
        for micro_batch in micro_batches:
            found = step.measure(micro_batch, measures)
            for name, value in found.items():
                if counts or (reports and not name.endswith("/count")):
                    sums[name] += value
    totals = world.sum(sums)
    return {name: totals[name] / (totals[f"{name}/count"] or 1) for name in measures}


def evaluation_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> Iterator[MicroBatch]:
    """Yield this data-parallel rank's batches, padded to the plan's micro-batch if the model needs a fixed shape.

    If forward communicates between data-parallel ranks, ranks that run out of samples continue with padding-only
    batches until all ranks finish. Each batch then costs one small all-reduce.
    """
    group = None
    if plan.zero >= 2 and plan.layout.dp > 1:
        group = world.axis_group(plan.layout, ("replicate", "shard"), on_host=True)
    pads = plan.layout.pp > 1 and job.loss.by_row
    shard = token_shard(job, plan, world, job.metrics)
    dtype = torch.float64 if plan.precision.compute == "fp64" else None
    previous: Collated | None = None
    batches = iter(_rank_batches(job, plan, world, dataset))
    while True:
        loaded = next(batches, None)
        rows = 0 if loaded is None else loaded.rows
        if not _any_rank_has(rows, group):
            return
        if loaded is None:
            loaded = previous or _first(job, dataset)
        previous, (batch, filled, marks) = loaded, loaded
        if pads and filled < plan.micro_batch:
            batch, filled = fill_rows(batch, filled, plan.micro_batch, marks), plan.micro_batch
        local, whole = batch, None
        if shard is not None:
            local, whole = shard(batch), batch
        yield MicroBatch(move(local, world.device, dtype), rows, filled, None, whole, marks)


def _any_rank_has(rows: int, group: dist.ProcessGroup | None) -> bool:
    """Return whether any rank has rows left. Communicates over `group`; call on every rank."""
    if group is None:
        return rows > 0
    left = torch.tensor(rows)
    dist.all_reduce(left, group=group)
    return bool(left)


def _first(job: Job, dataset: Any) -> Collated:
    sample = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
    return CountedCollate(job.collate)([sample])


def _rank_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> DataLoader[Collated]:
    dp_size, dp_rank = plan.layout.dp, plan.layout.data_index(world.rank)
    share: Dataset[Any]
    if isinstance(dataset, IterableDataset):
        share = StreamShare(dataset, dp_rank=dp_rank, dp_size=dp_size, micro_batch=plan.micro_batch)
    else:
        length = dataset_length(dataset)  # type: ignore[arg-type]
        share = Subset(dataset, range(length * dp_rank // dp_size, length * (dp_rank + 1) // dp_size))
    return DataLoader(
        share,
        batch_size=plan.micro_batch,
        collate_fn=CountedCollate(job.collate),
        num_workers=job.num_workers,
        generator=torch.Generator(),  # the global generator is for training: evaluation must not change dropout masks
    )


# Exporting from any strategy: the trained weights as one file, and adapters as a directory that peft loads.


def export(model: nn.Module, path: Path | str) -> None:
    """Write the model's full state dict to `path` on rank 0. Communicates over the world; call on every rank.

    LoRA adapters are merged into their base weights, so the state dict has the keys of the user's model.
    `torch.load(path, weights_only=True)` loads the file without shardwise. The file is replaced atomically; if it
    cannot be written, every rank raises the same CheckpointError.
    """
    if not isinstance(model, nn.Module):
        raise JobError(
            f"export requires a torch.nn.Module, got {type(model).__module__}.{type(model).__qualname__}",
            code="support.export-not-torch",
            fix='copy weights.pt of the run directory, or call save_weights("model.safetensors") of the mlx.nn.Module',
        )
    write_weights(whole_weights(model), path)


def write_weights(weights: dict[str, Tensor], path: Path | str) -> None:
    """Write the full weights of rank 0 to `path` as `export` does. Communicates over the world; call on every rank."""
    path = Path(path)
    group = dist.group.WORLD if dist.is_initialized() else None
    run_collectively(group, f"exporting {path}", lambda: _write(weights, path) if weights else None, no_results)


def export_adapters(model: nn.Module, folder: Path | str, *, base: str | None = None) -> None:
    """Write the LoRA adapters of `model` in peft's format on rank 0. Communicates over the world; call on every rank.

    `base` is the source of the frozen weights, recorded in the adapter configuration. The directory is replaced
    atomically.
    """
    folder = Path(folder)
    lora = adapter_facts(model)
    if lora is None:
        raise JobError(
            "the model has no LoRA adapters", code="model.no-adapters", fix="set Job.lora, or call sw.export"
        )
    adapters: list[tuple[str, Tensor]] = []
    names: list[str] = []
    for stage in stages_of(model):
        for name, parameter in stage.named_parameters():
            if is_adapter(name):
                adapters.append((name, parameter))
        names += [name for name in stage.state_dict(keep_vars=True) if not is_adapter(name)]
    trained = full_values(adapters)
    frozen: list[str] = []
    for names_of_rank in gather_objects(names):
        frozen += names_of_rank
    group = dist.group.WORLD if dist.is_initialized() else None

    def write() -> None:
        draft = folder.with_name(f".exporting-{folder.name}-{secrets.token_hex(4)}")
        try:
            write_adapters(draft, trained, frozen, {**lora, "base": base})
            if folder.is_dir():
                remove_atomically(folder)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    run_collectively(group, f"exporting {folder}", write if trained else lambda: None, no_results)


def write_config(model: Any, folder: Path, events: EventLog) -> None:
    """Write config.json and generation_config.json of a transformers model; do nothing for any other model."""
    module = user_module(model) if isinstance(model, nn.Module) else None
    for name in ("config", "generation_config"):
        config: Any = getattr(module, name, None)
        if not hasattr(config, "save_pretrained"):
            continue
        try:
            config = copy.deepcopy(config)
            if name == "config" and not getattr(config, "architectures", None):
                config.architectures = [user_class(model).__name__]
            config.save_pretrained(folder)
        except Exception as error:  # noqa: BLE001 - transformers rejects some settings; the training has succeeded
            events.write("note", text=f"{name}.json was not written: {error}")


def _write(weights: dict[str, Tensor], path: Path) -> None:
    draft = path.with_name(f".exporting-{path.name}-{secrets.token_hex(4)}")
    try:
        with draft.open("xb") as file:
            _save(weights, file, path)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _save(weights: dict[str, Tensor], file: IO[bytes], path: Path) -> None:
    try:
        torch.save(weights, file)
    except RuntimeError as error:
        cause = write_error(path.parent)  # torch reports only that the file is too short, without the errno
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
