"""Saving checkpoints, resuming from them, and handling stop signals during training."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping  # noqa: TC003 - read at run time by msgspec
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from shardwise.checkpoint import (
    AsyncSaver,
    CheckpointDirectory,
    CheckpointError,
    MismatchError,
    check_storage,
    load_newest,
)
from shardwise.checkpoint.convert.contents import MODEL
from shardwise.checkpoint.manifest import DTYPES
from shardwise.data.feed import DataPosition  # noqa: TC001 - read at run time by msgspec
from shardwise.errors import InputError, ShardwiseError, nearest
from shardwise.parallel.gradsync import local
from shardwise.runs.console import PREEMPTED
from shardwise.runs.directory import RunDirectory, parse_keep
from shardwise.runs.failure import NOT_SAVED
from shardwise.spec import is_url
from shardwise.training.compile_artifact import CompileArtifact
from shardwise.training.float8 import with_saved_layers
from shardwise.training.state import (
    UPDATE,
    USER,
    check_same_job,
    check_same_samples,
    join_state,
    load_targets,
    plain_states,
    restore_plain_states,
    restore_random,
    saved_position,
    split_state,
    state_facts,
    state_tensors,
    user_load_targets,
)
from shardwise.training.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint import LoadReport, Manifest, SaveReport
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.runs import EventLog
    from shardwise.training.callbacks import Callbacks
    from shardwise.training.spec import SaveSpec
    from shardwise.training.step.step import Step


class Saving:
    """Saves checkpoints and compiled graphs in the background while training continues; used identically on every rank.

    `folder` is the folder of checkpoints in the run directory.
    """

    def __init__(
        self,
        spec: SaveSpec,
        folder: Path,
        *,
        job: Job,
        plan: Plan,
        world: World,
        events: EventLog,
        callbacks: Callbacks | None = None,
    ) -> None:
        keep = parse_keep(str(spec.keep))
        metrics = {"loss", *job.metrics}
        if keep.metric and keep.metric not in metrics:
            raise InputError(
                f"--keep refers to metric {keep.metric!r}, which the job does not define",
                code="train.keep-metric-unknown",
                fix=nearest(keep.metric, metrics),
            )
        if job.state is not None:
            split_state(job.state.state_dict())  # reject unsupported values now, not at the first save
        if callbacks is not None:
            callbacks.state()
        self.spec, self.folder, self.keep = spec, folder, keep
        self._callbacks = callbacks
        self._job, self._plan, self._world, self._events = job, plan, world, events
        self._group = world.own_host_group() if world.size > 1 else None
        self._uploads = Uploads(spec, folder, keep, world=world, group=self._group, events=events)
        self._saver = AsyncSaver(self._group, self._uploads.submit)
        self._compiled = CompileArtifact(RunDirectory(folder.parent).compiled, plan, world, self._note)
        self._last_saved: int | None = None
        self._has_shared_storage = False
        self._has_checked_states = False

    def resume(self, build: Callable[[StartPoint], Step]) -> Step | None:
        """Return a step restored from the checkpoint to resume from, or None to start from scratch.

        `build(start)` builds a step that starts there. The compiled graphs of this run are loaded, with
        or without a checkpoint. Communicates over the world; call on every rank.
        """
        self._compiled.load()
        if self.spec.resume == "never":
            return None
        self._uploads.download()
        is_own = self.spec.resume in (None, "auto") or is_url(self.spec.resume)
        path = self.folder if is_own else Path(str(self.spec.resume))
        resuming = Resuming(path, self._job, self._plan, self._world, self._note, callbacks=self._callbacks)
        step = resuming.run(build, self._group)
        self._uploads.submit_latest()
        if step is None and not is_own:
            raise InputError(
                f"--resume {path} contains no checkpoint",
                code="checkpoint.none-found",
                fix="pass a run directory that contains checkpoints, or a checkpoint",
            )
        return step

    def is_due(self, step: Step) -> bool:
        """Return whether a checkpoint is due at this step; with `sync_every`, only at a synchronization of replicas."""
        return step.length.is_due(step.number, self.spec.every)

    def after(self, step: Step, evaluation: dict[str, float], *, is_stopping: bool) -> None:
        """Save if a checkpoint is due, and raise StoppedError after a stop signal; call on every rank after every step.

        `evaluation` contains the metrics evaluated at this step; empty if there was no evaluation.
        """
        self._compiled.after_step()
        self._uploads.write_events()
        if not self._has_checked_states:
            plain_states(step.optimized)  # raises if optimizer states, created in the first step, cannot be saved
            self._has_checked_states = True
        should_save = is_stopping or self.is_due(step) or (evaluation and self.keep.best)
        if not (should_save and step.length.syncs_after(step.number)):
            return
        step.mark("save", step.number)
        self.save(step, evaluation)
        if is_stopping:
            uploaded = self.finish(self.spec.upload_grace_s)
            outcome = f"saved at step {step.number} {uploaded}".rstrip()
            if self._last_saved != step.number:
                outcome = NOT_SAVED
            fix = f"continue with --resume {self.folder}"
            raise StoppedError(f"training stopped after a stop signal, {outcome}", code="train.stopped", fix=fix)
        step.mark("data", step.number)

    def save(self, step: Step, evaluation: dict[str, float]) -> None:
        """Start an asynchronous save of the current state. Communicates over the world; call on every rank.

        If this save or the previous one fails, raises the error if `must_save` is set, and logs it otherwise.
        """
        if step.number == self._last_saved:
            return
        began = time.perf_counter()
        previous = self._settle()
        self._uploads.check()
        waited_s = time.perf_counter() - began
        tensors, facts = state_of(step, evaluation)
        if self._callbacks is not None:
            facts |= self._callbacks.state()
        try:
            if not self._has_shared_storage:
                check_storage(self.folder, group=self._group)
                self._has_shared_storage = True
            stall = self._saver.save(self.folder, step.number, tensors, facts)
        except CheckpointError as error:
            self._report_failure(error)
            return
        self._last_saved = step.number
        self._events.write("save", step=step.number, stall_s=waited_s + stall.stall_s, bytes=stall.bytes_here)
        if self._world.is_main and previous is not None:
            CheckpointDirectory(self.folder).prune(self.keep, spare=self._uploads.paths())

    def _settle(self) -> SaveReport | None:
        """Wait for the pending save and return its report; return None if it failed or no save is pending."""
        try:
            return self._saver.finish()
        except CheckpointError as error:
            self._last_saved = None
            self._report_failure(error)
            return None

    def finish(self, upload_timeout_s: float | None = None) -> str:
        """Wait until the last save is durable and uploaded; call on every rank. Returns the outcome of the upload."""
        began = time.perf_counter()
        self._compiled.finish()
        try:
            self._saver.close()
        except CheckpointError as error:
            self._last_saved = None
            self._report_failure(error)
        outcome = self._uploads.finish(upload_timeout_s)
        if self._world.is_main:
            CheckpointDirectory(self.folder).prune(self.keep)
        self._events.write("saved", waited_s=time.perf_counter() - began)
        return outcome

    def _report_failure(self, error: CheckpointError) -> None:
        if self.spec.must_save:
            raise error
        self._note(f"checkpoint not saved: {error}")

    def _note(self, text: str) -> None:
        self._events.write("note", text=text)


def state_of(step: Step, evaluation: dict[str, float]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and manifest facts of a step's checkpoint. Communicates over the world; call on every rank."""
    job, plan, world = step.source
    facts = state_facts(job, plan, world, step) | {"metrics": evaluation}
    tensors = state_tensors(step, plan.replica(world.rank))
    if job.state is not None:
        facts["user"], user_tensors = split_state(job.state.state_dict())
        tensors |= user_tensors
    return tensors, facts


# Resuming: build a step at the step number of a checkpoint and load the checkpoint into it.


_CONVERTIBLE = {torch.float32, torch.bfloat16}
"""Dtypes of parameters between which a checkpoint is converted when a run is resumed in another precision."""


class StartPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a training starts: at a step and, if its data is a corpus or a stream, at a position in it."""

    step: int
    position: DataPosition | None = None
    facts: Mapping[str, Any] = msgspec.field(default_factory=dict)
    """The manifest facts of the checkpoint; empty without one."""

    def planned(self, plan: Plan) -> Plan:
        """Return the plan of the step to build, which has the settled choices of the checkpoint."""
        return with_saved_layers(plan, self.facts)


class Resuming:
    """One attempt to resume from `path`: a run directory, a directory of checkpoints, or one checkpoint."""

    def __init__(
        self,
        path: Path,
        job: Job,
        plan: Plan,
        world: World,
        note: Callable[[str], None],
        *,
        callbacks: Callbacks | None = None,
    ) -> None:
        self._path, self._job, self._plan, self._world, self._note = path, job, plan, world, note
        self._callbacks = callbacks
        self._step: Step | None = None
        self._user: dict[str, Tensor] = {}
        self._converted: list[tuple[Tensor, Tensor]] = []
        """Values of the model, and tensors of the dtype in which the checkpoint stores them."""

    def run(self, build: Callable[[StartPoint], Step], group: dist.ProcessGroup | None) -> Step | None:
        """Return a step restored from the newest intact checkpoint, or None if there is no checkpoint.

        `build(start)` builds a step that starts there. Damaged checkpoints are logged and skipped; the
        checksums of the loaded checkpoint are verified. Communicates over `group`; call on every rank.
        """

        def targets(manifest: Manifest) -> dict[str, Tensor]:
            check_same_samples(manifest.facts, self._job)  # before the data compares its samples, whatever its form
            self._step = None  # free the step built for a damaged checkpoint before the next one is allocated
            position = saved_position(manifest.facts)
            self._step = build(StartPoint(step=manifest.step, position=position, facts=manifest.facts))
            return self._load_targets(self._step, manifest)

        report = load_newest(
            self._path,
            targets,
            group=group,
            strict=False,
            announce=lambda forecast: self._note(f"loading from {self._path}: {forecast}"),
        )
        if report is None or self._step is None:
            return None
        for reason in report.skipped:
            self._note(f"skipped checkpoint: {reason}")
        self._restore(self._step, report)
        return self._step

    def _load_targets(self, step: Step, manifest: Manifest) -> dict[str, Tensor]:
        check_same_job(manifest.facts, self._job, number=manifest.step, num_steps=step.length.num_steps)
        forms = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
        self._user = {}
        if self._job.state is not None:
            _, now = split_state(self._job.state.state_dict())
            self._user = user_load_targets(forms, now)
        targets = load_targets(step, forms, self._plan.replica(self._world.rank))
        self._converted = []
        for name, value in targets.items():
            shape, dtype = forms.get(name, (None, None))
            if name.startswith(MODEL) and shape == tuple(value.shape) and {dtype, value.dtype} == _CONVERTIBLE:
                targets[name] = torch.zeros_like(value, dtype=dtype)
                self._converted.append((value, targets[name]))
        return targets | self._user

    def _restore(self, step: Step, report: LoadReport) -> None:
        """Apply the loaded state to the step and the job, and log the state that the checkpoint does not contain."""
        compared = report.comparison
        # The loss scale depends on the precision and user state on the job; all other tensors must match.
        mismatched = [name for name in (*compared.missing, *compared.unexpected) if not name.startswith((UPDATE, USER))]
        if mismatched or compared.differing:
            raise MismatchError(
                f"{report.path} was saved with a different model or optimizer: {compared}",
                code="checkpoint.tensors-mismatch",
                fix="resume the same job, or pass --resume never",
            )
        with torch.no_grad():
            for value, loaded in self._converted:
                local(value).copy_(local(loaded))
        step.optimized.refresh()
        optimizer = report.facts.get("optimizer", {})
        restore_plain_states(step.optimized, optimizer.get("values", {}))  # converted checkpoints may have none
        if self._callbacks is not None:
            self._callbacks.load(report.facts)
        notes = [f"resumed from {report.path} at step {step.number}"]
        if not compared.is_equal:
            notes.append(str(compared))
        if self._converted:
            value, loaded = self._converted[0]
            notes.append(f"converted {len(self._converted)} tensors from {loaded.dtype} to {value.dtype}")
            self._converted = []
        now, saved = step.length.num_steps, report.facts.get("num_steps", step.length.num_steps)
        if now != saved:
            notes.append(f"the learning-rate schedule follows the new length, {now} steps (before: {saved})")
        if not restore_random(report.facts, self._plan, self._world, step) and self._job.masks == "drawn":
            notes.append("dropout masks use new random streams because the layout differs")
        if self._job.state is not None and "user" in report.facts:
            self._job.state.load_state_dict(join_state(report.facts["user"], self._user))
        elif self._job.state is not None:
            notes.append("Job.state keeps its initial value because the checkpoint does not contain it")
        elif "user" in report.facts:
            notes.append("the saved Job.state is ignored because the job does not define one")
        self._note("; ".join(notes))


# Stop requests: after a signal, the training saves and exits between two steps.


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that SLURM, Kubernetes and the launcher send before they terminate a job."""


class StoppedError(ShardwiseError):
    """Raised after a stop signal, when the last save has ended; --resume continues from the newest checkpoint."""

    exit_code = PREEMPTED


class StopRequest:
    """A flag that a stop signal sets on this rank."""

    def __init__(self) -> None:
        self.is_set = False

    def set(self, *_: object) -> None:
        """Set the flag; has the signature of a signal handler."""
        self.is_set = True


@contextmanager
def stop_requests(*, is_enabled: bool = True) -> Iterator[StopRequest]:
    """Yield a flag that stop signals set inside this context; outside the main thread it is never set."""
    request = StopRequest()
    if not is_enabled or threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request.set) for number in STOP_SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
