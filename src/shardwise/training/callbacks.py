"""Evaluation while a job trains, and the job's callbacks after steps and evaluations, on every rank alike."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping  # noqa: TC003 - read at run time by msgspec
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from shardwise.data.loaders import dataset_length
from shardwise.dist import World  # noqa: TC001 - read at run time by msgspec
from shardwise.errors import DataError
from shardwise.job.callbacks import STOP, EarlyStopping, as_callbacks
from shardwise.job.generators import untouched_generators
from shardwise.runs import EventLog  # noqa: TC001 - read at run time by msgspec
from shardwise.training.evaluate import evaluate, evaluate_batches, evaluation_batches
from shardwise.training.state import plain_value
from shardwise.training.step.first_step_checks import is_stateless
from shardwise.training.step.step import Step  # noqa: TC001 - read at run time by msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.utils.data import Dataset

    from shardwise.data.feed import MicroBatch
    from shardwise.job import Job
    from shardwise.job.callbacks import Callback
    from shardwise.training.saving import StopRequest
    from shardwise.training.step.step import StepReport


class CallbackContext(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The argument of a callback after a step or an evaluation; its values are global and equal on all ranks."""

    step: int
    """Number of completed optimizer steps; 0 in an evaluation before the first step."""
    num_steps: int
    """Number of optimizer steps of the whole training."""
    epoch: int
    """The epoch of the last step, counted from 1."""
    metrics: Mapping[str, float]
    """Results of the last evaluation of the test split: "loss" and Job.metrics by name; empty before the first one."""
    report: Any
    """The StepReport of the last step (grad_norm, samples, skipped ...); None before the first step of this process."""
    world: World
    """Rank, size, device and collectives of this world."""
    running: Step
    """The step object: the model of this rank (`running.model`, sharded as the plan defines) and its optimizer."""
    events: EventLog
    """The event log of this rank."""

    @property
    def loss(self) -> float:
        """Mean loss of the last step over the global batch; reading it synchronizes with the device only."""
        return math.nan if self.report is None else float(self.report.loss)

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group in the last step."""
        return math.nan if self.report is None else float(self.report.lr)

    def full_model(self) -> Any:
        """Return an unsharded copy of the model, in eval mode in host memory, on rank 0; None on other ranks.

        Gathers the parameters under every strategy. Communicates over the world; call on every rank.
        """
        job, plan, world = self.running.source
        weights = self.running.whole_weights()
        if not world.is_main:
            return None
        with untouched_generators():  # initializing the copy must not change the dropout masks of the training
            model: Any = job.model()
        if not isinstance(model, nn.Module):
            return self.running.model  # an engine without torch modules, whose plans replicate the model
        if plan.precision.parameter == "fp64":
            model.double()
        model.load_state_dict(weights)
        return model.eval()

    def log(self, name: str, value: float | Tensor) -> None:
        """Log a value of this step to the event log; `shardwise watch` and trackers plot it as a curve.

        Every rank may call this method; the value of rank 0 is shown. `value` may be a tensor of one element.
        """
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self.events.write("log", step=self.step, values={name: number})


class Callbacks:
    """The callbacks of one training; used identically on every rank."""

    def __init__(self, job: Job, world: World, events: EventLog) -> None:
        self.has_stopped = False
        """Whether the ranks agreed to stop after the last step."""
        self.metrics: dict[str, float] = {}
        """Results of the last evaluation."""
        self.epoch = 0
        """Epoch of the last step, counted from 0."""
        self.has_pending_evaluation = False
        """Whether a stop signal interrupted the evaluation after the last step; a resumed run repeats it."""
        self._world, self._events = world, events
        self._state_of_job: Any = job.state
        self._on_step = _fresh(job.on_step)
        self._on_evaluate = _fresh(job.on_evaluate)
        self._report: StepReport | None = None
        self._stop_requested = False

    def after_step(self, step: Step, report: StepReport) -> bool:
        """Call Job.on_step; return whether training stops here. Communicates over the world if there is a callback.

        With `sync_every`, training stops at the next synchronization of the replicas, as it does after a stop signal.
        """
        self._report, self.epoch = report, report.cursor.epoch
        if self._on_step:
            self._call(self._on_step, step)
        self.has_stopped = self._stop_requested and step.length.syncs_after(step.number)
        return self.has_stopped

    def after_evaluation(self, step: Step, metrics: dict[str, float]) -> None:
        """Call Job.on_evaluate. Communicates over the world if there is a callback."""
        self.metrics = metrics
        if self._on_evaluate:
            self._call(self._on_evaluate, step)
        self.has_stopped = self.has_stopped or self._stop_requested

    def _call(self, callbacks: tuple[Callback, ...], step: Step) -> None:
        """Call each callback, and stop on all ranks if a callback of any rank returned STOP. Communicates."""
        context = CallbackContext(
            step=step.number,
            num_steps=step.length.num_steps,
            epoch=self.epoch + 1,
            metrics=self.metrics,
            report=self._report,
            world=self._world,
            running=step,
            events=self._events,
        )
        stopping = [callback for callback in callbacks if callback(context) is STOP]
        if self._stop_requested or not _any_rank(bool(stopping), self._world):
            return
        self._stop_requested = True
        name = getattr(stopping[0], "__qualname__", stopping[0]) if stopping else "a callback on another rank"
        self._events.write("note", text=f"training stops at step {step.number}: {name} returned sw.STOP")

    # State in checkpoints: a resumed run stops at the same step as an uninterrupted run.

    def state(self) -> dict[str, Any]:
        """Return the pending evaluation and the state of the callbacks as plain values; empty if there are none."""
        pending = {"pending_evaluation": {"epoch": self.epoch}} if self.has_pending_evaluation else {}
        states = {}
        for key, callback in self._stateful().items():
            states[key] = plain_value(callback.state_dict(), (f"Job.{key}",))
        if not (states or self._on_step or self._on_evaluate):
            return pending
        return {"callbacks": {"stopped": self.has_stopped, "states": states, "metrics": self.metrics}} | pending

    def load(self, facts: Mapping[str, Any]) -> None:
        """Restore the callbacks' state from a checkpoint's facts; do nothing if the checkpoint does not contain it."""
        if "pending_evaluation" in facts:
            self.has_pending_evaluation, self.epoch = True, facts["pending_evaluation"]["epoch"]
        saved = facts.get("callbacks")
        if saved is None:
            return
        self.has_stopped = self._stop_requested = saved["stopped"]
        self.metrics = {name: math.nan if value is None else value for name, value in saved["metrics"].items()}
        for key, callback in self._stateful().items():
            if key in saved["states"]:
                callback.load_state_dict(saved["states"][key])

    def _stateful(self) -> dict[str, Any]:
        found = {}
        for name, callbacks in (("on_step", self._on_step), ("on_evaluate", self._on_evaluate)):
            for number, callback in enumerate(callbacks):
                # Job.state is saved separately, including its tensors.
                if hasattr(callback, "load_state_dict") and callback is not self._state_of_job:
                    found[f"{name}[{number}]"] = callback
        return found


def _fresh(given: Any) -> tuple[Callback, ...]:
    """Return the callbacks of a Job field; EarlyStopping is reset, because a Job may be trained several times."""
    return tuple(each.fresh() if isinstance(each, EarlyStopping) else each for each in as_callbacks(given))


def _any_rank(value: bool, world: World) -> bool:  # noqa: FBT001 - the value to reduce
    """Return whether the value is true on any rank. Communicates over the world, on the host."""
    return bool(_largest([float(value)], world)[0])


def _largest(values: list[float], world: World) -> list[float]:
    """Return the maximum over all ranks of each value. Communicates over the world, on the host."""
    if world.size == 1:
        return values
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=world.host_group)
    return largest.tolist()


_WINDOW_S = 1.0
"""Time between two decisions of the ranks to continue an evaluation."""
_REPORT_S = 5.0
"""Time between two reports of an evaluation's progress."""
_MOST_BATCHES = 1000


class Evaluations:
    """Evaluates the test split: at the start, every `Job.evaluate_every` steps or each epoch, and at the end."""

    def __init__(
        self, job: Job, dataset: Dataset[Any] | None, callbacks: Callbacks, events: EventLog, stop: StopRequest
    ) -> None:
        fields = [name for name in ("evaluate_every", "evaluate_at_start", "on_evaluate") if getattr(job, name)]
        if dataset is None and fields:
            raise DataError(
                f"Job.{fields[0]} requires a test split, but Job.data('test') returned None",
                code="data.no-test-split",
                fix="return a dataset for split 'test' from Job.data",
            )
        self.last = callbacks.metrics if callbacks.has_stopped else {}
        """Loss and metrics of the last evaluation; from the checkpoint if callbacks had stopped the training before."""
        self._job, self._dataset, self._callbacks, self._events, self._stop = job, dataset, callbacks, events, stop

    def is_due(self, step: Step, *, is_last: bool) -> bool:
        """Return whether the test split is evaluated after this step."""
        if self._dataset is None:
            return False
        if self._job.evaluate_every is None:
            return is_last or step.length.ends_epoch(step.number - 1)
        return is_last or step.length.is_due(step.number, self._job.evaluate_every)

    def before_first_step(self, step: Step) -> bool:
        """Evaluate if `Job.evaluate_at_start` requests it or an evaluation is pending. Communicates over the world.

        Otherwise metrics without state are tried on a micro-batch per rank, so that a metric that fails raises here.
        Returns whether this step must be saved, because its evaluation was interrupted now or before the resume.
        """
        was_pending = self._callbacks.has_pending_evaluation and self._dataset is not None
        self._callbacks.has_pending_evaluation = was_pending
        if was_pending or (self._job.evaluate_at_start and step.number == 0):
            self.run(step)
            return was_pending or self._callbacks.has_pending_evaluation
        metrics, dataset = self._job.metrics.values(), self._dataset
        is_indexed = dataset is not None and not isinstance(dataset, IterableDataset)
        plan = step.source.plan
        # A compiled model would specialize on the shapes of the test split instead of those of training.
        is_tried = metrics and is_indexed and plan.compile == "none"
        if is_tried and all(is_stateless(measure.sum) for measure in (self._job.loss, *metrics)):
            step.mark("evaluate", step.number)
            num_rows = min(plan.layout.dp * plan.micro_batch, dataset_length(dataset))  # type: ignore[arg-type]
            evaluate(step, Subset(dataset, range(num_rows)))  # type: ignore[arg-type]
        return False

    def run(self, step: Step) -> bool:
        """Evaluate, log, and call Job.on_evaluate; return whether training stops. Communicates over the world.

        A stop signal on any rank interrupts the evaluation on all ranks, which leaves `last` empty.
        """
        step.mark("evaluate", step.number)
        job, plan, world = step.source
        self._callbacks.has_pending_evaluation = False
        micro_batches = evaluation_batches(job, plan, world, self._dataset)  # type: ignore[arg-type]
        self.last = evaluate_batches(step, self._until_stopped(micro_batches, step.number, world))
        if self._callbacks.has_pending_evaluation:
            self.last = {}
        else:
            self._events.write("evaluation", step=step.number, epoch=self._callbacks.epoch, values=self.last)
            self._callbacks.after_evaluation(step, self.last)
        step.mark("data", step.number)
        return self._callbacks.has_stopped

    def _until_stopped(self, batches: Iterator[MicroBatch], number: int, world: World) -> Iterator[MicroBatch]:
        """Yield this rank's batches until all ranks have finished theirs, or any rank received a stop signal.

        All ranks synchronize about once per second, after equal numbers of batches. Ranks may have different numbers of
        batches; a rank without further batches participates until all have finished. Communicates over the world.
        """
        size, num_batches = 1, 0
        began = reported = time.perf_counter()
        while True:
            window_began = time.perf_counter()
            num_before = num_batches
            for batch in islice(batches, size):
                yield batch
                num_batches += 1
            now = time.perf_counter()
            may_have_more = num_batches - num_before == size
            here = [float(may_have_more), float(self._stop.is_set), now - window_began]
            continues, stops, window_s = _largest(here, world)
            if not continues:
                return
            if stops:
                self._callbacks.has_pending_evaluation = True
                return
            size = min(_MOST_BATCHES, max(1, round(size * _WINDOW_S / max(window_s, 1e-6))))
            if now - reported >= _REPORT_S:
                reported = now
                self._events.write("evaluating", step=number, batches=num_batches, seconds=now - began)
