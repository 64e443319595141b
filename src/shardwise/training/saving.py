"""Saving, resuming and stop requests of a training."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint import (
    AsyncSaver,
    CheckpointError,
    CheckpointFolder,
    MismatchError,
    check_storage,
    load_newest,
)
from shardwise.checkpoint.manifest import DTYPES
from shardwise.errors import InputError, ShardwiseError, nearest
from shardwise.runs.console import PREEMPTED
from shardwise.runs.directory import parse_keep
from shardwise.runs.failure import NOT_SAVED
from shardwise.training.state import (
    UPDATE,
    USER,
    check_same_job,
    join_state,
    make_room,
    plain_states,
    restore_plain_states,
    restore_random,
    room_for,
    split_state,
    state_facts,
    state_tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint import LoadReport, Manifest, SaveReport
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.training.spec import SaveSpec
    from shardwise.training.step.step import Step


class Saving:
    """Saves in the background while training goes on; on every rank alike."""

    def __init__(self, spec: SaveSpec, folder: Path, *, job: Job, plan: Plan, world: World, events: EventLog) -> None:
        keep = parse_keep(str(spec.keep))
        metrics = {"loss", *job.metrics}
        if keep.metric and keep.metric not in metrics:
            raise InputError(
                f"the checkpoint with the best {keep.metric!r} is to stay, which the job does not measure",
                code="train.keep-metric-unknown",
                fix=nearest(keep.metric, metrics),
            )
        if job.state is not None:
            split_state(job.state.state_dict())  # what no checkpoint can hold is refused now, not at the first save
        self.spec, self.folder, self.keep = spec, folder, keep
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
        path = self.folder if is_auto else Path(self.spec.resume)
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
        is_asked = is_stopping or self.is_due(step) or (evaluation and self.keep.best)
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
        tensors, facts = state_of(step, evaluation)
        try:
            if not self._has_shared_storage:
                check_storage(self.folder, group=self._group)
                self._has_shared_storage = True
            stall = self._saver.save(self.folder, step.number, tensors, facts)
        except CheckpointError as error:
            self._tell_failure(error)
            return
        self._last_saved = step.number
        self._events.write("save", step=step.number, stall_s=waited_s + stall.stall_s, bytes=stall.bytes_here)
        if self._world.is_main and previous is not None:
            CheckpointFolder(self.folder).prune(self.keep)

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
            CheckpointFolder(self.folder).prune(self.keep)
        self._events.write("saved", waited_s=time.perf_counter() - began)

    def _tell_failure(self, error: CheckpointError) -> None:
        if self.spec.must_save:
            raise error
        self._note(f"not saved: {error}")

    def _note(self, text: str) -> None:
        self._events.write("note", text=text)


def state_of(step: Step, evaluation: dict[str, float]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and facts of a checkpoint of a step; communicates over the world, on every rank."""
    job, plan, world = step.source
    facts = state_facts(job, plan, world, step) | {"metrics": evaluation}
    tensors = state_tensors(step, plan.replica(world.rank))
    if job.state is not None:
        facts["user"], own = split_state(job.state.state_dict())
        tensors |= own
    return tensors, facts


# Resuming: a step built where a checkpoint ends, with all of its state put into it.


class Resuming:
    """One attempt to go on from what is at `path`: a run directory, a folder of checkpoints, or one."""

    def __init__(self, path: Path, job: Job, plan: Plan, world: World, note: Callable[[str], None]) -> None:
        self._path, self._job, self._plan, self._world, self._note = path, job, plan, world, note
        self._step: Step | None = None
        self._user: dict[str, Tensor] = {}

    def run(self, build: Callable[[int], Step], group: dist.ProcessGroup | None) -> Step | None:
        """Return a step with the state of the newest good checkpoint, None if there is none; on every rank.

        `build` makes a step that begins at the given number. Damaged checkpoints are named and passed over; every
        byte of the one that is taken was checked. Communicates over `group`.
        """

        def room(manifest: Manifest) -> dict[str, Tensor]:
            self._step = None  # one that was built in vain goes before the next one comes
            self._step = build(manifest.step)
            return self._room(self._step, manifest)

        report = load_newest(
            self._path,
            room,
            group=group,
            strict=False,
            announce=lambda forecast: self._note(f"loading from {self._path}: {forecast}"),
        )
        if report is None or self._step is None:
            return None
        for words in report.skipped:
            self._note(f"passed over: {words}")
        self._restore(self._step, report)
        return self._step

    def _room(self, step: Step, manifest: Manifest) -> dict[str, Tensor]:
        check_same_job(manifest.facts, self._job, number=manifest.step, num_steps=step.length.num_steps)
        forms = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
        self._user = {}
        if self._job.state is not None:
            _, now = split_state(self._job.state.state_dict())
            self._user = room_for(forms, now)
        return make_room(step, forms, self._plan.replica(self._world.rank)) | self._user

    def _restore(self, step: Step, report: LoadReport) -> None:
        """Take over what was loaded, and say what was not."""
        compared = report.comparison
        # Loss scaling comes and goes with the precision, the user's own with the job; the rest must be as it was.
        off = [name for name in (*compared.missing, *compared.unexpected) if not name.startswith((UPDATE, USER))]
        if off or compared.differing:
            raise MismatchError(
                f"{report.path} is of another model or optimizer: {compared}",
                code="checkpoint.tensors-mismatch",
                fix="resume the same job, or --resume never",
            )
        step.optimized.refresh()
        optimizer = report.facts.get("optimizer", {})
        restore_plain_states(step.optimized, optimizer.get("values", {}))  # one from elsewhere may have none
        notes = [f"resumed from {report.path} at step {step.number}"]
        if not compared.is_equal:
            notes.append(str(compared))
        if not restore_random(report.facts, self._plan, self._world, step) and self._job.masks == "drawn":
            notes.append("random masks begin anew, since the layout is another")
        if self._job.state is not None and "user" in report.facts:
            self._job.state.load_state_dict(join_state(report.facts["user"], self._user))
        elif self._job.state is not None:
            notes.append("Job.state begins anew, since the checkpoint holds none")
        elif "user" in report.facts:
            notes.append("a Job.state was saved and is left alone, since the job has none")
        self._note("; ".join(notes))


# Stop requests: a signal asks the training to save and leave, and it does so between two steps.


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What SLURM, Kubernetes and the launcher send before they end a job."""


class StoppedError(ShardwiseError):
    """The training saved its state and left because it was asked to; run it again to continue."""

    exit_code = PREEMPTED


class StopRequest:
    """Whether somebody has asked this rank to stop."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, *_: object) -> None:
        """Take note of a request."""
        self.is_set = True


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Take note of stop signals in here, instead of dying of them; where signals cannot be caught, never set."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.set) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
