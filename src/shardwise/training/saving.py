"""Saving: when a training writes its state, which checkpoints stay, and what becomes of a save that fails."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint import AsyncSaver, CheckpointError, CheckpointFolder, check_storage
from shardwise.errors import InputError, nearest
from shardwise.runs.failure import NOT_SAVED
from shardwise.runs.keep import Keep
from shardwise.training.optimizer_state import plain_states
from shardwise.training.resuming import Resuming
from shardwise.training.state import state_facts, state_tensors
from shardwise.training.stop import StoppedError
from shardwise.training.user_state import split_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwise.checkpoint import SaveReport
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.training.step.step import Step


@dataclass(frozen=True, kw_only=True)
class SavingSpec:
    """Where, how often and how many checkpoints; and what to go on from."""

    folder: Path
    every: int = 0
    """Optimizer steps between saves; 0 saves only when the run is asked to stop."""
    keep: Keep = field(default_factory=lambda: Keep(last=3))
    """Which stay. Where it wants the best by a metric, every evaluation is followed by a save."""
    must_save: bool = False
    """Whether a save that fails ends the training; else it is told, and training goes on with what was saved before."""
    resume: str = "auto"
    """"auto" goes on from the newest good checkpoint in `folder`, "never" from none, else the path of one."""


class Saving:
    """Saves in the background while training goes on; on every rank alike."""

    def __init__(self, spec: SavingSpec, job: Job, plan: Plan, world: World, events: EventLog) -> None:
        metrics = {"loss", *job.metrics}
        if spec.keep.metric and spec.keep.metric not in metrics:
            raise InputError(
                f"the checkpoint with the best {spec.keep.metric!r} is to stay, which the job does not measure",
                code="train.keep-metric-unknown",
                fix=nearest(spec.keep.metric, metrics),
            )
        if job.state is not None:
            split_state(job.state.state_dict())  # what no checkpoint can hold is refused now, not at the first save
        self.spec = spec
        self._job, self._plan, self._world, self._events = job, plan, world, events
        self._group = world.own_host_group() if world.size > 1 else None
        self._saver = AsyncSaver(self._group)
        self._last_saved: int | None = None
        self._has_shared_storage = False
        self._has_checked_states = False

    def resume(self, build: Callable[[int], Step]) -> Step | None:
        """Return a step with the state of the checkpoint to go on from, None for a fresh start; on every rank.

        `build` makes a step that begins at the given number. Communicates over the world.
        """
        if self.spec.resume == "never":
            return None
        is_auto = self.spec.resume == "auto"
        path = self.spec.folder if is_auto else Path(self.spec.resume)
        step = Resuming(path, self._job, self._plan, self._world, self._note).run(build, self._group)
        if step is None and not is_auto:
            raise InputError(
                f"--resume {path} holds no checkpoint",
                code="checkpoint.none-found",
                fix="name a run directory or a checkpoint",
            )
        return step

    def is_due(self, step: Step) -> bool:
        """Whether a checkpoint is due now; where replicas train on their own, when they have met."""
        return step.length.is_due(step.number, self.spec.every)

    def after(self, step: Step, evaluation: dict[str, float], *, is_stopping: bool) -> None:
        """Save if it is time; leave with a StoppedError if asked to stop. Called on every rank after every step.

        `evaluation` is that of this very step, empty if there was none.
        """
        if not self._has_checked_states:
            plain_states(step.optimized)  # made in the first step; what no checkpoint can hold is refused there
            self._has_checked_states = True
        is_asked = is_stopping or self.is_due(step) or (evaluation and self.spec.keep.best)
        if not (is_asked and step.length.syncs_after(step.number)):
            return
        step.mark("save", step.number)
        self.save(step, evaluation)
        if is_stopping:
            self.finish()
            words = NOT_SAVED if self._last_saved != step.number else f"saved at step {step.number}"
            raise StoppedError(f"asked to stop, {words}", code="train.stopped", fix="run it again to continue")
        step.mark("data", step.number)

    def save(self, step: Step, evaluation: dict[str, float]) -> None:
        """Begin to save this moment's state; a failure, of this save or the last, is raised if told to, else said."""
        if step.number == self._last_saved:
            return
        began = time.perf_counter()
        previous = self._settle()
        waited_s = time.perf_counter() - began
        facts = state_facts(self._job, self._plan, self._world, step) | {"metrics": evaluation}
        tensors = state_tensors(step, self._plan.replica(self._world.rank))
        if self._job.state is not None:
            facts["user"], own = split_state(self._job.state.state_dict())
            tensors |= own
        try:
            if not self._has_shared_storage:
                check_storage(self.spec.folder, group=self._group)
                self._has_shared_storage = True
            stall = self._saver.save(self.spec.folder, step.number, tensors, facts)
        except CheckpointError as error:
            self._tell_failure(error)
            return
        self._last_saved = step.number
        self._events.write("save", step=step.number, stall_s=waited_s + stall.stall_s, bytes=stall.bytes_here)
        if self._world.is_main and previous is not None:
            CheckpointFolder(self.spec.folder).prune(self.spec.keep)

    def _settle(self) -> SaveReport | None:
        """Wait for the save under way: one that failed does not keep the next from its turn."""
        try:
            return self._saver.finish()
        except CheckpointError as error:
            self._last_saved = None
            self._tell_failure(error)
            return None

    def finish(self) -> None:
        """Wait until the last save is durable; called on every rank."""
        began = time.perf_counter()
        try:
            self._saver.close()
        except CheckpointError as error:
            self._last_saved = None
            self._tell_failure(error)
        if self._world.is_main:
            CheckpointFolder(self.spec.folder).prune(self.spec.keep)
        self._events.write("saved", waited_s=time.perf_counter() - began)

    def _tell_failure(self, error: CheckpointError) -> None:
        if self.spec.must_save:
            raise error
        self._note(f"not saved: {error}")

    def _note(self, text: str) -> None:
        self._events.write("note", text=text)
