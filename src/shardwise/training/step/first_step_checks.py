"""First-step checks of the loss, of the output tensors that contain rows, and of the batches of model-parallel peers.

A Loss is a sum over rows and a normalizer. Duplicated rows must therefore double both; a `sum` that returns a mean does
not, and would train at 1/rows of the learning rate without an error. The check passes the output of the first forward
pass to the loss twice: it needs no second forward pass and no gradient, and it restores the random generators. A loss
may communicate between tensor-parallel ranks here, because these ranks all check the same rows.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, MutableSet
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.data.rows import RowMarks, drop_padding_outputs, map_rows, mark_rows, non_tensors, settle_marks, tensors
from shardwise.errors import JobError
from shardwise.job import losses
from shardwise.job.generators import untouched_generators
from shardwise.parallel.first_passes import CHECKED_PASSES, gathered, reject_ranks
from shardwise.recorder.fingerprint import fingerprints
from shardwise.torch_private.dispatch import TorchDispatchMode, is_traceable_wrapper_subclass, tree_leaves

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from shardwise.data.feed import MicroBatch, StepBatch
    from shardwise.job import Loss


_MOST_LOGITS = 2**28
"""Maximum number of logits per row for which the loss is computed a second time, in fp32."""
_WHOLE_BYTES = 2**20
"""Largest output in bytes whose rows are all duplicated; logits may take gigabytes, so larger outputs use one row."""


ROW_SUMS = (losses.cross_entropy, losses.token_cross_entropy, losses.next_token, losses.labels)
"""Losses that are sums over rows whatever the output is. To repeat rows would only take memory: the logits of a single
row may be gigabytes, which a plan that fits has no space for."""


def loss_check(loss: Loss, note: Callable[[str], None]) -> LossCheck | None:
    """Return the check of a loss on the first outputs; None if there is nothing to check."""
    return None if loss in ROW_SUMS and loss != losses.labels else LossCheck(loss, note)


class LossCheck:
    """Raises for a loss whose sum is a mean; passes a message to `note` if the loss depends on the grouping of rows."""

    def __init__(self, loss: Loss, note: Callable[[str], None]) -> None:
        self._loss = loss
        self._note = note

    def __call__(self, output: Any, batch: Any, micro_batch: MicroBatch) -> bool:
        """Check the loss on an output and a batch without padding rows; return whether the check was conclusive.

        Call on every rank that computes the loss, inside the autocast context of its forward pass.
        """
        if not self._loss.by_row:
            if micro_batch.whole is None:  # a context-parallel rank has a slice of the labels
                self._check_count(output, batch, micro_batch.rows)
            return True
        if not micro_batch.rows:
            return False
        if self._loss.sum is losses.labels.sum:
            self._check_shift(output, batch)
        found = None if self._loss in ROW_SUMS else self._repeat(output, batch, micro_batch)
        if found is None:
            return True
        once, twice, counts, tolerance = found
        if not math.isfinite(once + twice):
            return True  # the update handles losses that are not finite
        if abs(once) < tolerance:
            return False  # these rows may have no counted elements
        self._check_ratio(twice / once, counts, tolerance)
        return True

    @torch.no_grad()
    def _check_count(self, output: Any, batch: Any, rows: int) -> None:
        """Report a Loss.count that differs from the number of labels over which the model averages its own loss."""
        mean, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        if type(mean) is not Tensor or type(logits) is not Tensor or not isinstance(batch, Mapping):
            return
        if not isinstance(batch.get("labels"), Tensor) or batch["labels"].shape != logits.shape[:-1] or logits.ndim < 3:
            return
        labels = batch["labels"]
        kept = labels[labels != losses.IGNORE]
        if labels.dtype != torch.long or not kept.numel() or logits[0].numel() > _MOST_LOGITS:
            return
        if int(kept.min()) < 0 or int(kept.max()) >= logits.shape[-1]:  # another ignored index than cross_entropy's
            return
        counted = self._loss.count_of(batch, rows)
        matching = {}
        for name, loss in (("count_next_labels", losses.next_token), ("count_labels", losses.labels)):
            totals = []
            for row in range(len(logits)):  # logits may take gigabytes: one row at a time
                one = slice(row, row + 1)
                totals.append(float(loss.sum(logits[one].float(), {"labels": batch["labels"][one]})))
            number = loss.count_of(batch, rows)
            if number and math.isclose(sum(totals) / number, float(mean), rel_tol=1e-4):
                matching[name] = number
        if matching and counted not in matching.values():
            name, number = next(iter(matching.items()))
            self._note(
                f"Loss.count returns {counted:g}, but the model's loss is a mean over {number:g} labels, so batches of"
                f" other lengths get a wrong weight: use sw.losses.returned_by_model(sw.losses.{name})"
            )

    def _check_shift(self, output: Any, batch: Any) -> None:
        """Report labels that equal the input tokens, as decoders have them, under a loss that does not shift them."""
        if getattr(output, "encoder_last_hidden_state", None) is not None:  # an encoder-decoder shifts its own labels
            return
        tokens, labels = batch.get("input_ids"), batch.get("labels")
        if not isinstance(tokens, Tensor) or "decoder_input_ids" in batch or tokens.shape != labels.shape:
            return
        kept = labels != losses.IGNORE
        if bool((labels == tokens)[kept].all()) and int(kept.sum()) > len(labels):
            self._note(
                'batch["labels"] equals batch["input_ids"], so sw.losses.labels trains the model to return its input:'
                " use sw.losses.next_token for decoders (...ForCausalLM), which compares with the next token"
            )

    def _check_ratio(self, ratio: float, counts: tuple[float, float], tolerance: float) -> None:
        doubles = math.isclose(counts[1], 2 * counts[0], rel_tol=tolerance)
        if abs(ratio - 2) < tolerance and doubles:
            return
        if abs(ratio - 1) < tolerance and doubles:
            raise JobError(
                "Loss.sum must return a sum over rows, got a mean: duplicated rows do not double it",
                code="loss.sum-is-mean",
                fix='return a sum over rows, as cross_entropy(..., reduction="sum"), or use sw.Loss.from_mean(...)',
            )
        factors = f"{ratio:.4g} and {counts[1] / (counts[0] or 1):.4g}"
        self._note(
            f"duplicated rows multiply Loss.sum and Loss.count by {factors} instead of 2: the loss depends on the rows"
            " of a micro-batch, so it changes with accumulation, pipeline stages and data-parallel ranks"
        )

    @torch.no_grad()
    def _repeat(
        self, output: Any, batch: Any, micro_batch: MicroBatch
    ) -> tuple[float, float, tuple[float, float], float] | None:
        """Return the loss sums of some rows and of the same rows duplicated, both counts, and the tolerance.

        Returns None if rows cannot be duplicated or the loss may have side effects.
        """
        rows = micro_batch.rows
        of_output = mark_rows(output, rows)
        of_batch = settle_marks(micro_batch.marks, batch, rows)
        by_row = [marked for marked, tensor in zip(of_batch, tensors(batch), strict=True) if tensor.ndim]
        known = all(type(tensor) is Tensor for tensor in tensors(output))  # the rows of a DTensor may be on other ranks
        if sum(of_output) != 1 or not by_row or not all(by_row) or non_tensors(batch) or not known:
            return None
        if not is_stateless(self._loss.sum):
            return None
        size = sum(tensor.nbytes for tensor in tensors(output))
        num_rows = rows if size <= _WHOLE_BYTES else 1

        def repeated(times: int) -> tuple[Any, Any]:
            def repeat(tensor: Tensor) -> Tensor:
                return torch.cat([tensor[:num_rows]] * times)

            return map_rows(repeat, output, of_output), map_rows(repeat, batch, of_batch)

        with untouched_generators():
            try:
                single, double = repeated(1), repeated(2)
                once, twice = self._loss.sum_of(*single), self._loss.sum_of(*double)
                counts = self._loss.count_of(single[1], num_rows), self._loss.count_of(double[1], 2 * num_rows)
            except Exception:  # noqa: BLE001 - user code may require the number of rows it is trained with
                return None
        tolerance = max(1e-3, 8 * torch.finfo(once.dtype).eps)
        return float(once), float(twice), counts, tolerance


def is_stateless(function: Any) -> bool:
    """Return whether a function has no state, so that it can be called more than once per micro-batch.

    Returns False for methods, callable objects, and functions that close over a module with buffers, over a mutable
    collection or over an iterator.
    """
    if isinstance(function, functools.partial):
        return is_stateless(function.func) and not any(map(_may_change, (*function.args, *function.keywords.values())))
    if not isinstance(function, types.FunctionType):
        return False
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return not any(map(_may_change, cells))


def _may_change(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return next(value.buffers(), None) is not None
    return isinstance(value, Iterator | MutableSequence | MutableMapping | MutableSet)


def check_counted(total: Tensor) -> None:
    """Raise JobError if the loss sum of a step is not 0 although its normalizer is 0."""
    if bool(total != 0):
        raise JobError(
            f"Loss.count is 0 over the global batch, but the loss sum is {float(total):.6g}",
            code="loss.count-zero",
            fix="return the number of rows, tokens or elements in the loss sum from Loss.count",
        )


# Output tensors that contain rows are those computed from the batch.
#
# The padding rows of a short micro-batch are dropped from the output before the loss reads it. An output that depends
# only on the model (prototypes, a codebook) may have the length of the micro-batch by coincidence and must not be
# truncated. If an output has several tensors of that length, the first forward pass of a short micro-batch is traced
# operator by operator: the result of an operator that reads the batch, or a value computed from it, contains rows.


class OutputRows:
    """Drops the padding rows of outputs, and records which output tensors contain rows."""

    def __init__(self) -> None:
        self._marks: RowMarks | None = None
        self._trace: _DependencyTrace | None = None
        self._is_unambiguous = False

    def observe(self, output: Any, rows: int) -> None:
        """Record whether at most one tensor of an unpadded output has length `rows`, so the length identifies it."""
        self._is_unambiguous = sum(mark_rows(output, rows)) <= 1

    @contextmanager
    def tracking(self, *inputs: Any) -> Iterator[None]:
        """Trace the forward pass of a short micro-batch, unless the output tensors with rows are known."""
        if self._is_unambiguous or self._marks is not None:
            yield
            return
        self._trace = _DependencyTrace(tensors(inputs))
        with self._trace:
            yield

    def drop_padding(self, output: Any, rows: int, filled: int) -> Any:
        """Return an output of `filled` rows with only its first `rows` rows."""
        if self._trace is not None:
            depends = tuple(map(self._trace.includes, tensors(output)))
            # Operations outside torch's dispatcher are not traced; then every tensor of that length contains rows.
            self._marks = depends if any(depends) else (True,) * len(depends)
            self._trace = None
        return drop_padding_outputs(output, rows, filled, self._marks)


class _DependencyTrace(TorchDispatchMode):
    """Records the storages that contain values computed from some root tensors."""

    def __init__(self, roots: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[StorageWeakRef] = set()
        for root in roots:
            self._add(root)

    def includes(self, tensor: Tensor) -> bool:
        """Return whether a tensor was computed from the roots."""
        return any(_storage_of(part) in self._storages for part in _parts(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(map(self.includes, inputs)):
            for output in tree_leaves(result):
                if isinstance(output, Tensor):
                    self._add(output)
        return result

    def _add(self, tensor: Tensor) -> None:
        self._storages.update(map(_storage_of, _parts(tensor)))


def _parts(tensor: Any) -> list[Tensor]:
    """Return a tensor and, for a wrapper subclass such as DTensor, its local tensors."""
    parts = [tensor]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a DTensor also lists its mesh
                parts.append(part)
    return parts


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# Batches of model-parallel peers: the tp, cp and pp ranks of one data-parallel rank must train on the same samples.


_FIX = "iterate over step.feed, or select samples by plan.layout.data_index(world.rank) without per-rank randomness"


class PeerBatches:
    """Compares the batches of model-parallel ranks in the first steps."""

    def __init__(self, group: dist.ProcessGroup, token_shard: Callable[[Any], Any] | None) -> None:
        """Create the check over the host group of the peers; `token_shard` slices this rank's tokens under cp."""
        self._group = group
        self._token_shard = token_shard
        self._num_steps = 0

    def __call__(self, batch: StepBatch) -> None:
        """Raise on every peer if batches differ. Communicates over the group in the first steps; call on every rank."""
        if self._num_steps >= CHECKED_PASSES:
            return
        self._num_steps += 1
        forms = [_form(micro_batch) for micro_batch in batch.micro_batches]
        is_slice = all(self._is_slice(micro_batch) for micro_batch in batch.micro_batches)
        by_rank = gathered(((batch.denominator, batch.samples, forms), is_slice), self._group)
        first, (expected, _) = by_rank[0]
        different, unsliced = [], []
        for rank, (found, is_sliced) in by_rank:
            if found != expected:
                different.append(rank)
            if not is_sliced:
                unsliced.append(rank)
        reject_ranks(different, f"a different batch than rank {first}", code="data.peer-batches-differ", fix=_FIX)
        reject_ranks(
            unsliced,
            "a batch other than the rank's slice of the tokens, which cp requires",
            code="data.peer-tokens-unsliced",
            fix=_FIX,
        )

    def _is_slice(self, micro_batch: MicroBatch) -> bool:
        """Return whether a micro-batch contains this rank's slice of the tokens; floats may differ in precision."""
        if self._token_shard is None:
            return True
        if micro_batch.whole is None:
            return False
        expected, found = tensors(self._token_shard(micro_batch.whole)), tensors(micro_batch.batch)
        if len(expected) != len(found):
            return False
        for one, other in zip(expected, found, strict=True):
            if one.shape != other.shape:
                return False
            if not one.is_floating_point() and not torch.equal(one, other.cpu()):
                return False
        return True


def _form(micro_batch: MicroBatch) -> Any:
    """Return the shapes and fingerprints of a micro-batch, which are equal on ranks with the same batch."""
    whole = tensors(micro_batch.unsharded)
    forms = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in whole]
    return micro_batch.rows, micro_batch.filled, forms, fingerprints(whole)
