"""The update: unscale and clip gradients, skip the step if they are not finite, and step the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from shardwise.torch_private.dispatch import check_finite, reads_overflow_flag, update_loss_scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.parallel.gradsync import GradNorm

_GROWTH, _BACKOFF, _GROWTH_INTERVAL = 2.0, 0.5, 2000
_FIRST_SCALE = 65536.0
"""The defaults of torch.amp.GradScaler: halve after an overflow, double after 2000 steps without one."""


class Updated(NamedTuple):
    """The result of an update; tensors stay on the device until they are read."""

    grad_norm: Tensor | None
    """Gradient norm before clipping; None if it was not computed."""
    skipped: Tensor | float
    """1.0 if the step was skipped because the gradient was not finite, else 0.0."""


class Update(Protocol):
    """Applies an optimizer step to reduced gradients."""

    @property
    def norm(self) -> GradNorm | None:
        """The gradient norm over all ranks, or None if the engine does not expose it."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to back-propagate."""

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Step the optimizer unless the gradient is not finite."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors to save in a checkpoint."""


class PlainUpdate:
    """An optimizer step that is skipped if a gradient is not finite; for gradients that are equal on every rank."""

    def __init__(self, norm: GradNorm, parameters: Sequence[nn.Parameter]) -> None:
        self.norm = norm
        self._parameters = parameters
        self._one = torch.ones((), device=parameters[0].device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Step the optimizer if all gradients are finite; gradients are already reduced, so all ranks agree."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        flag = torch.zeros_like(self._one)
        check_finite(grads, flag, self._one)  # the kernel of fp16 loss scaling with scale 1
        return Updated(None, step_unless(optimizer, flag))

    def state(self) -> dict[str, Tensor]:
        """Return no tensors: this update has no state."""
        return {}


class NormedUpdate:
    """An optimizer step that computes the gradient norm, clips it if requested, and is skipped if it is not finite."""

    def __init__(self, norm: GradNorm, clip_norm: float | None) -> None:
        self.norm = norm
        self._clip_norm = clip_norm

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Clip the gradients and step the optimizer; the norm is equal on every rank, so all ranks agree on a skip."""
        norm = self.norm()
        if self._clip_norm is not None:
            self.norm.scale(clip_factor(norm, self._clip_norm))
        return Updated(norm, step_unless(optimizer, not_finite(norm)))

    def state(self) -> dict[str, Tensor]:
        """Return no tensors: this update has no state."""
        return {}


class ScaledUpdate:
    """An fp16 optimizer step with dynamic loss scaling against gradient underflow, and optional gradient clipping."""

    def __init__(self, norm: GradNorm, clip_norm: float | None, device: torch.device, gain: int) -> None:
        """Divide the initial loss scale by `gain`, the factor by which the gradient sync enlarges local gradients."""
        self.norm = norm
        self._clip_norm = clip_norm
        # With the division, the first overflow does not occur earlier on more ranks.
        self.loss_scale = torch.full((), _FIRST_SCALE / gain, device=device)
        self._steps_without_overflow = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss multiplied by the loss scale."""
        return loss * self.loss_scale

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Unscale and clip the gradients and step the optimizer; the norm is global, so all ranks agree on a skip."""
        norm = self.norm() / self.loss_scale
        factor = self.loss_scale.reciprocal()
        if self._clip_norm is not None:
            factor = factor * clip_factor(norm, self._clip_norm)
        self.norm.scale(factor)
        overflow = not_finite(norm)
        skipped = step_unless(optimizer, overflow)
        update_loss_scale(
            self.loss_scale,
            self._steps_without_overflow,
            overflow,
            growth=_GROWTH,
            backoff=_BACKOFF,
            interval=_GROWTH_INTERVAL,
        )
        return Updated(norm, skipped)

    def state(self) -> dict[str, Tensor]:
        """Return the loss scale and the number of steps since its last change."""
        return {"loss_scale": self.loss_scale, "steps_without_overflow": self._steps_without_overflow}


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """Return the factor that clips a gradient of this norm to `clip_norm`, with the formula of torch."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def not_finite(norm: Tensor) -> Tensor:
    """Return 1.0 if the norm is not finite, else 0.0, on its device."""
    return (~torch.isfinite(norm)).to(torch.float32)


def step_unless(optimizer: Any, overflow: Tensor) -> Tensor | float:
    """Step the optimizer unless the overflow flag is set; return 1.0 if the step was skipped, else 0.0.

    Fused optimizers read the flag on the GPU, without a device synchronization.
    """
    if overflow.is_cuda and reads_overflow_flag(optimizer):
        optimizer.grad_scale, optimizer.found_inf = None, overflow
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        return overflow
    if overflow:
        return 1.0
    optimizer.step()
    return 0.0


def choose_update(
    norm: GradNorm, *, parameters: Sequence[nn.Parameter], clip_norm: float | None, fp16_gain: int | None
) -> Update:
    """Return the update for the job's clipping and precision.

    `fp16_gain` is the gain of the gradient sync if the compute precision is fp16, else None.
    """
    if fp16_gain is not None:
        return ScaledUpdate(norm, clip_norm, parameters[0].device, fp16_gain)
    # PlainUpdate's kernel also writes the gradients back, which costs 1 % of a step of a billion parameters on an H200;
    # the norm only reads them and costs 0.4 %. On a CPU, PlainUpdate makes fewer calls.
    if clip_norm is None and norm.is_local and parameters[0].device.type == "cpu":
        return PlainUpdate(norm, parameters)
    return NormedUpdate(norm, clip_norm)
