"""One segment of a training: run as `shardwise train` does, recorded step by step, and killed at a chosen moment."""

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

from shardwise.checkpoint import CheckpointFolder
from shardwise.checkpoint.disk import TEMPORARY
from shardwise.checkpoint.errors import name_of, parse_name
from shardwise.data.rows import CountedCollate, RowMarks, num_rows, settle_marks, stack_samples, tensors
from shardwise.engines.engine import engine_named
from shardwise.errors import InputError, TrainingError
from shardwise.job.generators import untouched_generators
from shardwise.parallel.collectives import full_values
from shardwise.parity.capture import digest_rows
from shardwise.parity.prepare import prepare_job
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
    from shardwise.plans import Plan
    from shardwise.training.step.step import StepReport

LEAST_STEPS = 4
"""One saved and one lost before the first kill, one saved and one torn before the second."""
_TIMEOUT_S = 60.0
"""How long a checkpoint may take before a kill that must come after it."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When all ranks of a run are killed."""

    moment: Literal["step", "open", "os.rename"]
    """After a step; or in a save: before its first byte, or with all bytes there, before it gets its name."""
    step: int
    """The step, counted from 0; or how many steps the torn checkpoint would have had."""

    def __str__(self) -> str:
        where = {
            "step": f"after step {self.step}",
            "open": f"as the checkpoint of step {self.step} was begun",
            "os.rename": f"before the checkpoint of step {self.step} got its name",
        }
        return where[self.moment]


def choose_kills(name: str, steps: int) -> tuple[Kill, Kill]:
    """Return when the first two segments end: after a step, and in a save; the same for the same plan and length."""
    if steps < LEAST_STEPS:
        raise InputError(
            f"--resume kills and resumes twice, for which {steps} steps are too few",
            code="verify.too-few-steps",
            fix=f"use --steps {LEAST_STEPS} or more",
        )
    chosen = random.Random(f"{name} {steps}")  # noqa: S311 - a choice that can be repeated, not a secret
    first = chosen.randint(1, steps - 3)
    second = chosen.randint(first + 2, steps - 1)
    return Kill(moment="step", step=first), Kill(moment=chosen.choice(("open", "os.rename")), step=second)


class SeenSamples(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of one step."""

    step: int
    loss: float | None
    """This rank's share of the mean loss; None for NaN."""
    rows: tuple[str, ...]
    """Digests of the rows in its loss."""
    rate: float
    """Learning rate."""
    draw: float
    """A random number, drawn after the step."""


@dataclass(frozen=True)
class SegmentFolder:
    """Where the ranks of one segment leave what they saw."""

    path: Path

    @property
    def killed(self) -> Path:
        """There when the ranks were killed as planned, and did not die of something else."""
        return self.path / "killed"

    @property
    def final(self) -> Path:
        """Whole parameters and buffers after the last step."""
        return self.path / "final.pt"

    def log(self, rank: int) -> Path:
        """What a rank saw, a line per step."""
        return self.path / f"{rank}.jsonl"

    def read(self, ranks: int) -> list[list[SeenSamples]]:
        """Return what each rank saw."""
        decoder = msgspec.json.Decoder(SeenSamples)
        return [decoder.decode_lines(self.log(rank).read_bytes()) for rank in range(ranks)]

    def values(self) -> dict[str, dict[str, Tensor]]:
        """Return final values by name, under "parameter" and "buffer"."""
        values: dict[str, dict[str, Tensor]] = torch.load(self.final, weights_only=True, mmap=True)
        return values


def run_segment(  # noqa: PLR0917 - positions of one caller
    world: World,
    preparation: Preparation,
    plan: Plan,
    folder: SegmentFolder,
    checkpoints: Path | None,
    kill: Kill | None,
) -> None:
    """Train from the newest of `checkpoints` to the end or the kill; communicates over the world, on every rank.

    None saves nothing and begins at the start.
    """
    end = _end(world, folder, checkpoints, kill) if kill is not None and checkpoints is not None else None
    with (
        true_double() if plan.precision.compute == "fp64" else nullcontext(),
        folder.log(world.rank).open("wb", buffering=0) as log,
    ):
        marks = _Marks(folder.path / f"marks-{world.rank}.json")
        job = _watched(prepare_job(preparation), log, end, marks, engine=plan.engine)
        _, step = run_loop(
            job, plan, world, EventLog(None), Timeline(), checkpoints=checkpoints, save=SaveSpec(every=1)
        )
        values = {"parameter": full_values(step.held().values.items()), "buffer": full_values(step.buffers().items())}
    if world.is_main:
        torch.save(values, folder.final)


@dataclass(frozen=True)
class _Marks:
    """Which tensors of a batch hold rows, in a file: loader workers collate, and the loss reads rows."""

    path: Path

    def collate(self, job: Job, samples: list[Any]) -> Any:
        """Collate as the job does; the first time, also leave the marks, which take two samples to see."""
        if not self.path.exists():
            with untouched_generators(), contextlib.suppress(Exception):  # user code may not collate a sample twice
                marks = CountedCollate(job.collate)(samples if len(samples) > 1 else samples * 2).marks
                own = self.path.with_suffix(f".{os.getpid()}")
                own.write_bytes(msgspec.json.encode(marks))
                own.replace(self.path)
        return (job.collate or stack_samples)(samples)

    def of(self, batch: Any, rows: int) -> RowMarks:
        """Return the marks of a batch; by length where the tensor that gave `rows` holds none, as in packed graphs."""
        known = msgspec.json.decode(self.path.read_bytes(), type=RowMarks) if self.path.exists() else ()
        shaped = [mark for mark, tensor in zip(known, tensors(batch), strict=False) if tensor.ndim]
        return settle_marks(known if any(shaped[:1]) else None, batch, rows)


def _watched(job: Job, log: IO[bytes], after_step: Callable[[int], None] | None, marks: _Marks, *, engine: str) -> Job:
    """Return the job with a loss that notes its rows, and a note of every step."""
    rows: set[str] = set()
    encode = msgspec.json.Encoder().encode

    def look(batch: Any) -> None:
        number = num_rows(batch)
        rows.update(digest_rows(batch, number, marks.of(batch, number)))

    def on_step(report: StepReport) -> None:
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
        loss=dataclasses.replace(job.loss, sum=engine_named(engine).observe_loss(look, job.loss.sum)),
        on_step=on_step,
        collate=partial(marks.collate, job),
        data=lambda split: job.data(split) if split == "train" else None,
    )


def _end(world: World, folder: SegmentFolder, checkpoints: Path, kill: Kill) -> Callable[[int], None] | None:
    """Prepare the death of all ranks by the hand of rank 0; communicates over the world, on every rank.

    Returns what rank 0 calls after each step, None where it need not.
    """
    pids = world.gather(os.getpid())
    if not world.is_main:
        return None
    if kill.moment != "step":
        torn = str(checkpoints / f"{TEMPORARY}{name_of(kill.step)}-")

        def on_event(event: str, arguments: Sequence[Any]) -> None:
            if event == kill.moment and isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(torn):
                _kill_all(pids, folder)

        # Python reports every file before it is opened or renamed, in any thread: no save is too short for that.
        sys.addaudithook(on_event)
        return None

    def after_step(number: int) -> None:
        if number == kill.step:
            _wait_for(checkpoints, kill.step)
            _kill_all(pids, folder)

    return after_step


def _wait_for(checkpoints: Path, step: int) -> None:
    """Wait until the checkpoint of `step` is published: without one, the next life would prove nothing."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        latest = CheckpointFolder(checkpoints).latest()
        if latest is not None and (parse_name(latest.name) or (-1,))[0] >= step:
            return
        time.sleep(0.005)
    raise TrainingError(
        f"no checkpoint of step {step} was published in {_TIMEOUT_S:.0f} s", code="verify.checkpoint-timeout"
    )


def _kill_all(pids: Sequence[int], folder: SegmentFolder) -> None:
    """Kill -9 every rank, the own one last."""
    folder.killed.touch()
    for pid in [*(pid for pid in pids if pid != os.getpid()), os.getpid()]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
