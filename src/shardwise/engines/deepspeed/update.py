"""The update under DeepSpeed: its own clipping and scaling, and no step on a gradient that is not finite."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.training.step.update import Updated, not_finite

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from shardwise.parallel.norm import GradNorm


class EngineUpdate:
    """Has the engine step; the same on every rank."""

    def __init__(self, engine: Any, norm: GradNorm | None, device: torch.device) -> None:
        """`norm` is given where the engine looks at none by itself: stage 0 in fp32."""
        self._engine = engine
        self._norm = norm
        self._device = device
        self._scale = _Scale(engine.optimizer.loss_scaler, device) if engine.fp16_enabled() else None

    def scale(self, loss: Tensor) -> Tensor:
        """Leave the loss alone: the engine scales it."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:  # noqa: ARG002 - the engine has it
        """Clip and move; communicates over all ranks."""
        if self._norm is not None:
            norm = self._norm()
            if not_finite(norm):
                self._engine.zero_grad()
                return Updated(norm, 1.0)
            self._engine.step()
            return Updated(norm, 0.0)
        self._engine.step()
        norm = torch.tensor(float(self._engine.get_global_grad_norm()), device=self._device)
        return Updated(norm, 0.0 if self._engine.was_step_applied() else 1.0)

    def state(self) -> dict[str, Tensor]:
        """fp16's scale and how many steps it has held; nothing else has any."""
        return self._scale.read() if self._scale is not None else {}

    def refresh(self) -> None:
        """Hand the tensors of `state` back to the engine, after something else has written them."""
        if self._scale is not None:
            self._scale.write()


class _Scale:
    """DeepSpeed's dynamic scale as two tensors, which a checkpoint can hold."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self._scaler = scaler
        self._loss_scale = torch.zeros((), device=device)
        self._held = torch.zeros((), dtype=torch.int32, device=device)

    def read(self) -> dict[str, Tensor]:
        self._loss_scale.fill_(self._scaler.cur_scale)
        self._held.fill_(self._scaler.cur_iter - self._scaler.last_overflow_iter - 1)
        return {"loss_scale": self._loss_scale, "steps_without_overflow": self._held}

    def write(self) -> None:
        self._scaler.cur_scale = float(self._loss_scale)
        self._scaler.last_overflow_iter = self._scaler.cur_iter - int(self._held) - 1
