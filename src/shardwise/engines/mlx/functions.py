"""The arithmetic of an MLX step: losses and optimizers as in torch; compiled gradients, sum over ranks and update.

Losses are registered for MLX arrays (see `job/losses.py`). `sw.adamw` and `sw.sgd` are translated to MLX optimizers; an
optimizer factory of the user must be written for MLX and is called unchanged.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import torch
from mlx import nn, optimizers
from mlx.utils import tree_flatten, tree_unflatten

from shardwise.data.rows import map_tensors, non_tensors, tensors
from shardwise.engines.mlx.arrays import counting, to_mlx, to_torch
from shardwise.job import losses
from shardwise.job.optimizers import SGD, AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from mlx.optimizers import Optimizer

    from shardwise.data.feed import MicroBatch
    from shardwise.engines.mlx.arrays import ArrayForm, Arrays, MlxBatchNorm
    from shardwise.job import Job, Loss
    from shardwise.job.optimizers import OptimizerFactory

Gradients = list[mx.array]
"""One array per parameter, in the order of `ArrayForm.trained`."""

_BUCKET_BYTES = 32 << 20
"""Maximum size of a bucket. On two ranks of one host, summing 60 arrays of 16 KB took 15 ms one by one and 1.8 ms in a
bucket; summing 20 arrays of 1 MB took 115 ms and 18 ms."""
_HALVES = (mx.bfloat16, mx.float16)


class Forward:
    """Computes the model's output for a batch, in the plan's compute dtype."""

    def __init__(self, job: Job, model: nn.Module, form: ArrayForm, low: mx.Dtype | None) -> None:
        """`low` is the dtype of forward and backward if it is lower than that of the parameters."""
        self._forward, self.model, self.form, self._low = job.forward, model, form, low
        self._parameter_dtype = form.read(model, form.trained)[form.trained[0]].dtype

    def __call__(self, skeleton: Any, arrays: list[mx.array]) -> Any:
        """Run the model on a batch with the structure of `skeleton` and the values of `arrays`."""
        return self._forward(self.model, _rebuilt(skeleton, [self.lower(array) for array in arrays]))

    def evaluate(self, micro_batch: MicroBatch) -> tuple[Any, Any]:
        """Return the model's output for a micro-batch without padding rows, and the batch, both as MLX arrays."""
        batch = micro_batch.batch
        arrays = self.arrays(batch)
        kept = self.form.read(self.model, self.form.parameters)
        self.form.write(self.model, {name: self.lower(array) for name, array in kept.items()})
        try:
            return self(batch, arrays), _rebuilt(batch, arrays)
        finally:
            self.form.write(self.model, kept)

    def arrays(self, batch: Any) -> list[mx.array]:
        """Return the tensors of a batch as arrays, floating-point ones in the dtype of the parameters."""
        return [to_mlx(tensor, self._parameter_dtype) for tensor in tensors(batch)]

    def lower(self, array: mx.array) -> mx.array:
        """Return an array in the compute dtype; only fp32 arrays are cast."""
        if self._low is None or array.dtype != mx.float32:
            return array
        return array.astype(self._low)


class Gradient:
    """Computes loss sum and gradients of micro-batches, compiled once per shape and structure of batches.

    Besides its arguments, the compiled function reads and writes the model's arrays and the random state.
    """

    def __init__(
        self, loss: Loss, forward: Forward, norms: Sequence[MlxBatchNorm], note: Callable[[str], None]
    ) -> None:
        self._loss, self._forward, self._norms = loss, forward, norms
        self._functions: dict[str, Callable[..., tuple[mx.array, Gradients]]] = {}
        self._note: Callable[[str], None] | None = note

    def __call__(self, micro_batch: MicroBatch, weight: mx.array, before: Gradients) -> tuple[mx.array, Gradients]:
        """Return the loss sum of a micro-batch, and `before` plus the gradients of the loss sum times `weight`.

        A micro-batch of padding rows alone contributes zero.
        """
        batch = micro_batch.batch
        arrays = self._forward.arrays(batch)
        real = mx.array(micro_batch.rows > 0)
        if not self._is_compiled(batch):
            return self._run(batch, arrays, weight, real, before)
        kind = repr(map_tensors(lambda _: None, batch))
        if kind not in self._functions:
            skeleton = map_tensors(lambda _: torch.empty(0), batch)
            kept = [self._forward.model.state, mx.random.state]
            self._functions[kind] = mx.compile(partial(self._run, skeleton), inputs=kept, outputs=kept)
        return self._functions[kind](arrays, weight, real, before)

    def _is_compiled(self, batch: Any) -> bool:
        """Return whether a compiled function may be reused for other batches of this structure; equal on all ranks.

        Ranks must agree, or they would issue their collectives in different orders: only the structure decides.
        """
        if not self._loss.by_row:
            return False  # this loss counts on the host: a compiled function would reuse the count of the first batch
        others = sorted({type(leaf).__name__ for leaf in non_tensors(batch)})
        if others and self._note is not None:
            self._note(f"batches contain {', '.join(others)} besides tensors: forward and backward are not compiled")
            self._note = None
        return not others

    def _run(
        self, skeleton: Any, arrays: list[mx.array], weight: mx.array, real: mx.array, before: Gradients
    ) -> tuple[mx.array, Gradients]:
        model, form = self._forward.model, self._forward.form
        kept = form.read(model, form.parameters)
        statistics: Arrays = {}

        def weighted_loss(trained: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
            form.write(model, {name: self._forward.lower(array) for name, array in {**kept, **trained}.items()})
            output = self._forward(skeleton, arrays)
            statistics.update(form.read(model, form.statistics))
            loss = self._loss.sum_of(output, _rebuilt(skeleton, arrays))
            loss = mx.where(real, loss.astype(mx.float32) if loss.dtype in _HALVES else loss, 0)
            return loss * weight, loss

        with counting(self._norms, real):
            (_, loss), found = mx.value_and_grad(weighted_loss)({name: kept[name] for name in form.trained})
        form.write(model, {**kept, **statistics})  # from forward: with mx.checkpoint, backward updates them once more
        gradients = [found[name] for name in form.trained]
        if before:
            gradients = [first + second for first, second in zip(before, gradients, strict=True)]
        return loss, gradients


def sum_over(group: mx.distributed.Group) -> Callable[[Gradients], Gradients]:
    """Return a compiled function that sums gradients over the ranks of `group`, in buckets."""

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
    """Split gradients into buckets of one dtype and at most `_BUCKET_BYTES`; a larger array is a separate bucket."""
    buckets: list[Gradients] = [[]]
    for array in gradients:
        filled = sum(each.nbytes for each in buckets[-1])
        if buckets[-1] and (filled + array.nbytes > _BUCKET_BYTES or buckets[-1][0].dtype != array.dtype):
            buckets.append([])
        buckets[-1].append(array)
    return buckets


def norm_of(gradients: Gradients) -> mx.array:
    """Return the L2 norm over all gradients."""
    return mx.sqrt(mx.stack([mx.square(array).sum() for array in gradients]).sum())


def update_by(
    model: nn.Module, form: ArrayForm, optimizer: optimizers.Optimizer, clip_norm: float | None, unused: Collection[str]
) -> Callable[[Gradients, mx.array], None]:
    """Return a compiled function that clips summed gradients by their norm and updates the model.

    Parameters that are in `unused` at its first call are not updated in steps where their gradient is zero.
    """

    def update(gradients: Gradients, norm: mx.array) -> None:
        if clip_norm is not None:
            factor = mx.minimum(clip_norm / (norm + 1e-6), 1.0)  # torch's own formula
            gradients = [array * factor for array in gradients]
        before = form.read(model, form.trained)
        named = dict(zip(form.trained, gradients, strict=True))
        gradient_tree = tree_unflatten(list(named.items()))
        updated = dict(tree_flatten(optimizer.apply_gradients(gradient_tree, tree_unflatten(list(before.items())))))
        for name in unused:
            updated[name] = mx.where((named[name] != 0).any(), updated[name], before[name])
        form.write(model, updated)

    kept = [model.state, optimizer.state]
    return mx.compile(update, inputs=kept, outputs=kept)


def _rebuilt(skeleton: Any, arrays: list[mx.array]) -> Any:
    """Return `skeleton` with its tensors replaced by `arrays`, in order."""
    left = iter(arrays)
    return map_tensors(lambda _: next(left), skeleton)


@losses.class_sum.register(mx.array)
@losses.token_sum.register(mx.array)
def cross_entropy_sum(logits: mx.array, targets: mx.array) -> mx.array:
    """Return the cross-entropy summed over targets that are not ignored, in fp32 or wider; 0 if all are ignored.

    Logits are [..., classes].
    """
    if logits.dtype in {mx.bfloat16, mx.float16}:
        logits = logits.astype(mx.float32)
    counts = targets != losses.IGNORE
    found = nn.losses.cross_entropy(logits, mx.where(counts, targets, 0))
    return mx.where(counts, found, 0).sum()


@losses.pad_ignored.register(mx.array)
def pad_ignored(labels: mx.array, number: int) -> mx.array:
    """Return labels [rows, length] with `number` ignored labels added to the end of each row."""
    return mx.pad(labels, [(0, 0), (0, number)], constant_values=losses.IGNORE)


@losses.finite.register(mx.array)
def finite(value: mx.array) -> mx.array:
    """Return an array with NaN replaced by 0."""
    return mx.nan_to_num(value)


def observe_loss(observe: Callable[[Any], None], loss_sum: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a function that calls `observe` with each batch, as tensors, before `loss_sum`.

    Disables compilation in this process: a compiled function runs its Python code only for the first batch.
    """
    mx.disable_compile()

    def observed(output: Any, batch: Any) -> Any:
        observe(_as_tensors(batch))
        return loss_sum(output, batch)

    return observed


def _as_tensors(value: Any) -> Any:
    if isinstance(value, mx.array):
        return to_torch(value)
    if isinstance(value, dict):
        return {key: _as_tensors(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_tensors(item) for item in value]
    return value


# Optimizers with torch's arithmetic.


def adapt_optimizer(factory: OptimizerFactory) -> Callable[[list[tuple[str, mx.array]]], Any]:
    """Return a factory of MLX optimizers over named arrays; a factory of the user is returned unchanged."""
    if isinstance(factory, AdamW):
        make: Callable[[float], Optimizer] = lambda weight_decay: MlxAdamW(  # noqa: E731
            factory.lr, betas=list(factory.betas), eps=factory.eps, weight_decay=weight_decay
        )
    elif isinstance(factory, SGD):
        make = lambda weight_decay: MlxSGD(  # noqa: E731
            factory.lr, momentum=factory.momentum, nesterov=factory.nesterov, weight_decay=weight_decay
        )
    else:
        return factory  # type: ignore[return-value]  # its parameters are arrays
    return lambda named: with_decay(named, factory.weight_decay, make)


class MlxAdamW(optimizers.AdamW):  # type: ignore[misc]  # MLX's classes are untyped
    """AdamW with an accurate bias correction: MLX computes 1 - 0.999 in fp32, which loses five digits."""

    _numbers: Any = None

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Return the updated parameters.

        Factors common to all parameters are computed once, in one array: MLX would fuse scalars into the kernel of each
        parameter and compute them again for every element: 1.4 ms instead of 0.25 ms for 65,000 elements.
        """
        rate = self.learning_rate
        corrections = [-mx.expm1((self.step + 1).astype(rate.dtype) * _log(beta)) for beta in self.betas]
        numbers = [1 - rate * self.weight_decay, rate / corrections[0], mx.rsqrt(corrections[1])]
        self._numbers = mx.stack(numbers)
        updated = super().apply_gradients(gradients, parameters)
        self._numbers = None
        return updated

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> Any:
        """Return the updated parameter and update its moments in `state`."""
        keep, rate, scale = self._numbers
        beta1, beta2 = self.betas
        state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
        state["v"] = beta2 * state["v"] + (1 - beta2) * mx.square(gradient)
        return parameter * keep - rate * (state["m"] / (mx.sqrt(state["v"]) * scale + self.eps))


class MlxSGD(optimizers.SGD):  # type: ignore[misc]
    """SGD that allocates no momentum buffers if momentum is 0."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Initialize momentum to 0, so that the first step equals torch's."""
        if self.momentum > 0:
            super().init_single(parameter, state)


READY_MADE: dict[type, str] = {MlxAdamW: "AdamW", MlxSGD: "SGD"}
"""Names of the built-in optimizers in checkpoints, equal for all engines."""


def with_decay(
    named_parameters: Iterable[tuple[str, mx.array]], weight_decay: float, make: Callable[[float], Optimizer]
) -> Optimizer:
    """Return an optimizer with `weight_decay` for matrices and filters and without it for norms and biases."""
    decaying = {parameter.ndim >= 2 for _, parameter in named_parameters}
    if len(decaying) == 1:
        return make(weight_decay if decaying.pop() else 0.0)
    return optimizers.MultiOptimizer([make(weight_decay), make(0.0)], [lambda _, parameter: parameter.ndim >= 2])


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
