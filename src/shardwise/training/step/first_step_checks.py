"""The first-step checks: the loss, which output tensors hold rows, and batches of model-parallel peers.

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
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.data.rows import RowMarks, cut_output, map_rows, mark_rows, others, settle_marks, tensors
from shardwise.errors import JobError
from shardwise.job.generators import untouched_generators
from shardwise.parallel.first_passes import CHECKED_PASSES, gathered, refuse_peers
from shardwise.recorder.fingerprint import fingerprints
from shardwise.torch_private.dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist

    from shardwise.data.feed import MicroBatch, StepBatch
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
                fix='return a sum over rows, as by cross_entropy(..., reduction="sum"), or give sw.Loss.from_mean(...)',
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


# Which tensors of a model's output hold rows: those computed from the batch.
#
# Padding rows of a short micro-batch are dropped from the output before the loss sees it. An output that only
# depends on the model (a table of prototypes, a codebook) may happen to be as long as the micro-batch and must stay
# whole. Where an output has several tensors of that length, the first short forward pass is watched operator by
# operator: what reads the batch, or anything computed from it, belongs to the batch.


class OutputRows:
    """Drops padding rows from outputs; remembers which of their tensors hold rows."""

    def __init__(self) -> None:
        self._marks: RowMarks | None = None
        self._seen: _Descent | None = None
        self._is_clear = False

    def look(self, output: Any, rows: int) -> None:
        """Note of an output of full length whether one tensor at most has that length: then length alone decides."""
        self._is_clear = sum(mark_rows(output, rows)) <= 1

    @contextmanager
    def watching(self, *inputs: Any) -> Iterator[None]:
        """Surround the forward pass of a short micro-batch; costs nothing where the rows of outputs are known."""
        if self._is_clear or self._marks is not None:
            yield
            return
        self._seen = _Descent(tensors(inputs))
        with self._seen:
            yield

    def cut(self, output: Any, rows: int, filled: int) -> Any:
        """Keep the real rows of an output that has `filled` rows."""
        if self._seen is not None:
            descends = tuple(map(self._seen.includes, tensors(output)))
            # What runs outside of torch's dispatcher leaves no trace: then length decides, as for one tensor.
            self._marks = descends if any(descends) else (True,) * len(descends)
            self._seen = None
        return cut_output(output, rows, filled, self._marks)


class _Descent(TorchDispatchMode):
    """Follows which memory holds values computed from some tensors."""

    def __init__(self, roots: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory: set[StorageWeakRef] = set()
        for root in roots:
            self._add(root)

    def includes(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from the roots."""
        return any(_memory_of(part) in self._memory for part in _parts(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(map(self.includes, given)):
            for made in tree_leaves(result):
                if isinstance(made, Tensor):
                    self._add(made)
        return result

    def _add(self, tensor: Tensor) -> None:
        self._memory.update(map(_memory_of, _parts(tensor)))


def _parts(tensor: Any) -> list[Tensor]:
    """Return a tensor and, of a wrapper such as a DTensor, what it holds on this rank."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    parts: list[Any] = [tensor, *(getattr(tensor, name) for name in names)]
    return [part for part in parts if isinstance(part, Tensor)]  # a DTensor also names its mesh


def _memory_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# Batches of model-parallel peers: the ranks of one data-parallel rank (tp, cp, pp) must train on the same samples.


_FIX = "iterate over step.feed, or read samples by plan.layout.data_index(world.rank), with no random numbers of a rank"


class PeerBatches:
    """Compares the batches of the first steps over the ranks that share them."""

    def __init__(self, group: dist.ProcessGroup, cut: Callable[[Any], Any] | None) -> None:
        """`group` joins the peers on the host; `cut` takes this rank's tokens from a whole batch, None without cp."""
        self._group = group
        self._cut = cut
        self._num_steps = 0

    def __call__(self, batch: StepBatch) -> None:
        """Raise on every peer if batches differ; in the first steps communicates over their group, on each of them."""
        if self._num_steps >= CHECKED_PASSES:
            return
        self._num_steps += 1
        forms = [_form(micro_batch) for micro_batch in batch.micro_batches]
        is_slice = all(self._is_slice(micro_batch) for micro_batch in batch.micro_batches)
        (first, (value, _)), *rest = everyone = gathered(
            ((batch.denominator, batch.samples, forms), is_slice), self._group
        )
        others = [rank for rank, (theirs, _) in rest if theirs != value]
        refuse_peers(others, f"another batch than rank {first}", code="data.peer-batches-differ", fix=_FIX)
        whole = [rank for rank, (_, theirs) in everyone if not theirs]
        refuse_peers(
            whole,
            "something else than slices of the tokens, which cp splits",
            code="data.peer-tokens-unsliced",
            fix=_FIX,
        )

    def _is_slice(self, micro_batch: MicroBatch) -> bool:
        """Whether a micro-batch has this rank's tokens of the whole one; floats may be in another precision."""
        if self._cut is None:
            return True
        if micro_batch.whole is None:
            return False
        wanted, given = tensors(self._cut(micro_batch.whole)), tensors(micro_batch.batch)
        if [tensor.shape for tensor in wanted] != [tensor.shape for tensor in given]:
            return False
        pairs = zip(wanted, given, strict=True)
        return all(torch.equal(one, other.cpu()) for one, other in pairs if not one.is_floating_point())


def _form(micro_batch: MicroBatch) -> Any:
    """Return what is equal on ranks with the same batch."""
    whole = tensors(micro_batch.uncut)
    forms = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in whole]
    return micro_batch.rows, micro_batch.filled, forms, fingerprints(whole)
