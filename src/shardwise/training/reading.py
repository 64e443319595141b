"""The loader of one data-parallel rank, and the length of a training in optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, IterableDataset, default_collate

from shardwise.data.cursor import Slices
from shardwise.data.loaders import IndexLoader, StreamLoader, dataset_length, dataset_of
from shardwise.data.tokens import TokenCut
from shardwise.errors import DataError, JobError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch.distributed as dist

    from shardwise.data.feed import StepLoader
    from shardwise.dist import World
    from shardwise.job import Job, Metric
    from shardwise.plans import Plan


@dataclass(frozen=True, kw_only=True)
class RankLoader:
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


def make_loader(job: Job, plan: Plan, where: RankLoader) -> tuple[StepLoader, Length]:
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
