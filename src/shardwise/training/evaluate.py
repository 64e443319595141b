"""The data of a training: loader of a data-parallel rank, length in steps, evaluation; and the export of weights."""

from __future__ import annotations

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

from shardwise.checkpoint.convert.peft import write_adapters
from shardwise.checkpoint.disk import remove_whole
from shardwise.checkpoint.errors import nothing_more, together
from shardwise.data.cursor import Slices
from shardwise.data.feed import MicroBatch
from shardwise.data.loaders import IndexLoader, StreamLoader, StreamShare, dataset_length, dataset_of
from shardwise.data.rows import Collated, CountedCollate, TokenCut, fill_rows, move
from shardwise.errors import DataError, JobError
from shardwise.job.generators import untouched_generators
from shardwise.job.lora import is_adapter
from shardwise.parallel.collectives import full_values, stages_of
from shardwise.runs.directory import write_error
from shardwise.training.step.module_step import adapter_facts, from_all, whole_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import IO

    from torch import Tensor

    from shardwise.data.feed import StepLoader
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step


# The loader of one data-parallel rank, and the length of a training in optimizer steps.


@dataclass(frozen=True, kw_only=True)
class RankLoader:
    """Who reads, and from where on."""

    dp_rank: int
    """Which of the plan's data-parallel ranks."""
    group: dist.ProcessGroup | None
    """Joins the data-parallel ranks on the host; None for one."""
    first_step: int
    on_gpu: bool


def token_cut(job: Job, plan: Plan, world: World, metrics: Mapping[str, Metric] | None = None) -> TokenCut | None:
    """Return what takes this rank's tokens from a batch; None where sequences stay whole."""
    if plan.layout.cp == 1:
        return None
    index = plan.layout.coordinate(world.rank).cp
    return TokenCut(index=index, size=plan.layout.cp, loss=job.loss, metrics=metrics or {})


def make_loader(job: Job, plan: Plan, where: RankLoader) -> tuple[StepLoader, Length]:
    """Return the loader of the job's training data, and the length of the whole training."""
    dataset = dataset_of(job, "train")
    if dataset is None:
        raise DataError("Job.data gave no dataset for split 'train'", code="data.no-train-split", fix="return one")
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


# How long to train: epochs, steps or tokens, all turned into optimizer steps before the first one.


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps of a training, and of one epoch."""

    num_steps: int
    steps_per_epoch: int | None
    """None for streams."""
    source: str
    sync_every: int = 1
    """Steps that replicas train on their own before they meet."""

    def syncs_after(self, number: int) -> bool:
        """Whether replicas are equal after `number` steps: where a round, an epoch or the training ends.

        Rounds are counted within the epoch, so that its end cuts only the last one short.
        """
        within = number % (self.steps_per_epoch or self.num_steps)
        return within % self.sync_every == 0 or number == self.num_steps

    def is_due(self, number: int, every: int) -> bool:
        """Whether what comes `every` so many steps comes after `number`: there or, if replicas differ, when they meet.

        0 is never.
        """
        if not every or not self.syncs_after(number):
            return False
        last = next(before for before in range(number - 1, -1, -1) if self.syncs_after(before))
        return number // every > last // every

    def ends_epoch(self, number: int) -> bool:
        """Whether step `number` (from 0) is the last of its epoch."""
        return self.steps_per_epoch is not None and (number + 1) % self.steps_per_epoch == 0


def training_length(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None, *, sync_every: int = 1) -> Length:
    """Settle the length; `steps_per_epoch` is None for a stream, which must be counted in steps."""
    num_steps, source = _count_steps(job, dataset, steps_per_epoch)
    return Length(num_steps=num_steps, steps_per_epoch=steps_per_epoch, source=source, sync_every=sync_every)


def _count_steps(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None) -> tuple[int, str]:
    if job.steps is not None:
        return job.steps, "steps of the job"
    if steps_per_epoch is None:
        raise JobError(
            "a stream (IterableDataset) has no epochs and no known tokens",
            code="data.stream-without-steps",
            fix="give the job steps=",
        )
    if job.epochs is not None:
        return job.epochs * steps_per_epoch, f"{job.epochs} epochs x {steps_per_epoch} steps"
    per_sample = job.loss.count_of((job.collate or default_collate)([dataset[0]]), 1)
    if not per_sample:
        raise JobError(
            "the first sample counts no token, so tokens= cannot be turned into steps",
            code="data.sample-without-tokens",
            fix="give steps=",
        )
    source = f"{job.tokens} tokens / ({per_sample} in the first sample x batch_size {job.batch_size})"
    return math.ceil((job.tokens or 0) / (per_sample * job.batch_size)), source


def evaluate(step: Step, dataset: Dataset[Any] | None = None) -> dict[str, float]:
    """Return the loss and metrics of a step's job over a dataset, every sample once; communicates, on every rank.

    Without `dataset` over the job's test split; {} where it has none.
    """
    job, plan, world = step.source
    if dataset is None:
        dataset = dataset_of(job, "test")
    if dataset is None:
        return {}
    measures = {"loss": job.loss, **job.metrics}
    sums = dict.fromkeys([*measures, *(f"{name}/count" for name in measures)], 0.0)
    tells = plan.layout.reports_loss(world.rank)
    counts = tells and plan.layout.coordinate(world.rank).cp == 0  # slices have sums of their own, and one count
    with untouched_generators(), step.evaluating(world.axis_group(plan.layout, ("replicate", "shard"))):
        for micro_batch in _micro_batches(job, plan, world, dataset):
            found = step.measure(micro_batch, measures)
            for name, value in found.items():
                if counts or (tells and not name.endswith("/count")):
                    sums[name] += value
    totals = world.sum(sums)
    return {name: totals[name] / (totals[f"{name}/count"] or 1) for name in measures}


def _micro_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> Iterator[MicroBatch]:
    """Yield this data-parallel rank's batches, filled to the plan's shape where the model needs one shape.

    Where forward communicates between ranks, those that are through continue with batches of no real row until all are;
    each batch then costs one small agreement.
    """
    meets = plan.zero >= 2 and plan.layout.dp > 1
    group = world.axis_group(plan.layout, ("replicate", "shard"), on_host=True) if meets else None
    fills = plan.layout.pp > 1 and job.loss.by_row
    cut = token_cut(job, plan, world, job.metrics)
    dtype = torch.float64 if plan.precision.compute == "fp64" else None
    spare: Collated | None = None
    batches = iter(_reader_batches(job, plan, world, dataset))
    while True:
        loaded = next(batches, None)
        rows = 0 if loaded is None else loaded.rows
        if not _anyone_has(rows, group):
            return
        if loaded is None:
            loaded = spare if spare is not None else _first(job, dataset)
        spare, (batch, filled, marks) = loaded, loaded
        if fills and filled < plan.micro_batch:
            batch, filled = fill_rows(batch, filled, plan.micro_batch, marks), plan.micro_batch
        mine = batch if cut is None else cut(batch)
        whole = None if cut is None else batch
        yield MicroBatch(move(mine, world.device, dtype), rows, filled, None, whole, marks)


def _anyone_has(rows: int, group: dist.ProcessGroup | None) -> bool:
    """Whether any rank has rows left; communicates over `group`."""
    if group is None:
        return rows > 0
    left = torch.tensor(rows)
    dist.all_reduce(left, group=group)
    return bool(left)


def _first(job: Job, dataset: Any) -> Collated:
    sample = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
    return CountedCollate(job.collate)([sample])


def _reader_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> DataLoader[Collated]:
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
        generator=torch.Generator(),  # the global one is training's: dropout must not notice an evaluation
    )


# Exporting: the trained weights as one plain file, and adapters as a folder that peft reads, from any strategy.


def export(model: nn.Module, path: Path | str) -> None:
    """Write the model's whole state dict to `path` on rank 0; called on every rank, communicates over the world.

    Adapters are merged into the weights they stand beside: the file is of the user's own model.
    `torch.load(path, weights_only=True)` reads it without shardwise. The file appears whole or not at all, replacing
    one that is there; if it cannot be written, every rank raises the same CheckpointError.
    """
    if not isinstance(model, nn.Module):
        raise JobError(
            f"export writes torch modules, and this is a {type(model).__module__}.{type(model).__qualname__}",
            code="support.export-not-torch",
            fix='use weights.pt of the run, or of an mlx.nn.Module model.save_weights("model.safetensors")',
        )
    write_weights(whole_weights(model), path)


def write_weights(weights: dict[str, Tensor], path: Path | str) -> None:
    """Write rank 0's whole weights to `path` as `export` does; called on every rank, communicates over the world."""
    path = Path(path)
    group = dist.group.WORLD if dist.is_initialized() else None
    together(group, f"exporting {path}", lambda: _write(weights, path) if weights else None, nothing_more)


def export_adapters(model: nn.Module, folder: Path | str, *, base: str | None = None) -> None:
    """Write the adapters of `model` as peft does, on rank 0; called on every rank, communicates over the world.

    `base` is where the frozen weights came from, for the file to say. The folder appears whole or not at all, replacing
    one that is there.
    """
    folder = Path(folder)
    lora = adapter_facts(model)
    if lora is None:
        raise JobError(
            "the model has no adapters", code="model.no-adapters", fix="train a job with lora=, or use export"
        )
    adapters: list[tuple[str, Tensor]] = []
    names: list[str] = []
    for stage in stages_of(model):
        adapters += [(name, parameter) for name, parameter in stage.named_parameters() if is_adapter(name)]
        names += [name for name in stage.state_dict(keep_vars=True) if not is_adapter(name)]
    trained = full_values(adapters)
    frozen = [name for theirs in from_all(names) for name in theirs]
    group = dist.group.WORLD if dist.is_initialized() else None

    def write() -> None:
        draft = folder.with_name(f".exporting-{folder.name}-{secrets.token_hex(4)}")
        try:
            write_adapters(draft, trained, frozen, {**lora, "base": base})
            if folder.is_dir():
                remove_whole(folder)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    together(group, f"exporting {folder}", write if trained else lambda: None, nothing_more)


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
        cause = write_error(path.parent)  # torch reports that its file is shorter than it wrote, and not why
        if cause is None:
            raise
        raise OSError(cause.errno, cause.strerror, str(path)) from error
