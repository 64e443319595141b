"""Reading: the loader of one reader, and how long it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.utils.data import IterableDataset

from shardwise.data.loaders import IndexLoader, StreamLoader, dataset_length, dataset_of
from shardwise.data.slices import Slices
from shardwise.data.tokens import TokenCut
from shardwise.errors import DataError
from shardwise.training.length import Length, training_length

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from shardwise.data.feed import StepLoader
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Who reads, and from where on."""

    reader: int
    """Which of the plan's readers."""
    group: dist.ProcessGroup | None
    """Joins the readers on the host; None for one."""
    first_step: int
    on_gpu: bool


def token_cut(job: Job, plan: Plan, world: World, metrics: Mapping[str, Metric] | None = None) -> TokenCut | None:
    """Return what takes this rank's tokens from a batch; None where sequences stay whole."""
    if plan.layout.cp == 1:
        return None
    index = plan.layout.coordinate(world.rank).cp
    return TokenCut(index=index, size=plan.layout.cp, loss=job.loss, metrics=metrics or {})


def make_loader(job: Job, plan: Plan, where: Reading) -> tuple[StepLoader, Length]:
    """Return the loader of the job's training data, and the length of the whole training."""
    dataset = dataset_of(job, "train")
    if dataset is None:
        raise DataError("Job.data gave no dataset for split 'train'", code="data.no-train-split", fix="return one")
    if isinstance(dataset, IterableDataset):
        length = training_length(job, dataset, None, sync_every=plan.communication.sync_every)
        stream = StreamLoader(
            dataset,
            reader=where.reader,
            readers=plan.layout.dp,
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
        reader=where.reader,
        readers=plan.layout.dp,
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
