"""The update: unscale, clip, refuse non-finite gradients on every rank alike, and move the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


class Updated(NamedTuple):
    """What an update did; tensors stay on a GPU until somebody reads them."""

    grad_norm: Tensor | None
    """Before clipping; None when nothing needed it."""
    skipped: Tensor | float
    """1.0 when the optimizer stood still because the gradient was not finite, else 0.0."""


class Update(Protocol):
    """Turns summed gradients into an optimizer step."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to back-propagate."""

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Move the optimizer."""


class PlainUpdate:
    """The optimizer step, unless a gradient is not finite."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
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
        torch._amp_foreach_non_finite_check_and_unscale_(grads, not_finite, self._one)
        return Updated(None, step_unless(optimizer, not_finite))


class ClippedUpdate:
    """Clips the norm of the whole gradient; a non-finite norm skips the step."""

    def __init__(self, parameters: Sequence[nn.Parameter], clip_norm: float) -> None:
        self._parameters = parameters
        self._clip_norm = clip_norm

    def scale(self, loss: Tensor) -> Tensor:
        """Leave the loss alone."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Clip and move; every rank sees the same norm, so all skip or none."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        not_finite = (~torch.isfinite(norm)).to(torch.float32)
        return Updated(norm, step_unless(optimizer, not_finite))


class ScaledUpdate:
    """fp16: dynamic loss scaling, so that small gradients do not vanish; optional clipping on true gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], clip_norm: float | None) -> None:
        self._parameters = parameters
        self._clip_norm = float("inf") if clip_norm is None else clip_norm
        self._scaler = torch.amp.GradScaler(parameters[0].device.type)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss up."""
        return self._scaler.scale(loss)

    def __call__(self, optimizer: Optimizer) -> Updated:
        """Unscale, clip and move; gradients are already summed, so every rank skips or none."""
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        return Updated(norm, (~torch.isfinite(norm)).to(torch.float32))


def step_unless(optimizer: Any, not_finite: Tensor) -> Tensor | float:
    """Move the optimizer unless the flag is set; fused ones on a GPU decide there, without a wait for it.

    Returns whether it stood still, as 1.0 or 0.0.
    """
    if not_finite.is_cuda and getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale, optimizer.found_inf = None, not_finite
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        return not_finite
    if not_finite:
        return 1.0
    optimizer.step()
    return 0.0


def choose_update(parameters: Sequence[nn.Parameter], *, clip_norm: float | None, fp16: bool) -> Update:
    """Pick the update once, at build."""
    if fp16:
        return ScaledUpdate(parameters, clip_norm)
    return PlainUpdate(parameters) if clip_norm is None else ClippedUpdate(parameters, clip_norm)
