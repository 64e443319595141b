"""Learning-rate schedules: the factor of each parameter group's learning rate, by optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import JobError

Schedule = Callable[[int, int], float]
"""(step, total steps) -> factor; steps count from 0 and do not depend on the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Constant learning rate after an optional linear warm-up."""

    warmup: float = 0
    """Number of warm-up steps, or their fraction of all steps if it is below 1."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)

    def __call__(self, step: int, total: int) -> float:
        """Return the factor at `step`."""
        return min(1.0, _warmup(self.warmup, step, total))


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then cosine decay to a factor of `floor` at the last step.

    With the default `floor=0`, the learning rate of the last step is 0; `floor=0.01` ends at 1 % of the learning rate.
    """

    warmup: float = 0
    """Number of warm-up steps, or their fraction of all steps if it is below 1."""
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)

    def __call__(self, step: int, total: int) -> float:
        """Return the factor at `step`."""
        if step < _warmup_steps(self.warmup, total):
            return _warmup(self.warmup, step, total)
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * _progress(self.warmup, step, total)))


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Linear warm-up, then linear decay to a factor of `floor`."""

    warmup: float = 0
    """Number of warm-up steps, or their fraction of all steps if it is below 1."""
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)

    def __call__(self, step: int, total: int) -> float:
        """Return the factor at `step`."""
        rising = _warmup(self.warmup, step, total)
        return rising if rising < 1 else 1 - (1 - self.floor) * _progress(self.warmup, step, total)


def is_torch_scheduler(value: object) -> bool:
    """Whether a value is a learning-rate scheduler of torch, or its class; does not import torch."""
    kind = value if isinstance(value, type) else type(value)
    return any(base.__module__ == "torch.optim.lr_scheduler" for base in kind.__mro__)


def check_schedule(schedule: Schedule, total: int) -> None:
    """Raise JobError unless a schedule returns a number for (step, total); a factory of torch schedulers does not."""
    fix = "pass a function (step, total) -> factor, such as sw.schedules.Cosine() or lambda step, total: 0.9**step"
    try:
        factor = schedule(0, total)
    except TypeError as error:
        raise JobError(
            f"Job.schedule(0, {total}) raised TypeError: {error}", code="job.schedule-signature", fix=fix
        ) from error
    try:
        float(factor)
    except (TypeError, ValueError):
        raise JobError(
            f"Job.schedule(0, {total}) must return a number, got {type(factor).__name__}",
            code="job.schedule-not-number",
            fix=fix,
        ) from None


def _warmup_steps(warmup: float, total: int) -> int:
    return round(warmup * total) if warmup < 1 else int(warmup)


def _warmup(warmup: float, step: int, total: int) -> float:
    steps = _warmup_steps(warmup, total)
    return (step + 1) / (steps + 1) if step < steps else 1.0


def _progress(warmup: float, step: int, total: int) -> float:
    """Return the fraction of the steps after the warm-up that are done, from 0 to 1."""
    steps = _warmup_steps(warmup, total)
    return min(1.0, (step - steps) / max(1, total - 1 - steps))


def _check_warmup(warmup: float) -> None:
    if not (isinstance(warmup, int | float) and math.isfinite(warmup) and warmup >= 0):
        raise JobError(
            f"warmup of a schedule must be finite and at least 0, got {warmup!r}",
            code="job.warmup-invalid",
            fix="use a number of steps, or a fraction of all steps below 1",
        )
