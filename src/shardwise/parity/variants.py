"""Other ways for one process to compute the same: rows regrouped, reordered, weights moved by one rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwise.data.feed import MicroBatch, StepBatch
from shardwise.data.rows import map_rows, settle_marks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """How one process differs from itself; at its defaults, not at all."""

    readers: int = 1
    accumulation: int = 1
    """Group rows into the micro-batches that so many readers share: batch statistics are theirs."""
    reverse: bool = False
    """Add up in another order."""
    nudge: bool = False
    """Move every weight by up to one rounding error."""

    @torch.no_grad()
    def perturb(self, step: Any) -> None:
        """Apply the nudge to the weights of a step."""
        if not self.nudge:
            return
        generator = torch.Generator().manual_seed(1)
        for value in step.held().values.values():
            noise = torch.rand(value.shape, generator=generator, dtype=value.dtype) - 0.5
            value.mul_(1 + 2 * torch.finfo(value.dtype).eps * noise)
        step.optimized.refresh()


def vary(batches: Iterable[StepBatch], variant: Variant) -> Iterator[StepBatch]:
    """Yield each step with its rows grouped and ordered as `variant` says; steps come as one micro-batch."""
    for step in batches:
        (whole,) = step.micro_batches
        groups = regroup(whole.rows, variant.readers, variant.accumulation)
        orders = [order[::-1] if variant.reverse else order for order in groups if order]
        yield StepBatch([_take(whole, order) for order in orders], step.denominator, step.samples, step.cursor)


def regroup(rows: int, readers: int, accumulation: int) -> list[list[int]]:
    """Return the rows of each micro-batch over all readers, as Slices deals them out."""
    cells = readers * accumulation
    spans = [range(cell * rows // cells, (cell + 1) * rows // cells) for cell in range(cells)]
    return [
        [row for reader in range(readers) for row in spans[reader * accumulation + number]]
        for number in range(accumulation)
    ]


def _take(whole: MicroBatch, order: list[int]) -> MicroBatch:
    index = torch.tensor(order)

    marks = settle_marks(whole.marks, whole.batch, whole.filled)
    places = whole.places
    if places is not None:
        places = msgspec.structs.replace(places, indices=[places.indices[row] for row in order])
    batch = map_rows(lambda tensor: tensor[index], whole.batch, marks)
    return MicroBatch(batch, len(order), len(order), places, None, whole.marks)
