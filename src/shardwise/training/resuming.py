"""Resuming: a step built where a checkpoint ends, with all of its state put into it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.checkpoint import MismatchError, load_newest
from shardwise.checkpoint.dtypes import DTYPES
from shardwise.training.optimizer_state import restore_plain_states
from shardwise.training.state import UPDATE, check_same_job, make_room, restore_random
from shardwise.training.user_state import USER, join_state, room_for, split_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch.distributed as dist
    from torch import Tensor

    from shardwise.checkpoint import LoadReport, Manifest
    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.plans import Plan
    from shardwise.training.step.step import Step


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
