"""Batch algebra: global batch = micro-batch x accumulation x dp, or a refusal with the nearest possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.errors import PlanError

if TYPE_CHECKING:
    from shardwise.layout import Layout


@dataclass(frozen=True)
class BatchSplit:
    """How the samples of one optimizer step are split for each data-parallel rank."""

    micro_batch: int
    accumulation: int


def split_batch(
    batch_size: int, *, dp: int, accumulation: int | None = None, micro_batch: int | None = None
) -> BatchSplit:
    """Split a global batch over `dp` ranks; give accumulation, micro-batch, both (then checked) or neither."""
    if batch_size < dp:
        raise PlanError(
            f"batch_size {batch_size} is smaller than the {dp} ranks that read samples",
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
            f"micro_batch {micro_batch} x accumulation {accumulation} x dp {dp} is not batch_size {batch_size}",
            code="plan.batch-split-mismatch",
            fix=f"set accumulation={split.accumulation}, or leave it out",
        )
    return split


def fill_pipeline(batch_size: int | None, layout: Layout) -> int:
    """Return how many micro-batches keep the stages of `layout` busy: four per stage, two where four do not divide."""
    if layout.pp == 1:
        return 1
    for per_stage in (4, 2, 1):
        number = per_stage * layout.pp
        if batch_size is None or batch_size % (layout.dp * number) == 0:
            return number
    return layout.pp


def refit_batch(batch_size: int, *, dp: int, largest_micro_batch: int) -> BatchSplit:
    """Keep the global batch on another number of data-parallel ranks; the micro-batch may shrink, never grow."""
    per_rank = _divide(batch_size, dp, f"{dp} data-parallel ranks")
    for micro_batch in range(min(largest_micro_batch, per_rank), 0, -1):
        if per_rank % micro_batch == 0:
            return BatchSplit(micro_batch, per_rank // micro_batch)
    raise AssertionError("1 divides everything")


def _divide(batch_size: int, parts: int, divisor: str) -> int:
    share, rest = divmod(batch_size, parts)
    if rest or share == 0:
        below, above = share * parts, (share + 1) * parts
        choices = f"{below} or {above}" if below else f"{above}"
        raise PlanError(
            f"batch_size {batch_size} does not divide by {divisor}",
            code="plan.batch-not-divisible",
            fix=f"set batch_size to {choices}",
        )
    return share
