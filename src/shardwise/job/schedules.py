"""Learning-rate schedules: a factor on each group's own rate, counted in optimizer steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import JobError

Schedule = Callable[[int, int], float]
"""(step, total steps) -> factor; step counts from 0 and never depends on the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same rate throughout, after an optional linear warm-up."""

    warmup: float = 0
    """Steps, or below 1 a share of all steps."""

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)

    def __call__(self, step: int, total: int) -> float:
        """Return the factor at `step`."""
        return min(1.0, _warmup(self.warmup, step, total))


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine down to `floor`."""

    warmup: float = 0
    """Steps, or below 1 a share of all steps."""
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
    """Linear warm-up, then a straight line down to `floor`."""

    warmup: float = 0
    """Steps, or below 1 a share of all steps."""
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_warmup(self.warmup)

    def __call__(self, step: int, total: int) -> float:
        """Return the factor at `step`."""
        rising = _warmup(self.warmup, step, total)
        return rising if rising < 1 else 1 - (1 - self.floor) * _progress(self.warmup, step, total)


def is_torch_scheduler(value: object) -> bool:
    """Whether a value is one of torch's learning-rate schedulers, or such a class; torch is not imported for it."""
    kind = value if isinstance(value, type) else type(value)
    return any(base.__module__ == "torch.optim.lr_scheduler" for base in kind.__mro__)


def check_schedule(schedule: Schedule, total: int) -> None:
    """Refuse a schedule that does not turn (step, total) into a number, such as a factory of torch's schedulers."""
    fix = "give a function (step, total) -> factor, such as sw.schedules.Cosine() or lambda step, total: 0.9**step"
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
            f"Job.schedule(0, {total}) returned a {type(factor).__name__}, not a number",
            code="job.schedule-not-number",
            fix=fix,
        ) from None


def _warmup_steps(warmup: float, total: int) -> int:
    return round(warmup * total) if warmup < 1 else int(warmup)


def _warmup(warmup: float, step: int, total: int) -> float:
    steps = _warmup_steps(warmup, total)
    return (step + 1) / (steps + 1) if step < steps else 1.0


def _progress(warmup: float, step: int, total: int) -> float:
    """Share of the way from the end of the warm-up to the last step, 0 to 1."""
    steps = _warmup_steps(warmup, total)
    return min(1.0, (step - steps) / max(1, total - 1 - steps))


def _check_warmup(warmup: float) -> None:
    if not (isinstance(warmup, int | float) and math.isfinite(warmup) and warmup >= 0):
        raise JobError(
            f"schedule warmup is {warmup!r}",
            code="job.warmup-invalid",
            fix="give steps, or a share of all steps below 1",
        )
