"""Running one step again from the same state, to see whether it comes to the same; training is as before after it."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.parallel.gradsync import local
from shardwise.recorder.fingerprint import fingerprints
from shardwise.training.step.snapshot import on_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from shardwise.data.feed import StepBatch
    from shardwise.training.step.step import Step


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
    kept: dict[str, Tensor] = {}
    gradients: list[int] = []
    values: list[int] = []

    def look() -> None:
        found = step.own_gradients()
        if name in found:
            gradients.extend(fingerprints([found[name]]))
        if not kept:
            kept.update({each: on_host(gradient) for each, gradient in found.items()})
        else:
            step.put_gradients(kept)

    tap.look = look
    try:
        with _set_back(step) as restore:
            for _ in range(2):
                step(batch)
                values += _value_prints(step, name)
                restore()
    finally:
        tap.look = None
    pair = (gradients[0], gradients[1]) if gradients else None
    return Repeated(gradients=pair, values=(values[0], values[1]))


@contextmanager
def _set_back(step: Step) -> Iterator[Callable[[], None]]:
    """Set a step back by one and yield what brings back its state of now; afterwards all is as it was."""
    put_back = step.snapshot()
    number = step.number

    def restore() -> None:
        put_back()
        step.number = number - 1

    step.number = number - 1
    try:
        yield restore
    finally:
        restore()
        step.number = number


def _value_prints(step: Step, name: str) -> list[int]:
    """Return the fingerprint of this rank's part of a tensor, 0 where it holds none."""
    value = {**step.buffers(), **dict(step.named_parameters())}.get(name)
    return fingerprints([local(value.detach())]) if value is not None else [0]
