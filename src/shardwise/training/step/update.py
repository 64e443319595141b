"""The update: unscale, clip, refuse non-finite gradients on every rank alike, and move the optimizer."""

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
"""torch's own values: halve after an overflow, double after so many steps without one."""


class Updated(NamedTuple):
    """What an update did; tensors stay on a GPU until somebody reads them."""

    grad_norm: Tensor | None
    """Before clipping; None when nothing needed it."""
    skipped: Tensor | float
    """1.0 when the optimizer stood still because the gradient was not finite, else 0.0."""


class Update(Protocol):
    """Turns summed gradients into an optimizer step."""

    @property
    def norm(self) -> GradNorm | None:
        """Of the whole gradient; None where an engine has it to itself."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to back-propagate."""

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Move the optimizer."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a resumed training must find again."""


class PlainUpdate:
    """The optimizer step, unless a gradient is not finite; for gradients that are whole and equal on every rank."""

    def __init__(self, norm: GradNorm, parameters: Sequence[nn.Parameter]) -> None:
        self.norm = norm
        self._parameters = parameters
        self._one = torch.ones((), device=parameters[0].device)

    def scale(self, loss: Tensor) -> Tensor:
        """Leave the loss alone."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Check and move; gradients are already summed, so every rank skips or none."""
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        not_finite = torch.zeros_like(self._one)
        # The kernel that fp16 scaling uses, with scale 1: one pass over the gradients, 3 us for a small model.
        check_finite(grads, not_finite, self._one)
        return Updated(None, step_unless(optimizer, not_finite))

    def state(self) -> dict[str, Tensor]:
        """There is none."""
        return {}


class NormedUpdate:
    """Looks at the norm of the whole gradient: clips it if asked; a non-finite norm skips the step."""

    def __init__(self, norm: GradNorm, clip_norm: float | None) -> None:
        self.norm = norm
        self._clip_norm = clip_norm

    def scale(self, loss: Tensor) -> Tensor:
        """Leave the loss alone."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Clip and move; every rank sees the same norm, so all skip or none."""
        norm = self.norm()
        if self._clip_norm is not None:
            self.norm.scale(clip_factor(norm, self._clip_norm))
        return Updated(norm, step_unless(optimizer, not_finite(norm)))

    def state(self) -> dict[str, Tensor]:
        """There is none."""
        return {}


class ScaledUpdate:
    """fp16: dynamic loss scaling, so that small gradients do not vanish; optional clipping on true gradients."""

    def __init__(self, norm: GradNorm, clip_norm: float | None, device: torch.device, gain: int) -> None:
        """`gain` is that of the gradient sync: where it averages, gradients of one rank are that much larger."""
        self.norm = norm
        self._clip_norm = clip_norm
        # So that an overflow, and the skipped step after it, does not come sooner on more ranks.
        self.loss_scale = torch.full((), _FIRST_SCALE / gain, device=device)
        self._steps_without_overflow = torch.zeros((), dtype=torch.int32, device=device)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss up."""
        return loss * self.loss_scale

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Unscale, clip and move; the norm is of the whole gradient, so every rank skips or none."""
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
        """The loss scale, and the number of steps since it last changed."""
        return {"loss_scale": self.loss_scale, "steps_without_overflow": self._steps_without_overflow}


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """Return what brings a gradient of this norm to at most `clip_norm`, by torch's own formula."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0)


def not_finite(norm: Tensor) -> Tensor:
    """Return 1.0 for a norm that is no number, else 0.0, on its device."""
    return (~torch.isfinite(norm)).to(torch.float32)


def step_unless(optimizer: Any, overflow: Tensor) -> Tensor | float:
    """Move the optimizer unless the flag is set; fused ones on a GPU decide there, without a wait for it.

    Returns whether it stood still, as 1.0 or 0.0.
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
    """Pick the update once, at build.

    `fp16_gain` is None unless compute is in fp16, then the gain of the gradient sync.
    """
    if fp16_gain is not None:
        return ScaledUpdate(norm, clip_norm, parameters[0].device, fp16_gain)
    # PlainUpdate's kernel also writes the gradients back: on a GPU, where memory is what costs, that is 1 % of a step
    # of a billion parameters (H200); the norm, which only reads, is 0.4 %. On a CPU the kernel has fewer calls.
    if clip_norm is None and norm.is_local and parameters[0].device.type == "cpu":
        return PlainUpdate(norm, parameters)
    return NormedUpdate(norm, clip_norm)
