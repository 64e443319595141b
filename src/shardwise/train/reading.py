"""Reading: the loader of one reader, and how long it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from shardwise.data.loaders import IndexLoader, StreamLoader, dataset_length
from shardwise.data.slices import Slices
from shardwise.errors import DataError
from shardwise.step.length import Length, training_length

if TYPE_CHECKING:
    import torch.distributed as dist

    from shardwise.data.feed import StepLoader
    from shardwise.job import Job
    from shardwise.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Who reads, and from where on."""

    reader: int
    """Which of the plan's readers."""
    group: dist.ProcessGroup | None
    """Joins the readers on the host; None for one."""
    first_step: int
    on_gpu: bool


def make_loader(job: Job, plan: Plan, where: Reading) -> tuple[StepLoader, Length]:
    """Return the loader of the job's training data, and the length of the whole training."""
    dataset: Any = job.data("train")
    if dataset is None:
        raise DataError("Job.data gave no dataset for split 'train'", fix="return one")
    if isinstance(dataset, IterableDataset):
        length = training_length(job, dataset, steps_per_epoch=None)
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
    length = training_length(job, dataset, slices.steps_per_epoch)
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
