"""Evaluation while a job trains, and the job's callbacks after steps and evaluations, on every rank alike."""

from __future__ import annotations

import math
from collections.abc import Mapping  # noqa: TC003 - read at run time by msgspec
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.dist import World  # noqa: TC001 - read at run time by msgspec
from shardwise.errors import DataError
from shardwise.job.callbacks import STOP, EarlyStopping, as_callbacks
from shardwise.job.generators import untouched_generators
from shardwise.runs import EventLog  # noqa: TC001 - read at run time by msgspec
from shardwise.training.evaluate import evaluate
from shardwise.training.state import plain_value
from shardwise.training.step.step import Step  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from shardwise.job import Job
    from shardwise.job.callbacks import Callback
    from shardwise.training.step.step import StepReport


class CallbackContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a callback gets after a step or an evaluation, on every rank; values are global, equal on all ranks."""

    step: int
    """Optimizer steps that are done: 1 after the first, 0 at an evaluation before it."""
    num_steps: int
    """Optimizer steps of the whole training."""
    epoch: int
    """The epoch of the last step, counted from 1."""
    metrics: Mapping[str, float]
    """The last evaluation: "loss" and the names of Job.metrics, over the test split; empty before the first."""
    report: Any
    """The StepReport of the last step (grad_norm, samples, skipped ...); None before the first."""
    world: World
    """Rank, size, device and collectives of this world."""
    running: Step
    """The step object: the model of this rank (`running.model`, sharded as the plan defines) and its optimizer."""
    events: EventLog
    """The event log of this rank."""

    @property
    def loss(self) -> float:
        """Mean loss of the last step over the global batch; reading it waits for the device, without a collective."""
        return math.nan if self.report is None else float(self.report.loss)

    @property
    def lr(self) -> float:
        """Learning rate of the last step, of the first parameter group."""
        return math.nan if self.report is None else float(self.report.lr)

    def full_model(self) -> Any:
        """Return a copy of the whole model, in eval mode in host memory, on rank 0; None on other ranks.

        Gathers the parameters under every strategy, so it communicates over the world: call it on every rank.
        """
        job, plan, world = self.running.source
        weights = self.running.whole_weights()
        if not world.is_main:
            return None
        with untouched_generators():  # the copy draws initial values, and dropout masks must not change
            model: Any = job.model()
        if not isinstance(model, nn.Module):
            return self.running.model  # of an engine whose plans replicate the model
        if plan.precision.parameter == "fp64":
            model.double()
        model.load_state_dict(weights)
        return model.eval()

    def log(self, name: str, value: float | Tensor) -> None:
        """Record a value of this step: in the events of the run, as a curve of `watch`, and in trackers.

        Every rank may call it; the value of rank 0 is shown. A tensor of one element is accepted.
        """
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self.events.write("log", step=self.step, values={name: number})


class Callbacks:
    """The callbacks of one training; used identically on every rank."""

    def __init__(self, job: Job, world: World, events: EventLog) -> None:
        self.has_stopped = False
        """Whether the ranks agreed to stop after the last step."""
        self.metrics: dict[str, float] = {}
        """The last evaluation."""
        self._world, self._events = world, events
        self._state_of_job: Any = job.state
        self._on_step = _fresh(job.on_step)
        self._on_evaluate = _fresh(job.on_evaluate)
        self._report: StepReport | None = None
        self._is_asked = False

    def after_step(self, step: Step, report: StepReport) -> bool:
        """Call Job.on_step; return whether training stops here. Communicates over the world if there is a callback.

        With `sync_every`, training stops when the replicas are synchronized, as it does after a stop signal.
        """
        self._report = report
        if self._on_step:
            self._call(self._on_step, step)
        self.has_stopped = self._is_asked and step.length.syncs_after(step.number)
        return self.has_stopped

    def after_evaluation(self, step: Step, metrics: dict[str, float]) -> None:
        """Call Job.on_evaluate. Communicates over the world if there is a callback."""
        self.metrics = metrics
        if self._on_evaluate:
            self._call(self._on_evaluate, step)
        self.has_stopped = self.has_stopped or self._is_asked

    def _call(self, callbacks: tuple[Callback, ...], step: Step) -> None:
        """Call each callback, and agree on whether any rank wants to stop."""
        context = CallbackContext(
            step=step.number,
            num_steps=step.length.num_steps,
            epoch=1 if self._report is None else self._report.cursor.epoch + 1,
            metrics=self.metrics,
            report=self._report,
            world=self._world,
            running=step,
            events=self._events,
        )
        stopping = [callback for callback in callbacks if callback(context) is STOP]
        if self._is_asked or not _any_rank(bool(stopping), self._world):
            return
        self._is_asked = True
        who = getattr(stopping[0], "__qualname__", stopping[0]) if stopping else "a callback on another rank"
        self._events.write("note", text=f"training stops at step {step.number}: {who} returned sw.STOP")

    # State in checkpoints: a run that resumes stops at the step at which the uninterrupted run stops.

    def state(self) -> dict[str, Any]:
        """Return the state of the callbacks as plain values; empty for callbacks without state."""
        states = {}
        for key, callback in self._stateful().items():
            states[key] = plain_value(callback.state_dict(), (f"Job.{key}",))
        if not (states or self._on_step or self._on_evaluate):
            return {}
        return {"callbacks": {"stopped": self.has_stopped, "states": states, "metrics": self.metrics}}

    def load(self, facts: Mapping[str, Any]) -> None:
        """Restore the state that a checkpoint's facts contain; a checkpoint without it leaves callbacks as they are."""
        saved = facts.get("callbacks")
        if saved is None:
            return
        self.has_stopped = self._is_asked = saved["stopped"]
        self.metrics = {name: math.nan if value is None else value for name, value in saved["metrics"].items()}
        for key, callback in self._stateful().items():
            if key in saved["states"]:
                callback.load_state_dict(saved["states"][key])

    def _stateful(self) -> dict[str, Any]:
        found = {}
        for name, callbacks in (("on_step", self._on_step), ("on_evaluate", self._on_evaluate)):
            for number, callback in enumerate(callbacks):
                # Job.state is saved under its own name, tensors included.
                if hasattr(callback, "load_state_dict") and callback is not self._state_of_job:
                    found[f"{name}[{number}]"] = callback
        return found


def _fresh(given: Any) -> tuple[Callback, ...]:
    """Return the callbacks of a field; early stopping begins anew, because a Job may be trained several times."""
    return tuple(each.fresh() if isinstance(each, EarlyStopping) else each for each in as_callbacks(given))


def _any_rank(value: bool, world: World) -> bool:  # noqa: FBT001 - the value to agree on
    """Return whether the value is true on any rank. Communicates over the world, on the host."""
    if world.size == 1:
        return value
    total = torch.tensor(float(value))
    dist.all_reduce(total, group=world.host_group)
    return bool(total)


class Evaluations:
    """Evaluates the test split: at the start, every `Job.evaluate_every` steps or each epoch, and after the end."""

    def __init__(self, job: Job, dataset: Dataset[Any] | None, callbacks: Callbacks, events: EventLog) -> None:
        asked = [name for name in ("evaluate_every", "evaluate_at_start", "on_evaluate") if getattr(job, name)]
        if dataset is None and asked:
            raise DataError(
                f"Job.{asked[0]} requires a test split, and Job.data('test') returned None",
                code="data.no-test-split",
                fix="return a dataset for the split 'test'",
            )
        self.last = callbacks.metrics if callbacks.has_stopped else {}
        """Loss and metrics of the last evaluation in this run, or of a run that resumes after it was stopped."""
        self._job, self._dataset, self._callbacks, self._events = job, dataset, callbacks, events

    def is_due(self, step: Step, *, is_last: bool) -> bool:
        """Return whether the test split is evaluated after this step."""
        if self._dataset is None:
            return False
        if self._job.evaluate_every is None:
            return is_last or step.length.ends_epoch(step.number - 1)
        return is_last or step.length.is_due(step.number, self._job.evaluate_every)

    def before_first_step(self, step: Step) -> None:
        """Evaluate if `Job.evaluate_at_start` is set and nothing was trained yet. Communicates over the world."""
        if self._job.evaluate_at_start and step.number == 0:
            self.run(step, epoch=0)

    def run(self, step: Step, *, epoch: int) -> bool:
        """Evaluate, log it, call Job.on_evaluate; return whether training stops. Communicates over the world."""
        step.mark("evaluate", step.number)
        self.last = evaluate(step, self._dataset)
        self._events.write("evaluation", step=step.number, epoch=epoch, values=self.last)
        self._callbacks.after_evaluation(step, self.last)
        step.mark("data", step.number)
        return self._callbacks.has_stopped
