"""The update: unscale, clip, refuse non-finite gradients on every rank alike, and move the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer


class Update(Protocol):
    """Turns summed gradients into an optimizer step."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to back-propagate."""

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Move the optimizer; return the gradient's norm before clipping where it was needed."""


class PlainUpdate:
    """Just the optimizer step."""

    def scale(self, loss: Tensor) -> Tensor:
        """Leave the loss alone."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Move the optimizer."""
        optimizer.step()
        return None


class ClippedUpdate:
    """Clips the norm of the whole gradient; a non-finite norm skips the step."""

    def __init__(self, parameters: Sequence[nn.Parameter], clip_norm: float) -> None:
        self._parameters = parameters
        self._clip_norm = clip_norm

    def scale(self, loss: Tensor) -> Tensor:
        """Leave the loss alone."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Clip and move; every rank sees the same norm, so all skip or none."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if torch.isfinite(norm):
            optimizer.step()
        return norm


class ScaledUpdate:
    """fp16: dynamic loss scaling, so that small gradients do not vanish; optional clipping on true gradients."""

    def __init__(self, parameters: Sequence[nn.Parameter], clip_norm: float | None, device_type: str) -> None:
        self._parameters = parameters
        self._clip_norm = float("inf") if clip_norm is None else clip_norm
        self._scaler = torch.amp.GradScaler(device_type)

    def scale(self, loss: Tensor) -> Tensor:
        """Scale the loss up."""
        return self._scaler.scale(loss)

    def __call__(self, optimizer: Optimizer) -> Tensor | None:
        """Unscale, clip and move; gradients are already summed, so every rank skips or none."""
        self._scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def choose_update(
    parameters: Sequence[nn.Parameter], *, clip_norm: float | None, fp16: bool, device_type: str
) -> Update:
    """Pick the update once, at build."""
    if fp16:
        return ScaledUpdate(parameters, clip_norm, device_type)
    return PlainUpdate() if clip_norm is None else ClippedUpdate(parameters, clip_norm)
