"""Collating with a count: how many samples a batch holds, and which of its tensors have one entry for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import default_collate

from shardwise.data.rows import RowMarks, mark_rows
from shardwise.job.generators import untouched_generators

if TYPE_CHECKING:
    from collections.abc import Callable


class Collated(NamedTuple):
    """A batch with what only its collation knows; travels from DataLoader workers, pinned where asked."""

    batch: Any
    rows: int
    """Samples it was made of, whatever the length of its first tensor (which may hold nodes, or packed tokens)."""
    marks: RowMarks | None
    """Which of its tensors hold rows; None where only their length tells."""


class CountedCollate:
    """Collates samples as the job does, and marks row tensors by origin.

    A tensor holds rows if its length follows the number of samples: it is as long as the batch, and has length 1 when
    the first sample is collated alone. That second collation happens once per process, with all generators restored.
    """

    def __init__(self, collate: Callable[[list[Any]], Any] | None = None) -> None:
        self._collate = collate or stack_samples
        self._marks: RowMarks | None = None

    def __call__(self, samples: list[Any]) -> Collated:
        """Return the batch of `samples`, counted and marked."""
        batch = self._collate(samples)
        if self._marks is None and len(samples) > 1:
            alone = self._marks_of_one(samples[0])
            together = mark_rows(batch, len(samples))
            same = alone is not None and len(alone) == len(together)
            self._marks = tuple(map(all, zip(alone or (), together, strict=True))) if same else together
        return Collated(batch, len(samples), self._marks)

    def _marks_of_one(self, sample: Any) -> RowMarks | None:
        """Return the marks of a batch of one sample; None where the job's collate cannot make one."""
        with untouched_generators():
            try:
                return mark_rows(self._collate([sample]), 1)
            except Exception:  # noqa: BLE001 - user code, asked for a batch it may never have to make
                return None


def stack_samples(samples: list[Any]) -> Any:
    """What torch's default_collate makes of samples; for tuples of tensors without its look at every type."""
    first = samples[0]
    if type(first) is tuple and all(type(value) is torch.Tensor for value in first):
        return [torch.stack(values) for values in zip(*samples, strict=True)]
    return default_collate(samples)
