"""The check of a job's loss, once, on the first micro-batch that is trained.

A Loss is a sum over rows and what that sum is divided by. Rows that are given twice must therefore double both; a
`sum` that returns a mean does not, and would train at 1/rows of the learning rate without a word. The output of the
first forward pass is given to the loss twice over: no second forward pass, no gradient, and every generator is put
back. Losses that communicate between tensor-parallel ranks may do so here: all of them check the same rows.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import MutableMapping, MutableSequence, MutableSet
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.data.rows import map_rows, mark_rows, others, settle_marks, tensors
from shardwise.errors import JobError
from shardwise.job.generators import untouched_generators

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.data.feed import MicroBatch
    from shardwise.job import Loss

_WHOLE_BYTES = 2**20
"""Outputs up to this size are repeated whole, of larger ones one row: logits of a large vocabulary are gigabytes."""


class LossCheck:
    """Refuses a loss that cannot be right; passes a remark to `note` on one that depends on how rows are grouped."""

    def __init__(self, loss: Loss, note: Callable[[str], None]) -> None:
        self._loss = loss
        self._note = note

    def __call__(self, output: Any, batch: Any, micro_batch: MicroBatch) -> bool:
        """Check the loss of an output and a batch without padding rows; return whether there was enough to see.

        Called on every rank that computes the loss, inside the autocast of its forward pass.
        """
        if not self._loss.by_row:
            return True  # the output is a finished mean, which only another forward pass could change
        if not micro_batch.rows:
            return False
        found = self._repeat(output, batch, micro_batch)
        if found is None:
            return True
        once, twice, counts, tolerance = found
        if not math.isfinite(once + twice):
            return True  # a loss that is not finite is another matter, which the update looks at
        if abs(once) < tolerance:
            return False  # nothing counted in these rows, perhaps
        self._judge(twice / once, counts, tolerance)
        return True

    def _judge(self, ratio: float, counts: tuple[float, float], tolerance: float) -> None:
        doubles = math.isclose(counts[1], 2 * counts[0], rel_tol=tolerance)
        if abs(ratio - 2) < tolerance and doubles:
            return
        if abs(ratio - 1) < tolerance and doubles:
            raise JobError(
                "Loss.sum returns the same for rows given once and twice, as a mean does, and Loss.count divides it"
                " again",
                code="loss.sum-is-mean",
                fix='return a sum over rows, such as cross_entropy(..., reduction="sum")',
            )
        times = f"{ratio:.4g} and {counts[1] / (counts[0] or 1):.4g} times"
        self._note(
            f"rows given twice make Loss.sum and Loss.count {times} as large, not 2 times each: the loss depends on"
            " which rows share a micro-batch, so it changes with accumulation, pipelines and data-parallel ranks"
        )

    @torch.no_grad()
    def _repeat(
        self, output: Any, batch: Any, micro_batch: MicroBatch
    ) -> tuple[float, float, tuple[float, float], float] | None:
        """Return sums of some rows once and twice, the counts of both, and how exact they are; None if not possible."""
        rows = micro_batch.rows
        of_output = mark_rows(output, rows)
        of_batch = settle_marks(micro_batch.marks, batch, rows)
        by_row = [marked for marked, tensor in zip(of_batch, tensors(batch), strict=True) if tensor.ndim]
        known = all(type(tensor) is Tensor for tensor in tensors(output))  # a DTensor's rows may lie elsewhere
        if sum(of_output) != 1 or not by_row or not all(by_row) or others(batch) or not known:
            return None
        if not _is_stateless(self._loss.sum):
            return None
        size = sum(tensor.nbytes for tensor in tensors(output))
        few = rows if size <= _WHOLE_BYTES else 1

        def repeated(times: int) -> tuple[Any, Any]:
            def repeat(tensor: Tensor) -> Tensor:
                return torch.cat([tensor[:few]] * times)

            return map_rows(repeat, output, of_output), map_rows(repeat, batch, of_batch)

        with untouched_generators():
            try:
                pairs = [repeated(1), repeated(2)]
                once, twice = (self._loss.sum_of(*pair) for pair in pairs)
                counts = [self._loss.count_of(pair[1], few * (number + 1)) for number, pair in enumerate(pairs)]
            except Exception:  # noqa: BLE001 - user code may insist on the rows it is trained with
                return None
        tolerance = max(1e-3, 8 * torch.finfo(once.dtype).eps)
        return float(once), float(twice), (counts[0], counts[1]), tolerance


def _is_stateless(function: Any) -> bool:
    """Whether a function may be called more often than once a micro-batch: nothing it refers to keeps statistics.

    Methods and callable objects may; a plain function may where it closes over a module with buffers, or over a list
    or a dict that it could write to.
    """
    if isinstance(function, functools.partial):
        return _is_stateless(function.func) and not any(map(_may_change, (*function.args, *function.keywords.values())))
    if not isinstance(function, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return not any(map(_may_change, cells))


def _may_change(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return next(value.buffers(), None) is not None
    return isinstance(value, MutableSequence | MutableMapping | MutableSet)


def refuse_uncounted(total: Tensor) -> None:
    """Refuse a step in which the loss has a sum and no rank counts anything."""
    if bool(total != 0):
        raise JobError(
            f"Loss.count is 0 over the whole global batch, and the sum of the loss is {float(total):.6g}",
            code="loss.count-zero",
            fix="return what the sum is divided by: how many rows, tokens or elements of the batch it covers",
        )
