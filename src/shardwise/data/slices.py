"""Which places of an epoch each reader and micro-batch gets: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Slices:
    """How one reader cuts the global batches of an epoch into micro-batches."""

    batch_size: int
    """Samples per optimizer step over all readers."""
    accumulation: int
    reader: int
    """Which of the `readers` this is: the data coordinate, never the rank."""
    readers: int
    length: int
    """Samples in the dataset."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise DataError("the training set is empty", code="data.no-samples", fix="give a dataset with samples")

    @property
    def micro_batch(self) -> int:
        """Rows of a full micro-batch."""
        return self.batch_size // (self.readers * self.accumulation)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps per epoch; the last may be short, none is dropped."""
        return -(-self.length // self.batch_size)

    def rows_of_step(self, step: int) -> int:
        """Real samples of a step of the epoch, over all readers."""
        return min(self.batch_size, self.length - step * self.batch_size)

    def places(self, step: int) -> list[tuple[int, int]]:
        """Return (start, stop) in the epoch's order for each micro-batch of this reader; empty spans are allowed.

        A short step is spread evenly, so that no reader waits for another and as few as possible have nothing.
        """
        rows, first, cells = self.rows_of_step(step), step * self.batch_size, self.readers * self.accumulation
        start = self.reader * self.accumulation
        return [
            (first + cell * rows // cells, first + (cell + 1) * rows // cells)
            for cell in range(start, start + self.accumulation)
        ]
