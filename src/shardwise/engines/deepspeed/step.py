"""The step under DeepSpeed: our samples, weights and rates; its forward, backward, reduction and update."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import JobError
from shardwise.parallel.gradsync import NoSync
from shardwise.training.step.held import Held
from shardwise.training.step.plain import PlainStep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    from shardwise.data.feed import MicroBatch
    from shardwise.engines.deepspeed.holding import Holding
    from shardwise.job import Job
    from shardwise.training.step.held import Forms
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
        holding: Holding,
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
