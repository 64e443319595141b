"""Trains a segment of a run as `shardwise train` does, records each step, and kills all ranks at a chosen moment."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import msgspec
import torch

from shardwise.checkpoint import CheckpointDirectory
from shardwise.checkpoint.disk import TEMPORARY
from shardwise.checkpoint.names import name_of, parse_name
from shardwise.data.rows import CountedCollate, RowMarks, num_rows, settle_marks, stack_samples, tensors
from shardwise.engines.engine import engine_named
from shardwise.errors import InputError, TrainingError
from shardwise.job.generators import untouched_generators
from shardwise.parallel.collectives import full_values
from shardwise.parity.capture import digest_rows
from shardwise.parity.prepare import prepare_job
from shardwise.parity.progress import SAVE_S, Pulse, watched
from shardwise.parity.reference import true_double
from shardwise.runs import EventLog
from shardwise.runs.recorder import Timeline
from shardwise.training.loop import run_loop
from shardwise.training.spec import SaveSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shardwise.dist import World
    from shardwise.job import Job
    from shardwise.parity.prepare import Preparation
    from shardwise.parity.progress import PauseLimit
    from shardwise.plans import Plan
    from shardwise.training.callbacks import CallbackContext

LEAST_STEPS = 4
"""Smallest number of steps: each of the two kills requires a committed checkpoint and a later step or save."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """The moment at which all ranks of a run are killed."""

    moment: Literal["step", "open", "os.rename"]
    """After a step, before a save writes its first byte, or after its last byte but before the commit."""
    step: int
    """The step, counted from 0, or the step number of the interrupted checkpoint."""

    def __str__(self) -> str:
        where = {
            "step": f"after step {self.step + 1}",
            "open": f"at the start of the save of step {self.step}",
            "os.rename": f"before the commit of the checkpoint of step {self.step}",
        }
        return where[self.moment]


def choose_kills(name: str, steps: int) -> tuple[Kill, Kill]:
    """Return a kill after a step and a kill during a save for the first two segments, seeded by the arguments."""
    if steps < LEAST_STEPS:
        raise InputError(
            f"--resume requires at least {LEAST_STEPS} steps for two kills, got {steps}",
            code="verify.too-few-steps",
            fix=f"pass --steps {LEAST_STEPS} or more",
        )
    chosen = random.Random(f"{name} {steps}")  # noqa: S311 - a reproducible choice, not a secret
    first = chosen.randint(1, steps - 3)
    second = chosen.randint(first + 2, steps - 1)
    return Kill(moment="step", step=first), Kill(moment=chosen.choice(("open", "os.rename")), step=second)


class SeenSamples(msgspec.Struct, frozen=True, kw_only=True):
    """The recording of one step on one rank."""

    step: int
    loss: float | None
    """This rank's share of the mean loss; None for NaN."""
    rows: tuple[str, ...]
    """Digests of the rows in the loss of this rank."""
    rate: float
    """Learning rate."""
    draw: float
    """A random number sampled after the step, which shows the state of the random generator."""


@dataclass(frozen=True)
class SegmentFolder:
    """The folder with the recordings of the ranks of a segment."""

    path: Path

    @property
    def killed(self) -> Path:
        """File that exists if the ranks were killed as planned and did not fail for another reason."""
        return self.path / "killed"

    @property
    def final(self) -> Path:
        """File of full parameters and buffers after the last step."""
        return self.path / "final.pt"

    def log(self, rank: int) -> Path:
        """Return the file with the recording of a rank, one line per step."""
        return self.path / f"{rank}.jsonl"

    def read(self, ranks: int) -> list[list[SeenSamples]]:
        """Return the recordings of all ranks."""
        decoder = msgspec.json.Decoder(SeenSamples)
        return [decoder.decode_lines(self.log(rank).read_bytes()) for rank in range(ranks)]

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return the final values by name, under "parameter" and "buffer"."""
        values: dict[str, dict[str, Tensor]] = torch.load(self.final, weights_only=True, mmap=True)
        return values


def run_segment(  # noqa: PLR0917 - positions of one caller
    world: World,
    preparation: Preparation,
    plan: Plan,
    folder: SegmentFolder,
    checkpoints: Path | None,
    kill: Kill | None,
    limit: PauseLimit,
) -> None:
    """Train from the newest checkpoint until the end or `kill`. Communicates over the world; call on every rank.

    If `checkpoints` is None, the segment starts at step 0 and saves no checkpoint. A rank without progress for longer
    than `limit` writes its location into `folder` and exits.
    """
    pulse = Pulse()
    end = None
    if kill is not None and checkpoints is not None:
        end = _end(world, folder, checkpoints, kill, pulse)
    with (
        true_double() if plan.precision.compute == "fp64" else nullcontext(),
        watched(pulse, limit, world.rank, folder.path),
        folder.log(world.rank).open("wb", buffering=0) as log,
    ):
        marks = _Marks(folder.path / f"marks-{world.rank}.json")
        job = _watched(prepare_job(preparation), log, end, marks, engine=plan.engine)
        _, step = run_loop(
            job,
            plan,
            world,
            EventLog(None),
            Timeline(),
            checkpoints=checkpoints,
            save=SaveSpec(every=1),
            mark=lambda phase, _: pulse.begin(phase),
        )
        values = {
            "parameter": full_values(step.local_state().values.items()),
            "buffer": full_values(step.buffers().items()),
        }
    if world.is_main:
        torch.save(values, folder.final)


@dataclass(frozen=True)
class _Marks:
    """The marks of batch tensors that contain rows, in a file that data-loader workers write and the loss reads."""

    path: Path

    def collate(self, job: Job, samples: list[Any]) -> Any:
        """Collate with the job's function; the first call also writes the marks, which require two samples."""
        if not self.path.exists():
            with untouched_generators(), contextlib.suppress(Exception):  # user code may not collate a sample twice
                marks = CountedCollate(job.collate)(samples if len(samples) > 1 else samples * 2).marks
                own = self.path.with_suffix(f".{os.getpid()}")
                own.write_bytes(msgspec.json.encode(marks))
                own.replace(self.path)
        return (job.collate or stack_samples)(samples)

    def of(self, batch: Any, rows: int) -> RowMarks:
        """Return the marks of a batch, by tensor length if its first tensor has no rows, as in packed graphs."""
        known = msgspec.json.decode(self.path.read_bytes(), type=RowMarks) if self.path.exists() else ()
        shaped = [mark for mark, tensor in zip(known, tensors(batch), strict=False) if tensor.ndim]
        return settle_marks(known if any(shaped[:1]) else None, batch, rows)


def _watched(job: Job, log: IO[bytes], after_step: Callable[[int], None] | None, marks: _Marks, *, engine: str) -> Job:
    """Return the job with a loss that records its rows, and a callback that records every step."""
    rows: set[str] = set()
    encode = msgspec.json.Encoder().encode

    def record_rows(batch: Any) -> None:
        number = num_rows(batch)
        rows.update(digest_rows(batch, number, marks.of(batch, number)))

    def on_step(context: CallbackContext) -> None:
        report = context.report
        loss = float(report.loss_share)
        seen = SeenSamples(
            step=report.number,
            loss=loss if math.isfinite(loss) else None,
            rows=tuple(sorted(rows)),
            rate=report.lr,
            draw=float(torch.rand((), dtype=torch.float64)),
        )
        log.write(encode(seen) + b"\n")
        rows.clear()
        if after_step is not None:
            after_step(report.number)

    return dataclasses.replace(
        job,
        loss=dataclasses.replace(job.loss, sum=engine_named(engine).observe_loss(record_rows, job.loss.sum)),
        on_step=on_step,
        on_evaluate=None,
        evaluate_every=None,
        evaluate_at_start=False,
        collate=partial(marks.collate, job),
        data=lambda split: job.data(split) if split == "train" else None,
    )


def _end(
    world: World, folder: SegmentFolder, checkpoints: Path, kill: Kill, pulse: Pulse
) -> Callable[[int], None] | None:
    """Prepare rank 0 to kill all ranks. Communicates over the world; call on every rank.

    Returns a function that every rank calls after each step, or None if the ranks are killed during a save.
    """
    pids = world.gather(os.getpid())
    if kill.moment != "step":
        if not world.is_main:
            return None
        draft = str(checkpoints / f"{TEMPORARY}{name_of(kill.step)}-")

        def on_event(event: str, arguments: Sequence[Any]) -> None:
            if event == kill.moment and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(draft):
                _kill_all(pids, folder)

        # An audit hook runs before every open and rename in any thread, so that it can interrupt even a short save.
        sys.addaudithook(on_event)
        return None

    def after_step(number: int) -> None:
        if number == kill.step:
            _wait_for(checkpoints, kill.step, pulse)  # on every rank, since waiting for rank 0 would count as a hang
            if world.is_main:
                _kill_all(pids, folder)

    return after_step


def _wait_for(checkpoints: Path, step: int, pulse: Pulse) -> None:
    """Wait until the checkpoint of `step`, from which the next segment resumes, is committed; raise after SAVE_S."""
    deadline = time.monotonic() + SAVE_S
    while time.monotonic() < deadline:
        pulse.beat()
        latest = CheckpointDirectory(checkpoints).latest()
        if latest is not None and (parse_name(latest.name) or (-1,))[0] >= step:
            return
        time.sleep(0.005)
    raise TrainingError(
        f"no checkpoint of step {step} was committed within {SAVE_S:.0f} s", code="verify.checkpoint-timeout"
    )


def _kill_all(pids: Sequence[int], folder: SegmentFolder) -> None:
    """Send SIGKILL to every rank, and to this process last."""
    folder.killed.touch()
    for pid in [*(pid for pid in pids if pid != os.getpid()), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
