"""Callbacks of a job: the decision to stop, and early stopping by a metric of the test split."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, Literal

from shardwise.errors import JobError


class CallbackDecision(enum.Enum):
    """What a callback may return."""

    STOP = "stop"


STOP = CallbackDecision.STOP
"""Returned by a callback on any rank, ends the training after this step on all ranks: exit code 0, weights kept."""

Callback = Callable[[Any], Any]
"""Gets a CallbackContext; may return STOP, other values have no effect.

A callback with state_dict() and load_state_dict() is saved in checkpoints and restored from them.
"""
Callbacks = Callback | list[Callback] | tuple[Callback, ...] | None


def as_callbacks(given: Callbacks) -> tuple[Callback, ...]:
    """Return the callbacks of a field of Job, which may be one, several or None."""
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
                fix=f"write {name}=function, called with a context, or {name}=[function, another]",
            )


class EarlyStopping:
    """A callback for `Job.on_evaluate`: stops after `patience` evaluations in a row without a better `metric`.

    `metric` is "loss" or a name of Job.metrics. `mode` is "min" or "max", the direction of an improvement; it is
    required except for "loss". An improvement must exceed `min_delta`. The state is saved in checkpoints.
    """

    def __init__(
        self,
        metric: str = "loss",
        patience: int = 3,
        *,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        """Refuse a metric whose direction is not known."""
        if mode is None and metric == "loss":
            mode = "min"
        if mode not in {"min", "max"}:
            raise JobError(
                f"mode of EarlyStopping({metric!r}) must be 'min' or 'max', got {mode!r}",
                code="job.early-stopping-mode",
                fix=f'write EarlyStopping({metric!r}, mode="max"), or mode="min"',
            )
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise JobError(
                f"patience of EarlyStopping must be a positive integer, got {patience!r}",
                code="job.early-stopping-patience",
                fix="use an integer number of evaluations of at least 1",
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        """The best value so far; None before the first evaluation."""
        self.waited = 0
        """Evaluations since the best value."""

    def __call__(self, context: Any) -> CallbackDecision | None:
        """Compare the last evaluation with the best one."""
        value = context.metrics[self.metric]
        if math.isfinite(value) and self._improves(value):
            self.best, self.waited = value, 0
            return None
        self.waited += 1
        return STOP if self.waited >= self.patience else None

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        gain = self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta

    def __str__(self) -> str:
        return f"EarlyStopping (best {self.metric} {self.best}, {self.waited} evaluations ago)"

    def fresh(self) -> EarlyStopping:
        """Return a copy without state: one Job may be trained several times."""
        return EarlyStopping(self.metric, self.patience, mode=self.mode, min_delta=self.min_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint contains."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what a checkpoint contained."""
        self.best, self.waited = state["best"], state["waited"]
