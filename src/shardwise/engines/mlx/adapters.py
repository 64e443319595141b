"""The ready-made losses and optimizers for MLX, with torch's arithmetic.

Losses are registered for MLX's arrays (see `job/losses.py`), optimizer factories adapted; an optimizer factory that a
job brings itself is written for MLX already and stays as it is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn, optimizers

from shardwise.engines.mlx.arrays import to_torch
from shardwise.job import losses
from shardwise.job.optimizers import SGD, AdamW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mlx.optimizers import Optimizer

    from shardwise.job.optimizers import OptimizerFactory


@losses.class_sum.register(mx.array)
@losses.token_sum.register(mx.array)
def cross_entropy_sum(logits: mx.array, targets: mx.array) -> mx.array:
    """Return the sum over all targets that count; logits [..., classes], in fp32 at least, as torch's.

    Where nothing is left the sum is 0.
    """
    if logits.dtype in {mx.bfloat16, mx.float16}:
        logits = logits.astype(mx.float32)
    counts = targets != losses.IGNORE
    found = nn.losses.cross_entropy(logits, mx.where(counts, targets, 0))
    return mx.where(counts, found, 0).sum()


@losses.finite.register(mx.array)
def finite(value: mx.array) -> mx.array:
    """Return an array with 0 for NaN."""
    return mx.nan_to_num(value)


def observe_loss(observe: Callable[[Any], None], loss_sum: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return `loss_sum` with a call of `observe` for each batch, as tensors; turns compilation off in this process.

    A compiled function runs its Python once, so that a call inside it would see one batch of many.
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
    return [_as_tensors(item) for item in value] if isinstance(value, list | tuple) else value


# Optimizers with torch's arithmetic.


def adapt_optimizer(factory: OptimizerFactory) -> Callable[[list[tuple[str, mx.array]]], Any]:
    """Return what makes MLX's optimizer from named arrays: a ready-made factory by MLX, any other as it is."""
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
    """AdamW whose bias correction keeps its digits: 1 - 0.999 in fp32, as MLX has it, has lost five of them."""

    _numbers: Any = None

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """Return the moved parameters; what is the same for all of them is computed once, and in one array.

        As scalars it would be fused into the kernel of each parameter, and computed again for each of its elements:
        1.4 ms, and not 0.25, for 65,000 of them.
        """
        rate = self.learning_rate
        corrections = [-mx.expm1((self.step + 1).astype(rate.dtype) * _log(beta)) for beta in self.betas]
        numbers = [1 - rate * self.weight_decay, rate / corrections[0], mx.rsqrt(corrections[1])]
        self._numbers = mx.stack(numbers)
        moved = super().apply_gradients(gradients, parameters)
        self._numbers = None
        return moved

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> Any:
        """Return the moved parameter, and keep its moments in `state`."""
        keep, rate, scale = self._numbers
        beta1, beta2 = self.betas
        state["m"] = beta1 * state["m"] + (1 - beta1) * gradient
        state["v"] = beta2 * state["v"] + (1 - beta2) * mx.square(gradient)
        return parameter * keep - rate * (state["m"] / (mx.sqrt(state["v"]) * scale + self.eps))


class MlxSGD(optimizers.SGD):  # type: ignore[misc]
    """SGD that holds no momentum where it has none."""

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Begin momentum at 0, which gives torch's first step."""
        if self.momentum > 0:
            super().init_single(parameter, state)


READY_MADE: dict[type, str] = {MlxAdamW: "AdamW", MlxSGD: "SGD"}
"""What checkpoints call the ready-made optimizers, whichever engine trained."""


def with_decay(
    named_parameters: Iterable[tuple[str, mx.array]], weight_decay: float, make: Callable[[float], Optimizer]
) -> Optimizer:
    """Return `make(weight_decay)` for parameters that decay (matrices, filters) and make(0.0) for norms and biases."""
    decaying = {parameter.ndim >= 2 for _, parameter in named_parameters}
    if len(decaying) == 1:
        return make(weight_decay if decaying.pop() else 0.0)
    return optimizers.MultiOptimizer([make(weight_decay), make(0.0)], [lambda _, parameter: parameter.ndim >= 2])


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf
