"""Evaluation: every sample of the test split exactly once, whatever the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, Subset

from shardwise.data.loaders import ReaderShare, dataset_length
from shardwise.data.rows import move, num_rows

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from shardwise.job import Job
    from shardwise.plan import Plan
    from shardwise.step.plain import Autocast
    from shardwise.world import World


@torch.no_grad()
def evaluate(
    job: Job, plan: Plan, world: World, *, module: nn.Module, dataset: Dataset[Any], autocast: Autocast
) -> dict[str, float]:
    """Return the loss and metrics over the whole dataset; communicates over the world, on every rank.

    `module` is the plain module: ranks with fewer batches than others must not meet in its collectives.
    """
    measures = {"loss": job.loss, **job.metrics}
    sums = dict.fromkeys([*measures, *(f"{name}/count" for name in measures)], 0.0)
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    share_buffers(module, world)
    for batch in _reader_batches(job, plan, world, dataset):
        rows = num_rows(batch)
        moved = move(batch, world.device, torch.float64 if plan.precision.compute == "fp64" else None)
        with autocast():
            output = job.forward(module, moved)
            for name, measure in measures.items():
                sums[name] += float(measure.sum(output, moved))
                sums[f"{name}/count"] += measure.count_of(moved, rows)
    for part, was_training in modes:  # one by one: some may have been frozen in eval mode by the user
        part.training = was_training
    totals = world.sum(sums)
    return {name: totals[name] / max(1.0, totals[f"{name}/count"]) for name in measures}


def share_buffers(module: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0; communicates over the world.

    Local batch statistics differ by rank, and one model is evaluated, not one per rank.
    """
    if world.size > 1:
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def _reader_batches(job: Job, plan: Plan, world: World, dataset: Dataset[Any]) -> DataLoader[Any]:
    readers, reader = plan.layout.dp, plan.layout.data_index(world.rank)
    share: Dataset[Any]
    if isinstance(dataset, IterableDataset):
        share = ReaderShare(dataset, reader, readers)
    else:
        length = dataset_length(dataset)  # type: ignore[arg-type]
        share = Subset(dataset, range(length * reader // readers, length * (reader + 1) // readers))
    return DataLoader(
        share,
        batch_size=plan.micro_batch,
        collate_fn=job.collate,
        num_workers=job.num_workers,
        generator=torch.Generator(),  # the global one is training's: dropout must not notice an evaluation
    )
