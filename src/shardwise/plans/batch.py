"""Batch arithmetic: global batch size = micro-batch size x gradient accumulation steps x data-parallel size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.layout import Layout


@dataclass(frozen=True)
class BatchSplit:
    """Split of the samples of an optimizer step on each data-parallel rank."""

    micro_batch: int
    accumulation: int


def split_batch(
    batch_size: int, *, dp: int, accumulation: int | None = None, micro_batch: int | None = None
) -> BatchSplit:
    """Split a global batch over `dp` data-parallel ranks; raises PlanError if it cannot be split evenly.

    With both `accumulation` and `micro_batch`, they must match `batch_size`; with neither, accumulation is 1.
    """
    if batch_size < dp:
        raise PlanError(
            f"batch_size {batch_size} is smaller than the number of data-parallel ranks, {dp}",
            code="plan.batch-too-small",
            fix=f"set batch_size={dp} or more, or use --nproc {batch_size}",
        )
    if micro_batch is None:
        accumulation = accumulation or 1
        return BatchSplit(
            _divide(batch_size, dp * accumulation, f"{dp} data-parallel ranks x accumulation {accumulation}"),
            accumulation,
        )
    split = BatchSplit(
        micro_batch, _divide(batch_size, dp * micro_batch, f"{dp} data-parallel ranks x micro_batch {micro_batch}")
    )
    if accumulation not in {None, split.accumulation}:
        raise PlanError(
            f"micro_batch {micro_batch} x accumulation {accumulation} x dp {dp} does not equal batch_size {batch_size}",
            code="plan.batch-split-mismatch",
            fix=f"set accumulation={split.accumulation}, or omit it",
        )
    return split


def fill_pipeline(batch_size: int | None, layout: Layout) -> int:
    """Return the accumulation steps that fill a pipeline: 4, 2 or 1 x pp, the most that divide the batch evenly."""
    if layout.pp == 1:
        return 1
    for per_stage in (4, 2, 1):
        accumulation = per_stage * layout.pp
        if batch_size is None or batch_size % (layout.dp * accumulation) == 0:
            return accumulation
    return layout.pp


def refit_batch(batch_size: int, *, dp: int, largest_micro_batch: int) -> BatchSplit:
    """Split the same global batch over another number of data-parallel ranks, with at most `largest_micro_batch`."""
    per_rank = _divide(batch_size, dp, f"{dp} data-parallel ranks")
    for micro_batch in range(min(largest_micro_batch, per_rank), 0, -1):
        if per_rank % micro_batch == 0:
            return BatchSplit(micro_batch, per_rank // micro_batch)
    raise AssertionError("unreachable: a micro-batch of 1 divides every batch")


def _divide(batch_size: int, parts: int, divisor: str) -> int:
    quotient, remainder = divmod(batch_size, parts)
    if remainder or quotient == 0:
        below, above = quotient * parts, (quotient + 1) * parts
        choices = f"{below} or {above}" if below else f"{above}"
        raise PlanError(
            f"batch_size {batch_size} is not divisible by {divisor}",
            code="plan.batch-not-divisible",
            fix=f"set batch_size to {choices}",
        )
    return quotient
