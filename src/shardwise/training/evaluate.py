"""Evaluation: every sample of the test split exactly once, whatever the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Subset

from shardwise.data.collate import Collated, CountedCollate
from shardwise.data.feed import MicroBatch
from shardwise.data.loaders import StreamShare, dataset_length
from shardwise.data.rows import fill_rows, move
from shardwise.job.generators import untouched_generators
from shardwise.training.reading import token_cut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import Dataset

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step


def evaluate(job: Job, plan: Plan, world: World, *, step: Step, dataset: Dataset[Any]) -> dict[str, float]:
    """Return the loss and metrics over the whole dataset; communicates over the world, on every rank."""
    measures = {"loss": job.loss, **job.metrics}
    sums = dict.fromkeys([*measures, *(f"{name}/count" for name in measures)], 0.0)
    tells = plan.layout.tells_loss(world.rank)
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
