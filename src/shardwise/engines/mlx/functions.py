"""The compiled parts of a step: loss and gradients of a micro-batch, their sum over ranks, and the update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import torch
from mlx.utils import tree_flatten, tree_unflatten

from shardwise.data.rows import map_tensors, others, tensors
from shardwise.engines.mlx.arrays import counting, to_mlx

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mlx import nn, optimizers

    from shardwise.data.feed import MicroBatch
    from shardwise.engines.mlx.arrays import ArrayForm, Arrays, MlxBatchNorm
    from shardwise.job import Job, Loss

Gradients = list[mx.array]
"""In the order of `Form.trained`."""

_BUCKET_BYTES = 32 << 20
"""Measured on two ranks of one host: 60 arrays of 16 KB took 15 ms one by one and 1.8 in a bucket, 20 of 1 MB 115 and
18."""
_HALVES = (mx.bfloat16, mx.float16)


class Forward:
    """The model's output for a batch, computed in a lower dtype where the plan says so."""

    def __init__(self, job: Job, model: nn.Module, form: ArrayForm, low: mx.Dtype | None) -> None:
        """`low` is the dtype of forward and backward where the arrays that are trained are wider."""
        self._forward, self.model, self.form, self._low = job.forward, model, form, low
        self._held = form.read(model, form.trained)[form.trained[0]].dtype

    def __call__(self, skeleton: Any, arrays: list[mx.array]) -> Any:
        """Run the model on a batch of this structure."""
        return self._forward(self.model, _rebuilt(skeleton, [self.lower(array) for array in arrays]))

    def evaluate(self, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Return the output for a micro-batch without filler, and the batch, both in MLX."""
        batch = micro_batch.batch
        arrays = self.arrays(batch)
        kept = self.form.read(self.model, self.form.parameters)
        self.form.write(self.model, {name: self.lower(array) for name, array in kept.items()})
        try:
            return self(batch, arrays), _rebuilt(batch, arrays)
        finally:
            self.form.write(self.model, kept)

    def arrays(self, batch: Any) -> list[mx.array]:
        """Return the tensors of a batch as arrays, floating-point ones in the dtype that weights are held in."""
        return [to_mlx(tensor, self._held) for tensor in tensors(batch)]

    def lower(self, array: mx.array) -> mx.array:
        """Return an array in the dtype that the model computes in."""
        return array if self._low is None or array.dtype != mx.float32 else array.astype(self._low)


class Gradient:
    """Loss sum and gradients of micro-batches, compiled once for each shape and structure that batches have.

    The model's arrays and the random state are what the compiled function takes and leaves besides its arguments.
    """

    def __init__(
        self, loss: Loss, forward: Forward, norms: Sequence[MlxBatchNorm], note: Callable[[str], None]
    ) -> None:
        self._loss, self._forward, self._norms = loss, forward, norms
        self._functions: dict[str, Callable[..., tuple[mx.array, Gradients]]] = {}
        self._note: Callable[[str], None] | None = note

    def __call__(self, micro_batch: MicroBatch, weight: mx.array, before: Gradients) -> tuple[mx.array, Gradients]:
        """Return the loss sum of a micro-batch, and `before` plus the gradients of that sum times `weight`.

        Of a micro-batch without a real row nothing counts.
        """
        batch = micro_batch.batch
        arrays = self._forward.arrays(batch)
        real = mx.array(micro_batch.rows > 0)
        if not self._is_compiled(batch):
            return self._run(batch, arrays, weight, real, before)
        kind = repr(map_tensors(_nothing, batch))
        if kind not in self._functions:
            skeleton = map_tensors(lambda _: torch.empty(0), batch)
            kept = [self._forward.model.state, mx.random.state]
            self._functions[kind] = mx.compile(partial(self._run, skeleton), inputs=kept, outputs=kept)
        return self._functions[kind](arrays, weight, real, before)

    def _is_compiled(self, batch: Any) -> bool:
        """Whether a function that holds all but the tensors of this batch is right for the next; the same on all ranks.

        Ranks must agree, or their sums would meet in another order: so the structure decides, not what was seen.
        """
        if not self._loss.by_row:
            return False  # such a loss counts on the host, inside its sum: compiled, it would count this batch for ever
        held = sorted({type(leaf).__name__ for leaf in others(batch)})
        if held and self._note is not None:
            self._note(f"batches hold {', '.join(held)} beside tensors, so that forward and backward are not compiled")
            self._note = None
        return not held

    def _run(
        self, skeleton: Any, arrays: list[mx.array], weight: mx.array, real: mx.array, before: Gradients
    ) -> tuple[mx.array, Gradients]:
        model, form = self._forward.model, self._forward.form
        kept = form.read(model, form.parameters)
        statistics: Arrays = {}

        def weigh(trained: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
            form.write(model, {name: self._forward.lower(array) for name, array in {**kept, **trained}.items()})
            output = self._forward(skeleton, arrays)
            statistics.update(form.read(model, form.statistics))
            loss = self._loss.sum_of(output, _rebuilt(skeleton, arrays))
            loss = mx.where(real, loss.astype(mx.float32) if loss.dtype in _HALVES else loss, 0)
            return loss * weight, loss

        with counting(self._norms, real):
            (_, loss), found = mx.value_and_grad(weigh)({name: kept[name] for name in form.trained})
        form.write(model, {**kept, **statistics})  # those of forward: backward moves them again inside mx.checkpoint
        gradients = [found[name] for name in form.trained]
        if before:
            gradients = [first + second for first, second in zip(before, gradients, strict=True)]
        return loss, gradients


def sum_over(group: mx.distributed.Group) -> Callable[[Gradients], Gradients]:
    """Return what sums gradients over the ranks of `group`, in few messages; compiled."""

    def total(gradients: Gradients) -> Gradients:
        summed: Gradients = []
        for bucket in _buckets(gradients):
            flat = mx.distributed.all_sum(mx.concatenate([array.reshape(-1) for array in bucket]), group=group)
            ends = [0]
            for array in bucket:
                ends.append(ends[-1] + array.size)
            parts = mx.split(flat, ends[1:-1])
            summed += [part.reshape(array.shape) for part, array in zip(parts, bucket, strict=True)]
        return summed

    return mx.compile(total)


def _buckets(gradients: Gradients) -> list[Gradients]:
    """Cut a list where a bucket is full; arrays of one bucket have one dtype."""
    buckets: list[Gradients] = [[]]
    for array in gradients:
        filled = sum(each.nbytes for each in buckets[-1])
        if buckets[-1] and (filled + array.nbytes > _BUCKET_BYTES or buckets[-1][0].dtype != array.dtype):
            buckets.append([])
        buckets[-1].append(array)
    return buckets


def norm_of(gradients: Gradients) -> mx.array:
    """Return the norm of the whole gradient."""
    return mx.sqrt(mx.stack([mx.square(array).sum() for array in gradients]).sum())


def update_by(
    model: nn.Module, form: ArrayForm, optimizer: optimizers.Optimizer, clip_norm: float | None, still: Collection[str]
) -> Callable[[Gradients, mx.array], None]:
    """Return what moves the model by summed gradients of a known norm, which are clipped first; compiled.

    Parameters that are in `still` when it is first called stay as they are in each step that gives them no gradient.
    """

    def move(gradients: Gradients, norm: mx.array) -> None:
        if clip_norm is not None:
            factor = mx.minimum(clip_norm / (norm + 1e-6), 1.0)  # torch's own formula
            gradients = [array * factor for array in gradients]
        before = form.read(model, form.trained)
        given = tree_unflatten(list(zip(form.trained, gradients, strict=True)))
        moved = tree_flatten(optimizer.apply_gradients(given, tree_unflatten(list(before.items()))))
        found = dict(zip(form.trained, gradients, strict=True))
        form.write(
            model,
            {
                name: mx.where((found[name] != 0).any(), array, before[name]) if name in still else array
                for name, array in moved
            },
        )

    kept = [model.state, optimizer.state]
    return mx.compile(move, inputs=kept, outputs=kept)


def _rebuilt(skeleton: Any, arrays: list[mx.array]) -> Any:
    """Return a batch of this structure with arrays for its tensors, in order."""
    left = iter(arrays)
    return map_tensors(lambda _: next(left), skeleton)


def _nothing(_: torch.Tensor) -> None:
    """Stand for a tensor."""
