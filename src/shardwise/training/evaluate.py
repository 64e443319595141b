"""Evaluation over every sample of the test split exactly once, and the export of trained weights and adapters."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from shardwise.checkpoint.convert.peft import write_adapters
from shardwise.checkpoint.disk import remove_whole
from shardwise.checkpoint.errors import nothing_more, together
from shardwise.data.feed import MicroBatch
from shardwise.data.loaders import StreamShare, dataset_length
from shardwise.data.rows import Collated, CountedCollate, fill_rows, move
from shardwise.errors import JobError
from shardwise.job.generators import untouched_generators
from shardwise.job.lora import is_adapter
from shardwise.parallel.collectives import full_values, stages_of
from shardwise.runs.directory import write_error
from shardwise.training.reading import token_cut
from shardwise.training.step.module_step import adapter_facts, from_all, whole_weights

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

    from torch import Tensor
    from torch.utils.data import Dataset

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step


def evaluate(job: Job, plan: Plan, world: World, *, step: Step, dataset: Dataset[Any]) -> dict[str, float]:
    """Return the loss and metrics over the whole dataset; communicates over the world, on every rank."""
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
    """Yield this reader's batches, filled to the plan's shape where the model needs one shape.

    Where forward communicates between readers, those that are through go on with batches of no real row until all are;
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
    """Whether any reader has rows left; communicates over `group`."""
    if group is None:
        return rows > 0
    left = torch.tensor(rows)
    dist.all_reduce(left, group=group)
    return bool(left)


def _first(job: Job, dataset: Any) -> Collated:
    sample = next(iter(dataset)) if isinstance(dataset, IterableDataset) else dataset[0]
    return CountedCollate(job.collate)([sample])


def _reader_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> DataLoader[Collated]:
    readers, reader = plan.layout.dp, plan.layout.data_index(world.rank)
    share: Dataset[Any]
    if isinstance(dataset, IterableDataset):
        share = StreamShare(dataset, dp_rank=reader, dp_size=readers, micro_batch=plan.micro_batch)
    else:
        length = dataset_length(dataset)  # type: ignore[arg-type]
        share = Subset(dataset, range(length * reader // readers, length * (reader + 1) // readers))
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
    trained = full_values(
        item for stage in stages_of(model) for item in stage.named_parameters() if is_adapter(item[0])
    )
    names = [name for stage in stages_of(model) for name in stage.state_dict(keep_vars=True) if not is_adapter(name)]
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
