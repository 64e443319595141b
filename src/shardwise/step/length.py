"""How long to train: epochs, steps or tokens, all turned into optimizer steps before the first one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, default_collate

from shardwise.errors import JobError

if TYPE_CHECKING:
    from shardwise.job import Job


@dataclass(frozen=True, kw_only=True)
class Length:
    """Optimizer steps of a training, and of one epoch."""

    num_steps: int
    steps_per_epoch: int | None
    """None for streams."""
    source: str

    def ends_epoch(self, number: int) -> bool:
        """Whether step `number` (from 0) is the last of its epoch."""
        return self.steps_per_epoch is not None and (number + 1) % self.steps_per_epoch == 0


def training_length(job: Job, dataset: Dataset[Any], steps_per_epoch: int | None) -> Length:
    """Settle the length; `steps_per_epoch` is None for a stream, which must be counted in steps."""
    if job.steps is not None:
        return Length(num_steps=job.steps, steps_per_epoch=steps_per_epoch, source="steps of the job")
    if steps_per_epoch is None:
        raise JobError("a stream (IterableDataset) has no epochs and no known tokens", fix="give the job steps=")
    if job.epochs is not None:
        return Length(
            num_steps=job.epochs * steps_per_epoch,
            steps_per_epoch=steps_per_epoch,
            source=f"{job.epochs} epochs x {steps_per_epoch} steps",
        )
    per_sample = job.loss.count_of((job.collate or default_collate)([dataset[0]]), 1)
    if per_sample < 1:
        raise JobError("the first sample counts no token, so tokens= cannot be turned into steps", fix="give steps=")
    return Length(
        num_steps=math.ceil((job.tokens or 0) / (per_sample * job.batch_size)),
        steps_per_epoch=steps_per_epoch,
        source=f"{job.tokens} tokens / ({per_sample} in the first sample x batch_size {job.batch_size})",
    )
