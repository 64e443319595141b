"""Running one step again from the same state, to see whether it comes to the same; training is as before after it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.parallel.gather import own_buffers
from shardwise.parallel.gradsync import local
from shardwise.record.fingerprint import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from shardwise.data.feed import StepBatch
    from shardwise.step.step import Step


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """One tensor in two runs of the same step: the second took the gradients of the first for its update."""

    gradients: tuple[int, int] | None
    """Fingerprints of its summed gradient on this rank; None for a buffer, or where it got none."""
    values: tuple[int, int]
    """Fingerprints of what the step made of it."""


class GradientTap:
    """Stands between backward and update of every step, and does nothing there but while a step is repeated."""

    def __init__(self) -> None:
        self.look: Callable[[], None] | None = None

    def __call__(self) -> None:
        """Let the one who repeats a step look at the summed gradients; on every rank."""
        if self.look is not None:
            self.look()


def repeat_step(step: Step, batch: StepBatch, tap: GradientTap, name: str) -> Repeated:
    """Run the step of `batch` twice more and say what came of the tensor `name`; communicates, on every rank.

    A rank that does not hold the tensor takes part. Costs two steps, and their state and gradients on the host.
    """
    parameters = dict(step.named_parameters())
    watched = parameters.get(name, dict(own_buffers(step.model)).get(name))
    kept: list[tuple[Tensor, Tensor]] = []
    gradients: list[int] = []
    values: list[int] = []

    def look() -> None:
        found = [local(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]
        if name in parameters and (gradient := parameters[name].grad) is not None:
            gradients.extend(fingerprints([local(gradient)]))
        if not kept:
            kept.extend((gradient, _on_host(gradient)) for gradient in found)
        else:
            for gradient, (_, first) in zip(found, kept, strict=True):
                gradient.copy_(first)

    tap.look = look
    try:
        with _kept_state(step) as restore:
            for _ in range(2):
                step(batch)
                values += fingerprints([local(watched)]) if watched is not None else [0]
                restore()
    finally:
        tap.look = None
    pair = (gradients[0], gradients[1]) if gradients else None
    return Repeated(gradients=pair, values=(values[0], values[1]))


@contextmanager
def _kept_state(step: Step) -> Iterator[Callable[[], None]]:
    """Set a step back by one and yield what brings back its state of now; afterwards all is as it was."""
    tensors = [parameter.detach() for _, parameter in step.named_parameters()]
    tensors += [buffer for _, buffer in step.model.named_buffers()]
    tensors += step.update.state().values()
    states = step.optimizer.state
    tensors += [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
    known = {parameter: set(state) for parameter, state in states.items()}
    plain = {
        parameter: {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        for parameter, state in states.items()
    }
    pairs = [(local(tensor), _on_host(local(tensor))) for tensor in tensors]
    random = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    number = step.number

    @torch.no_grad()
    def restore() -> None:
        for tensor, before in pairs:
            tensor.copy_(before)
        for parameter in list(states):
            if parameter not in known:
                del states[parameter]
                continue
            for key in set(states[parameter]) - known[parameter]:
                del states[parameter][key]
            states[parameter].update(plain[parameter])
        step.optimized.refresh()
        torch.set_rng_state(random)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device)
        step.number = number - 1

    step.number = number - 1
    try:
        yield restore
    finally:
        restore()
        step.number = number


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
