"""The optimizer step of a DeepSpeed engine.

shardwise provides batches, loss weights and learning rates; DeepSpeed runs forward and backward, reduces gradients and
updates parameters. DeepSpeed averages gradients over data-parallel ranks, so every loss sum is multiplied by their
number first: the reduced gradient is then a sum, as in every other Step.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import optim

from shardwise.data.rows import map_tensors
from shardwise.errors import JobError
from shardwise.parallel.gradsync import NoSync
from shardwise.training.step.module_step import LocalState
from shardwise.training.step.plain import PlainStep
from shardwise.training.step.update import Updated, not_finite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from shardwise.data.feed import MicroBatch
    from shardwise.engines.deepspeed.state import DeepSpeedState
    from shardwise.job import Job
    from shardwise.parallel.gradsync import GradNorm
    from shardwise.training.step.module_step import Forms
    from shardwise.training.step.step import StepParts


class EngineSync(NoSync):
    """Gradient synchronization by DeepSpeed, which averages gradients over data-parallel ranks during backward."""

    def __init__(self, dp_size: int) -> None:
        self.gain = dp_size


class DeepSpeedStep(PlainStep):
    """One optimizer step of a DeepSpeed engine; gradients are reduced at the last micro-batch, never rescaled."""

    def __init__(
        self,
        job: Job,
        engine: Any,
        parts: StepParts,
        state: DeepSpeedState,
        *,
        plain: bool,
        shapes: Mapping[str, torch.Size],
    ) -> None:
        """`plain` means that the optimizer updates the model's own parameters, which are unsharded and in fp32."""
        super().__init__(job, engine.module, parts)
        self._trained = engine
        self._engine = engine
        self._state = state
        self._plain = plain
        self._shapes = shapes
        self._unused_parameters: Callable[[], list[str]] | None = _track_gradients(self.named_parameters())

    @property
    def num_parameters(self) -> int:
        """Number of elements in the parameters of the whole model."""
        return sum(shape.numel() for shape in self._shapes.values())

    def local_state(self) -> LocalState:
        """Return parameters and optimizer states, sharded by rows; communicates over data-parallel ranks."""
        return LocalState(self.values(), self._state.states(), self.saved_buffers(), self.update.state())

    def values(self) -> dict[str, Tensor]:
        """Return the trained values; if sharded, this rank's rows, communicating over data-parallel ranks."""
        if self._plain:
            return {name: parameter.detach() for name, parameter in self.named_parameters()}
        return self._state.values()

    def load_targets(self, saved: Forms) -> LocalState:
        """Return tensors for the caller to fill from a checkpoint; `optimized.refresh` loads them into DeepSpeed."""
        targets = self._state.load_targets(saved, values=not self._plain)
        values = self.values() if self._plain else targets.values
        return LocalState(values, targets.states, self.saved_buffers(), self.update.state())

    def gradients(self) -> dict[str, Tensor]:
        """Return full gradients; call between backward and update. Communicates over data-parallel ranks."""
        return self._state.gradients()

    def _accumulate(self, micro_batches: list[MicroBatch], weight: float | Tensor) -> Tensor:
        """Sum gradients over micro-batches and data-parallel ranks; return the loss sum of this rank."""
        sums = []
        for number, micro_batch in enumerate(micro_batches, 1):
            self._engine.set_gradient_accumulation_boundary(is_boundary=number == len(micro_batches))
            sums.append(self._backward(micro_batch, weight))
        if self._unused_parameters is not None:
            unused, self._unused_parameters = self._unused_parameters(), None
            if unused:
                raise JobError(
                    f"parameters {', '.join(unused)} received no gradient in the first step, but DeepSpeed would"
                    " update them",
                    code="train.unused-parameters",
                    fix="freeze them, use them in forward, or pass --set engine=torch",
                )
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _backpropagate(self, loss: Tensor, weight: float | Tensor) -> None:
        """Back-propagate a weighted loss sum; communicates over data-parallel ranks."""
        self._engine.backward(loss * weight, scale_wrt_gas=False)


def _track_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> Callable[[], list[str]]:
    """Install gradient hooks; the returned function removes them and lists the parameters without a gradient."""
    missing: dict[str, bool] = {}
    handles = []

    def on_gradient(name: str, _: Tensor) -> None:
        missing.pop(name, None)

    for name, parameter in named:
        if parameter.requires_grad:
            missing[name] = True
            handles.append(parameter.register_hook(partial(on_gradient, name)))

    def finish() -> list[str]:
        for handle in handles:
            handle.remove()
        return list(missing)

    return finish


# The optimizer update: DeepSpeed clips and unscales gradients; non-finite gradients skip the step on every rank.


class EngineUpdate:
    """Calls `engine.step()`, with the same outcome on every rank."""

    def __init__(self, engine: Any, norm: GradNorm | None, device: torch.device) -> None:
        """`norm` computes the gradient norm in stage 0 with fp32, where DeepSpeed computes none."""
        self._engine = engine
        self.norm = None  # the engine clips gradients itself
        self._norm = norm
        self._device = device
        self._scale = _Scale(engine.optimizer.loss_scaler, device) if engine.fp16_enabled() else None

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss unchanged: the engine applies the loss scale in backward."""
        return loss

    def __call__(self, optimizer: Optimizer) -> Updated:  # noqa: ARG002 - the engine has it
        """Clip gradients and update parameters; communicates over all ranks."""
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
        """Return the fp16 loss scale and the number of steps since the last overflow; {} in other dtypes."""
        return self._scale.read() if self._scale is not None else {}

    def refresh(self) -> None:
        """Copy the tensors of `state` back to the engine, after a checkpoint was loaded into them."""
        if self._scale is not None:
            self._scale.write()


class _Scale:
    """DeepSpeed's dynamic loss scale as two tensors that a checkpoint can save."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self._scaler = scaler
        self._loss_scale = torch.zeros((), device=device)
        self._num_steps = torch.zeros((), dtype=torch.int32, device=device)

    def read(self) -> dict[str, Tensor]:
        self._loss_scale.fill_(self._scaler.cur_scale)
        self._num_steps.fill_(self._scaler.cur_iter - self._scaler.last_overflow_iter - 1)
        return {"loss_scale": self._loss_scale, "steps_without_overflow": self._num_steps}

    def write(self) -> None:
        self._scaler.cur_scale = float(self._loss_scale)
        self._scaler.last_overflow_iter = self._scaler.cur_iter - int(self._num_steps) - 1


# Mixed precision over parameters that DeepSpeed stores in bf16 or fp16.


def compute_in(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Patch `module.forward` to cast inputs to `dtype`, run under autocast and return fp32 outputs for the loss.

    DeepSpeed disables an autocast that was entered outside its forward, so this one is entered inside. It is needed
    since buffers stay in fp32: autocast casts their products with activations back to `dtype`.
    """
    module.forward = partial(_forward, module.forward, dtype, device_type)


def _forward(inner: Callable[..., Any], dtype: torch.dtype, device_type: str, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype):
        args, kwargs = map_tensors(partial(_to, dtype), args), map_tensors(partial(_to, dtype), kwargs)
        output = inner(*args, **kwargs)
    return map_tensors(partial(_to, torch.float32), output)


def _to(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# Optimizers whose state ZeRO may partition: those that update every element independently.


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
"""Adagrad is excluded: DeepSpeed replaces it with a new Adagrad of a single group, ignoring the job's groups."""


def require_elementwise(optimizer: Optimizer, stage: int) -> None:
    """Raise JobError if the optimizer computes different updates on flat slices than on whole parameters."""
    if stage and not isinstance(optimizer, ELEMENTWISE):
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise JobError(
            f"optimizer {type(optimizer).__name__} is not elementwise, and DeepSpeed's stage {stage} passes it flat"
            " slices of parameters",
            code="support.deepspeed-optimizer-elementwise",
            fix=f"use one of {kinds}, or pass --plan ddp or --set engine=torch",
        )
