"""Saving and resuming: when a training writes its state, and from which it goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint import (
    AsyncSaver,
    CheckpointError,
    CheckpointFolder,
    Keep,
    MismatchError,
    check_storage,
    load,
    read_manifest,
)
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.errors import InputError
from shardwise.train.state import UPDATE, check_same_job, make_room, restore_random, state_facts, state_tensors
from shardwise.train.stop import StoppedError

if TYPE_CHECKING:
    from shardwise.checkpoint import Manifest
    from shardwise.job import Job
    from shardwise.plan import Plan
    from shardwise.run import EventLog
    from shardwise.step.step import Step
    from shardwise.world import World


@dataclass(frozen=True, kw_only=True)
class SavingSpec:
    """Where, how often and how many checkpoints; and what to go on from."""

    folder: Path
    every: int = 0
    """Optimizer steps between saves; 0 saves only when the run is asked to stop."""
    keep: int = 3
    """Newest checkpoints that stay."""
    resume: str = "auto"
    """"auto" goes on from the newest good checkpoint in `folder`, "never" from none, else the path of one."""


class Saving:
    """Saves in the background while training goes on; on every rank alike."""

    def __init__(self, spec: SavingSpec, job: Job, plan: Plan, world: World, events: EventLog) -> None:
        self.spec = spec
        self._job, self._plan, self._world, self._events = job, plan, world, events
        self._group = world.own_host_group() if world.size > 1 else None
        self._saver = AsyncSaver(self._group)
        self._last_saved: int | None = None
        self._has_shared_storage = False

    def resume_point(self) -> tuple[Path, Manifest] | None:
        """Return the checkpoint to go on from, None for a fresh start; communicates over the world.

        Damaged ones are named and passed over; every byte of the one that is taken was checked.
        """
        found: Path | InputError | None = None
        if self._world.is_main and self.spec.resume != "never":
            found = self._newest() if self.spec.resume == "auto" else _named(Path(self.spec.resume))
        found = self._world.gather(found)[0]
        if isinstance(found, InputError):
            raise found
        return None if found is None else (found, read_manifest(found))

    def restore(self, step: Step, path: Path, manifest: Manifest) -> None:
        """Put the state at `path` into a step that was built to begin at its step number; on every rank."""
        check_same_job(manifest.facts, self._job, number=manifest.step, num_steps=step.length.num_steps)
        forms = {name: (entry.shape, DTYPES[entry.dtype]) for name, entry in manifest.tensors.items()}
        report = load(path, make_room(step, forms), group=self._group, strict=False)
        compared = report.comparison
        # Loss scaling comes and goes with the precision; everything else must be there, and nothing else.
        off = [name for name in (*compared.missing, *compared.unexpected) if not name.startswith(UPDATE)]
        if off or compared.differing:
            raise MismatchError(
                f"{path} is of another model or optimizer: {compared}", fix="resume the same job, or --resume never"
            )
        step.optimized.refresh()
        same = restore_random(manifest.facts, self._plan, self._world, step)
        words = "" if same else "; random masks begin anew, since the layout is another"
        self._events.write("note", text=f"resumed from {path} at step {step.number}{words}")
        self._last_saved = step.number

    def is_due(self, number: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return bool(self.spec.every) and number % self.spec.every == 0

    def after(self, step: Step, metrics: dict[str, float], *, is_stopping: bool) -> None:
        """Save if it is time; leave with a StoppedError if asked to stop. Called on every rank after every step."""
        if is_stopping or self.is_due(step.number):
            self.save(step, metrics)
        if is_stopping:
            self.finish()
            words = "and not saved" if self._last_saved != step.number else f"saved at step {step.number}"
            raise StoppedError(f"asked to stop, {words}", fix="run it again to go on")

    def save(self, step: Step, metrics: dict[str, float]) -> None:
        """Begin to save this moment's state; a failure is told and training goes on with what was saved before."""
        if step.number == self._last_saved:
            return
        facts = state_facts(self._job, self._plan, self._world, step) | {"metrics": metrics}
        try:
            if not self._has_shared_storage:
                check_storage(self.spec.folder, group=self._group)
                self._has_shared_storage = True
            stall = self._saver.save(self.spec.folder, step.number, state_tensors(step), facts)
        except CheckpointError as error:
            self._events.write("note", text=f"not saved: {error}")
            return
        self._last_saved = step.number
        self._events.write("save", step=step.number, stall_s=stall.stall_s, bytes=stall.bytes_here)
        if self._world.is_main and stall.previous is not None:
            CheckpointFolder(self.spec.folder).prune(Keep(last=self.spec.keep))

    def finish(self) -> None:
        """Wait until the last save is durable; called on every rank."""
        began = time.perf_counter()
        try:
            self._saver.close()
        except CheckpointError as error:
            self._last_saved = None
            self._events.write("note", text=f"not saved: {error}")
        if self._world.is_main:
            CheckpointFolder(self.spec.folder).prune(Keep(last=self.spec.keep))
        self._events.write("saved", waited_s=time.perf_counter() - began)

    def _newest(self) -> Path | None:
        entry, damages = CheckpointFolder(self.spec.folder).newest_good(deep=True)
        for damage in damages:
            self._events.write("note", text=f"passed over: {damage}")
        return entry.path if entry is not None else None


def _named(path: Path) -> Path | InputError:
    """Return the checkpoint a user named: itself, or the newest good one in a folder of them or of a run."""
    if (path / "manifest.json").exists():
        return path
    for folder in (path, path / "checkpoints"):
        entry: Any = CheckpointFolder(folder).newest_good(deep=True)[0]
        if entry is not None:
            found: Path = entry.path
            return found
    return InputError(f"--resume {path} holds no good checkpoint", fix="name a run directory or a checkpoint")
