"""The step under DeepSpeed: our samples, weights and rates; its forward, backward, reduction and update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import optim

from shardwise.data.rows import map_tensors
from shardwise.errors import JobError
from shardwise.parallel.gradsync import NoSync
from shardwise.training.step.module_step import Held
from shardwise.training.step.plain import PlainStep
from shardwise.training.step.update import Updated, not_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.data.feed import MicroBatch
    from shardwise.engines.deepspeed.holding import DeepSpeedState
    from shardwise.job import Job
    from shardwise.parallel.gradsync import GradNorm
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import StepParts


class EngineSync(NoSync):
    """DeepSpeed sums during backward, and averages over readers."""

    def __init__(self, readers: int) -> None:
        self.gain = readers


class DeepSpeedStep(PlainStep):
    """One optimizer step of a DeepSpeed engine, which reduces at our boundary and never scales by accumulation."""

    def __init__(
        self,
        job: Job,
        engine: Any,
        parts: StepParts,
        holding: DeepSpeedState,
        *,
        plain: bool,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        """`plain`: the model's parameters are whole and are the values that are trained, in fp32."""
        super().__init__(job, engine.module, parts)
        self._trained = engine
        self._engine = engine
        self._holding = holding
        self._plain = plain
        self._shapes = shapes
        self._unseen: Callable[[], list[str]] | None = _watch_gradients(self.named_parameters())

    @property
    def num_parameters(self) -> int:
        """Elements of the whole model."""
        return sum(shape.numel() for shape in self._shapes.values())

    def held(self) -> Held:
        """Communicate over the readers to return values and optimizer states, as rows where they are cut."""
        return Held(self.values(), self._holding.states(), self.saved_buffers(), self.update.state())

    def values(self) -> dict[str, Tensor]:
        """Return the values that are trained; where they are cut, communicate to return this rank's rows."""
        if self._plain:
            return {name: parameter.detach() for name, parameter in self.named_parameters()}
        return self._holding.values()

    def room(self, saved: Forms) -> Held:
        """Return tensors to be filled; `optimized.refresh` takes them over."""
        given = self._holding.room(saved, values=not self._plain)
        values = self.values() if self._plain else given.values
        return Held(values, given.states, self.saved_buffers(), self.update.state())

    def gradients(self) -> dict[str, Tensor]:
        """Communicate over the readers to return whole gradients, between backward and update."""
        return self._holding.gradients()

    def _accumulate(self, micro_batches: list[MicroBatch], weight: float | Tensor) -> Tensor:
        """Add up the gradients of all micro-batches and, over ranks, of all readers; returns the loss sum."""
        sums = []
        for number, micro_batch in enumerate(micro_batches, 1):
            self._engine.set_gradient_accumulation_boundary(is_boundary=number == len(micro_batches))
            sums.append(self._backward(micro_batch, weight))
        if self._unseen is not None:
            missing, self._unseen = self._unseen(), None
            if missing:
                raise JobError(
                    f"parameters got no gradient in the first step ({', '.join(missing)}), and DeepSpeed would move"
                    " them all the same",
                    code="train.unused-parameters",
                    fix="freeze them, use them, or --set engine=torch",
                )
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _pass_back(self, loss: Tensor, weight: float | Tensor) -> None:
        """Back-propagate a loss sum with its weight; communicates over the readers."""
        self._engine.backward(loss * weight, scale_wrt_gas=False)


def _watch_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> Callable[[], list[str]]:
    """Watch which parameters get a gradient; returns what names those that did not, and ends the watch."""
    missing: dict[str, bool] = {}
    handles = []

    def seen(name: str, _: Tensor) -> None:
        missing.pop(name, None)

    for name, parameter in named:
        if parameter.requires_grad:
            missing[name] = True
            handles.append(parameter.register_hook(partial(seen, name)))

    def finish() -> list[str]:
        for handle in handles:
            handle.remove()
        return list(missing)

    return finish


# The update under DeepSpeed: its own clipping and scaling, and no step on a gradient that is not finite.


class EngineUpdate:
    """Has the engine step; the same on every rank."""

    def __init__(self, engine: Any, norm: GradNorm | None, device: torch.device) -> None:
        """`norm` is given where the engine looks at none by itself: stage 0 in fp32."""
        self._engine = engine
        self.norm = None  # the engine clips by itself
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


# Compute below fp32 on parameters that DeepSpeed holds in that dtype.


def compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Have `module` take its input to `dtype` and give its output in fp32, in which the loss is then summed.

    DeepSpeed ends an autocast that begins outside of it, so this one begins inside: buffers stay in fp32, and what
    they are multiplied with must come down again.
    """
    module.forward = partial(_forward, module.forward, dtype, device_type)


def _forward(inner: Callable[..., Any], dtype: torch.dtype, device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype):
        args, kwargs = map_tensors(partial(_to, dtype), args), map_tensors(partial(_to, dtype), kwargs)
        output = inner(*args, **kwargs)
    return map_tensors(partial(_to, torch.float32), output)


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# Which optimizers ZeRO may cut: those that treat every element by itself.


ELEMENTWISE: tuple[type[Optimizer], ...] = (
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.Adadelta,
    optim.ASGD,
    optim.SGD,
)
"""Adagrad is not among them: DeepSpeed makes a new one with one group and forgets the job's."""


def require_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Refuse an optimizer that would give other numbers on flat slices than on whole parameters."""
    if stage and not isinstance(optimizer, ELEMENTWISE):
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise JobError(
            f"{type(optimizer).__name__} under DeepSpeed's stage {stage} would see flat slices of all parameters, and"
            " only optimizers that treat every element by itself give the same numbers there",
            code="support.deepspeed-optimizer-elementwise",
            fix=f"use one of {kinds}, or --plan ddp, or --set engine=torch",
        )
