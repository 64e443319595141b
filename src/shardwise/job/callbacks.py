"""Callbacks of a job: the decision to stop, and early stopping by a metric of the test split."""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from shardwise.errors import JobError
from shardwise.units import format_number


class CallbackDecision(enum.Enum):
    """Decision that a callback may return."""

    STOP = "stop"


STOP = CallbackDecision.STOP
"""Return it from a callback on any rank to end training on all ranks after this step, with exit code 0."""

Callback = Callable[[Any], Any]
"""Function of a CallbackContext; it may return STOP, and other return values are ignored.

A callback with state_dict() and load_state_dict() is saved in checkpoints and restored from them.
"""
Callbacks = Callback | list[Callback] | tuple[Callback, ...] | None


def as_callbacks(given: Callbacks) -> tuple[Callback, ...]:
    """Return the callbacks of a field of Job as a tuple; the field may be one callback, a list or None."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, list | tuple) else (given,)


def check_callbacks(name: str, given: Callbacks) -> None:
    """Raise JobError if a field of Job contains a value that is not a callback."""
    for callback in as_callbacks(given):
        if not callable(callback) or isinstance(callback, type):
            raise JobError(
                f"Job.{name} must contain functions, got {callback!r}",
                code="job.not-a-callback",
                fix=f"pass {name}=function or {name}=[function, another], called with a CallbackContext",
            )


@dataclass(eq=False)
class EarlyStopping:
    """A callback for `Job.on_evaluate`: stops after `patience` evaluations in a row without a better `metric`.

    `metric` is "loss" or a name of Job.metrics. `mode` is "min" or "max", the direction of an improvement; it is
    required except for "loss". An improvement must exceed `min_delta`. The state is saved in checkpoints.
    """

    metric: str = "loss"
    patience: int = 3
    _: KW_ONLY
    mode: Literal["min", "max"] | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        """Raise JobError if a value is invalid."""
        if self.mode not in {"min", "max"} and (self.mode is not None or self.metric != "loss"):
            raise JobError(
                f"mode of EarlyStopping({self.metric!r}) must be 'min' or 'max', got {self.mode!r}",
                code="job.early-stopping-mode",
                fix=f'write EarlyStopping({self.metric!r}, mode="max"), or mode="min"',
            )
        if not isinstance(self.patience, int) or isinstance(self.patience, bool) or self.patience < 1:
            raise JobError(
                f"patience of EarlyStopping must be a positive integer, got {self.patience!r}",
                code="job.early-stopping-patience",
                fix="use an integer of at least 1",
            )
        if not isinstance(self.min_delta, int | float):
            raise JobError(
                f"min_delta of EarlyStopping must be a number, got {self.min_delta!r}",
                code="job.early-stopping-min-delta",
                fix="use a number, such as 0.001",
            )
        self.best: float | None = None
        """The best value so far; None before the first evaluation."""
        self.waited = 0
        """Evaluations since the best value."""

    def __call__(self, context: Any) -> CallbackDecision | None:
        """Return STOP if the metric has not improved in the last `patience` evaluations, else None."""
        value = context.metrics[self.metric]
        if math.isfinite(value) and self._improves(value):
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        return STOP if self.waited >= self.patience else None

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = value - self.best if self.mode == "max" else self.best - value
        return gain > self.min_delta

    def __str__(self) -> str:
        return f"EarlyStopping (best {self.metric} {format_number(self.best)}, {self.waited} evaluations ago)"

    def fresh(self) -> EarlyStopping:
        """Return a copy without state, because one Job may be trained several times."""
        fresh = copy.copy(self)
        fresh.best, fresh.waited = None, 0
        return fresh

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since, for checkpoints."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.best, self.waited = state["best"], state["waited"]
